package server

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"go.uber.org/goleak"

	"github.com/magnetar-io/magnetar/metadata"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var discard = slog.New(slog.DiscardHandler)

// seeded returns a generator whose seed is logged and can be set.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// clientID returns the n-th client of a test.
func clientID(n int) (id ClientID) {
	copy(id[:], fmt.Sprintf("client %08d", n))
	return id
}

// randomCommand returns a command on a small key space, so that commands meet.
func randomCommand(rng *rand.Rand, revision metadata.Version) *Command {
	c := &Command{Kind: Kind(1 + rng.IntN(7))}
	if rng.IntN(3) == 0 {
		c.Origin = Origin{Client: clientID(rng.IntN(4)), Sequence: 1 + rng.Uint64N(20), Resend: rng.IntN(2) == 0}
	}
	version := func() metadata.Version { return metadata.Version(rng.Int64N(int64(revision) + 2)) }
	key := func() string { return fmt.Sprintf("/%c/%c", 'a'+rng.IntN(3), 'a'+rng.IntN(6)) }
	value := func() []byte { return []byte(strconv.Itoa(rng.IntN(1000)))[:rng.IntN(2)] }
	lease := func() metadata.LeaseID { return metadata.LeaseID(version()) }
	switch c.Kind {
	case KindPut:
		c.Key, c.Value, c.If = key(), value(), metadata.AnyVersion
		if rng.IntN(2) == 0 {
			c.If = version()
		}
		if rng.IntN(2) == 0 {
			c.Lease = lease()
		}
	case KindSequential:
		c.Key, c.Value = fmt.Sprintf("/%c/", 'x'+rng.IntN(3)), value()
	case KindDelete:
		c.Key, c.If = key(), metadata.AnyVersion
		if rng.IntN(2) == 0 {
			c.If = version()
		}
	case KindGrant:
		c.TTL = metadata.MinTTL
	case KindRevoke:
		c.Lease = lease()
	case KindExpire:
		c.Lease, c.Revision, c.Leader = lease(), version(), version()
	case KindLead:
	}
	return c
}
