package ownership

import (
	"fmt"
	"slices"
	"testing"
)

func TestTopicHash(t *testing.T) {
	tests := []struct {
		topic string
		want  uint32
	}{
		{"persistent://public/default/my-topic", 0x2bad45f7},
		{"persistent://public/default/my-topic-partition-0", 0x3d4b4235},
	}
	for _, tt := range tests {
		if got := topicHash(tt.topic); got != tt.want {
			t.Errorf("topicHash(%q) = 0x%08x, want 0x%08x", tt.topic, got, tt.want)
		}
	}
}

func TestBundleRange(t *testing.T) {
	tests := []struct {
		hash    uint32
		bundles int
		want    string
	}{
		{0, 1, "0x00000000_0xffffffff"},
		{0xffffffff, 1, "0x00000000_0xffffffff"},
		{0, 4, "0x00000000_0x40000000"},
		{0x3fffffff, 4, "0x00000000_0x40000000"},
		{0x40000000, 4, "0x40000000_0x80000000"},
		{0xbfffffff, 4, "0x80000000_0xc0000000"},
		{0xc0000000, 4, "0xc0000000_0xffffffff"},
		{0xffffffff, 4, "0xc0000000_0xffffffff"},
		{0x55555555, 3, "0x55555555_0xaaaaaaaa"},
		{0xfffffffe, 3, "0xaaaaaaaa_0xffffffff"}, // what three does not divide
		{0xffffffff, 3, "0xaaaaaaaa_0xffffffff"},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%08x-of-%d", tt.hash, tt.bundles), func(t *testing.T) {
			if got := bundleRange(tt.hash, tt.bundles); got != tt.want {
				t.Errorf("bundleRange(%#x, %d) = %s, want %s", tt.hash, tt.bundles, got, tt.want)
			}
		})
	}
	if got, want := boundaries(4), []string{"0x00000000", "0x40000000", "0x80000000", "0xc0000000", "0xffffffff"}; !slices.Equal(got, want) {
		t.Errorf("boundaries(4) = %v, want %v", got, want)
	}
}

// TestChooseMovesOnlyWhatItMust removes one broker of four: only its bundles may
// go elsewhere, and each broker has a fair share before and after.
func TestChooseMovesOnlyWhatItMust(t *testing.T) {
	brokers := []BrokerInfo{{ID: "broker-1"}, {ID: "broker-2"}, {ID: "broker-3"}, {ID: "broker-4"}}
	const bundles = 4000
	share := map[string]int{}
	for i := range bundles {
		bundle := fmt.Sprintf("public/ns-%d/%s", i/4, bundleRange(uint32(i%4)<<30, 4))
		before, ok := choose(bundle, brokers)
		if !ok {
			t.Fatal("no broker chosen of four")
		}
		share[before.ID]++
		after, _ := choose(bundle, without(brokers, "broker-3"))
		if before.ID != "broker-3" && after != before {
			t.Fatalf("%s moved from %s to %s though its broker stayed", bundle, before.ID, after.ID)
		}
		backwards := slices.Clone(brokers)
		slices.Reverse(backwards)
		if other, _ := choose(bundle, backwards); other != before {
			t.Fatalf("%s: choice depends on the order of the list: %s or %s", bundle, before.ID, other.ID)
		}
	}
	for id, n := range share {
		if n < bundles/4*8/10 || n > bundles/4*12/10 {
			t.Errorf("%s is chosen for %d of %d bundles, want about a quarter", id, n, bundles)
		}
	}
	if _, ok := choose("public/default/x", nil); ok {
		t.Error("a broker was chosen of none")
	}
}
