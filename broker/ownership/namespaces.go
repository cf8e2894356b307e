package ownership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/magnetar-io/magnetar/metadata"
)

// What every cluster has from its first start. The tenant "pulsar" and its
// namespace are where Pulsar's clients expect system topics.
const (
	DefaultTenant    = "public"
	DefaultNamespace = "public/default"
	SystemTenant     = "pulsar"
	SystemNamespace  = "pulsar/system"
)

// Tenant is what is kept of a tenant, in the form Pulsar's REST interface shows.
type Tenant struct {
	AllowedClusters []string `json:"allowedClusters"`
	AdminRoles      []string `json:"adminRoles"`
}

// Namespace is what is kept of a namespace.
type Namespace struct {
	// Bundles is the number of bundles, 1 to MaxBundles. It never changes.
	Bundles int `json:"bundles"`
}

// Boundaries returns the ends of the namespace's bundles, in order, as Pulsar
// spells them: one more than there are bundles.
func (n Namespace) Boundaries() []string { return boundaries(n.Bundles) }

// Namespaces is the directory of tenants, namespaces and partitioned topics. It
// keeps nothing in memory: each call asks metadata, so what one broker created
// another one sees at once.
type Namespaces struct {
	store   metadata.Store
	bundles int // of a namespace created without saying how many
	log     *slog.Logger
}

// NewNamespaces returns the directory kept in store. It does no I/O.
func NewNamespaces(cfg Config, store metadata.Store, log *slog.Logger) *Namespaces {
	return &Namespaces{store: store, bundles: cfg.withDefaults().Bundles, log: log.With("component", "namespaces")}
}

// Bootstrap creates the default and the system tenant and namespace where they
// are missing. Call it at every start; deleting one of them lasts until then.
func (n *Namespaces) Bootstrap(ctx context.Context) error {
	for _, tenant := range []string{DefaultTenant, SystemTenant} {
		if err := n.CreateTenant(ctx, tenant, Tenant{}); err != nil && !errors.Is(err, ErrExists) {
			return fmt.Errorf("create tenant %s: %w", tenant, err)
		}
	}
	for _, ns := range []string{DefaultNamespace, SystemNamespace} {
		if err := n.CreateNamespace(ctx, ns, 0); err != nil && !errors.Is(err, ErrExists) {
			return fmt.Errorf("create namespace %s: %w", ns, err)
		}
	}
	return nil
}

// CreateTenant returns an error wrapping ErrExists or ErrInvalid, or metadata's.
func (n *Namespaces) CreateTenant(ctx context.Context, tenant string, t Tenant) error {
	if err := checkName("tenant", tenant); err != nil {
		return err
	}
	_, err := n.store.Put(ctx, tenantKey(tenant), encode(t.normal()), 0, 0)
	if errors.Is(err, metadata.ErrBadVersion) {
		return fmt.Errorf("tenant %s %w", tenant, ErrExists)
	}
	return err
}

// UpdateTenant replaces what is kept of a tenant; ErrNoSuchTenant if there is none.
func (n *Namespaces) UpdateTenant(ctx context.Context, tenant string, t Tenant) error {
	for {
		_, version, err := n.tenant(ctx, tenant)
		if err != nil {
			return err
		}
		_, err = n.store.Put(ctx, tenantKey(tenant), encode(t.normal()), version, 0)
		if !errors.Is(err, metadata.ErrBadVersion) {
			return err
		}
	}
}

// Tenant returns a tenant, or ErrNoSuchTenant.
func (n *Namespaces) Tenant(ctx context.Context, tenant string) (Tenant, error) {
	t, _, err := n.tenant(ctx, tenant)
	return t, err
}

// Tenants lists the tenants in order.
func (n *Namespaces) Tenants(ctx context.Context) ([]string, error) {
	return n.list(ctx, tenantsPrefix)
}

// DeleteTenant deletes a tenant without namespaces; ErrNotEmpty if it has some.
func (n *Namespaces) DeleteTenant(ctx context.Context, tenant string) error {
	for {
		_, version, err := n.tenant(ctx, tenant)
		if err != nil {
			return err
		}
		some, err := n.store.Range(ctx, namespaceKey(tenant)+"/", "", 1)
		if err != nil {
			return err
		}
		if len(some) > 0 {
			return fmt.Errorf("tenant %s is %w: delete its namespaces first", tenant, ErrNotEmpty)
		}
		// A namespace created since then has raised the tenant's version.
		err = n.store.Delete(ctx, tenantKey(tenant), version)
		if !errors.Is(err, metadata.ErrBadVersion) {
			return notFoundAs(err, ErrNoSuchTenant, tenant)
		}
	}
}

// CreateNamespace creates "tenant/namespace" with the given number of bundles,
// or the configured number for 0. Errors wrap ErrNoSuchTenant, ErrExists or
// ErrInvalid, or are metadata's.
func (n *Namespaces) CreateNamespace(ctx context.Context, ns string, bundles int) error {
	tenant, err := tenantOf(ns)
	if err != nil {
		return err
	}
	if bundles == 0 {
		bundles = n.bundles
	}
	if bundles < 1 || bundles > MaxBundles {
		return fmt.Errorf("namespace %s with %d bundles is %w: want 1 to %d", ns, bundles, ErrInvalid, MaxBundles)
	}
	if _, _, err := n.tenant(ctx, tenant); err != nil {
		return err
	}
	_, err = n.store.Put(ctx, namespaceKey(ns), encode(Namespace{Bundles: bundles}), 0, 0)
	if errors.Is(err, metadata.ErrBadVersion) {
		return fmt.Errorf("namespace %s %w", ns, ErrExists)
	}
	if err != nil {
		return err
	}
	return n.touchTenant(ctx, tenant, ns)
}

// touchTenant raises the version of tenant's record after ns was created, so
// that a DeleteTenant which listed the namespaces before does not succeed. If the
// tenant is gone already, ns goes too.
func (n *Namespaces) touchTenant(ctx context.Context, tenant, ns string) error {
	for {
		t, version, err := n.tenant(ctx, tenant)
		if errors.Is(err, ErrNoSuchTenant) {
			if undo := n.store.Delete(ctx, namespaceKey(ns), metadata.AnyVersion); undo != nil {
				n.log.Warn("namespace of a deleted tenant not removed; delete it by hand", "namespace", ns, "err", undo)
			}
			return err
		}
		if err != nil {
			return err
		}
		_, err = n.store.Put(ctx, tenantKey(tenant), encode(t), version, 0)
		if !errors.Is(err, metadata.ErrBadVersion) {
			return err
		}
	}
}

// Namespace returns a namespace, or ErrNoSuchNamespace.
func (n *Namespaces) Namespace(ctx context.Context, ns string) (Namespace, error) {
	record, _, err := readNamespace(ctx, n.store, ns)
	return record, err
}

// NamespaceExists reports whether "tenant/namespace" exists. The error is
// metadata's: not knowing is not the same as no.
func (n *Namespaces) NamespaceExists(ctx context.Context, ns string) (bool, error) {
	_, _, err := readNamespace(ctx, n.store, ns)
	if errors.Is(err, ErrNoSuchNamespace) || errors.Is(err, ErrInvalid) {
		return false, nil
	}
	return err == nil, err
}

// Namespaces lists a tenant's namespaces as "tenant/namespace", in order, or
// returns ErrNoSuchTenant.
func (n *Namespaces) Namespaces(ctx context.Context, tenant string) ([]string, error) {
	if _, _, err := n.tenant(ctx, tenant); err != nil {
		return nil, err
	}
	names, err := n.list(ctx, namespaceKey(tenant)+"/")
	for i := range names {
		names[i] = tenant + "/" + names[i]
	}
	return names, err
}

// DeleteNamespace deletes a namespace without topics; ErrNotEmpty if it has some.
func (n *Namespaces) DeleteNamespace(ctx context.Context, ns string) error {
	_, version, err := readNamespace(ctx, n.store, ns)
	if err != nil {
		return err
	}
	for _, dir := range []string{managedLedgerDir(ns), partitionedDir(ns)} {
		some, err := n.store.Range(ctx, dir, "", 1)
		if err != nil {
			return err
		}
		if len(some) > 0 {
			return fmt.Errorf("namespace %s is %w: delete its topics first, such as %s", ns, ErrNotEmpty, strings.TrimPrefix(some[0].Key, dir))
		}
	}
	return notFoundAs(n.store.Delete(ctx, namespaceKey(ns), version), ErrNoSuchNamespace, ns)
}

func (n *Namespaces) tenant(ctx context.Context, tenant string) (Tenant, metadata.Version, error) {
	if err := checkName("tenant", tenant); err != nil {
		return Tenant{}, 0, err
	}
	var t Tenant
	version, err := read(ctx, n.store, tenantKey(tenant), &t)
	return t, version, notFoundAs(err, ErrNoSuchTenant, tenant)
}

// list returns what follows prefix in every key that has it, in order.
func (n *Namespaces) list(ctx context.Context, prefix string) ([]string, error) {
	all, err := metadata.List(ctx, n.store, prefix)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(all))
	for _, kv := range all {
		names = append(names, strings.TrimPrefix(kv.Key, prefix))
	}
	return names, nil
}

func readNamespace(ctx context.Context, store metadata.Store, ns string) (Namespace, metadata.Version, error) {
	if _, err := tenantOf(ns); err != nil {
		return Namespace{}, 0, err
	}
	var record Namespace
	version, err := read(ctx, store, namespaceKey(ns), &record)
	if err == nil && (record.Bundles < 1 || record.Bundles > MaxBundles) {
		err = fmt.Errorf("record of namespace %s: %d bundles, want 1 to %d", ns, record.Bundles, MaxBundles)
	}
	return record, version, notFoundAs(err, ErrNoSuchNamespace, ns)
}

// read decodes the value at key into v.
func read(ctx context.Context, store metadata.Store, key string, v any) (metadata.Version, error) {
	kv, err := store.Get(ctx, key)
	if err != nil {
		return 0, err
	}
	if err := json.Unmarshal(kv.Value, v); err != nil {
		return 0, fmt.Errorf("record at %s: %w", key, err)
	}
	return kv.Version, nil
}

// notFoundAs gives a missing key the name of what is missing.
func notFoundAs(err, sentinel error, name string) error {
	if errors.Is(err, metadata.ErrNotFound) {
		return fmt.Errorf("%w: %s", sentinel, name)
	}
	return err
}

// encode writes a record. Records hold nothing that JSON cannot.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("ownership: encode %T: %v", v, err))
	}
	return b
}

// normal makes absent lists empty ones, which Pulsar's clients expect.
func (t Tenant) normal() Tenant {
	if t.AllowedClusters == nil {
		t.AllowedClusters = []string{}
	}
	if t.AdminRoles == nil {
		t.AdminRoles = []string{}
	}
	return t
}
