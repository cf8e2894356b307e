// Package compat holds Magnetar against unmodified Pulsar clients.
package compat

import (
	"testing"

	_ "github.com/apache/pulsar-client-go/pulsar" // registers the client's own descriptors
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/magnetar-io/magnetar/protocol/pulsarpb"
)

// TestProtocolNumbers compares every message, field and enum of the client's
// protocol with ours: numbers, types, cardinality, defaults. Ours may have more.
func TestProtocolNumbers(t *testing.T) {
	ours := pulsarpb.File_protocol_pulsarpb_pulsar_proto
	theirs := clientProtocol(t)
	messages, fields, values := 0, 0, 0
	eachMessage(theirs.Messages(), func(want protoreflect.MessageDescriptor) {
		messages++
		got := ours.Messages().ByName(want.Name())
		if got == nil {
			t.Errorf("message %s is missing", want.Name())
			return
		}
		for i := range want.Fields().Len() {
			fields++
			compareField(t, want.Fields().Get(i), got)
		}
		for i := range want.Enums().Len() {
			values += compareEnum(t, want.Enums().Get(i), got.Enums())
		}
	})
	for i := range theirs.Enums().Len() {
		values += compareEnum(t, theirs.Enums().Get(i), ours.Enums())
	}
	if messages < 70 || fields < 300 || values < 150 {
		t.Errorf("compared only %d messages, %d fields, %d enum values", messages, fields, values)
	}
}

func clientProtocol(t *testing.T) protoreflect.FileDescriptor {
	t.Helper()
	var found protoreflect.FileDescriptor
	protoregistry.GlobalFiles.RangeFilesByPackage("pulsar.proto", func(f protoreflect.FileDescriptor) bool {
		found = f
		return false
	})
	if found == nil {
		t.Fatal("the client has not registered package pulsar.proto")
	}
	return found
}

func eachMessage(list protoreflect.MessageDescriptors, f func(protoreflect.MessageDescriptor)) {
	for i := range list.Len() {
		f(list.Get(i))
	}
}

// renamed holds fields whose name changed upstream after this client's release.
var renamed = map[protoreflect.FullName]protoreflect.Name{
	"pulsar.proto.CommandNewTxn.txn_ttl_seconds": "txn_ttl_millis",
}

// retyped holds message types that we split in two; the bytes are the same.
var retyped = map[protoreflect.FullName]protoreflect.Name{
	"pulsar.proto.MessageIdData.first_chunk_message_id": "FirstChunkMessageIdData",
}

func compareField(t *testing.T, want protoreflect.FieldDescriptor, in protoreflect.MessageDescriptor) {
	t.Helper()
	got := in.Fields().ByNumber(want.Number())
	if got == nil {
		t.Errorf("%s = %d is missing", want.FullName(), want.Number())
		return
	}
	name := want.Name()
	if n, ok := renamed[want.FullName()]; ok {
		name = n
	}
	if got.Name() != name || got.Kind() != want.Kind() || got.Cardinality() != want.Cardinality() || got.IsPacked() != want.IsPacked() {
		t.Errorf("field %d of %s: ours is %v %v %s (packed %v), the client's %v %v %s (packed %v)", want.Number(), in.Name(),
			got.Cardinality(), got.Kind(), got.Name(), got.IsPacked(), want.Cardinality(), want.Kind(), name, want.IsPacked())
	}
	if got.HasDefault() != want.HasDefault() || got.HasDefault() && defaultOf(got) != defaultOf(want) {
		t.Errorf("%s: default is %v, the client's is %v", got.FullName(), got.Default(), want.Default())
	}
	if m := want.Message(); m != nil {
		typ := m.Name()
		if n, ok := retyped[want.FullName()]; ok {
			typ = n
		}
		if got.Message().Name() != typ {
			t.Errorf("%s is a %s, the client's is a %s", got.FullName(), got.Message().Name(), typ)
		}
	}
	if e := want.Enum(); e != nil && got.Enum().Name() != e.Name() {
		t.Errorf("%s is a %s, the client's is a %s", got.FullName(), got.Enum().Name(), e.Name())
	}
}

func defaultOf(f protoreflect.FieldDescriptor) any {
	if v := f.DefaultEnumValue(); v != nil {
		return v.Number()
	}
	return f.Default().Interface()
}

func compareEnum(t *testing.T, want protoreflect.EnumDescriptor, in protoreflect.EnumDescriptors) int {
	t.Helper()
	got := in.ByName(want.Name())
	if got == nil {
		t.Errorf("enum %s is missing", want.FullName())
		return 0
	}
	for i := range want.Values().Len() {
		w := want.Values().Get(i)
		if g := got.Values().ByNumber(w.Number()); g == nil || g.Name() != w.Name() {
			t.Errorf("%s = %d: ours is %v", w.FullName(), w.Number(), g)
		}
	}
	return want.Values().Len()
}
