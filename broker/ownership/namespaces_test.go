package ownership

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

func TestBootstrapTwice(t *testing.T) {
	store := metadatatest.NewMemory(t)
	n := bootstrap(t, store)
	bootstrap(t, store)
	tenants, err := n.Tenants(t.Context())
	if err != nil || !slices.Equal(tenants, []string{"public", "pulsar"}) {
		t.Errorf("tenants are %v, %v, want public and pulsar", tenants, err)
	}
	for _, ns := range []string{"public/default", "pulsar/system"} {
		if ok, err := n.NamespaceExists(t.Context(), ns); err != nil || !ok {
			t.Errorf("NamespaceExists(%s) = %v, %v, want true", ns, ok, err)
		}
	}
}

func TestTenants(t *testing.T) {
	n := bootstrap(t, metadatatest.NewMemory(t))
	ctx := t.Context()
	step := func(what string, got, want error) {
		t.Helper()
		if !errors.Is(got, want) || (want == nil && got != nil) {
			t.Errorf("%s = %v, want %v", what, got, want)
		}
	}
	step("create", n.CreateTenant(ctx, "acme", Tenant{AdminRoles: []string{"ann"}}), nil)
	step("create again", n.CreateTenant(ctx, "acme", Tenant{}), ErrExists)
	step("create a bad name", n.CreateTenant(ctx, "a/b", Tenant{}), ErrInvalid)
	step("create an empty name", n.CreateTenant(ctx, "", Tenant{}), ErrInvalid)
	step("update", n.UpdateTenant(ctx, "acme", Tenant{AllowedClusters: []string{"east"}}), nil)
	step("update what is not there", n.UpdateTenant(ctx, "nobody", Tenant{}), ErrNoSuchTenant)
	got, err := n.Tenant(ctx, "acme")
	step("get", err, nil)
	if d := cmp.Diff(Tenant{AllowedClusters: []string{"east"}, AdminRoles: []string{}}, got); d != "" {
		t.Errorf("tenant after update (-want +got):\n%s", d)
	}
	step("create a namespace", n.CreateNamespace(ctx, "acme/one", 0), nil)
	step("delete with a namespace", n.DeleteTenant(ctx, "acme"), ErrNotEmpty)
	step("delete the namespace", n.DeleteNamespace(ctx, "acme/one"), nil)
	step("delete", n.DeleteTenant(ctx, "acme"), nil)
	step("delete again", n.DeleteTenant(ctx, "acme"), ErrNoSuchTenant)
	_, err = n.Tenant(ctx, "acme")
	step("get after delete", err, ErrNoSuchTenant)
}

func TestNamespaces(t *testing.T) {
	store := metadatatest.NewMemory(t)
	n := bootstrap(t, store)
	ctx := t.Context()
	step := func(what string, got, want error) {
		t.Helper()
		if !errors.Is(got, want) || (want == nil && got != nil) {
			t.Errorf("%s = %v, want %v", what, got, want)
		}
	}
	step("create with 8 bundles", n.CreateNamespace(ctx, "public/eight", 8), nil)
	step("create again", n.CreateNamespace(ctx, "public/eight", 8), ErrExists)
	step("create for nobody", n.CreateNamespace(ctx, "nobody/x", 0), ErrNoSuchTenant)
	step("create with too many bundles", n.CreateNamespace(ctx, "public/many", MaxBundles+1), ErrInvalid)
	step("create with the most bundles", n.CreateNamespace(ctx, "public/most", MaxBundles), nil)
	step("create without a tenant", n.CreateNamespace(ctx, "alone", 0), ErrInvalid)
	got, err := n.Namespace(ctx, "public/eight")
	step("get", err, nil)
	if got.Bundles != 8 || len(got.Boundaries()) != 9 {
		t.Errorf("namespace has %d bundles and boundaries %v, want 8", got.Bundles, got.Boundaries())
	}
	names, err := n.Namespaces(ctx, "public")
	step("list", err, nil)
	if want := []string{"public/default", "public/eight", "public/most"}; !slices.Equal(names, want) {
		t.Errorf("namespaces are %v, want %v", names, want)
	}
	_, err = n.Namespaces(ctx, "nobody")
	step("list for nobody", err, ErrNoSuchTenant)
	if ok, err := n.NamespaceExists(ctx, "public/none"); ok || err != nil {
		t.Errorf("NamespaceExists = %v, %v, want false", ok, err)
	}

	inUse := topic(t, "persistent://public/eight/t")
	if _, err := store.Put(ctx, topicsPrefix+inUse.ManagedLedgerName(), nil, 0, 0); err != nil {
		t.Fatal(err)
	}
	step("delete with a topic", n.DeleteNamespace(ctx, "public/eight"), ErrNotEmpty)
	if err := store.Delete(ctx, topicsPrefix+inUse.ManagedLedgerName(), metadata.AnyVersion); err != nil {
		t.Fatal(err)
	}
	step("create a partitioned topic", n.CreatePartitioned(ctx, inUse, 2), nil)
	step("delete with a partitioned topic", n.DeleteNamespace(ctx, "public/eight"), ErrNotEmpty)
	step("delete the partitioned topic", n.DeletePartitioned(ctx, inUse), nil)
	step("delete", n.DeleteNamespace(ctx, "public/eight"), nil)
	step("delete again", n.DeleteNamespace(ctx, "public/eight"), ErrNoSuchNamespace)
}

// TestTenantDeletedWhileNamespaceIsCreated lets DeleteTenant run whole between
// the steps of CreateNamespace: neither order may leave a namespace without tenant.
func TestTenantDeletedWhileNamespaceIsCreated(t *testing.T) {
	tests := []struct {
		name   string
		before bool // delete before the namespace's key is written, or after
	}{{"before-the-key", true}, {"after-the-key", false}}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			store := metadatatest.NewMemory(t)
			g := newGate(store)
			n, rival := bootstrap(t, g), NewNamespaces(testConfig(), store, quiet())
			if err := n.CreateTenant(t.Context(), "acme", Tenant{}); err != nil {
				t.Fatal(err)
			}
			var deleted error
			strike := func(key string) {
				if key == namespaceKey("acme/one") {
					deleted = rival.DeleteTenant(context.Background(), "acme")
				}
			}
			if tt.before {
				g.beforePut = strike
			} else {
				g.afterPut = func(key string) error { strike(key); return nil }
			}
			created := n.CreateNamespace(t.Context(), "acme/one", 0)
			if (created == nil) == (deleted == nil) {
				t.Errorf("create = %v, delete = %v, want exactly one to succeed", created, deleted)
			}
			_, err := store.Get(t.Context(), namespaceKey("acme/one"))
			if (err == nil) != (created == nil) {
				t.Errorf("namespace key: %v after create = %v", err, created)
			}
		})
	}
}

func TestPartitionedTopics(t *testing.T) {
	n := bootstrap(t, metadatatest.NewMemory(t))
	ctx := t.Context()
	step := func(what string, got, want error) {
		t.Helper()
		if !errors.Is(got, want) || (want == nil && got != nil) {
			t.Errorf("%s = %v, want %v", what, got, want)
		}
	}
	odd := topic(t, "persistent://public/default/a b%2Fc")
	count := func(want int) {
		t.Helper()
		if got, err := n.Partitions(ctx, odd); err != nil || got != want {
			t.Errorf("Partitions = %d, %v, want %d", got, err, want)
		}
	}
	count(0)
	step("create 0", n.CreatePartitioned(ctx, odd, 0), ErrInvalid)
	step("create too many", n.CreatePartitioned(ctx, odd, MaxPartitions+1), ErrInvalid)
	step("create a partition", n.CreatePartitioned(ctx, odd.WithPartition(1), 2), ErrInvalid)
	step("create nowhere", n.CreatePartitioned(ctx, topic(t, "public/nowhere/t"), 2), ErrNoSuchNamespace)
	step("update what is not there", n.UpdatePartitions(ctx, odd, 2), ErrNotPartitioned)
	step("create", n.CreatePartitioned(ctx, odd, 3), nil)
	step("create again", n.CreatePartitioned(ctx, odd, 3), ErrExists)
	count(3)
	step("shrink", n.UpdatePartitions(ctx, odd, 2), ErrInvalid)
	step("same", n.UpdatePartitions(ctx, odd, 3), nil)
	step("grow", n.UpdatePartitions(ctx, odd, MaxPartitions), nil)
	count(MaxPartitions)
	names, err := n.ListPartitioned(ctx, "public/default")
	step("list", err, nil)
	if want := []string{odd.String()}; !slices.Equal(names, want) {
		t.Errorf("partitioned topics are %v, want %v", names, want)
	}
	_, err = n.ListPartitioned(ctx, "public/nowhere")
	step("list nowhere", err, ErrNoSuchNamespace)
	step("delete", n.DeletePartitioned(ctx, odd), nil)
	step("delete again", n.DeletePartitioned(ctx, odd), ErrNotPartitioned)
	count(0)
}
