package managedledger

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/magnetar-io/magnetar/cursor"
	"github.com/magnetar-io/magnetar/ledger"
)

func sampleRecord() *record {
	end := at(12, 41)
	return &record{
		owner: "00112233445566778899aabbccddeeff",
		ledgers: []LedgerInfo{
			{ID: 7, Entries: 3, Bytes: 300, Closed: time.UnixMilli(1_700_000_000_000)},
			{ID: 12, Entries: 42, Bytes: 1 << 33, Closed: time.UnixMilli(1_700_000_000_001)},
			{ID: 13},
		},
		last: 13, unlisted: []ledger.ID{4, 9}, terminated: &end, deleting: true,
	}
}

func sampleState() cursor.State {
	return cursor.State{
		MarkDeleted: at(7, -1),
		Acked:       []cursor.Range{{Ledger: 7, First: 1, Last: 1}, {Ledger: 12, First: 0, Last: 40}},
		Unsaved:     3,
	}
}

// TestGoldenRecords compares both records with the bytes of format 1, which every
// later version must still read. Run with -rewrite only together with a new
// format.
func TestGoldenRecords(t *testing.T) {
	for name, got := range map[string][]byte{
		"managed-ledger-record": sampleRecord().marshal(),
		"cursor-record":         marshalCursor(sampleState(), "00112233445566778899aabbccddeeff"),
	} {
		file := filepath.Join("testdata", name+".hex")
		text := hex.EncodeToString(got) + "\n"
		if *rewrite {
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if text != string(want) {
			t.Errorf("%s is\n%swant\n%s", name, text, want)
		}
	}
	r, err := parseRecord("x", sampleRecord().marshal())
	if err != nil || !reflect.DeepEqual(r, sampleRecord()) {
		t.Errorf("the managed ledger's record reads back as %+v, %v", r, err)
	}
	s, err := parseCursor("x", marshalCursor(sampleState(), "o"))
	if err != nil || !reflect.DeepEqual(s, sampleState()) {
		t.Errorf("the cursor's record reads back as %+v, %v", s, err)
	}
}

func TestRecordsOfOtherFormatsAreRefused(t *testing.T) {
	newer := []byte{0x08, 0x02} // format = 2
	if _, err := parseRecord("t/n/persistent/x", newer); err == nil || !strings.Contains(err.Error(), "format 2") {
		t.Errorf("managed ledger: %v", err)
	}
	if _, err := parseCursor("/cursors/x", newer); err == nil || !strings.Contains(err.Error(), "format 2") {
		t.Errorf("cursor: %v", err)
	}
}

func TestDamagedRecordsAreRefused(t *testing.T) {
	breaks := map[string]func(*record){
		"order":         func(r *record) { r.ledgers[0].ID = 20; r.last = 30 },
		"open-not-last": func(r *record) { r.ledgers[0].Closed = time.Time{} },
		"closed-empty":  func(r *record) { r.ledgers[1].Entries = 0 },
		"last-too-low":  func(r *record) { r.last = 12 },
	}
	for name, change := range breaks {
		r := sampleRecord()
		change(r)
		if _, err := parseRecord("x", r.marshal()); err == nil {
			t.Errorf("%s: a damaged record was accepted", name)
		}
	}
}

func FuzzParseRecords(f *testing.F) {
	f.Add(sampleRecord().marshal())
	f.Add(marshalCursor(sampleState(), "owner"))
	f.Add([]byte{0x08, 0x01})
	f.Fuzz(func(t *testing.T, data []byte) {
		if r, err := parseRecord("x", data); err == nil {
			again, err := parseRecord("x", r.marshal())
			if err != nil || !reflect.DeepEqual(again, r) {
				t.Errorf("record %+v reads back as %+v, %v", r, again, err)
			}
		}
		if s, err := parseCursor("x", data); err == nil {
			again, err := parseCursor("x", marshalCursor(s, "o"))
			if err != nil || !reflect.DeepEqual(again, s) {
				t.Errorf("cursor %+v reads back as %+v, %v", s, again, err)
			}
		}
		recordOwner(data)
		cursorOwner(data)
	})
}
