package ownership

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatatest"
)

const myTopic = "persistent://public/default/my-topic"

func TestRaceHasOneOwnerPerBundle(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	brokers := []*Service{start(t, store, "broker-1", nil), start(t, store, "broker-2", nil)}

	var mu sync.Mutex
	owners := map[string]map[string]bool{} // bundle to the ids of brokers that claimed it
	var wg sync.WaitGroup
	for i := range 64 {
		name := topic(t, fmt.Sprintf("persistent://public/default/t-%d", i%16))
		for _, s := range brokers {
			wg.Go(func() {
				c, err := s.Acquire(t.Context(), name)
				if other, ok := errors.AsType[*NotOwnerError](err); ok {
					if other.Broker.ID == s.self.ID {
						t.Errorf("%s was sent to itself", s.self.ID)
					}
					return
				}
				if err != nil {
					t.Errorf("%s acquires %v: %v", s.self.ID, name, err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				if owners[c.Bundle()] == nil {
					owners[c.Bundle()] = map[string]bool{}
				}
				owners[c.Bundle()][s.self.ID] = true
			})
		}
	}
	wg.Wait()
	if len(owners) != 4 {
		t.Errorf("%d bundles were claimed, want 4: %v", len(owners), owners)
	}
	for bundle, ids := range owners {
		if len(ids) != 1 {
			t.Errorf("bundle %s is claimed by %v, want one broker", bundle, ids)
		}
	}
}

func TestAcquireAgainReturnsTheSameClaim(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	s := start(t, store, "broker-1", nil)
	first, again := acquire(t, s, myTopic), acquire(t, s, myTopic)
	if first != again || !first.Valid() {
		t.Errorf("Acquire twice gave %p and %p, valid %v; want one valid claim", first, again, first.Valid())
	}
	if got, want := first.Bundle(), "public/default/0x00000000_0x40000000"; got != want { // the hash is 0x2bad45f7
		t.Errorf("bundle is %s, want %s", got, want)
	}
}

func TestLookupPointsEverybodyToTheOwner(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	one, two := start(t, store, "broker-1", nil), start(t, store, "broker-2", nil)
	eventually(t, "each broker sees both", func() bool {
		return len(one.brokers.all()) == 2 && len(two.brokers.all()) == 2
	})
	for i := range 16 {
		name := topic(t, fmt.Sprintf("persistent://public/default/t-%d", i))
		a, err := one.Lookup(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		b, err := two.Lookup(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if a.Broker != b.Broker {
			t.Errorf("%v: broker-1 answers %v, broker-2 answers %v", name, a.Broker, b.Broker)
		}
		if a.Mine == b.Mine || a.Mine != (a.Broker.ID == "broker-1") {
			t.Errorf("%v: answers %+v and %+v, want exactly the owner to say mine", name, a, b)
		}
	}
}

// TestInsistingClientIsServed takes a bundle at the broker that the hash does not
// advise; from then on everybody is sent there.
func TestInsistingClientIsServed(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	one, two := start(t, store, "broker-1", nil), start(t, store, "broker-2", nil)
	eventually(t, "each broker sees both", func() bool {
		return len(one.brokers.all()) == 2 && len(two.brokers.all()) == 2
	})
	bundle, err := one.bundleOf(t.Context(), topic(t, myTopic))
	if err != nil {
		t.Fatal(err)
	}
	advised, _ := choose(bundle, one.brokers.all())
	other := map[string]*Service{"broker-1": two, "broker-2": one}[advised.ID]
	acquire(t, other, myTopic)
	for _, s := range []*Service{one, two} {
		eventually(t, s.self.ID+" looks up the owner", func() bool {
			a, err := s.Lookup(t.Context(), topic(t, myTopic))
			return err == nil && a.Broker == other.self
		})
	}
}

// TestClaimEndsByTheClock silences metadata and asks nothing but the claim.
func TestClaimEndsByTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newGate(metadatatest.NewMemory(t))
		bootstrap(t, store)
		s := start(t, store, "broker-1", nil)
		c := acquire(t, s, myTopic)
		time.Sleep(time.Minute) // renewals carry it
		if !c.Valid() {
			t.Fatal("claim invalid though metadata answers")
		}
		store.silence()
		time.Sleep(testTTL / 2)
		if !c.Valid() {
			t.Error("claim invalid half a TTL after metadata fell silent")
		}
		time.Sleep(testTTL / 2)
		if c.Valid() {
			t.Error("claim valid a whole TTL after metadata fell silent")
		}
		store.open()
	})
}

// TestClaimNeedsNobodyToNotice: of a process that was stopped and continues, the
// first thing to run may be a dispatcher, before any goroutine of this room.
func TestClaimNeedsNobodyToNotice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newGate(metadatatest.NewMemory(t))
		session, err := metadata.NewSession(t.Context(), store, testTTL, quiet())
		if err != nil {
			t.Fatal(err)
		}
		c := &Claim{session: session, lost: make(chan struct{})} // belongs to no service
		store.silence()
		time.Sleep(testTTL)
		select {
		case <-c.Lost():
			t.Error("somebody ended the claim")
		default:
		}
		if c.Valid() {
			t.Error("claim valid past its session's deadline")
		}
		store.open()
		if err := session.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestTakeover cuts the owner off. Another broker gets the bundle within 10 s and
// not before the owner's claim is invalid.
func TestTakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := metadatatest.NewMemory(t)
		cut := newGate(store)
		bootstrap(t, store)
		owner, heir := start(t, cut, "broker-1", nil), start(t, store, "broker-2", nil)
		old := acquire(t, owner, myTopic)
		cut.silence()
		defer cut.open()
		silent := time.Now()
		for {
			c, err := heir.Acquire(t.Context(), topic(t, myTopic))
			if err == nil {
				if old.Valid() {
					t.Error("two brokers have a valid claim on one bundle")
				}
				if !c.Valid() {
					t.Error("the new claim is not valid")
				}
				break
			}
			if _, ok := errors.AsType[*NotOwnerError](err); !ok {
				t.Fatal(err)
			}
			if time.Since(silent) > 10*time.Second {
				t.Fatalf("not taken over after %v", time.Since(silent))
			}
			time.Sleep(50 * time.Millisecond)
		}
		eventually(t, "lookup at the heir says mine", func() bool {
			a, err := heir.Lookup(t.Context(), topic(t, myTopic))
			return err == nil && a.Mine
		})
		eventually(t, "the heir alone is live", func() bool { return len(heir.brokers.all()) == 1 })
	})
}

// TestSessionLoss silences metadata for longer than a lease: every claim is lost,
// the hooks run for each bundle on invalid claims, and afterwards the broker
// registers anew and acquires again.
func TestSessionLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := metadatatest.NewMemory(t)
		cut := newGate(store)
		bootstrap(t, store)
		var mu sync.Mutex
		var closed []string
		s := start(t, cut, "broker-1", func(_ context.Context, bundle string) {
			mu.Lock()
			defer mu.Unlock()
			closed = append(closed, bundle)
		})
		claims := map[string]*Claim{}
		for i := range 16 {
			c := acquire(t, s, fmt.Sprintf("persistent://public/default/t-%d", i))
			claims[c.Bundle()] = c
		}
		cut.silence()
		time.Sleep(testTTL)
		synctest.Wait()
		for bundle, c := range claims {
			select {
			case <-c.Lost():
			default:
				t.Errorf("claim on %s not lost a TTL after metadata fell silent", bundle)
			}
		}
		mu.Lock()
		slices.Sort(closed)
		if len(closed) != len(claims) || len(slices.Compact(closed)) != len(claims) {
			t.Errorf("hooks ran for %v, want once for each of %d bundles", closed, len(claims))
		}
		mu.Unlock()
		if _, err := s.Acquire(t.Context(), topic(t, myTopic)); err == nil {
			t.Error("acquired without a session")
		}
		if err := s.Check(t.Context()); !errors.Is(err, ErrNotReady) {
			t.Errorf("Check without a session = %v, want ErrNotReady", err)
		}

		cut.open()
		eventually(t, "healthy again", func() bool { return s.Check(t.Context()) == nil })
		again := acquire(t, s, myTopic)
		if old := claims[again.Bundle()]; old.Valid() || old == again || !again.Valid() {
			t.Errorf("after the loss: old claim valid %v, new one %v, want false, true", old.Valid(), again.Valid())
		}
	})
}

// TestAcquireWaitsForHooks: a lost bundle cannot be acquired again before what
// was open of it is closed.
func TestAcquireWaitsForHooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cut := newGate(metadatatest.NewMemory(t))
		bootstrap(t, cut)
		finish := make(chan struct{})
		s := start(t, cut, "broker-1", func(context.Context, string) { <-finish })
		acquire(t, s, myTopic)
		cut.silence()
		time.Sleep(testTTL)
		cut.open()
		eventually(t, "a new session", func() bool { return s.Check(t.Context()) == nil })

		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Acquire(short, topic(t, myTopic)); !errors.Is(err, ErrNotReady) {
			t.Errorf("Acquire while the hook runs = %v, want ErrNotReady", err)
		}
		close(finish)
		acquire(t, s, myTopic)
	})
}

func TestReleaseHandsOver(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	var claim *Claim
	var ran atomic.Int32
	one := start(t, store, "broker-1", func(ctx context.Context, bundle string) {
		ran.Add(1)
		if !claim.Valid() {
			t.Error("the claim is invalid while its topics close")
		}
		if _, err := store.Get(ctx, ownerKey(bundle)); err != nil {
			t.Errorf("owner key while topics close: %v", err)
		}
	})
	two := start(t, store, "broker-2", nil)
	claim = acquire(t, one, myTopic)
	if _, err := two.Acquire(t.Context(), topic(t, myTopic)); err == nil {
		t.Fatal("acquired a bundle that is owned")
	}
	if err := one.Release(t.Context(), claim.Bundle()); err != nil {
		t.Fatal(err)
	}
	if ran.Load() != 1 || claim.Valid() {
		t.Errorf("after Release: hook ran %d times, claim valid %v, want once, false", ran.Load(), claim.Valid())
	}
	select {
	case <-claim.Lost():
	default:
		t.Error("Lost is open after Release")
	}
	acquire(t, two, myTopic)
	if err := one.Release(t.Context(), claim.Bundle()); err != nil {
		t.Errorf("releasing a bundle that is not ours: %v", err)
	}
}

func TestCloseHandsEverythingOver(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	var ran atomic.Int32
	one := start(t, store, "broker-1", func(ctx context.Context, _ string) {
		ran.Add(1)
		// Others must not send clients here any more.
		if _, err := store.Get(ctx, brokerKey("broker-1")); !errors.Is(err, metadata.ErrNotFound) {
			t.Errorf("registration while bundles are released: %v, want not found", err)
		}
	})
	two := start(t, store, "broker-2", nil)
	bundles := map[string]bool{}
	for i := range 16 {
		bundles[acquire(t, one, fmt.Sprintf("persistent://public/default/t-%d", i)).Bundle()] = true
	}
	for range 2 {
		if err := one.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if int(ran.Load()) != len(bundles) {
		t.Errorf("hooks ran %d times, want once for each of %d bundles", ran.Load(), len(bundles))
	}
	for i := range 16 {
		acquire(t, two, fmt.Sprintf("persistent://public/default/t-%d", i))
	}
	if _, err := one.Acquire(t.Context(), topic(t, myTopic)); !errors.Is(err, ErrClosed) {
		t.Errorf("Acquire after Close = %v, want ErrClosed", err)
	}
	if left, err := store.Range(t.Context(), brokersPrefix, "", 10); err != nil || len(left) != 1 {
		t.Errorf("registered after Close: %v, %v, want broker-2 alone", left, err)
	}
}

// TestSameBrokerID starts a broker whose id a killed process still holds.
func TestSameBrokerID(t *testing.T) {
	tests := []struct {
		name    string
		sole    bool
		renewed bool // the other one lives
		atLeast time.Duration
		fails   bool
	}{
		{"waits-for-a-dead-one", false, false, testTTL - time.Second, false},
		{"sole-holder-does-not-wait", true, false, 0, false},
		{"refuses-a-living-one", false, true, 2 * testTTL, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := metadatatest.NewMemory(t)
				bootstrap(t, store)
				lease, err := store.GrantLease(t.Context(), testTTL)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := store.Put(t.Context(), brokerKey("broker-1"), encode(info("broker-1")), 0, lease); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var renewing sync.WaitGroup
				if tt.renewed {
					renewing.Go(func() {
						for ctx.Err() == nil {
							store.KeepAlive(ctx, lease)
							time.Sleep(testTTL / 3)
						}
					})
				}
				cfg := testConfig()
				cfg.SoleHolder = tt.sole
				s := New(cfg, store, info("broker-1"), quiet())
				begun := time.Now()
				err = s.Start(t.Context())
				if (err != nil) != tt.fails {
					t.Errorf("Start = %v, want an error: %v", err, tt.fails)
				}
				if took := time.Since(begun); took < tt.atLeast || took > 5*testTTL || (tt.atLeast == 0 && took > time.Second) {
					t.Errorf("Start took %v, want at least %v", took, tt.atLeast)
				}
				cancel()
				renewing.Wait()
				if err := s.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestLostAnswerIsAdopted: an owner key that we wrote without learning so is ours
// at the next attempt, and a lookup finds that out by itself.
func TestLostAnswerIsAdopted(t *testing.T) {
	store := newGate(metadatatest.NewMemory(t))
	bootstrap(t, store)
	s := start(t, store, "broker-1", nil)
	start(t, store, "broker-2", nil)
	eventually(t, "both brokers are seen", func() bool { return len(s.brokers.all()) == 2 })
	myTopic := adviseElsewhere(t, s)
	lose := errors.Join(metadata.ErrUnknownOutcome, context.DeadlineExceeded)
	store.mu.Lock()
	store.afterPut = func(string) error { return lose }
	store.mu.Unlock()
	if _, err := s.Acquire(t.Context(), topic(t, myTopic)); !errors.Is(err, metadata.ErrUnknownOutcome) {
		t.Fatalf("Acquire = %v, want the unknown outcome", err)
	}
	store.mu.Lock()
	store.afterPut = nil
	store.mu.Unlock()
	bundle, err := s.bundleOf(t.Context(), topic(t, myTopic))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the watch tells of the key", func() bool {
		_, ok := s.owners.get(ownerKey(bundle))
		return ok
	})
	a, err := s.Lookup(t.Context(), topic(t, myTopic))
	if err != nil || !a.Mine {
		t.Errorf("Lookup = %+v, %v, want mine", a, err)
	}
	if c := acquire(t, s, myTopic); !c.Valid() {
		t.Error("the adopted claim is not valid")
	}
}

// TestOwnKeyOfLostSessionSendsNobodyAway: while metadata still names a broker whose
// session is gone, the others send clients to it, so it must not send them back.
func TestOwnKeyOfLostSessionSendsNobodyAway(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	s := start(t, store, "broker-1", nil)
	other := start(t, store, "broker-2", nil)
	eventually(t, "both brokers are seen", func() bool { return len(s.brokers.all()) == 2 })
	name := topic(t, adviseElsewhere(t, s))
	bundle, err := s.bundleOf(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	former, err := store.GrantLease(t.Context(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Put(t.Context(), ownerKey(bundle), encode(s.self), 0, former); err != nil {
		t.Fatal(err)
	}
	for _, b := range []*Service{s, other} {
		eventually(t, b.self.ID+" sees the key", func() bool {
			_, ok := b.owners.get(ownerKey(bundle))
			return ok
		})
	}
	if a, err := other.Lookup(t.Context(), name); err != nil || a.Broker.ID != s.self.ID {
		t.Fatalf("%s answers %+v, %v, want broker-1", other.self.ID, a, err)
	}
	if a, err := s.Lookup(t.Context(), name); !errors.Is(err, ErrNotReady) {
		t.Errorf("with a new session: Lookup = %+v, %v, want ErrNotReady", a, err)
	}

	session := s.session
	setSession := func(to *metadata.Session) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.session = to
	}
	setSession(nil)
	if a, err := s.Lookup(t.Context(), name); !errors.Is(err, ErrNotReady) {
		t.Errorf("without a session: Lookup = %+v, %v, want ErrNotReady", a, err)
	}
	setSession(session)

	if err := store.RevokeLease(t.Context(), former); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the key is gone and somebody serves the topic", func() bool {
		_, err := s.Lookup(t.Context(), name)
		return err == nil
	})
}

// adviseElsewhere returns a topic whose bundle the hash gives to another broker.
func adviseElsewhere(t *testing.T, s *Service) string {
	t.Helper()
	for i := range 1000 {
		name := fmt.Sprintf("persistent://public/default/elsewhere-%d", i)
		bundle, err := s.bundleOf(t.Context(), topic(t, name))
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := choose(bundle, s.brokers.all()); b.ID != s.self.ID {
			return name
		}
	}
	t.Fatal("every bundle is given to " + s.self.ID)
	return ""
}

// TestForeignHandEndsClaim deletes an owner key behind its owner's back.
func TestForeignHandEndsClaim(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	closed := make(chan string, 1)
	s := start(t, store, "broker-1", func(_ context.Context, bundle string) { closed <- bundle })
	c := acquire(t, s, myTopic)
	if err := store.Delete(t.Context(), ownerKey(c.Bundle()), metadata.AnyVersion); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.Lost():
	case <-time.After(10 * time.Second):
		t.Fatal("claim stands though its key is gone")
	}
	if c.Valid() {
		t.Error("the claim is valid though it is lost")
	}
	if got := <-closed; got != c.Bundle() {
		t.Errorf("hook ran for %s, want %s", got, c.Bundle())
	}
	if again := acquire(t, s, myTopic); again == c || !again.Valid() {
		t.Error("no new claim after the old one was lost")
	}
}

func TestUnknownNamespace(t *testing.T) {
	store := metadatatest.NewMemory(t)
	bootstrap(t, store)
	s := start(t, store, "broker-1", nil)
	nowhere := topic(t, "persistent://public/nowhere/t")
	if _, err := s.Lookup(t.Context(), nowhere); !errors.Is(err, ErrNoSuchNamespace) {
		t.Errorf("Lookup = %v, want ErrNoSuchNamespace", err)
	}
	if _, err := s.Acquire(t.Context(), nowhere); !errors.Is(err, ErrNoSuchNamespace) {
		t.Errorf("Acquire = %v, want ErrNoSuchNamespace", err)
	}
}
