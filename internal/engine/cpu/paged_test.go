package cpu

import (
	"fmt"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// longestCache is the most slots of a cache.
const longestCache = 700

func TestPagedAttention(t *testing.T) {
	for _, b := range backends(t, 2) {
		for _, c := range enginetest.PagedCases(longestCache) {
			attend := func(b engine.Backend) []engine.Tensor { return c.Attend(b, 1) }
			enginetest.Compare(t, fmt.Sprintf("paged attention %+v", c), b, 3e-6, attend)
		}
	}
}

// Where pages lie, and how many threads there are, must not change a bit.
func TestPagesAndThreadsChangeNothing(t *testing.T) {
	first := map[string]string{}
	for _, threads := range []int{1, 3} {
		for _, b := range backends(t, threads) {
			for i, c := range enginetest.PagedCases(longestCache) {
				for shuffle := range uint64(3) {
					r := c.Attend(b, shuffle)
					got, key := fmt.Sprint(enginetest.Download(b, r[0]), enginetest.Download(b, r[3])), fmt.Sprint(b.Name(), i)
					if old, ok := first[key]; ok && old != got {
						t.Fatalf("%s, %+v: result depends on pages or threads", b.Name(), c)
					}
					first[key] = got
				}
			}
		}
	}
}

func TestStoreAndMovePages(t *testing.T) {
	for _, b := range backends(t, 2) {
		enginetest.Compare(t, "store and move pages", b, 0, enginetest.StoreAndMovePages)
	}
}

func BenchmarkPagedAttention(bench *testing.B) {
	b := backends(bench, 1)[0]
	c := enginetest.PagedCase{Heads: 9, KVHeads: 3, HeadDim: 64, Block: 16, Rows: 36, Longest: longestCache}
	pages, lanes := c.Build(b, 1)
	slots := 0
	for _, row := range lanes {
		for i := range row {
			row[i].Probabilities = nil
			slots += row[i].Spans[0].Hi
		}
	}
	r := enginetest.Seeded(99)
	q, k := enginetest.Random(r, c.Rows, c.Heads*c.HeadDim).On(b), enginetest.Random(r, c.Rows, c.KVHeads*c.HeadDim).On(b)
	out, table := b.New(c.Rows, c.Heads*c.HeadDim), enginetest.Rotary(c.HeadDim, 1000)
	bench.SetBytes(int64(slots * c.HeadDim * 8))
	for bench.Loop() {
		b.PagedAttention(out, q, k, k, pages, lanes, table, c.Spec())
	}
}
