package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
	"github.com/magnetar-io/magnetar/protocol/wireclient"
)

// subscriptionTypes are the values of --type.
var subscriptionTypes = map[string]wireclient.SubscriptionType{
	"exclusive": wireclient.Exclusive, "shared": wireclient.Shared,
	"failover": wireclient.Failover, "key_shared": wireclient.KeyShared,
}

// consumeFlags are the flags of "magnetar consume".
type consumeFlags struct {
	topic        string
	url          string
	subscription string
	count        int
	typ          string
	earliest     bool
	timeout      time.Duration
}

func consumeCommand() *cobra.Command {
	var f consumeFlags
	cmd := &cobra.Command{
		Use:   "consume TOPIC -s SUBSCRIPTION",
		Short: "Receive and acknowledge messages of a topic",
		Long: `Receive messages of a topic through a subscription, print the id, key, properties
and text of each, and acknowledge it.`,
		Example: `  magnetar consume my-topic -s my-subscription -n 1
  magnetar consume my-topic -s audit -n 0 --earliest --type shared`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f.topic = args[0]
			if err := f.check(); err != nil {
				return err
			}
			return consume(cmd.Context(), cmd.OutOrStdout(), f)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.url, "url", defaultURL, "service URL of the brokers, several hosts separated by commas")
	flags.StringVarP(&f.subscription, "subscription", "s", "", "name of the subscription; it is created if it does not exist")
	flags.IntVarP(&f.count, "count", "n", 1, "how many messages to receive; 0 = go on until interrupted")
	flags.StringVar(&f.typ, "type", "exclusive", "exclusive, shared, failover or key_shared")
	flags.BoolVar(&f.earliest, "earliest", false, "start a new subscription at the first message, not after the last")
	flags.DurationVar(&f.timeout, "timeout", 30*time.Second, "how long to wait for the broker to answer")
	_ = cmd.MarkFlagRequired("subscription") // fails only for a flag that does not exist
	return cmd
}

func (f *consumeFlags) check() error {
	var errs []error
	if f.count < 0 {
		errs = append(errs, fmt.Errorf("--count is %d: want 0 (for ever) or more", f.count))
	}
	if f.subscription == "" {
		errs = append(errs, errors.New("--subscription is empty: give the subscription a name"))
	}
	if _, ok := subscriptionTypes[f.typ]; !ok {
		errs = append(errs, fmt.Errorf("--type is %q: want %s", f.typ, strings.Join(slices.Sorted(maps.Keys(subscriptionTypes)), ", ")))
	}
	if _, err := protocol.ParseTopic(f.topic); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func consume(ctx context.Context, out io.Writer, f consumeFlags) error {
	opening, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	client, err := wireclient.Dial(opening, f.url, wireclient.Options{Name: "consume"})
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // never fails
	topics, err := partitionsOf(opening, client, f.topic)
	if err != nil {
		return err
	}
	var consumers []*wireclient.Consumer
	for _, topic := range topics {
		c, err := client.Subscribe(opening, wireclient.SubscribeOptions{
			Topic: topic, Subscription: f.subscription, Type: subscriptionTypes[f.typ], FromEarliest: f.earliest,
		})
		if err != nil {
			return err
		}
		consumers = append(consumers, c)
	}
	err = receiveAll(ctx, out, consumers, f)
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		err = nil // interrupted, which is how one ends it
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.timeout)
	defer cancel()
	for _, c := range consumers {
		err = errors.Join(err, c.Close(closing))
	}
	return err
}

// received is a message with the consumer that must acknowledge it.
type received struct {
	message  *wireclient.Message
	consumer *wireclient.Consumer
}

// receiveAll prints the messages of all consumers until there are enough.
func receiveAll(ctx context.Context, out io.Writer, consumers []*wireclient.Consumer, f consumeFlags) error {
	group, ctx := errgroup.WithContext(ctx)
	messages := make(chan received)
	enough := make(chan struct{})
	reading, stop := context.WithCancel(ctx)
	for _, c := range consumers {
		group.Go(func() error {
			for {
				m, err := c.Receive(reading)
				if err != nil {
					return unless(enough, err)
				}
				select {
				case messages <- received{m, c}:
				case <-reading.Done():
					return unless(enough, context.Cause(reading))
				}
			}
		})
	}
	group.Go(func() error {
		defer stop()
		for n := 1; ; n++ {
			select {
			case r := <-messages:
				if err := r.print(ctx, out, f); err != nil {
					return err
				}
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if n == f.count {
				close(enough)
				return nil
			}
		}
	})
	return group.Wait()
}

// unless returns err, or nil if done is closed.
func unless(done <-chan struct{}, err error) error {
	select {
	case <-done:
		return nil
	default:
		return err
	}
}

// print writes one message and then acknowledges it, so that a message which was
// never shown comes again.
func (r received) print(ctx context.Context, out io.Writer, f consumeFlags) error {
	m := r.message
	text := string(m.Payload)
	if m.Compression != pulsarpb.CompressionType_NONE {
		text = fmt.Sprintf("(%d bytes, compressed with %v)", len(m.Payload), m.Compression)
	}
	var line strings.Builder
	line.WriteString(m.ID.String())
	if m.Key != "" {
		fmt.Fprintf(&line, " key=%q", m.Key)
	}
	for _, k := range slices.Sorted(maps.Keys(m.Properties)) {
		fmt.Fprintf(&line, " %s=%q", k, m.Properties[k])
	}
	fmt.Fprintf(&line, " %s\n", text)
	if _, err := io.WriteString(out, line.String()); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	err := r.consumer.AckAndWait(ctx, m)
	if errors.Is(err, wireclient.ErrDisconnected) {
		return nil // the broker will deliver it again
	}
	return err
}

// partitionsOf returns the topics to work on: the partitions, or topic itself.
func partitionsOf(ctx context.Context, client *wireclient.Client, topic string) ([]string, error) {
	name, err := protocol.ParseTopic(topic)
	if err != nil {
		return nil, err
	}
	if name.Partition >= 0 {
		return []string{name.String()}, nil
	}
	n, err := client.Partitions(ctx, name.String())
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return []string{name.String()}, nil
	}
	topics := make([]string, n)
	for i := range topics {
		topics[i] = name.WithPartition(i).String()
	}
	return topics, nil
}
