package server

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/magnetar-io/magnetar/metadata"
	"github.com/magnetar-io/magnetar/metadata/metadatapb"
)

// Service is an [Engine] behind gRPC.
type Service struct {
	metadatapb.UnimplementedMetadataServer
	engine *Engine
}

// Register starts the leader's side of machine, which group drives, and offers
// it on s. Close the service before the group closes, and before a graceful stop
// of s, which would wait for the watches.
// Errors become statuses in the interceptors of [rpc.NewServer].
func Register(s grpc.ServiceRegistrar, group Group, machine *Machine, log *slog.Logger) *Service {
	service := &Service{engine: NewEngine(group, machine, log)}
	metadatapb.RegisterMetadataServer(s, service)
	return service
}

// Close ends the watches and the lease clock.
func (s *Service) Close() { s.engine.Close() }

// Get implements the RPC.
func (s *Service) Get(ctx context.Context, r *metadatapb.GetRequest) (*metadatapb.GetReply, error) {
	found, err := s.engine.Get(ctx, r.GetKey())
	if err != nil {
		return nil, err
	}
	return &metadatapb.GetReply{Kv: toWire(found)}, nil
}

// Range implements the RPC.
func (s *Service) Range(ctx context.Context, r *metadatapb.RangeRequest) (*metadatapb.RangeReply, error) {
	kvs, more, err := s.engine.Range(ctx, r.GetPrefix(), r.GetAfter(), int(r.GetLimit()))
	if err != nil {
		return nil, err
	}
	reply := &metadatapb.RangeReply{Kvs: make([]*metadatapb.KV, 0, len(kvs)), More: more}
	for i := range kvs {
		reply.Kvs = append(reply.Kvs, toWire(kvs[i]))
	}
	return reply, nil
}

// kindOf maps the wire's kinds. An expiry never comes from outside.
var kindOf = map[metadatapb.ChangeRequest_Kind]Kind{
	metadatapb.ChangeRequest_PUT:        KindPut,
	metadatapb.ChangeRequest_SEQUENTIAL: KindSequential,
	metadatapb.ChangeRequest_DELETE:     KindDelete,
	metadatapb.ChangeRequest_GRANT:      KindGrant,
	metadatapb.ChangeRequest_REVOKE:     KindRevoke,
}

// Change implements the RPC.
func (s *Service) Change(ctx context.Context, r *metadatapb.ChangeRequest) (*metadatapb.ChangeReply, error) {
	c := &Command{
		Kind: kindOf[r.GetKind()], Key: r.GetKey(), Value: r.GetValue(), If: metadata.Version(r.GetIfVersion()),
		Lease: metadata.LeaseID(r.GetLease()), TTL: time.Duration(r.GetTtlMillis()) * time.Millisecond,
		Origin: Origin{Sequence: r.GetSequence(), Resend: r.GetResend(), Known: metadata.Version(r.GetKnown())},
	}
	if c.Kind == 0 || len(r.GetClient()) != len(c.Origin.Client) {
		return nil, fmt.Errorf("change of kind %v by a client id of %d bytes: want a known kind and %d bytes: %w",
			r.GetKind(), len(r.GetClient()), len(c.Origin.Client), metadata.ErrInvalid)
	}
	copy(c.Origin.Client[:], r.GetClient())
	result, err := s.engine.Change(ctx, c)
	if err != nil {
		return nil, err
	}
	return &metadatapb.ChangeReply{
		Version: int64(result.Version), Number: result.Number, Lease: int64(result.Lease),
		Revision: int64(result.Revision), Forgotten: result.Code == CodeForgotten,
	}, nil
}

// KeepAlive implements the RPC.
func (s *Service) KeepAlive(ctx context.Context, r *metadatapb.KeepAliveRequest) (*metadatapb.KeepAliveReply, error) {
	if err := s.engine.KeepAlive(ctx, metadata.LeaseID(r.GetLease())); err != nil {
		return nil, err
	}
	return &metadatapb.KeepAliveReply{}, nil
}

// Revision implements the RPC.
func (s *Service) Revision(ctx context.Context, _ *metadatapb.RevisionRequest) (*metadatapb.RevisionReply, error) {
	revision, err := s.engine.Revision(ctx)
	if err != nil {
		return nil, err
	}
	return &metadatapb.RevisionReply{Revision: int64(revision)}, nil
}

// Watch implements the RPC.
func (s *Service) Watch(r *metadatapb.WatchRequest, stream grpc.ServerStreamingServer[metadatapb.WatchReply]) error {
	return s.engine.Watch(stream.Context(), r.GetPrefix(), r.GetResume(), metadata.Version(r.GetFrom()), func(t Told) error {
		reply := &metadatapb.WatchReply{Reset_: t.Reset, Synced: t.Synced, Through: int64(t.Through)}
		reply.Changes = make([]*metadatapb.WatchReply_Change, 0, len(t.Events))
		for i := range t.Events {
			event := &t.Events[i]
			reply.Changes = append(reply.Changes, &metadatapb.WatchReply_Change{
				Kv: toWire(event.KV), Deleted: event.Type == metadata.EventDelete,
			})
		}
		return stream.Send(reply)
	})
}

func toWire(kv metadata.KV) *metadatapb.KV {
	return &metadatapb.KV{Key: kv.Key, Value: kv.Value, Version: int64(kv.Version), Lease: int64(kv.Lease)}
}
