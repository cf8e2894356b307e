package broker

import (
	"context"
	"fmt"
	"time"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// heard notes a sign of life.
func (c *conn) heard() {
	c.lastHeard.Store(int64(time.Since(c.born)))
	c.mu.Lock()
	listeners := c.listeners
	c.listeners = nil
	c.mu.Unlock()
	for _, l := range listeners {
		close(l)
	}
}

// startKeepAlive asks a silent peer for a sign of life after an interval, and
// closes the connection after the next. It runs on a timer's goroutine and never
// waits.
func (c *conn) startKeepAlive() {
	interval := time.Duration(c.b.cfg.KeepAliveIntervalSeconds) * time.Second
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keepAlive = time.AfterFunc(interval, func() { c.checkSilence(interval) })
}

func (c *conn) checkSilence(interval time.Duration) {
	silent := time.Since(c.born) - time.Duration(c.lastHeard.Load())
	next := interval
	switch {
	case c.ctx.Err() != nil:
		return
	case c.paused.Load(): // we are not listening
	case silent >= 2*interval:
		c.b.metrics.silent.Inc()
		c.log.Info("connection closed: the peer is silent", "silent", silent)
		c.close(fmt.Errorf("silent for %v", silent))
		return
	case silent >= interval:
		c.out.reply(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}})
		next = 2*interval - silent
	default:
		next = interval - silent
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.gone {
		c.keepAlive.Reset(max(next, time.Millisecond))
	}
}

// alive implements [holder].
func (c *conn) alive(ctx context.Context) bool {
	if c.paused.Load() {
		return true // it is we who do not listen
	}
	sign := make(chan struct{})
	c.mu.Lock()
	gone := c.gone
	if !gone {
		c.listeners = append(c.listeners, sign)
	}
	c.mu.Unlock()
	if gone {
		close(sign) // it is ending already
	}
	c.out.reply(&pulsarpb.BaseCommand{Type: pulsarpb.BaseCommand_PING.Enum(), Ping: &pulsarpb.CommandPing{}})
	timeout := time.NewTimer(millis(c.b.cfg.ConnectionLivenessTimeoutMillis))
	defer timeout.Stop()
	select {
	case <-sign:
		if !gone && c.ctx.Err() == nil {
			return true
		}
	case <-c.ctx.Done():
	case <-ctx.Done():
		return true // we cannot know
	case <-timeout.C:
		c.log.Info("connection closed: no answer, and its place is wanted")
		c.close(fmt.Errorf("no answer for %d ms when its place was wanted", c.b.cfg.ConnectionLivenessTimeoutMillis))
	}
	select {
	case <-c.done:
		return false
	case <-ctx.Done():
		return true
	}
}
