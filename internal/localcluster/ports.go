package localcluster

import (
	"errors"
	"math/rand/v2"
)

// FreePortBase returns a port base all of whose ports are free at this moment, for
// tests. It stays below the ports that systems give to outgoing connections.
func FreePortBase() (int, error) {
	const low, high, step, attempts = 12000, 28000, 30, 200
	for range attempts {
		base := low + step*rand.IntN((high-low)/step)
		c := Cluster{state: state{PortBase: base, Bookies: maxProcesses, Brokers: maxProcesses}}
		if c.portsFree() == nil {
			return base, nil
		}
	}
	return 0, errors.New("no 30 free ports in a row between 12000 and 28000")
}
