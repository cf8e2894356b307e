package ownership

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"sync"

	"github.com/magnetar-io/magnetar/metadata"
)

// cache is a copy of the broker records under one prefix, kept by a watch. It is
// as old as the watch is behind; nothing but speed may depend on it.
type cache struct {
	prefix  string
	changed func(ctx context.Context, key string, lease metadata.LeaseID) // after a change; lease 0 = the key is gone; may be nil
	ready   chan struct{}                                                 // closed once the first full copy is there

	mu      sync.Mutex // guards current
	current map[string]cached

	next map[string]cached // being read after a reset; nil otherwise; watch goroutine only
}

type cached struct {
	broker BrokerInfo
	lease  metadata.LeaseID
}

func newCache(prefix string, changed func(context.Context, string, metadata.LeaseID)) *cache {
	return &cache{prefix: prefix, changed: changed, ready: make(chan struct{}), current: map[string]cached{}}
}

// get returns what the cache holds for key.
func (c *cache) get(key string) (BrokerInfo, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.current[key]
	return v.broker, ok
}

// all returns every record, by id.
func (c *cache) all() []BrokerInfo {
	c.mu.Lock()
	list := make([]BrokerInfo, 0, len(c.current))
	for _, v := range c.current {
		list = append(list, v.broker)
	}
	c.mu.Unlock()
	slices.SortFunc(list, func(a, b BrokerInfo) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// follow keeps the cache up to date until ctx ends.
func (c *cache) follow(ctx context.Context, store metadata.Store, log *slog.Logger) {
	for {
		events, err := store.Watch(ctx, c.prefix)
		if err != nil {
			if ctx.Err() == nil {
				log.Warn("watch not begun; will retry", "prefix", c.prefix, "err", err)
			}
		} else {
			for e := range events {
				c.apply(ctx, e, log)
			}
		}
		if !pause(ctx) {
			return
		}
	}
}

// apply takes in one event. After a reset the old copy stays visible until the
// new one is complete, so that lookups never see half of it.
func (c *cache) apply(ctx context.Context, e metadata.Event, log *slog.Logger) {
	switch e.Type {
	case metadata.EventReset:
		c.next = map[string]cached{}
	case metadata.EventPut:
		v := cached{lease: e.KV.Lease}
		if err := json.Unmarshal(e.KV.Value, &v.broker); err != nil {
			log.Warn("broker record not understood; ignored", "key", e.KV.Key, "err", err)
			return
		}
		if c.next != nil {
			c.next[e.KV.Key] = v
			return
		}
		c.mu.Lock()
		c.current[e.KV.Key] = v
		c.mu.Unlock()
		c.tell(ctx, e.KV.Key, v.lease)
	case metadata.EventDelete:
		if c.next != nil {
			delete(c.next, e.KV.Key)
			return
		}
		c.mu.Lock()
		delete(c.current, e.KV.Key)
		c.mu.Unlock()
		c.tell(ctx, e.KV.Key, 0)
	case metadata.EventSynced:
		if c.next != nil {
			c.swap(ctx)
		}
	}
}

// swap makes the copy read since the reset the current one.
func (c *cache) swap(ctx context.Context) {
	c.mu.Lock()
	old := c.current
	c.current, c.next = c.next, nil
	now := c.current
	c.mu.Unlock()
	for key := range old {
		if _, still := now[key]; !still {
			c.tell(ctx, key, 0)
		}
	}
	for key, v := range now {
		if old[key] != v {
			c.tell(ctx, key, v.lease)
		}
	}
	select {
	case <-c.ready:
	default:
		close(c.ready)
	}
}

func (c *cache) tell(ctx context.Context, key string, lease metadata.LeaseID) {
	if c.changed != nil {
		c.changed(ctx, key, lease)
	}
}
