package protocol

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxTopicName is the longest topic name accepted, in bytes, in full form.
const MaxTopicName = 1 << 10

const (
	persistentScheme    = "persistent"
	nonPersistentScheme = "non-persistent"
	partitionSuffix     = "-partition-"

	defaultTenant    = "public"
	defaultNamespace = "default"
)

// ErrTopicName reports a topic name that cannot exist. Answer InvalidTopicName.
var ErrTopicName = errors.New("invalid topic name")

// TopicName is a topic's name taken apart. Names that [ParseTopic] returns are
// equal exactly when they name the same topic, so they serve as map keys.
type TopicName struct {
	Persistent        bool
	Tenant, Namespace string

	// Local is the last part as its owner spelled it, not escaped, with the
	// partition's suffix if there is one.
	Local string

	// Partition is the number in Local's suffix "-partition-N", or -1. It repeats
	// what Local says: change it with WithPartition and Base only.
	Partition int
}

// ParseTopic reads the forms that Pulsar clients write:
//
//	persistent://tenant/namespace/local
//	non-persistent://tenant/namespace/local
//	tenant/namespace/local                    persistent
//	local                                     persistent, in public/default
//
// The local part may hold any printable character but '/'; tenant and namespace
// hold letters, digits and any of "_-=:.". The error wraps [ErrTopicName].
func ParseTopic(name string) (TopicName, error) {
	t, err := parseTopic(name)
	if err != nil {
		if len(name) > 2*MaxTopicName {
			name = name[:MaxTopicName] + "..."
		}
		return TopicName{}, fmt.Errorf("%w %q: %w", ErrTopicName, name, err)
	}
	return t, nil
}

func parseTopic(name string) (TopicName, error) {
	t := TopicName{Persistent: true, Tenant: defaultTenant, Namespace: defaultNamespace, Local: name}
	scheme, rest, full := strings.Cut(name, "://")
	if !full {
		rest = name
	}
	switch {
	case full && scheme == nonPersistentScheme:
		t.Persistent = false
	case full && scheme != persistentScheme:
		return t, fmt.Errorf("it starts with %q, want persistent:// or non-persistent://", scheme+"://")
	}
	switch parts := strings.Split(rest, "/"); {
	case len(parts) == 3:
		t.Tenant, t.Namespace, t.Local = parts[0], parts[1], parts[2]
	case len(parts) == 1 && !full:
	case len(parts) == 4:
		return t, errors.New("four parts: names with a cluster are from Pulsar 1 and not served; a '/' inside the topic must be written as %2F")
	default:
		return t, errors.New("want [persistent://]tenant/namespace/topic or just topic")
	}
	if err := cmp.Or(checkEntity("tenant", t.Tenant), checkEntity("namespace", t.Namespace), checkLocal(t.Local)); err != nil {
		return t, err
	}
	t.Partition = partitionOf(t.Local)
	if n := len(t.String()); n > MaxTopicName {
		return t, fmt.Errorf("%d bytes long in full form: at most %d are allowed", n, MaxTopicName)
	}
	return t, nil
}

// ParseNamespace checks a namespace name, "tenant/namespace", and takes it
// apart. The error wraps [ErrTopicName].
func ParseNamespace(name string) (tenant, namespace string, err error) {
	tenant, namespace, ok := strings.Cut(name, "/")
	if !ok {
		return "", "", fmt.Errorf("%w: namespace %q: want tenant/namespace", ErrTopicName, name)
	}
	if err := cmp.Or(checkEntity("tenant", tenant), checkEntity("namespace", namespace)); err != nil {
		return "", "", fmt.Errorf("%w: namespace %q: %w", ErrTopicName, name, err)
	}
	return tenant, namespace, nil
}

// checkEntity holds tenants and namespaces to Pulsar's rule for named entities.
func checkEntity(what, name string) error {
	if name == "" {
		return fmt.Errorf("the %s is empty", what)
	}
	for _, c := range []byte(name) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte("_-=:.", c) >= 0:
		default:
			return fmt.Errorf("the %s %q holds %q: want letters, digits and any of _-=:. only", what, name, c)
		}
	}
	return nil
}

func checkLocal(name string) error {
	if name == "" {
		return errors.New("the topic is empty")
	}
	if !utf8.ValidString(name) {
		return errors.New("the topic is not UTF-8")
	}
	if i := strings.IndexFunc(name, unicode.IsControl); i >= 0 {
		return fmt.Errorf("the topic holds a control character at byte %d", i)
	}
	return nil
}

// partitionOf returns N of "…-partition-N", or -1. Like Pulsar it takes no sign
// and no leading zero, so that each partition has one name.
func partitionOf(local string) int {
	i := strings.LastIndex(local, partitionSuffix)
	if i <= 0 { // a partition of the empty name is a plain topic
		return -1
	}
	digits := local[i+len(partitionSuffix):]
	n, err := strconv.ParseInt(digits, 10, 32)
	if err != nil || n < 0 || strconv.FormatInt(n, 10) != digits {
		return -1
	}
	return int(n)
}

// String returns the full form, "persistent://tenant/namespace/local".
func (t TopicName) String() string {
	scheme := nonPersistentScheme
	if t.Persistent {
		scheme = persistentScheme
	}
	return scheme + "://" + t.Tenant + "/" + t.Namespace + "/" + t.Local
}

// NamespaceName returns "tenant/namespace".
func (t TopicName) NamespaceName() string { return t.Tenant + "/" + t.Namespace }

// ManagedLedgerName returns the name under which the topic's entries are kept,
// "tenant/namespace/persistent/local" with local escaped, so that it has no '/'.
func (t TopicName) ManagedLedgerName() string {
	scheme := nonPersistentScheme
	if t.Persistent {
		scheme = persistentScheme
	}
	return t.Tenant + "/" + t.Namespace + "/" + scheme + "/" + url.PathEscape(t.Local)
}

// ParseManagedLedgerName is the inverse of [TopicName.ManagedLedgerName]. The
// error wraps [ErrTopicName].
func ParseManagedLedgerName(name string) (TopicName, error) {
	parts := strings.Split(name, "/")
	if len(parts) != 4 {
		return TopicName{}, fmt.Errorf("%w: managed ledger %q: want tenant/namespace/persistent/topic", ErrTopicName, name)
	}
	local, err := url.PathUnescape(parts[3])
	if err != nil {
		return TopicName{}, fmt.Errorf("%w: managed ledger %q: %w", ErrTopicName, name, err)
	}
	return ParseTopic(parts[2] + "://" + parts[0] + "/" + parts[1] + "/" + local)
}

// Base returns the partitioned topic that a partition belongs to, and any other
// topic itself.
func (t TopicName) Base() TopicName {
	if t.Partition < 0 {
		return t
	}
	t.Local = t.Local[:strings.LastIndex(t.Local, partitionSuffix)]
	t.Partition = partitionOf(t.Local)
	return t
}

// WithPartition returns partition i of the topic. For i = -1, and for a topic
// that is partition i already, it returns the topic itself, as Pulsar does.
func (t TopicName) WithPartition(i int) TopicName {
	if i < 0 || i == t.Partition {
		return t
	}
	t.Local += partitionSuffix + strconv.Itoa(i)
	t.Partition = i
	return t
}
