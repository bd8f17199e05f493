package profile

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// benchRecord writes the statistics of made-up attention: SmolLM2's heads at 2,048 tokens, some layers of it.
func benchRecord(b *testing.B, dir string, layers int) int64 {
	b.Helper()
	const n = 2048
	r := rand.New(rand.NewPCG(1, 1))
	list := func() []float32 {
		out := make([]float32, n)
		for i := range out {
			out[i] = r.Float32()
		}
		return out
	}
	g := DefaultGrid()
	g.MapSamples = 0
	s := plainSample(0, n)
	meta := Meta{Format: formatName, Version: formatVersion, Model: Model{Layers: layers, Heads: 9, KVHeads: 3}, Grid: g, Dataset: Dataset{Samples: 1}}
	for _, t := range []string{tableMaps, tableColumns, tableHeads, tableSamples} {
		if err := os.MkdirAll(filepath.Join(dir, t), 0o777); err != nil {
			b.Fatal(err)
		}
	}
	rec := &recorder{dir: dir, meta: meta, classes: testClasses{}, progress: func(int, int, int) {}}
	j, err := rec.newJob(&s)
	if err != nil {
		b.Fatal(err)
	}
	tap := &engine.Tap{KV: make([]engine.KVStats, 3)}
	for range 9 {
		st := engine.HeadStats{Total: list(), Keys: []float64{1, 2, 3}}
		for range g.distances(n) {
			st.Far = append(st.Far, list())
		}
		for range len(g.Windows) + 1 {
			st.Window = append(st.Window, list())
		}
		tap.Heads = append(tap.Heads, st)
	}
	for l := range layers {
		if err := j.tapped(l, tap); err != nil {
			b.Fatal(err)
		}
	}
	if err := j.commit(); err != nil {
		b.Fatal(err)
	}
	size, err := Estimate(engine.Config{Layers: layers, Heads: 9, KVHeads: 3}, Grid{MapSamples: NoMaps}, []Size{{n, n, 0}})
	if err != nil {
		b.Fatal(err)
	}
	return size.Total()
}

func BenchmarkWrite(b *testing.B) {
	dir := b.TempDir()
	var bytes int64
	for b.Loop() {
		bytes = benchRecord(b, dir, 8)
	}
	b.SetBytes(bytes)
}

func BenchmarkColumns(b *testing.B) {
	dir := b.TempDir()
	b.SetBytes(benchRecord(b, dir, 8) / 8)
	rec, err := Open(dir)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := rec.Columns(0, 5); err != nil {
			b.Fatal(err)
		}
	}
}
