package raftlog

import (
	"sync"

	"github.com/hashicorp/raft"
)

// logCacheBytes bounds the newest log entries that one group keeps in memory for
// its followers and its own apply. raft's own cache bounds entries, not bytes.
const logCacheBytes = 16 << 20

// logEntryOverhead is what an entry costs beyond its data.
const logEntryOverhead = 128

// logCache holds the newest run of a log, contiguous in index.
type logCache struct {
	limit int64

	mu    sync.RWMutex // guards what follows
	logs  []raft.Log   // logs[i].Index == first+i
	first uint64       // index of logs[0]; meaningless if logs is empty
	bytes int64
}

func logBytes(l *raft.Log) int64 {
	return int64(len(l.Data)) + int64(len(l.Extensions)) + logEntryOverhead
}

// add appends logs that were just made durable. They replace cached entries of
// the same index; what does not continue the cached run starts a new one.
func (c *logCache) add(logs []*raft.Log) {
	if len(logs) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cutSuffix(logs[0].Index)
	for _, l := range logs {
		if n := uint64(len(c.logs)); n == 0 || l.Index != c.first+n {
			c.reset()
			c.first = l.Index
		}
		c.logs = append(c.logs, *l)
		c.bytes += logBytes(l)
	}
	drop := 0
	for drop < len(c.logs) && c.bytes > c.limit {
		c.bytes -= logBytes(&c.logs[drop])
		c.logs[drop] = raft.Log{} // let the data go before the array does
		drop++
	}
	c.logs = c.logs[drop:]
	c.first += uint64(drop)
}

// get returns the entry at index, if it is cached.
func (c *logCache) get(index uint64, into *raft.Log) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if index < c.first || index-c.first >= uint64(len(c.logs)) {
		return false
	}
	*into = c.logs[index-c.first]
	return true
}

// remove forgets the entries from low to high, inclusive. A hole in the middle
// drops what is behind it too.
func (c *logCache) remove(low, high uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.logs) == 0 || high < c.first {
		return
	}
	if low > c.first {
		c.cutSuffix(low)
		return
	}
	n := min(high-c.first+1, uint64(len(c.logs)))
	for i := range c.logs[:n] {
		c.bytes -= logBytes(&c.logs[i])
		c.logs[i] = raft.Log{}
	}
	c.logs, c.first = c.logs[n:], c.first+n
}

// cutSuffix forgets the entries from index on. The caller holds mu.
func (c *logCache) cutSuffix(index uint64) {
	if len(c.logs) == 0 || index >= c.first+uint64(len(c.logs)) {
		return
	}
	if index <= c.first {
		c.reset()
		return
	}
	keep := index - c.first
	for i := range c.logs[keep:] {
		c.bytes -= logBytes(&c.logs[keep:][i])
		c.logs[keep:][i] = raft.Log{}
	}
	c.logs = c.logs[:keep]
}

func (c *logCache) reset() {
	c.logs, c.bytes = nil, 0
}
