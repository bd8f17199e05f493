//go:build linux

package cuda

import (
	"fmt"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// longestCache is the most slots of a cache: simulated kernels are slow.
const longestCache = 300

func TestPagedAttention(t *testing.T) {
	both(t, func(t *testing.T, b *Backend) {
		for _, c := range enginetest.PagedCases(longestCache) {
			attend := func(b engine.Backend) []engine.Tensor { return c.Attend(b, 1) }
			enginetest.Compare(t, fmt.Sprintf("paged attention %+v", c), b, 3e-6, attend)
		}
	})
}

// Where pages lie must not change a bit.
func TestPagesChangeNothing(t *testing.T) {
	b := newBackend(t, "f32")
	for _, c := range enginetest.PagedCases(longestCache) {
		var first string
		for shuffle := range uint64(3) {
			r := c.Attend(b, shuffle)
			got := fmt.Sprint(enginetest.Download(b, r[0]), enginetest.Download(b, r[3]))
			if first == "" {
				first = got
			}
			if got != first {
				t.Fatalf("%+v: result depends on pages", c)
			}
		}
	}
}

func TestStoreAndMovePages(t *testing.T) {
	enginetest.Compare(t, "store and move pages", newBackend(t, "bf16"), 0, enginetest.StoreAndMovePages)
}
