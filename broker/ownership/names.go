package ownership

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/magnetar-io/magnetar/protocol"
)

// maxNameBytes bounds a tenant's and a namespace's name.
const maxNameBytes = 255

// Where things are kept in metadata.
const (
	tenantsPrefix     = "/tenants/"
	namespacesPrefix  = "/namespaces/"
	partitionedPrefix = "/partitioned-topics/"
	brokersPrefix     = "/brokers/"
	ownersPrefix      = "/owners/"
	topicsPrefix      = "/managed-ledgers/"
)

func tenantKey(tenant string) string { return tenantsPrefix + tenant }
func namespaceKey(ns string) string  { return namespacesPrefix + ns }
func brokerKey(id string) string     { return brokersPrefix + url.PathEscape(id) }
func ownerKey(bundle string) string  { return ownersPrefix + bundle }

// managedLedgerDir holds every topic of a namespace that has a log.
func managedLedgerDir(ns string) string { return topicsPrefix + ns + "/" }

// partitionedDir holds every partitioned topic of a namespace.
func partitionedDir(ns string) string { return partitionedPrefix + ns + "/" }

func partitionedKey(topic protocol.TopicName) string {
	return partitionedPrefix + topic.ManagedLedgerName()
}

// checkName accepts what Pulsar accepts as the name of a tenant or namespace:
// letters, digits and any of "-=:._".
func checkName(kind, name string) error {
	if name == "" || len(name) > maxNameBytes {
		return fmt.Errorf("%s name %q is %w: want 1 to %d characters", kind, name, ErrInvalid, maxNameBytes)
	}
	for _, r := range name {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !letter && !strings.ContainsRune("-=:._", r) {
			return fmt.Errorf("%s name %q is %w: want letters, digits and any of -=:._", kind, name, ErrInvalid)
		}
	}
	return nil
}

// tenantOf checks both halves of "tenant/namespace" and returns the first.
func tenantOf(ns string) (string, error) {
	tenant, local, ok := strings.Cut(ns, "/")
	if !ok {
		return "", fmt.Errorf(`namespace %q is %w: want "tenant/namespace"`, ns, ErrInvalid)
	}
	if err := checkName("tenant", tenant); err != nil {
		return "", err
	}
	return tenant, checkName("namespace", local)
}
