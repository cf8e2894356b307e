package ledger

import "testing"

func TestPositionCompare(t *testing.T) {
	tests := []struct {
		name string
		p, q Position
		want int
	}{
		{"same", Position{7, 42}, Position{7, 42}, 0},
		{"earlier-entry", Position{7, 41}, Position{7, 42}, -1},
		{"ledger-outranks-entry", Position{8, 0}, Position{7, 42}, +1},
		{"before-first-precedes-entry-0", Position{7, BeforeFirst}, Position{7, 0}, -1},
		{"next-ledger-follows-last-entry", Position{8, BeforeFirst}, Position{7, 42}, +1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.p.Compare(tt.q); got != tt.want {
				t.Errorf("%v.Compare(%v) = %d, want %d", tt.p, tt.q, got, tt.want)
			}
			if got := tt.q.Compare(tt.p); got != -tt.want {
				t.Errorf("%v.Compare(%v) = %d, want %d (antisymmetry)", tt.q, tt.p, got, -tt.want)
			}
		})
	}
}

func FuzzParsePosition(f *testing.F) {
	for _, s := range []string{"7:42", "0:-1", "", ":", "7:", "7:42:1", "-1:0", "9223372036854775807:0", "+7:042"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePosition(s)
		if err != nil {
			return // rejecting is fine; crashing or changing the value is not
		}
		again, err := ParsePosition(p.String())
		if err != nil || again != p {
			t.Errorf("%q parsed to %v, which reads back as %v, %v", s, p, again, err)
		}
	})
}
