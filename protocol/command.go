package protocol

import "github.com/magnetar-io/magnetar/protocol/pulsarpb"

// hasBody reports whether c carries the body that its type names. Ping and Pong
// say all they have to say by their type; a type that this version does not know
// cannot be judged, and passes.
func hasBody(c *pulsarpb.BaseCommand) bool {
	switch c.GetType() {
	case pulsarpb.BaseCommand_CONNECT:
		return c.Connect != nil
	case pulsarpb.BaseCommand_CONNECTED:
		return c.Connected != nil
	case pulsarpb.BaseCommand_SUBSCRIBE:
		return c.Subscribe != nil
	case pulsarpb.BaseCommand_PRODUCER:
		return c.Producer != nil
	case pulsarpb.BaseCommand_SEND:
		return c.Send != nil
	case pulsarpb.BaseCommand_SEND_RECEIPT:
		return c.SendReceipt != nil
	case pulsarpb.BaseCommand_SEND_ERROR:
		return c.SendError != nil
	case pulsarpb.BaseCommand_MESSAGE:
		return c.Message != nil
	case pulsarpb.BaseCommand_ACK:
		return c.Ack != nil
	case pulsarpb.BaseCommand_FLOW:
		return c.Flow != nil
	case pulsarpb.BaseCommand_UNSUBSCRIBE:
		return c.Unsubscribe != nil
	case pulsarpb.BaseCommand_SUCCESS:
		return c.Success != nil
	case pulsarpb.BaseCommand_ERROR:
		return c.Error != nil
	case pulsarpb.BaseCommand_CLOSE_PRODUCER:
		return c.CloseProducer != nil
	case pulsarpb.BaseCommand_CLOSE_CONSUMER:
		return c.CloseConsumer != nil
	case pulsarpb.BaseCommand_PRODUCER_SUCCESS:
		return c.ProducerSuccess != nil
	case pulsarpb.BaseCommand_REDELIVER_UNACKNOWLEDGED_MESSAGES:
		return c.RedeliverUnacknowledgedMessages != nil
	case pulsarpb.BaseCommand_PARTITIONED_METADATA:
		return c.PartitionMetadata != nil
	case pulsarpb.BaseCommand_PARTITIONED_METADATA_RESPONSE:
		return c.PartitionMetadataResponse != nil
	case pulsarpb.BaseCommand_LOOKUP:
		return c.LookupTopic != nil
	case pulsarpb.BaseCommand_LOOKUP_RESPONSE:
		return c.LookupTopicResponse != nil
	case pulsarpb.BaseCommand_CONSUMER_STATS:
		return c.ConsumerStats != nil
	case pulsarpb.BaseCommand_CONSUMER_STATS_RESPONSE:
		return c.ConsumerStatsResponse != nil
	case pulsarpb.BaseCommand_REACHED_END_OF_TOPIC:
		return c.ReachedEndOfTopic != nil
	case pulsarpb.BaseCommand_SEEK:
		return c.Seek != nil
	case pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID:
		return c.GetLastMessageId != nil
	case pulsarpb.BaseCommand_GET_LAST_MESSAGE_ID_RESPONSE:
		return c.GetLastMessageIdResponse != nil
	case pulsarpb.BaseCommand_ACTIVE_CONSUMER_CHANGE:
		return c.ActiveConsumerChange != nil
	case pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE:
		return c.GetTopicsOfNamespace != nil
	case pulsarpb.BaseCommand_GET_TOPICS_OF_NAMESPACE_RESPONSE:
		return c.GetTopicsOfNamespaceResponse != nil
	case pulsarpb.BaseCommand_GET_SCHEMA:
		return c.GetSchema != nil
	case pulsarpb.BaseCommand_GET_SCHEMA_RESPONSE:
		return c.GetSchemaResponse != nil
	case pulsarpb.BaseCommand_AUTH_CHALLENGE:
		return c.AuthChallenge != nil
	case pulsarpb.BaseCommand_AUTH_RESPONSE:
		return c.AuthResponse != nil
	case pulsarpb.BaseCommand_ACK_RESPONSE:
		return c.AckResponse != nil
	case pulsarpb.BaseCommand_GET_OR_CREATE_SCHEMA:
		return c.GetOrCreateSchema != nil
	case pulsarpb.BaseCommand_GET_OR_CREATE_SCHEMA_RESPONSE:
		return c.GetOrCreateSchemaResponse != nil
	case pulsarpb.BaseCommand_NEW_TXN:
		return c.NewTxn != nil
	case pulsarpb.BaseCommand_NEW_TXN_RESPONSE:
		return c.NewTxnResponse != nil
	case pulsarpb.BaseCommand_ADD_PARTITION_TO_TXN:
		return c.AddPartitionToTxn != nil
	case pulsarpb.BaseCommand_ADD_PARTITION_TO_TXN_RESPONSE:
		return c.AddPartitionToTxnResponse != nil
	case pulsarpb.BaseCommand_ADD_SUBSCRIPTION_TO_TXN:
		return c.AddSubscriptionToTxn != nil
	case pulsarpb.BaseCommand_ADD_SUBSCRIPTION_TO_TXN_RESPONSE:
		return c.AddSubscriptionToTxnResponse != nil
	case pulsarpb.BaseCommand_END_TXN:
		return c.EndTxn != nil
	case pulsarpb.BaseCommand_END_TXN_RESPONSE:
		return c.EndTxnResponse != nil
	case pulsarpb.BaseCommand_END_TXN_ON_PARTITION:
		return c.EndTxnOnPartition != nil
	case pulsarpb.BaseCommand_END_TXN_ON_PARTITION_RESPONSE:
		return c.EndTxnOnPartitionResponse != nil
	case pulsarpb.BaseCommand_END_TXN_ON_SUBSCRIPTION:
		return c.EndTxnOnSubscription != nil
	case pulsarpb.BaseCommand_END_TXN_ON_SUBSCRIPTION_RESPONSE:
		return c.EndTxnOnSubscriptionResponse != nil
	case pulsarpb.BaseCommand_TC_CLIENT_CONNECT_REQUEST:
		return c.TcClientConnectRequest != nil
	case pulsarpb.BaseCommand_TC_CLIENT_CONNECT_RESPONSE:
		return c.TcClientConnectResponse != nil
	case pulsarpb.BaseCommand_WATCH_TOPIC_LIST:
		return c.WatchTopicList != nil
	case pulsarpb.BaseCommand_WATCH_TOPIC_LIST_SUCCESS:
		return c.WatchTopicListSuccess != nil
	case pulsarpb.BaseCommand_WATCH_TOPIC_UPDATE:
		return c.WatchTopicUpdate != nil
	case pulsarpb.BaseCommand_WATCH_TOPIC_LIST_CLOSE:
		return c.WatchTopicListClose != nil
	case pulsarpb.BaseCommand_TOPIC_MIGRATED:
		return c.TopicMigrated != nil
	case pulsarpb.BaseCommand_SCALABLE_TOPIC_LOOKUP:
		return c.ScalableTopicLookup != nil
	case pulsarpb.BaseCommand_SCALABLE_TOPIC_UPDATE:
		return c.ScalableTopicUpdate != nil
	case pulsarpb.BaseCommand_SCALABLE_TOPIC_CLOSE:
		return c.ScalableTopicClose != nil
	case pulsarpb.BaseCommand_SCALABLE_TOPIC_SUBSCRIBE:
		return c.ScalableTopicSubscribe != nil
	case pulsarpb.BaseCommand_SCALABLE_TOPIC_SUBSCRIBE_RESPONSE:
		return c.ScalableTopicSubscribeResponse != nil
	case pulsarpb.BaseCommand_SCALABLE_TOPIC_ASSIGNMENT_UPDATE:
		return c.ScalableTopicAssignmentUpdate != nil
	case pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS:
		return c.WatchScalableTopics != nil
	case pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS_UPDATE:
		return c.WatchScalableTopicsUpdate != nil
	case pulsarpb.BaseCommand_WATCH_SCALABLE_TOPICS_CLOSE:
		return c.WatchScalableTopicsClose != nil
	case pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS:
		return c.WatchTcAssignments != nil
	case pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS_UPDATE:
		return c.WatchTcAssignmentsUpdate != nil
	case pulsarpb.BaseCommand_WATCH_TC_ASSIGNMENTS_CLOSE:
		return c.WatchTcAssignmentsClose != nil
	default:
		return true
	}
}
