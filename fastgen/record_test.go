package fastgen

import (
	"math"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
	"github.com/kvprofile/kvprofile/profile"
)

type classes struct{}

func (classes) IsSpecial(id int32) bool     { return id < 4 }
func (classes) IsPunctuation(id int32) bool { return id%5 == 0 }

// A record on disk, from a model, gives what the exact maps in the same record give.
func TestRealRecord(t *testing.T) {
	cfg := enginetest.Tiny()
	m, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 3}, ref.New[float32]())
	if err != nil {
		t.Fatal(err)
	}
	d := &datasets.Dataset{}
	for id, n := range []int{40, 57} {
		d.Samples = append(d.Samples, datasets.Sample{ID: id, Tokens: enginetest.Tokens(cfg, n, uint64(id)), TargetTokens: n,
			Spans: []datasets.Span{{Kind: datasets.SpanSink, End: 1}, {Kind: datasets.SpanHaystack, Start: 1, End: n}}})
	}
	d.Meta.ContentHash = datasets.HashSamples(d.Samples)
	grid := profile.Grid{Recent: []int{8}, ExactSamples: []int{0, 1}}
	for l := range cfg.Layers {
		for h := range cfg.Heads {
			grid.ExactHeads = append(grid.ExactHeads, profile.Head{Layer: l, Head: h})
		}
	}
	dir := t.TempDir()
	if err := profile.Run(t.Context(), m, d, classes{}, profile.Options{Dir: dir, Grid: grid}, nil); err != nil {
		t.Fatal(err)
	}
	rec, err := profile.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Threshold: .8}
	got, err := Analyze(t.Context(), rec, "v", o)
	if err != nil {
		t.Fatal(err)
	}
	full := &made{meta: rec.Meta(), samples: rec.Samples(), maps: make([][][][][]float64, 2)}
	for id := range 2 {
		exact, err := rec.ExactMaps(id)
		if err != nil || len(exact) != cfg.Layers*cfg.Heads {
			t.Fatalf("%d maps, %v", len(exact), err)
		}
		full.maps[id] = make([][][][]float64, cfg.Layers)
		for _, x := range exact {
			rows := make([][]float64, x.Size)
			for i := range rows {
				rows[i] = make([]float64, x.Size)
				for j := range rows[i] {
					rows[i][j] = float64(x.Cells[i*x.Size+j])
				}
			}
			full.maps[id][x.Layer] = append(full.maps[id][x.Layer], rows)
		}
	}
	want, err := Analyze(t.Context(), full, "v", o)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := Streaming(rec, 4, 8, o)
	if err != nil {
		t.Fatal(err)
	}
	wantStream, err := Streaming(full, 4, 8, o)
	if err != nil {
		t.Fatal(err)
	}
	for l := range got.Layers {
		for k, h := range got.Layers[l] {
			w := want.Layers[l][k]
			for step := range h.Recovery {
				if math.Abs(h.Recovery[step]-w.Recovery[step]) > 1e-5 || h.Kept[step] != w.Kept[step] {
					t.Errorf("layer %d KV head %d: %+v, want %+v", l, k, h, w)
				}
			}
			if h.Policy != w.Policy || h.FirstHalf != w.FirstHalf || h.SecondHalf != w.SecondHalf {
				t.Errorf("layer %d KV head %d: %+v, want %+v", l, k, h, w)
			}
			if math.Abs(stream[l][k].Recovery-wantStream[l][k].Recovery) > 1e-5 || stream[l][k].Recovery <= 0 {
				t.Errorf("layer %d KV head %d: streaming %g, want %g", l, k, stream[l][k].Recovery, wantStream[l][k].Recovery)
			}
		}
	}
}
