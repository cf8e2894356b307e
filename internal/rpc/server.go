package rpc

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

// Limits and times that both ends of a connection share.
const (
	// MaxMessageBytes bounds one gRPC message in either direction.
	MaxMessageBytes = 16 << 20

	streamWindowBytes     = 1 << 20 // what one stream may have in flight
	connectionWindowBytes = 8 << 20 // what all streams of a connection may
	ioBufferBytes         = 64 << 10
	maxStreams            = 1024 // calls and streams at once on one connection

	// pingAfter is the quietest a connection may be before it is probed. gRPC
	// raises it to 10 s on the client side, so a Pool's connections also use
	// TCP keepalive probes.
	pingAfter   = 3 * time.Second
	pingTimeout = 2 * time.Second
)

// NewServer returns a gRPC server with settings that match a [Pool]: window and
// message sizes, keepalive, the codec, and interceptors that turn the errors of
// handlers into statuses with [Status]. opts come after these and win.
func NewServer(opts ...grpc.ServerOption) *grpc.Server {
	ours := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessageBytes),
		grpc.MaxSendMsgSize(MaxMessageBytes),
		grpc.InitialWindowSize(streamWindowBytes),
		grpc.InitialConnWindowSize(connectionWindowBytes),
		grpc.ReadBufferSize(ioBufferBytes),
		grpc.WriteBufferSize(ioBufferBytes),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ForceServerCodecV2(codec{}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingAfter / 2, PermitWithoutStream: true}),
		grpc.ChainUnaryInterceptor(statusUnary),
		grpc.ChainStreamInterceptor(statusStream),
	}
	return grpc.NewServer(append(ours, opts...)...)
}

func statusUnary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	reply, err := handle(ctx, req)
	return reply, Status(err)
}

func statusStream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	return Status(handle(srv, stream))
}
