//go:build linux

package cuda

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// Whatever is taken and given back in whatever order, pieces never overlap, the counts are right, neighbours merge, and nothing is lost.
func TestArena(t *testing.T) {
	errFull := errors.New("full")
	for _, grain := range []int64{0, 1 << 12, 1 << 16} {
		const memory = 1 << 18
		next, used := pointer(1<<20), int64(0)
		sizes := map[pointer]int64{}
		a := arena{grain: grain, take: func(n int64) (pointer, error) {
			if used+n > memory {
				return 0, errFull
			}
			p := next
			next += uint64(n) + 4096
			sizes[p] = n
			used += n
			return p, nil
		}, give: func(p pointer) error {
			n, ok := sizes[p]
			if !ok {
				t.Fatalf("%#x is given back but was not taken", p)
			}
			delete(sizes, p)
			used -= n
			return nil
		}}
		r := enginetest.Seeded(uint64(grain))
		type piece struct {
			at   pointer
			size int64
		}
		var live []piece
		var peak int64
		for range 5000 {
			if len(live) > 0 && r.IntN(5) < 2 {
				i := r.IntN(len(live))
				if err := a.put(live[i].at); err != nil {
					t.Fatal(err)
				}
				live = slices.Delete(live, i, i+1)
				continue
			}
			n := int64(r.IntN(9000))
			p, err := a.get(n)
			if err != nil {
				if !errors.Is(err, errFull) {
					t.Fatal(err)
				}
				for len(live) > 3 { // make room
					if err := a.put(live[0].at); err != nil {
						t.Fatal(err)
					}
					live = live[1:]
				}
				continue
			}
			if grain > 0 && p%alignment != 0 {
				t.Fatalf("%#x is not aligned", p)
			}
			inside := false
			for base, size := range sizes {
				inside = inside || p >= base && p+uint64(n) <= base+uint64(size)
			}
			if !inside {
				t.Fatalf("%d bytes at %#x lie outside of what was taken", n, p)
			}
			for _, o := range live {
				if p < o.at+uint64(max(1, o.size)) && o.at < p+uint64(max(1, n)) {
					t.Fatalf("%d bytes at %#x overlap %d at %#x", n, p, o.size, o.at)
				}
			}
			live = append(live, piece{p, n})
			peak = max(peak, a.inUse)
		}
		var sum int64
		for _, p := range live {
			sum += p.size
		}
		if a.peak != peak || a.inUse < sum || a.inUse > sum+int64(len(live)+1)*alignment || a.reserved != used {
			t.Errorf("grain %d: in use %d (%d asked for), peak %d (%d), reserved %d (%d taken)", grain, a.inUse, sum, a.peak, peak, a.reserved, used)
		}
		for _, p := range live {
			if err := a.put(p.at); err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range a.segments {
			if len(s.pieces) != 1 {
				t.Errorf("grain %d: %d free pieces side by side", grain, len(s.pieces))
			}
		}
		if freed := a.trim(); a.inUse != 0 || used != 0 || a.reserved != 0 || grain > 0 && freed == 0 {
			t.Errorf("grain %d: %d bytes in use, %d taken at the end", grain, a.inUse, used)
		}
	}
}
