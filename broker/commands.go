package broker

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// protocolVersion is the newest version of Pulsar's protocol that this broker
// speaks.
const protocolVersion = int32(pulsarpb.ProtocolVersion_v21)

// handlers says who serves each command that a client may send; cmd_*.go hold
// them, one command a file. A handler runs on the connection's reader and must
// not wait for anything slow: see [conn.async]. An error it returns costs the
// connection.
var handlers map[pulsarpb.BaseCommand_Type]func(*conn, protocol.Frame) error

func init() { // here, because handlers reach back to the table through conn.handle
	handlers = map[pulsarpb.BaseCommand_Type]func(*conn, protocol.Frame) error{
		pulsarpb.BaseCommand_CONNECT: (*conn).connect,
		pulsarpb.BaseCommand_PING:    (*conn).ping,
		pulsarpb.BaseCommand_PONG:    (*conn).pong,

		pulsarpb.BaseCommand_PARTITIONED_METADATA:    (*conn).partitionedMetadata,
		pulsarpb.BaseCommand_LOOKUP:                  (*conn).lookup,
		pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE: (*conn).topicsOfNamespace,

		pulsarpb.BaseCommand_PRODUCER:       (*conn).openProducer,
		pulsarpb.BaseCommand_SEND:           (*conn).send,
		pulsarpb.BaseCommand_CLOSE_PRODUCER: (*conn).closeProducer,

		pulsarpb.BaseCommand_SUBSCRIBE:                         (*conn).subscribe,
		pulsarpb.BaseCommand_FLOW:                              (*conn).flow,
		pulsarpb.BaseCommand_ACK:                               (*conn).ack,
		pulsarpb.BaseCommand_REDELIVER_UNACKNOWLEDGED_MESSAGES: (*conn).redeliver,
		pulsarpb.BaseCommand_CLOSE_CONSUMER:                    (*conn).closeConsumer,
		pulsarpb.BaseCommand_UNSUBSCRIBE:                       (*conn).unsubscribe,
		pulsarpb.BaseCommand_SEEK:                              (*conn).seek,
		pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID:               (*conn).lastMessageID,
		pulsarpb.BaseCommand_CONSUMER_STATS:                    (*conn).consumerStats,
	}
	for kind := range refusals {
		handlers[kind] = (*conn).refuseCommand
	}
}

// badRequest is what a handler returns for a command that no correct
// client sends.
func badRequest(request uint64, err error) error {
	return &violation{request, pulsarpb.ServerError_NotAllowedError, err}
}

// checkName refuses names of producers, consumers and subscriptions that could
// not be shown or are endless.
func checkName(what, name string) error {
	if !utf8.ValidString(name) {
		return fmt.Errorf("%s name %q is not UTF-8: %w", what, name, ErrInvalidName)
	}
	if len(name) > maxNameLength {
		return fmt.Errorf("%s name of %d bytes: at most %d are allowed: %w", what, len(name), maxNameLength, ErrInvalidName)
	}
	return nil
}

// parseTopic reads a topic's name and refuses what is not kept in storage.
func parseTopic(name string) (protocol.TopicName, error) {
	topic, err := protocol.ParseTopic(name)
	if err != nil {
		return topic, err
	}
	if !topic.Persistent {
		return topic, fmt.Errorf("topic %s: this broker serves persistent:// topics only: %w", topic, ErrUnsupported)
	}
	return topic, nil
}

// asBusy returns who stands in the way, if that is what err says.
func asBusy(err error) (holder, bool) {
	if busy, ok := errors.AsType[*busyError](err); ok && busy.holder != nil {
		return busy.holder, true
	}
	return nil, false
}
