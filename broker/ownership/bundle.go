package ownership

import (
	"fmt"
	"hash/crc32"
	"hash/fnv"
)

// hashSpace is the number of values a topic's hash can have.
const hashSpace = 1 << 32

// lastBoundary is the upper end of the last bundle, which alone includes it.
const lastBoundary = hashSpace - 1

// topicHash places a full topic name, partition suffix included, in the hash
// space. It is Pulsar's: CRC32 (IEEE) of the name in UTF-8.
func topicHash(topic string) uint32 { return crc32.ChecksumIEEE([]byte(topic)) }

// boundary returns the lower end of bundle i of n, or the upper end of the last
// one for i = n.
func boundary(i, n int) uint64 {
	if i == n {
		return lastBoundary
	}
	return uint64(i) * (hashSpace / uint64(n))
}

// boundaries returns the n+1 ends of n bundles as Pulsar spells them.
func boundaries(n int) []string {
	ends := make([]string, 0, n+1)
	for i := range n + 1 {
		ends = append(ends, fmt.Sprintf("0x%08x", boundary(i, n)))
	}
	return ends
}

// bundleRange returns the name, within its namespace, of the bundle that holds
// hash when there are n: its two ends.
//
//	0x00000000      0x40000000      0x80000000      0xc0000000      0xffffffff
//	     [------ 0 ------)[------ 1 ------)[------ 2 ------)[------ 3 ------]
func bundleRange(hash uint32, n int) string {
	size := hashSpace / uint64(n)
	// The last bundle takes what an uneven division leaves over.
	i := int(min(uint64(hash)/size, uint64(n-1)))
	return fmt.Sprintf("0x%08x_0x%08x", boundary(i, n), boundary(i+1, n))
}

// choose returns the broker that should serve bundle: the one with the highest
// hash of the pair. Every broker that sees the same list chooses alike, and when
// one comes or goes only its own bundles move.
func choose(bundle string, brokers []BrokerInfo) (BrokerInfo, bool) {
	var best BrokerInfo
	var bestScore uint64
	for i, b := range brokers {
		s := score(bundle, b.ID)
		if i == 0 || s > bestScore || (s == bestScore && b.ID < best.ID) {
			best, bestScore = b, s
		}
	}
	return best, len(brokers) > 0
}

// score hashes a pair. FNV alone hardly mixes the last bytes into the high bits,
// which decide here, so a final mix follows.
func score(bundle, broker string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(broker))
	h.Write([]byte{0})
	h.Write([]byte(bundle))
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return x
}
