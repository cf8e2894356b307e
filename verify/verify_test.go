package verify

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/ledger"
)

func at(entry int64) ledger.Position { return ledger.Position{Ledger: 7, Entry: ledger.EntryID(entry)} }

// publish records n acknowledged sends of a producer, from sequence 0.
func publish(h *History, producer string, n int64) {
	for i := range n {
		h.Send(producer, i, Payload(producer, i, 64))
		h.Acked(producer, i, at(i))
	}
}

func deliver(h *History, consumer, producer string, sequences ...int64) {
	for _, i := range sequences {
		h.Received(consumer, Payload(producer, i, 64))
	}
}

func TestJudge(t *testing.T) {
	tests := []struct {
		name    string
		options Options
		history func(h *History)
		want    Verdict // counts only
		text    []string
	}{
		{"empty", Options{}, func(*History) {}, Verdict{}, nil},
		{
			"all-delivered",
			Options{ExactlyOnce: true},
			func(h *History) { publish(h, "p", 3); deliver(h, "c", "p", 0, 1, 2) },
			Verdict{Published: 3, Acknowledged: 3, Delivered: 3},
			nil,
		},
		{
			"lost",
			Options{},
			func(h *History) { publish(h, "p", 3); deliver(h, "c", "p", 0, 2) },
			Verdict{Published: 3, Acknowledged: 3, Delivered: 2, Lost: 1},
			[]string{"lost: p/1 acknowledged at 7:1"},
		},
		{
			"lost-last",
			Options{},
			func(h *History) { publish(h, "p", 3); deliver(h, "c", "p", 0, 1) },
			Verdict{Published: 3, Acknowledged: 3, Delivered: 2, Lost: 1},
			[]string{"lost: p/2 acknowledged at 7:2"},
		},
		{
			"never-consumed",
			Options{},
			func(h *History) { publish(h, "p", 2) },
			Verdict{Published: 2, Acknowledged: 2, Lost: 2},
			[]string{"lost: p/0", "lost: p/1"},
		},
		{
			"unacknowledged-may-be-missing",
			Options{},
			func(h *History) { publish(h, "p", 1); h.Send("p", 1, Payload("p", 1, 64)); deliver(h, "c", "p", 0) },
			Verdict{Published: 2, Acknowledged: 1, Delivered: 1},
			nil,
		},
		{
			"failed-may-be-delivered",
			Options{},
			func(h *History) {
				h.Send("p", 0, Payload("p", 0, 64))
				h.Failed("p", 0)
				h.Failed("p", 0)
				h.Failed("p", 9)
				h.Failed("q", 0)
				deliver(h, "c", "p", 0)
			},
			Verdict{Published: 1, Failed: 1, Delivered: 1},
			nil,
		},
		{
			"invented-sequence",
			Options{},
			func(h *History) { publish(h, "p", 1); deliver(h, "c", "p", 0, 5000, -1) },
			Verdict{Published: 1, Acknowledged: 1, Delivered: 1, Invented: 2},
			[]string{"invented: p/5000 delivered to c", "invented: p/-1"},
		},
		{
			"invented-within-a-page",
			Options{},
			func(h *History) { publish(h, "p", 1); deliver(h, "c", "p", 0, 1) },
			Verdict{Published: 1, Acknowledged: 1, Delivered: 1, Invented: 1},
			[]string{"invented: p/1"},
		},
		{
			"invented-producer",
			Options{},
			func(h *History) { deliver(h, "c", "ghost", 0) },
			Verdict{Invented: 1},
			[]string{"invented: ghost/0"},
		},
		{
			"invented-receipt",
			Options{},
			func(h *History) { h.Acked("p", 0, at(3)) },
			Verdict{Invented: 1},
			[]string{"invented: p/0 acknowledged at 7:3, never sent"},
		},
		{
			"corrupt-unreadable",
			Options{},
			func(h *History) { h.Received("c", []byte("junk")) },
			Verdict{Corrupt: 1},
			[]string{"corrupt: c: payload corrupt: 4 bytes"},
		},
		{
			"corrupt-other-message-of-that-name",
			Options{},
			func(h *History) {
				publish(h, "p", 1)
				h.Delivered("c", "p", 0, Payload("p", 0, 65))
			},
			Verdict{Published: 1, Acknowledged: 1, Lost: 1, Corrupt: 1},
			[]string{"corrupt: p/0 delivered to c with other bytes", "lost: p/0"},
		},
		{
			"out-of-order",
			Options{},
			func(h *History) { publish(h, "p", 4); deliver(h, "c", "p", 0, 2); deliver(h, "d", "p", 1, 3) },
			Verdict{Published: 4, Acknowledged: 4, Delivered: 4, OutOfOrder: 1},
			[]string{"out of order: p/1 first delivered to d after p/2 was to c"},
		},
		{
			"any-order",
			Options{AnyOrder: true},
			func(h *History) { publish(h, "p", 3); deliver(h, "c", "p", 2, 0, 1) },
			Verdict{Published: 3, Acknowledged: 3, Delivered: 3, OutOfOrder: 2},
			nil,
		},
		{
			"producers-have-orders-of-their-own",
			Options{},
			func(h *History) {
				publish(h, "p", 2)
				publish(h, "q", 2)
				deliver(h, "c", "q", 0, 1)
				deliver(h, "c", "p", 0, 1)
			},
			Verdict{Published: 4, Acknowledged: 4, Delivered: 4},
			nil,
		},
		{
			"late-duplicate-is-no-reordering",
			Options{},
			func(h *History) { publish(h, "p", 3); deliver(h, "c", "p", 0, 1, 2, 0, 1) },
			Verdict{Published: 3, Acknowledged: 3, Delivered: 3, Duplicates: 2},
			nil,
		},
		{
			"exactly-once",
			Options{ExactlyOnce: true},
			func(h *History) { publish(h, "p", 1); deliver(h, "c", "p", 0, 0) },
			Verdict{Published: 1, Acknowledged: 1, Delivered: 1, Duplicates: 1},
			[]string{"duplicate: and 1 more"},
		},
		{
			"receipt-after-delivery",
			Options{},
			func(h *History) {
				h.Send("p", 0, Payload("p", 0, 64))
				deliver(h, "c", "p", 0)
				h.Acked("p", 0, at(0))
				h.Acked("p", 0, at(0))
			},
			Verdict{Published: 1, Acknowledged: 1, Delivered: 1},
			nil,
		},
		{
			"each-subscription-sees-all",
			Options{},
			func(h *History) {
				publish(h, "p", 2)
				h.Subscription("a").Received("c", Payload("p", 0, 64))
				h.Subscription("a").Received("c", Payload("p", 1, 64))
				h.Subscription("b").Received("c", Payload("p", 1, 64))
			},
			Verdict{Published: 2, Acknowledged: 2, Delivered: 3, Lost: 1},
			[]string{"lost: p/0 missing in b"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := New()
			tt.history(h)
			v := h.Judge(tt.options)
			if got := counts(v); got != counts(tt.want) {
				t.Errorf("got  %s\nwant %s", got, counts(tt.want))
			}
			if err := v.Err(); (err != nil) != (len(tt.text) > 0) || err != nil && !errors.Is(err, ErrViolated) {
				t.Errorf("Err() = %v", err)
			}
			for _, text := range tt.text {
				if !strings.Contains(v.String(), text) {
					t.Errorf("verdict lacks %q:\n%s", text, v)
				}
			}
			if h.Outstanding() != v.Lost {
				t.Errorf("Outstanding() = %d, lost %d", h.Outstanding(), v.Lost)
			}
		})
	}
}

// counts is the first line of a verdict, without examples.
func counts(v Verdict) string {
	line, _, _ := strings.Cut(v.String(), "\n")
	return line
}

func TestVerdictNamesTenAndCountsTheRest(t *testing.T) {
	h := New()
	publish(h, "p", pageSize+20)
	v := h.Judge(Options{})
	if v.Lost != pageSize+20 || len(v.Examples[Lost]) != maxExamples || !strings.Contains(v.String(), fmt.Sprintf("and %d more", pageSize+10)) {
		t.Errorf("verdict:\n%s", v)
	}
}

func TestMisuse(t *testing.T) {
	for name, f := range map[string]func(h *History){
		"negative": func(h *History) { h.Send("p", -1, nil) },
		"twice":    func(h *History) { h.Send("p", 0, nil); h.Send("p", 0, nil) },
		"name":     func(*History) { Payload(strings.Repeat("x", 256), 0, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(New())
		})
	}
}

func TestWait(t *testing.T) {
	h := New()
	publish(h, "p", 1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := h.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 acknowledged") {
		t.Errorf("Wait with one outstanding: %v", err)
	}
	go deliver(h, "c", "p", 0)
	if err := h.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestPayload(t *testing.T) {
	for _, size := range []int{0, 21, 29, 30, 100, 1024} {
		p := Payload("p", 1<<40, size)
		if len(p) != max(size, 21) || !bytes.Equal(p, Payload("p", 1<<40, size)) {
			t.Errorf("size %d: %d bytes, or not the same twice", size, len(p))
		}
		if m, err := Parse(p); err != nil || m != (Message{"p", 1 << 40}) {
			t.Errorf("size %d: Parse = %+v, %v", size, m, err)
		}
		for i := range len(p) * 8 {
			p[i/8] ^= 1 << (i % 8)
			if _, err := Parse(p); !errors.Is(err, ErrCorrupt) {
				t.Errorf("size %d, bit %d flipped: %v", size, i, err)
			}
			p[i/8] ^= 1 << (i % 8)
		}
		if _, err := Parse(p[:len(p)-1]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("size %d, cut: %v", size, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(Payload("p", 7, 100))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, p []byte) {
		m, err := Parse(p)
		if err == nil && len(Payload(m.Producer, m.Sequence, len(p))) != len(p) {
			t.Errorf("Parse accepts %d bytes that Payload cannot make", len(p))
		}
	})
}

// TestJudgeMatchesModel plays random faulty systems and compares the verdict
// with counts kept the obvious way.
func TestJudgeMatchesModel(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TEST_SEED=%d", seed)
	for round := range uint64(10) {
		rng := rand.New(rand.NewPCG(seed, round))
		h := New()
		var want Verdict
		const n = pageSize + 500
		acked, seen := make([]bool, n), make([]int, n)
		var wire []int64
		for i := range int64(n) {
			h.Send("p", i, Payload("p", i, 64))
			want.Published++
			if acked[i] = rng.IntN(10) > 0; acked[i] {
				want.Acknowledged++
			}
			switch rng.IntN(20) {
			case 0: // lost if acknowledged
			case 1:
				wire = append(wire, i, i)
			default:
				wire = append(wire, i)
			}
		}
		for range rng.IntN(5) {
			i, j := rng.IntN(len(wire)), rng.IntN(len(wire))
			wire[i], wire[j] = wire[j], wire[i]
		}
		early := rng.IntN(2) == 0 // receipts before deliveries, or after
		ack := func() {
			for i := range int64(n) {
				if acked[i] {
					h.Acked("p", i, at(i))
				}
			}
		}
		if early {
			ack()
		}
		highest := int64(-1)
		for _, i := range wire {
			deliver(h, "c", "p", i)
			if seen[i]++; seen[i] > 1 {
				want.Duplicates++
				continue
			}
			want.Delivered++
			if i < highest {
				want.OutOfOrder++
			}
			highest = max(highest, i)
		}
		if !early {
			ack()
		}
		for i := range n {
			if acked[i] && seen[i] == 0 {
				want.Lost++
			}
		}
		if got := h.Judge(Options{}); counts(got) != counts(want) {
			t.Fatalf("round %d\ngot  %s\nwant %s", round, counts(got), counts(want))
		}
	}
}

func TestManyAtOnce(t *testing.T) {
	h := New()
	var wg sync.WaitGroup
	const producers, n = 8, 2000
	for p := range producers {
		name := strconv.Itoa(p)
		sent := make(chan int64, 64)
		wg.Go(func() {
			for i := range int64(n) {
				h.Send(name, i, Payload(name, i, 64))
				sent <- i
				h.Acked(name, i, at(i))
			}
			close(sent)
		})
		wg.Go(func() {
			for i := range sent {
				deliver(h, "c", name, i)
			}
		})
	}
	wg.Go(func() {
		for range 100 {
			_ = h.Judge(Options{}).String()
			_ = h.Outstanding()
		}
	})
	wg.Wait()
	v := h.Judge(Options{ExactlyOnce: true})
	if err := v.Err(); err != nil || v.Delivered != producers*n {
		t.Errorf("%v, %v", v, err)
	}
}

// TestMemoryPerMessage keeps the promise of the package comment.
func TestMemoryPerMessage(t *testing.T) {
	const n = 1 << 20
	before := heap()
	h := New()
	for i := range int64(n) {
		h.Send("p", i, nil)
		h.Acked("p", i, at(i))
		h.Delivered("c", "p", i, nil)
	}
	if per := float64(heap()-before) / n; per > 6 {
		t.Errorf("%.1f bytes a message, want at most 6", per)
	}
	runtime.KeepAlive(h)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func BenchmarkHistory(b *testing.B) {
	p := Payload("p", 0, 1024)
	h := New()
	b.ReportAllocs()
	for i := int64(0); b.Loop(); i++ {
		h.Send("p", i, p)
		h.Acked("p", i, at(i))
		h.Delivered("c", "p", i, p)
	}
}
