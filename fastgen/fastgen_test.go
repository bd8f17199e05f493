package fastgen

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/profile"
)

// made is a record whose full attention maps are known: maps[sample][layer][head][query][key].
type made struct {
	meta    profile.Meta
	samples []profile.Sample
	maps    [][][][][]float64
}

func (m *made) Meta() profile.Meta                       { return m.meta }
func (m *made) Samples() []profile.Sample                { return m.samples }
func (m *made) Digest() (string, error)                  { return strings.Repeat("0", 64), nil }
func (m *made) head(sample, layer, head int) [][]float64 { return m.maps[sample][layer][head] }

// sums returns the attention that each of n keys receives from the rows and distances that are wanted.
func sums(rows [][]float64, n int, want func(i, j int) bool) []float32 {
	out := make([]float32, n)
	for j := range n {
		var s float64
		for i := j; i < len(rows); i++ {
			if want(i, j) {
				s += rows[i][j]
			}
		}
		out[j] = float32(s)
	}
	return out
}

func (m *made) Columns(sample, layer int) ([]profile.Columns, error) {
	s := &m.samples[sample]
	n := s.Prompt
	var out []profile.Columns
	for h := range m.meta.Model.Heads {
		rows := m.head(sample, layer, h)
		c := profile.Columns{
			Total: sums(rows, n, func(i, _ int) bool { return i < n }),
			Half:  sums(rows, n, func(i, _ int) bool { return i < n && i >= profile.HalfRow(n) }),
		}
		half := profile.HalfRow(n)
		for _, r := range m.meta.Grid.LocalRatios {
			d, e := profile.Tokens(r, n), profile.Tokens(r, half)
			c.FirstFar = append(c.FirstFar, sums(rows, half, func(i, j int) bool { return i < half && i-j >= e }))
			c.Far = append(c.Far, sums(rows, n, func(i, j int) bool { return i < n && i-j >= d }))
		}
		if len(s.Answers) > 0 {
			c.Answer = sums(rows, len(s.Tokens), func(i, _ int) bool { return slices.Contains(s.Answers, i) })
		}
		out = append(out, c)
	}
	return out, nil
}

func (m *made) Heads(sample int) ([]profile.HeadStats, error) {
	n := m.samples[sample].Prompt
	most := slices.Max(m.meta.Grid.Sinks)
	var out []profile.HeadStats
	for l := range m.meta.Model.Layers {
		for h := range m.meta.Model.Heads {
			st := profile.HeadStats{Layer: l, Head: h, KVHead: h / m.meta.Model.Group()}
			for _, w := range m.meta.Grid.Recent {
				rows := m.head(sample, l, h)[:n]
				var mass float64
				for i := range rows {
					for j := max(0, i-w+1); j <= i; j++ {
						mass += rows[i][j] / float64(n)
					}
				}
				st.Recent = append(st.Recent, mass)
				st.SinkFar = append(st.SinkFar, sums(rows, min(most, n), func(i, j int) bool { return i-j >= w }))
			}
			out = append(out, st)
		}
	}
	return out, nil
}

// softmax makes a row of a map.
func softmax(logits []float64) {
	top, z := slices.Max(logits), 0.0
	for j, x := range logits {
		logits[j] = math.Exp(x - top)
		z += logits[j]
	}
	for j := range logits {
		logits[j] /= z
	}
}

// randomRecord draws maps of heads of many kinds: peaked, local, on special tokens, even.
func randomRecord(seed uint64, lengths [][2]int) *made {
	r := rand.New(rand.NewPCG(seed, 5))
	m := &made{meta: profile.Meta{Model: profile.Model{Layers: 3, Heads: 6, KVHeads: 3},
		Grid: profile.Grid{LocalRatios: []float64{.15, .3}, Recent: []int{2, 5, 40}, Sinks: []int{1, 4}}}}
	for id, length := range lengths {
		all, n := length[0], length[1]
		s := profile.Sample{ID: id, Prompt: n, Tokens: make([]int32, all), Classes: make([]profile.Class, all)}
		for j := range s.Classes {
			switch {
			case j == 0 || r.IntN(12) == 0:
				s.Classes[j] = profile.Special
			case r.IntN(7) == 0:
				s.Classes[j] = profile.Punctuation
			}
		}
		for i := n - 1; i < all-1; i++ {
			if i != n+1 {
				s.Answers = append(s.Answers, i)
			}
		}
		m.samples = append(m.samples, s)
		layers := make([][][][]float64, 3)
		for l := range layers {
			for range 6 {
				class, local, peak := r.Float64()*6-1, r.Float64()*12-2, r.Float64()*4
				bias := make([]float64, all)
				for j := range bias {
					bias[j] = peak * r.NormFloat64()
					if s.Classes[j] != profile.Other {
						bias[j] += class
					}
				}
				rows := make([][]float64, all)
				for i := range rows {
					row := make([]float64, i+1)
					for j := range row {
						row[j] = bias[j] + r.NormFloat64() - local*float64(i-j)/float64(all)
					}
					softmax(row)
					rows[i] = append(row, make([]float64, all-i-1)...)
				}
				layers[l] = append(layers[l], rows)
			}
		}
		m.maps = append(m.maps, layers)
	}
	return m
}

// brute judges the lattice by the definition: for every row, the mass on the keys that the policy keeps for it.
// rows are those that count, columns those that can be kept; local tells the local keys of a row.
type brute struct {
	s        *profile.Sample
	group    [][][]float64
	rows     []int
	columns  int                 // frequent ones are chosen among so many first columns ...
	voters   []int               // ... by the attention of these rows
	local    func(i, j int) bool // local keys
	frequent float64
}

func (b brute) recovery(head, step int) float64 {
	frequent := map[int]bool{}
	type vote struct {
		sum float64
		j   int
	}
	var votes []vote
	for j := range b.columns {
		if b.s.Classes[j] != profile.Other {
			continue
		}
		v := vote{j: j}
		for _, rows := range b.group {
			for _, i := range b.voters {
				v.sum += rows[i][j]
			}
		}
		votes = append(votes, v)
	}
	slices.SortStableFunc(votes, func(x, y vote) int {
		if x.sum > y.sum {
			return -1
		}
		if x.sum < y.sum {
			return 1
		}
		return 0
	})
	for _, v := range votes[:min(len(votes), int(math.Ceil(b.frequent*float64(b.columns)-1e-9)))] {
		frequent[v.j] = true
	}
	var sum float64
	for _, i := range b.rows {
		for j := range i + 1 {
			keep := step == StepFull || b.s.Classes[j] == profile.Special ||
				step >= StepPunctuation && b.s.Classes[j] == profile.Punctuation ||
				step >= StepFrequent && frequent[j] || step >= StepLocal && b.local(i, j)
			if keep {
				sum += b.group[head][i][j]
			}
		}
	}
	return sum / float64(len(b.rows))
}

func span(lo, hi int) (out []int) {
	for i := lo; i < hi; i++ {
		out = append(out, i)
	}
	return out
}

func reduce(rule Rule, v []float64) float64 {
	if rule == Min {
		return slices.Min(v)
	}
	var s float64
	for _, x := range v {
		s += x
	}
	return s / float64(len(v))
}

func firstFit(recovery []float64, threshold float64) int {
	for step, x := range recovery {
		if step == StepFull || x >= threshold {
			return step
		}
	}
	return -1
}

// Exactness: recoveries, kept shares and policies of the whole prompt, its halves and the answers, against full maps
// in float64, for all rules.
func TestEqualsFullMaps(t *testing.T) {
	policies := map[int]int{}
	for seed := range uint64(6) {
		rec := randomRecord(seed, [][2]int{{37, 30}, {21, 21}, {52, 41}, {3, 1}})
		for _, o := range []Options{
			{},
			{Threshold: .999},
			{Threshold: .7, Group: Mean, Samples: Min, FrequentRatio: .1, LocalRatio: .15, Threads: 3},
			{Threshold: .8, Group: Min, Samples: Min, FrequentRatio: 1},
			{Threshold: .6, Group: Mean, Samples: Mean, FrequentRatio: .05},
		} {
			r, err := Analyze(t.Context(), rec, "v", o)
			if err != nil {
				t.Fatal(err)
			}
			o := r.Options
			var agree Agreement // sums over the 9 KV heads
			for l := range r.Layers {
				for kv, h := range r.Layers[l] {
					name := fmt.Sprintf("seed %d layer %d KV head %d", seed, l, kv)
					var want [views][]float64 // by step
					alone := make([][]float64, len(rec.samples))
					for step := range steps {
						var by [views][]float64 // by sample
						for id := range rec.samples {
							s := &rec.samples[id]
							n, d := s.Prompt, profile.Tokens(o.LocalRatio, s.Prompt)
							group := rec.maps[id][l][kv*2 : kv*2+2]
							half := n / 2
							e := profile.Tokens(o.LocalRatio, half)
							near := func(i, j int) bool { return i-j < d }
							judges := [views]brute{
								rowsPrompt:  {s: s, group: group, rows: span(0, n), columns: n, voters: span(0, n), local: near, frequent: o.FrequentRatio},
								rowsFirst:   {s: s, group: group, rows: span(0, half), columns: half, voters: span(0, half), local: func(i, j int) bool { return i-j < e }, frequent: o.FrequentRatio},
								rowsSecond:  {s: s, group: group, rows: span(half, n), columns: n, voters: span(half, n), local: near, frequent: o.FrequentRatio},
								rowsAnswers: {s: s, group: group, rows: s.Answers, columns: n, voters: span(0, n), local: func(_, j int) bool { return j >= n-d }, frequent: o.FrequentRatio},
							}
							for v, b := range judges {
								if len(b.rows) == 0 {
									continue
								}
								if x := reduce(o.Group, []float64{b.recovery(0, step), b.recovery(1, step)}); v == rowsPrompt {
									alone[id] = append(alone[id], x)
								}
								by[v] = append(by[v], reduce(o.Group, []float64{b.recovery(0, step), b.recovery(1, step)}))
							}
						}
						for v := range by {
							if len(by[v]) > 0 {
								want[v] = append(want[v], reduce(o.Samples, by[v]))
							}
						}
					}
					for step, x := range want[rowsPrompt] {
						if math.Abs(h.Recovery[step]-x) > 1e-6 {
							t.Errorf("%s: recovery of step %d is %.9f, want %.9f", name, step, h.Recovery[step], x)
						}
					}
					for v, got := range map[int]int{rowsPrompt: h.Policy, rowsFirst: h.FirstHalf, rowsSecond: h.SecondHalf, rowsAnswers: h.Answers} {
						if p := firstFit(want[v], o.Threshold); got != p {
							t.Errorf("%s: rows %d ask for %d, want %d (%v)", name, v, got, p, want[v])
						}
					}
					policies[h.Policy]++
					whole, first, second, answers := h.Policy, firstFit(want[rowsFirst], o.Threshold), firstFit(want[rowsSecond], o.Threshold), firstFit(want[rowsAnswers], o.Threshold)
					for _, x := range []struct {
						yes bool
						to  *float64
					}{{first == second, &agree.Halves}, {first == whole, &agree.FirstHalf}, {second == whole, &agree.SecondHalf},
						{answers == whole, &agree.Answers}, {want[rowsAnswers][whole] >= o.Threshold, &agree.Enough}} {
						if x.yes {
							*x.to += 1. / 9
						}
					}
					agree.Samples += h.Alone / 9
					var agree float64
					for _, own := range alone {
						if firstFit(own, o.Threshold) == h.Policy {
							agree += 1 / float64(len(alone))
						}
					}
					if math.Abs(h.Alone-agree) > 1e-9 {
						t.Errorf("%s: %g of the samples agree alone, want %g", name, h.Alone, agree)
					}
				}
			}
			got, want := reflect.ValueOf(r.Agreement), reflect.ValueOf(agree)
			for i := range got.NumField() {
				if math.Abs(got.Field(i).Float()-want.Field(i).Float()) > 1e-9 {
					t.Errorf("seed %d: agreement %+v, want %+v", seed, r.Agreement, agree)
				}
			}
		}
	}
	if len(policies) != steps {
		t.Errorf("the maps lead to policies %v only", policies)
	}
}

// The nested lattice: recovery and kept tokens never fall; a higher threshold never takes a cheaper policy.
func TestMonotone(t *testing.T) {
	for seed := range uint64(20) {
		rec := randomRecord(100+seed, [][2]int{{31, 24}, {18, 18}})
		last := map[[2]int]int{}
		for _, threshold := range []float64{.05, .3, .5, .7, .9, .99, 1} {
			r, err := Analyze(t.Context(), rec, "v", Options{Threshold: threshold})
			if err != nil {
				t.Fatal(err)
			}
			for l, layer := range r.Layers {
				for k, h := range layer {
					if !slices.IsSorted(h.Recovery) || !slices.IsSorted(h.Kept) || !slices.IsSorted(h.KeptMax) || h.Recovery[StepFull] != 1 || h.KeptMax[StepFull] != 1 {
						t.Errorf("seed %d: %+v", seed, h)
					}
					if h.Policy < last[[2]int{l, k}] {
						t.Errorf("seed %d: threshold %g takes policy %d after %d", seed, threshold, h.Policy, last[[2]int{l, k}])
					}
					last[[2]int{l, k}] = h.Policy
				}
			}
		}
	}
}

// uniform attention over ordinary tokens: nothing but full recovers enough.
func TestNothingFits(t *testing.T) {
	rec := randomRecord(1, [][2]int{{40, 40}})
	for j := range rec.samples[0].Classes {
		rec.samples[0].Classes[j] = profile.Other
	}
	for l := range rec.maps[0] {
		for h := range rec.maps[0][l] {
			for i, row := range rec.maps[0][l][h] {
				clear(row)
				for j := range i + 1 {
					row[j] = 1 / float64(i+1)
				}
			}
		}
	}
	r, err := Analyze(t.Context(), rec, "v", Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, layer := range r.Layers {
		for _, h := range layer {
			if h.Policy != StepFull || h.FirstHalf != StepFull || h.SecondHalf != StepFull || h.Answers != -1 {
				t.Errorf("%+v", h)
			}
		}
	}
	if a := r.Agreement; a.Halves != 1 || a.Samples != 1 || a.Answers != 0 {
		t.Errorf("%+v", a)
	}
}

// One query head of the group attends to special tokens only, the other to everything: min asks for full, mean less.
func TestGroupRules(t *testing.T) {
	rec := randomRecord(2, [][2]int{{40, 40}})
	s := &rec.samples[0]
	for j := range s.Classes {
		s.Classes[j] = profile.Other
	}
	s.Classes[0] = profile.Special
	for i := range 40 {
		clear(rec.maps[0][0][0][i])
		rec.maps[0][0][0][i][0] = 1
		clear(rec.maps[0][0][1][i])
		for j := range i + 1 {
			rec.maps[0][0][1][i][j] = 1 / float64(i+1)
		}
	}
	for rule, want := range map[Rule]int{Min: StepFull, Mean: StepSpecial} {
		r, err := Analyze(t.Context(), rec, "v", Options{Group: rule, Threshold: .54, FrequentRatio: .01, LocalRatio: .15})
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Layers[0][0].Policy; got != want {
			t.Errorf("rule %s takes policy %d, want %d: %v", rule, got, want, r.Layers[0][0].Recovery)
		}
	}
}

// Equal attention: the lowest positions are frequent.
func TestTies(t *testing.T) {
	v := view{}
	v.add(6, []float32{1, 1, 2, 1, 1, 0}, make([]float32, 6))
	kept := v.columns(make([]profile.Class, 6), .5)
	if want := []int{StepFrequent, StepFrequent, StepFrequent, StepFull, StepFull, StepFull}; !slices.Equal(kept, want) {
		t.Errorf("%v, want %v", kept, want)
	}
}

func TestThreadsDoNotMatter(t *testing.T) {
	rec := randomRecord(3, [][2]int{{37, 30}, {21, 21}})
	one, err := Analyze(t.Context(), rec, "v", Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	many, err := Analyze(t.Context(), rec, "v", Options{Threads: 8})
	if err != nil || !reflect.DeepEqual(one, many) {
		t.Errorf("results differ: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Analyze(ctx, rec, "v", Options{Threads: 2}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestStreaming(t *testing.T) {
	rec := randomRecord(4, [][2]int{{37, 30}, {21, 21}, {3, 2}})
	for _, c := range [][2]int{{0, 2}, {1, 2}, {3, 5}, {4, 5}, {4, 40}} {
		for _, o := range []Options{{}, {Group: Mean, Samples: Min}} {
			got, err := Streaming(rec, c[0], c[1], o)
			if err != nil {
				t.Fatal(err)
			}
			o, _ = o.resolve()
			for l := range got {
				for kv := range got[l] {
					var by []float64
					for id := range rec.samples {
						n := rec.samples[id].Prompt
						var group []float64
						for h := kv * 2; h < kv*2+2; h++ {
							var mass float64
							for i := range n {
								for j := range i + 1 {
									if j < c[0] || i-j < c[1] {
										mass += rec.maps[id][l][h][i][j] / float64(n)
									}
								}
							}
							group = append(group, mass)
						}
						by = append(by, reduce(o.Group, group))
					}
					if want := reduce(o.Samples, by); math.Abs(got[l][kv].Recovery-want) > 1e-6 {
						t.Errorf("sink %d recent %d layer %d KV head %d: %g, want %g", c[0], c[1], l, kv, got[l][kv].Recovery, want)
					}
				}
			}
		}
	}
	var bad *OptionError
	if _, err := Streaming(rec, 5, 5, Options{}); !errors.As(err, &bad) || bad.Option != "sink" {
		t.Errorf("too many sinks: %v", err)
	}
	if _, err := Streaming(rec, 1, 6, Options{}); !errors.As(err, &bad) || bad.Option != "recent" {
		t.Errorf("unrecorded width: %v", err)
	}
}

func TestBadOptions(t *testing.T) {
	rec := randomRecord(5, [][2]int{{10, 10}})
	for _, o := range []Options{{Threshold: 1.1}, {Threshold: -1}, {Threshold: math.NaN()}, {FrequentRatio: 2}, {LocalRatio: .2}, {Group: "max"}, {Samples: "x"}} {
		var bad *OptionError
		if _, err := Analyze(t.Context(), rec, "v", o); !errors.As(err, &bad) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestFile(t *testing.T) {
	rec := randomRecord(6, [][2]int{{37, 30}, {21, 21}})
	r, err := Analyze(t.Context(), rec, "v1", Options{Threshold: .8})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "fastgen.json")
	if err := r.Save(path); err != nil {
		t.Fatal(err)
	}
	back, err := Load(path)
	if err != nil || !reflect.DeepEqual(back, r) {
		t.Fatalf("reads back otherwise: %v", err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]string{
		{`"version": 1`, `"version": 2`},
		{`"kvprofile.fastgen"`, `"kvprofile.pyramid"`},
		{`"tool"`, `"tools"`},
		{`"threshold": 0.8`, `"threshold": 0.99999`},
		{`"name": "special"`, `"name": "sink"`},
		{`"kv_heads": 3`, `"kv_heads": 2`},
		{`"layers": 3`, `"layers": 4`},
		{`"first_half": `, `"first_half": 1`},
		{`"recovery": [`, `"recovery": [-1, `},
		{`}`, ``},
	} {
		bad := strings.Replace(string(text), c[0], c[1], 1)
		if bad == string(text) {
			t.Fatalf("no %s in the file", c[0])
		}
		if err := os.WriteFile(path, []byte(bad), 0o644); err != nil {
			t.Fatal(err)
		}
		var format *FormatError
		if _, err := Load(path); !errors.As(err, &format) {
			t.Errorf("%s for %s: %v", c[1], c[0], err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	r, err := Analyze(f.Context(), randomRecord(7, [][2]int{{12, 9}}), "v", Options{})
	if err != nil {
		f.Fatal(err)
	}
	path := filepath.Join(f.TempDir(), "x.json")
	if err := r.Save(path); err != nil {
		f.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(text))
	f.Add(`{"format":"kvprofile.fastgen","version":1}`)
	f.Add(`{"format":"kvprofile.fastgen","version":1,"model":{"layers":1,"heads":1,"kv_heads":1},"layers":[[{}]]}`)
	f.Fuzz(func(t *testing.T, s string) {
		r, err := decode(strings.NewReader(s))
		if err != nil {
			return
		}
		for _, layer := range r.Layers {
			for _, h := range layer {
				if h.Policy < 0 || h.Policy >= len(r.Lattice) || len(h.Recovery) != len(r.Lattice) {
					t.Errorf("%+v", h)
				}
			}
		}
	})
}
