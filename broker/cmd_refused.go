package broker

import (
	"fmt"

	"github.com/magnetar-io/magnetar/protocol"
	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// refuseCommand serves the commands that this broker knows and does not do. Each
// gets its own response where it has one to carry a failure, else an ERROR; the
// connection goes on.
func (c *conn) refuseCommand(f protocol.Frame) error {
	kind := f.Command.GetType()
	answer := refusals[kind]
	if answer == nil {
		return nil // a command that nobody waits for
	}
	err := fmt.Errorf("%v: %w", kind, ErrUnsupported)
	if kind == pulsarpb.BaseCommand_GET_SCHEMA {
		err = errNoSchema
	}
	c.log.Debug("command refused", "command", kind.String())
	c.out.reply(answer(f.Command, serverError(err), err.Error()))
	return nil
}

// errNoSchema is how Pulsar says that a topic has no schema: clients go on
// without one.
var errNoSchema = fmt.Errorf("no schema is kept for it: %w", ErrTopicNotFound)

type command = pulsarpb.BaseCommand

// refusal makes the answer that refuses a command.
type refusal func(c *command, code pulsarpb.ServerError, text string) *command

// plain is a refusal by ERROR.
func plain[T interface{ GetRequestId() uint64 }](body func(*pulsarpb.BaseCommand) T) refusal {
	return func(c *pulsarpb.BaseCommand, code pulsarpb.ServerError, text string) *pulsarpb.BaseCommand {
		request := body(c).GetRequestId()
		return &pulsarpb.BaseCommand{
			Type:  pulsarpb.BaseCommand_ERROR.Enum(),
			Error: &pulsarpb.CommandError{RequestId: &request, Error: &code, Message: &text},
		}
	}
}

// refusals says how each command that is known and not served is refused; nil =
// in silence.
var refusals = map[pulsarpb.BaseCommand_Type]refusal{
	pulsarpb.BaseCommand_AUTH_RESPONSE: func(_ *command, code pulsarpb.ServerError, text string) *command {
		request := noRequest
		return &pulsarpb.BaseCommand{
			Type:  pulsarpb.BaseCommand_ERROR.Enum(),
			Error: &pulsarpb.CommandError{RequestId: &request, Error: &code, Message: &text},
		}
	},
	pulsarpb.BaseCommand_GET_SCHEMA: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_GET_SCHEMA_RESPONSE.Enum(),
			GetSchemaResponse: &pulsarpb.CommandGetSchemaResponse{
				RequestId: c.GetSchema.RequestId, ErrorCode: &code, ErrorMessage: &text,
			},
		}
	},
	pulsarpb.BaseCommand_GET_OR_CREATE_SCHEMA: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_GET_OR_CREATE_SCHEMA_RESPONSE.Enum(),
			GetOrCreateSchemaResponse: &pulsarpb.CommandGetOrCreateSchemaResponse{
				RequestId: c.GetOrCreateSchema.RequestId, ErrorCode: &code, ErrorMessage: &text,
			},
		}
	},
	pulsarpb.BaseCommand_TC_CLIENT_CONNECT_REQUEST: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_TC_CLIENT_CONNECT_RESPONSE.Enum(),
			TcClientConnectResponse: &pulsarpb.CommandTcClientConnectResponse{
				RequestId: c.TcClientConnectRequest.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_NEW_TXN: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_NEW_TXN_RESPONSE.Enum(),
			NewTxnResponse: &pulsarpb.CommandNewTxnResponse{
				RequestId: c.NewTxn.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_ADD_PARTITION_TO_TXN: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_ADD_PARTITION_TO_TXN_RESPONSE.Enum(),
			AddPartitionToTxnResponse: &pulsarpb.CommandAddPartitionToTxnResponse{
				RequestId: c.AddPartitionToTxn.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_ADD_SUBSCRIPTION_TO_TXN: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_ADD_SUBSCRIPTION_TO_TXN_RESPONSE.Enum(),
			AddSubscriptionToTxnResponse: &pulsarpb.CommandAddSubscriptionToTxnResponse{
				RequestId: c.AddSubscriptionToTxn.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_END_TXN: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_END_TXN_RESPONSE.Enum(),
			EndTxnResponse: &pulsarpb.CommandEndTxnResponse{
				RequestId: c.EndTxn.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_END_TXN_ON_PARTITION: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_END_TXN_ON_PARTITION_RESPONSE.Enum(),
			EndTxnOnPartitionResponse: &pulsarpb.CommandEndTxnOnPartitionResponse{
				RequestId: c.EndTxnOnPartition.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_END_TXN_ON_SUBSCRIPTION: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_END_TXN_ON_SUBSCRIPTION_RESPONSE.Enum(),
			EndTxnOnSubscriptionResponse: &pulsarpb.CommandEndTxnOnSubscriptionResponse{
				RequestId: c.EndTxnOnSubscription.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_WATCH_TOPIC_LIST:       plain((*pulsarpb.BaseCommand).GetWatchTopicList),
	pulsarpb.BaseCommand_WATCH_TOPIC_LIST_CLOSE: plain((*pulsarpb.BaseCommand).GetWatchTopicListClose),
	pulsarpb.BaseCommand_SCALABLE_TOPIC_LOOKUP: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_SCALABLE_TOPIC_UPDATE.Enum(),
			ScalableTopicUpdate: &pulsarpb.CommandScalableTopicUpdate{
				SessionId: c.ScalableTopicLookup.SessionId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_SCALABLE_TOPIC_CLOSE: nil,
	pulsarpb.BaseCommand_SCALABLE_TOPIC_SUBSCRIBE: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_SCALABLE_TOPIC_SUBSCRIBE_RESPONSE.Enum(),
			ScalableTopicSubscribeResponse: &pulsarpb.CommandScalableTopicSubscribeResponse{
				RequestId: c.ScalableTopicSubscribe.RequestId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS_UPDATE.Enum(),
			WatchScalableTopicsUpdate: &pulsarpb.CommandWatchScalableTopicsUpdate{
				WatchId: c.WatchScalableTopics.WatchId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS_CLOSE: nil,
	pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS: func(c *command, code pulsarpb.ServerError, text string) *command {
		return &pulsarpb.BaseCommand{
			Type: pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS_UPDATE.Enum(),
			WatchTcAssignmentsUpdate: &pulsarpb.CommandWatchTcAssignmentsUpdate{
				WatchId: c.WatchTcAssignments.WatchId, Error: &code, Message: &text,
			},
		}
	},
	pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS_CLOSE: nil,
}
