package dtype

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"testing"
)

// The blocks and their values were recorded from another implementation: scripts/fixtures_dtype.py.
func TestDecodeIsBitExact(t *testing.T) {
	text, err := os.ReadFile("testdata/blocks.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases map[string]struct{ Blocks, Values string }
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	for d := F32; d.Valid(); d++ {
		c, ok := cases[d.String()]
		if !ok {
			t.Errorf("%v has no fixture", d)
			continue
		}
		blocks, _ := hex.DecodeString(c.Blocks)
		want, _ := hex.DecodeString(c.Values)
		got := make([]float32, len(want)/4)
		if len(got) != len(blocks)/d.BlockBytes()*d.BlockLen() {
			t.Fatalf("%v: %d values in %d bytes", d, len(got), len(blocks))
		}
		d.Decode(got, blocks)
		for i, v := range got {
			if w := binary.LittleEndian.Uint32(want[4*i:]); math.Float32bits(v) != w {
				t.Errorf("%v: value %d is %g, want %g", d, i, v, math.Float32frombits(w))
				break
			}
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	const n = 1 << 16
	dst := make([]float32, n)
	r := rand.New(rand.NewPCG(1, 1))
	for d := F32; d.Valid(); d++ {
		src := make([]byte, n/d.BlockLen()*d.BlockBytes())
		for i := range src {
			src[i] = byte(r.Uint32())
		}
		b.Run(d.String(), func(b *testing.B) {
			for b.Loop() {
				d.Decode(dst, src)
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mvalues/s")
		})
	}
}
