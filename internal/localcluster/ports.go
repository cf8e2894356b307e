package localcluster

import (
	"errors"
	"math/rand/v2"
	"sync/atomic"
)

// FreePortBase returns a port base all of whose ports are free at this moment, for
// tests. It stays below the ports that systems give to outgoing connections.
//
// Within one program no base is returned twice, so that tests that run side by side
// and have not opened their ports yet do not meet; programs that run side by side
// begin at different ones.
func FreePortBase() (int, error) {
	const low, step, slots = 12000, 30, 500
	firstSlot.CompareAndSwap(0, 1+rand.Int64N(slots))
	for range slots {
		base := low + step*int((firstSlot.Load()+usedSlots.Add(1))%slots)
		c := Cluster{state: state{PortBase: base, Bookies: maxProcesses, Brokers: maxProcesses}}
		if c.portsFree() == nil {
			return base, nil
		}
	}
	return 0, errors.New("no 30 free ports in a row between 12000 and 27000")
}

var firstSlot, usedSlots atomic.Int64
