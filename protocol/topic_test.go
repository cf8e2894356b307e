package protocol

import (
	"errors"
	"strings"
	"testing"
)

func TestParseTopic(t *testing.T) {
	tests := []struct {
		name, input, full, ledger string
		partition                 int
	}{
		{"short", "orders", "persistent://public/default/orders", "public/default/persistent/orders", -1},
		{"three-parts", "shop/eu/orders", "persistent://shop/eu/orders", "shop/eu/persistent/orders", -1},
		{"full", "persistent://shop/eu/orders", "persistent://shop/eu/orders", "shop/eu/persistent/orders", -1},
		{"non-persistent", "non-persistent://shop/eu/orders", "non-persistent://shop/eu/orders", "shop/eu/non-persistent/orders", -1},
		{"partition", "orders-partition-12", "persistent://public/default/orders-partition-12", "public/default/persistent/orders-partition-12", 12},
		{"leading-zero-is-no-partition", "orders-partition-01", "persistent://public/default/orders-partition-01", "public/default/persistent/orders-partition-01", -1},
		{"sign-is-no-partition", "orders-partition--1", "persistent://public/default/orders-partition--1", "public/default/persistent/orders-partition--1", -1},
		{"huge-is-no-partition", "orders-partition-2147483648", "persistent://public/default/orders-partition-2147483648", "public/default/persistent/orders-partition-2147483648", -1},
		{"suffix-alone-is-no-partition", "-partition-1", "persistent://public/default/-partition-1", "public/default/persistent/-partition-1", -1},
		{"escaped-slash-stays", "a%2Fb", "persistent://public/default/a%2Fb", "public/default/persistent/a%252Fb", -1},
		{"spaces-and-umlauts", "persistent://t/n/gr\u00fcn und blau", "persistent://t/n/gr\u00fcn und blau", "t/n/persistent/gr%C3%BCn%20und%20blau", -1},
		{"entity-characters", "a-b=c:d.e_F9/n/t", "persistent://a-b=c:d.e_F9/n/t", "a-b=c:d.e_F9/n/persistent/t", -1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseTopic(tt.input)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != tt.full || got.ManagedLedgerName() != tt.ledger || got.Partition != tt.partition {
				t.Errorf("ParseTopic(%q) = %q, ledger %q, partition %d; want %q, %q, %d",
					tt.input, got, got.ManagedLedgerName(), got.Partition, tt.full, tt.ledger, tt.partition)
			}
			if back, err := ParseManagedLedgerName(got.ManagedLedgerName()); err != nil || back != got {
				t.Errorf("ParseManagedLedgerName(%q) = %v, %v", got.ManagedLedgerName(), back, err)
			}
		})
	}
}

func TestParseTopicRefuses(t *testing.T) {
	longest := "persistent://public/default/" + strings.Repeat("x", MaxTopicName-len("persistent://public/default/"))
	if _, err := ParseTopic(longest); err != nil {
		t.Errorf("a name of %d bytes: %v", len(longest), err)
	}
	tests := []struct{ name, input, text string }{
		{"empty", "", "topic is empty"},
		{"two-parts", "a/b", "want [persistent://]tenant/namespace/topic"},
		{"cluster-form", "persistent://a/use/ns/t", "%2F"},
		{"five-parts", "a/b/c/d/e", "want [persistent"},
		{"full-but-short", "persistent://orders", "want [persistent"},
		{"scheme", "http://a/b/c", `starts with "http://"`},
		{"no-scheme", "://a/b/c", `starts with "://"`},
		{"no-tenant", "/b/c", "tenant is empty"},
		{"no-namespace", "a//c", "namespace is empty"},
		{"no-topic", "a/b/", "topic is empty"},
		{"tenant-characters", "a b/c/d", `the tenant "a b" holds ' '`},
		{"namespace-characters", "a/b*/d", `the namespace "b*" holds '*'`},
		{"control", "a\x00b", "control character at byte 1"},
		{"not-utf8", "a\xffb", "not UTF-8"},
		{"too-long", longest + "x", "at most 1024"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ParseTopic(tt.input)
			if !errors.Is(err, ErrTopicName) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("ParseTopic(%q) = %v, want ErrTopicName with %q", tt.input, err, tt.text)
			}
		})
	}
	if _, err := ParseTopic(strings.Repeat("x", 1<<20)); len(err.Error()) > 2*MaxTopicName {
		t.Errorf("the error of a 1 MiB name has %d bytes", len(err.Error()))
	}
}

func TestTopicPartitions(t *testing.T) {
	base, err := ParseTopic("orders")
	if err != nil {
		t.Fatal(err)
	}
	p := base.WithPartition(3)
	if p.String() != "persistent://public/default/orders-partition-3" || p.Partition != 3 {
		t.Errorf("WithPartition(3) = %v, %d", p, p.Partition)
	}
	if parsed, err := ParseTopic(p.String()); err != nil || parsed != p {
		t.Errorf("parsed %+v, built %+v, %v", parsed, p, err)
	}
	if p.Base() != base || base.Base() != base {
		t.Errorf("Base of %v is %v, of %v is %v", p, p.Base(), base, base.Base())
	}
	if p.WithPartition(3) != p || p.WithPartition(-1) != p {
		t.Error("a partition is not its own partition")
	}
	if p.NamespaceName() != "public/default" {
		t.Errorf("NamespaceName = %q", p.NamespaceName())
	}
}

func TestParseNamespace(t *testing.T) {
	if tenant, ns, err := ParseNamespace("shop/eu"); tenant != "shop" || ns != "eu" || err != nil {
		t.Errorf("ParseNamespace = %q, %q, %v", tenant, ns, err)
	}
	for _, bad := range []string{"", "shop", "shop/", "/eu", "shop/use/eu", "sh op/eu"} {
		if _, _, err := ParseNamespace(bad); !errors.Is(err, ErrTopicName) {
			t.Errorf("ParseNamespace(%q) = %v, want ErrTopicName", bad, err)
		}
	}
}

func FuzzParseTopic(f *testing.F) {
	for _, s := range []string{
		"orders", "a/b/c", "persistent://a/b/c-partition-0", "non-persistent://a/b/c", "a/b", "://", "a%2Fb", "x-partition-1-partition-2", "-partition-0",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := ParseTopic(s)
		if err != nil {
			return
		}
		if again, err := ParseTopic(name.String()); err != nil || again != name {
			t.Errorf("%q parsed to %+v, which reads back as %+v, %v", s, name, again, err)
		}
		if again, err := ParseManagedLedgerName(name.ManagedLedgerName()); err != nil || again != name {
			t.Errorf("%q is ledger %q, which reads back as %+v, %v", s, name.ManagedLedgerName(), again, err)
		}
		if base := name.Base(); name.Partition >= 0 && base.WithPartition(name.Partition) != name {
			t.Errorf("%q: partition %d of base %v is %v", s, name.Partition, base, base.WithPartition(name.Partition))
		}
	})
}
