package bookiepb_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/magnetar-io/magnetar/bookie/bookiepb"
	"github.com/magnetar-io/magnetar/ledger"
)

func TestFrames(t *testing.T) {
	var b []byte
	for _, s := range []string{"one", "", "three"} {
		b = bookiepb.AppendFrame(b, []byte(s))
	}
	if n, size, err := bookiepb.Check(b); n != 3 || size != 8 || err != nil {
		t.Fatalf("Check = %d, %d, %v, want 3, 8", n, size, err)
	}
	data, _, rest, err := bookiepb.Next(b)
	if err != nil || string(data) != "one" || len(rest) != len(b)-bookiepb.FrameHeaderBytes-3 {
		t.Errorf("Next = %q, %d bytes left, %v", data, len(rest), err)
	}
	b[len(b)-1] ^= 1
	if _, _, err := bookiepb.Check(b); !errors.Is(err, ledger.ErrDamaged) {
		t.Errorf("a flipped bit: %v, want ErrDamaged", err)
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(bookiepb.AppendFrame(bookiepb.AppendFrame(nil, []byte("a")), nil))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 1})
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, _, err := bookiepb.Check(b); err != nil {
			return
		}
		var again []byte
		for rest := b; len(rest) > 0; {
			data, _, r, err := bookiepb.Next(rest)
			if err != nil {
				t.Fatalf("Check took what Next refuses: %v", err)
			}
			again, rest = bookiepb.AppendFrame(again, data), r
		}
		if !bytes.Equal(again, b) {
			t.Errorf("%x reads back as %x", b, again)
		}
	})
}
