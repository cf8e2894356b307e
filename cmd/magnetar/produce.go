package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/wireclient"
)

// defaultURL is where a standalone or a local broker listens.
const defaultURL = "pulsar://localhost:6650"

// produceFlags are the flags of "magnetar produce".
type produceFlags struct {
	topic      string
	url        string
	messages   []string
	count      int
	key        string
	properties []string
	async      bool
	producers  int
	size       int
	pending    int
	timeout    time.Duration
}

func produceCommand() *cobra.Command {
	var f produceFlags
	cmd := &cobra.Command{
		Use:   "produce TOPIC -m TEXT [-m TEXT...]",
		Short: "Publish messages to a topic",
		Long: `Publish messages to a topic and print the id of each.

With -n every message is sent that many times, and the rate and the latencies are
printed at the end instead of the ids. By default a producer waits for each receipt
before it sends the next message; --async keeps up to --pending on their way. A
partitioned topic gets a producer for each partition, which take turns.`,
		Example: `  magnetar produce my-topic -m hello -k customer-7 -p colour=red
  magnetar produce my-topic --size 100 -n 10000
  magnetar produce my-topic --size 1024 -n 1000000 --async --producers 4`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f.topic = args[0]
			if err := f.check(cmd); err != nil {
				return err
			}
			return produce(cmd.Context(), cmd.OutOrStdout(), f)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.url, "url", defaultURL, "service URL of the brokers, several hosts separated by commas")
	flags.StringArrayVarP(&f.messages, "message", "m", nil, "text of a message; may be repeated")
	flags.IntVarP(&f.count, "count", "n", 1, "how often to send each message")
	flags.StringVarP(&f.key, "key", "k", "", "key of the messages")
	flags.StringArrayVarP(&f.properties, "property", "p", nil, "property key=value of the messages; may be repeated")
	flags.BoolVar(&f.async, "async", false, "do not wait for each receipt")
	flags.IntVar(&f.producers, "producers", 1, "how many producers send at once, each its share of the messages")
	flags.IntVar(&f.size, "size", 0, "send messages of that many bytes in place of -m")
	flags.IntVar(&f.pending, "pending", 1000, "with --async: messages without a receipt, for each producer")
	flags.DurationVar(&f.timeout, "timeout", 30*time.Second, "how long to wait for the broker, and for a receipt")
	return cmd
}

// check reports every flag that makes no sense at once.
func (f *produceFlags) check(cmd *cobra.Command) error {
	var errs []error
	if sized := cmd.Flags().Changed("size"); sized == (len(f.messages) > 0) {
		errs = append(errs, errors.New("give messages with -m, or their size with --size"))
	}
	for _, n := range []struct {
		flag string
		got  int
		least,
		most int
	}{
		{"--count", f.count, 1, 1 << 40},
		{"--producers", f.producers, 1, 10_000},
		{"--size", f.size, 0, 1 << 30},
		{"--pending", f.pending, 1, 1_000_000},
	} {
		if n.got < n.least || n.got > n.most {
			errs = append(errs, fmt.Errorf("%s is %d: want %d to %d", n.flag, n.got, n.least, n.most))
		}
	}
	if _, err := f.propertyMap(); err != nil {
		errs = append(errs, err)
	}
	if _, err := protocol.ParseTopic(f.topic); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (f *produceFlags) propertyMap() (map[string]string, error) {
	var m map[string]string
	for _, p := range f.properties {
		k, v, ok := strings.Cut(p, "=")
		if !ok || k == "" {
			return nil, fmt.Errorf("--property is %q: want key=value", p)
		}
		if m == nil {
			m = map[string]string{}
		}
		m[k] = v
	}
	return m, nil
}

func produce(ctx context.Context, out io.Writer, f produceFlags) (err error) {
	opening, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	client, err := wireclient.Dial(opening, f.url, wireclient.Options{Name: "produce"})
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // never fails
	lanes := make([]*lane, f.producers)
	for i := range lanes {
		if lanes[i], err = openLane(opening, client, f); err != nil {
			return err
		}
	}
	r := &report{out: out, ids: f.count == 1 && f.size == 0}
	start := time.Now()
	var sending sync.WaitGroup
	var next atomic.Int64 // message to send, shared by the producers
	errs := make([]error, len(lanes))
	for i, l := range lanes {
		sending.Go(func() { errs[i] = l.send(ctx, f, &next, r) })
	}
	sending.Wait()
	took := time.Since(start)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return r.finish(took, f)
}

// lane is what one of several producers sends on: a wire producer for each
// partition, in turns.
type lane struct {
	partitions []*wireclient.Producer
}

func openLane(ctx context.Context, client *wireclient.Client, f produceFlags) (*lane, error) {
	topics, err := partitionsOf(ctx, client, f.topic)
	if err != nil {
		return nil, err
	}
	l := &lane{}
	for _, topic := range topics {
		p, err := client.CreateProducer(ctx, wireclient.ProducerOptions{Topic: topic, MaxPending: f.pending, SendTimeout: f.timeout})
		if err != nil {
			return nil, err
		}
		l.partitions = append(l.partitions, p)
	}
	return l, nil
}

// send takes messages until none is left, then waits for the last receipts.
func (l *lane) send(ctx context.Context, f produceFlags, next *atomic.Int64, r *report) error {
	properties, err := f.propertyMap()
	if err != nil {
		return err
	}
	texts := f.messages
	if f.size > 0 || len(texts) == 0 {
		texts = []string{strings.Repeat("x", f.size)}
	}
	payloads := make([][]byte, len(texts))
	for i, t := range texts {
		payloads[i] = []byte(t)
	}
	total := int64(len(payloads)) * int64(f.count)
	var errs firstError
	for turn := 0; errs.get() == nil; turn++ {
		i := next.Add(1) - 1
		if i >= total {
			break
		}
		m := wireclient.OutMessage{Payload: payloads[i%int64(len(payloads))], Key: f.key, Properties: properties}
		p := l.partitions[turn%len(l.partitions)]
		sent := time.Now()
		if !f.async {
			id, err := p.Send(ctx, m)
			errs.set(err)
			r.receipt(id, time.Since(sent), err)
			continue
		}
		errs.set(p.SendAsync(ctx, m, func(id wireclient.MessageID, err error) {
			errs.set(err)
			r.receipt(id, time.Since(sent), err)
		}))
	}
	for _, p := range l.partitions {
		errs.set(p.Close(ctx))
	}
	return errs.get()
}

// firstError keeps the first error it is given.
type firstError struct {
	mu  sync.Mutex // guards err
	err error
}

func (f *firstError) set(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

func (f *firstError) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// report gathers receipts: it prints ids, or keeps latencies for the end.
type report struct {
	out io.Writer
	ids bool

	mu        sync.Mutex // guards all below, and out
	latencies latencies
	err       error // first failure to write
}

func (r *report) receipt(id wireclient.MessageID, latency time.Duration, err error) {
	if err != nil {
		return // send returns it
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ids {
		r.latencies.add(latency)
		return
	}
	if _, err := fmt.Fprintln(r.out, id); err != nil && r.err == nil {
		r.err = err
	}
}

// finish prints the rate and the latencies.
func (r *report) finish(took time.Duration, f produceFlags) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ids {
		return r.err
	}
	mode := "each receipt awaited"
	if f.async {
		mode = fmt.Sprintf("async, %d pending", f.pending)
	}
	n := r.latencies.total
	_, err := fmt.Fprintf(r.out, "%d messages, %d producers, %s: %.3f s, %.1f messages/s\nlatency ms: p50 %s, p95 %s, p99 %s, p99.9 %s, max %s\n",
		n, f.producers, mode, took.Seconds(), float64(n)/took.Seconds(),
		r.latencies.milliseconds(0.5), r.latencies.milliseconds(0.95), r.latencies.milliseconds(0.99),
		r.latencies.milliseconds(0.999), r.latencies.milliseconds(1))
	return err
}
