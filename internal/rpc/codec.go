package rpc

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// codec is gRPC's "proto" codec that uses the generated VT methods of messages
// that have them: no reflection, and buffers from gRPC's pool.
type codec struct{}

var _ encoding.CodecV2 = codec{}

type vtMarshaler interface {
	SizeVT() int
	MarshalToSizedBufferVT(b []byte) (int, error)
}

type vtUnmarshaler interface {
	UnmarshalVT(b []byte) error
}

// Name says which content type this is; it is protobuf on the wire.
func (codec) Name() string { return "proto" }

// Marshal encodes a generated message. gRPC frees the buffers it returns.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	switch m := v.(type) {
	case vtMarshaler:
		pool, size := mem.DefaultBufferPool(), m.SizeVT()
		if mem.IsBelowBufferPoolingThreshold(size) {
			b := make([]byte, size)
			if _, err := m.MarshalToSizedBufferVT(b); err != nil {
				return nil, err
			}
			return mem.BufferSlice{mem.SliceBuffer(b)}, nil
		}
		b := pool.Get(size)
		if _, err := m.MarshalToSizedBufferVT((*b)[:size]); err != nil {
			pool.Put(b)
			return nil, err
		}
		return mem.BufferSlice{mem.NewBuffer(b, pool)}, nil
	case proto.Message:
		b, err := proto.Marshal(m)
		if err != nil {
			return nil, err
		}
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	default:
		return nil, fmt.Errorf("rpc: cannot encode %T: not a protobuf message", v)
	}
}

// Unmarshal decodes into a generated message, which keeps no part of data.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	b := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer b.Free()
	switch m := v.(type) {
	case vtUnmarshaler:
		return m.UnmarshalVT(b.ReadOnlyData()) // copies every field
	case proto.Message:
		return proto.Unmarshal(b.ReadOnlyData(), m)
	default:
		return fmt.Errorf("rpc: cannot decode %T: not a protobuf message", v)
	}
}
