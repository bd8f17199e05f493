// Package profile records how a model attends over a dataset, and reads such records back.
//
// A record is a folder with four Parquet tables, samples, heads, columns and maps, of one part per sample. It holds
// sufficient statistics: attention maps are never stored whole (but on request), yet what a policy would keep, and
// which share of the attention falls on that, follows from the record exactly. docs/record.md describes every column.
//
// Run writes a record, Open reads one.
package profile

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
)

const (
	formatName    = "kvprofile.attention-record"
	formatVersion = 1
)

// Meta says what a record was made of and how. It stands in every part; all parts of a record have the same.
type Meta struct {
	Format  string  `json:"format"`
	Version int     `json:"version"`
	Tool    string  `json:"tool"`   // version of the program
	Engine  string  `json:"engine"` // device, tier and precision, as the backend names them: "cpu avx512 f32"
	Model   Model   `json:"model"`
	Dataset Dataset `json:"dataset"`
	Grid    Grid    `json:"grid"`
}

// Model is the shape and the identity of the profiled model.
type Model struct {
	Name         string `json:"name"`
	Architecture string `json:"architecture"`
	Layers       int    `json:"layers"`
	Heads        int    `json:"heads"` // query heads
	KVHeads      int    `json:"kv_heads"`
	HeadDim      int    `json:"head_dim"`
	MaxPosition  int    `json:"max_position"`
	// SlidingWindow is as in engine.Config: one window per layer in tokens, 0 for full attention; nil for all full.
	SlidingWindow []int `json:"sliding_window,omitempty"`
	// SHA256 holds the digests "config", "weights" and "tokenizer", as far as they were given.
	SHA256 map[string]string `json:"sha256"`
}

// Group is the number of query heads that share one KV head.
func (m Model) Group() int { return m.Heads / m.KVHeads }

// Window is the layer's sliding window in tokens, 0 when it attends to everything.
func (m Model) Window(layer int) int {
	if layer < len(m.SlidingWindow) {
		return m.SlidingWindow[layer]
	}
	return 0
}

// Dataset is the identity of the profiled dataset.
type Dataset struct {
	Hash      string `json:"hash"` // content hash of its samples
	Task      string `json:"task"`
	Purpose   string `json:"purpose"`
	Seed      uint64 `json:"seed"`
	Tokenizer string `json:"tokenizer"` // fingerprint
	Samples   int    `json:"samples"`
}

// Grid says which statistics are recorded. Zero fields of Options.Grid take the values of DefaultGrid.
type Grid struct {
	// LocalRatios are FastGen's r_l: for each, columns say what was received from distances of at least
	// ceil(r_l * prompt rows) tokens. Ascending, in (0,1).
	LocalRatios []float64 `json:"local_ratios"`
	// Windows are observation windows in rows, the last ones of the prompt. Ascending.
	Windows []int `json:"windows"`
	// Recent are widths in tokens of the recent part of streaming policies. Ascending.
	Recent []int `json:"recent"`
	// Sinks are numbers of first tokens whose mass is recorded. Ascending. Streaming policies with any number of
	// sink tokens up to the largest can be judged.
	Sinks []int `json:"sinks"`
	// KeysEvery: every n-th prompt row is counted for the numbers of keys (every row of a prompt shorter than n).
	KeysEvery int `json:"keys_every"`
	// Masses are the shares of a row's attention that keys are counted for. Ascending, in (0,1).
	Masses []float64 `json:"masses"`
	// VarianceWindow is the number of last prompt rows whose variance is recorded.
	VarianceWindow int `json:"variance_window"`
	// MapSamples is the number of first samples with block-pooled maps, of at most MapSize x MapSize cells.
	MapSamples int `json:"map_samples"`
	MapSize    int `json:"map_size"`
	// ExactSamples and ExactHeads choose the samples and query heads with exact maps: prompt rows^2 / 2 floats each.
	ExactSamples []int  `json:"exact_samples,omitempty"`
	ExactHeads   []Head `json:"exact_heads,omitempty"`
}

// Head names a query head.
type Head struct {
	Layer int `json:"layer"`
	Head  int `json:"head"`
}

// NoMaps as Grid.MapSamples asks for no pooled maps; 0 stands for the default.
const NoMaps = -1

// DefaultGrid returns the statistics that are recorded when nothing else is asked for.
func DefaultGrid() Grid {
	return Grid{
		LocalRatios:    []float64{0.3},
		Windows:        []int{8, 32, 64},
		Recent:         []int{64, 256, 1024},
		Sinks:          []int{4, 64, 128},
		KeysEvery:      16,
		Masses:         []float64{0.9, 0.95, 0.99},
		VarianceWindow: 32,
		MapSamples:     4,
		MapSize:        128,
	}
}

// resolve fills in defaults and checks.
func (g Grid) resolve(cfg engine.Config, samples int) (Grid, error) {
	d := DefaultGrid()
	if g.LocalRatios == nil {
		g.LocalRatios = d.LocalRatios
	}
	if g.Windows == nil {
		g.Windows = d.Windows
	}
	if g.Recent == nil {
		g.Recent = d.Recent
	}
	if g.Sinks == nil {
		g.Sinks = d.Sinks
	}
	if g.KeysEvery == 0 {
		g.KeysEvery = d.KeysEvery
	}
	if g.Masses == nil {
		g.Masses = d.Masses
	}
	if g.VarianceWindow == 0 {
		g.VarianceWindow = d.VarianceWindow
	}
	switch g.MapSamples {
	case 0:
		g.MapSamples = d.MapSamples
	case NoMaps:
		g.MapSamples = 0
	}
	if g.MapSize == 0 {
		g.MapSize = d.MapSize
	}
	if len(g.ExactHeads) > 0 && len(g.ExactSamples) == 0 {
		for i := range min(max(g.MapSamples, 1), samples) {
			g.ExactSamples = append(g.ExactSamples, i)
		}
	}
	return g, g.check(cfg.Layers, cfg.Heads, samples)
}

func (g Grid) check(layers, heads, samples int) error {
	for _, l := range []struct {
		option string
		values []float64
	}{{"local ratios", g.LocalRatios}, {"masses", g.Masses}} {
		for i, v := range l.values {
			if !(v > 0 && v < 1) {
				return &OptionError{l.option, fmt.Sprintf("%g is not between 0 and 1", v)}
			}
			if i > 0 && v <= l.values[i-1] {
				return &OptionError{l.option, "must ascend"}
			}
		}
	}
	for _, l := range []struct {
		option string
		values []int
	}{{"windows", g.Windows}, {"recent widths", g.Recent}, {"sinks", g.Sinks}} {
		for i, v := range l.values {
			if v < 1 {
				return &OptionError{l.option, fmt.Sprintf("%d is not positive", v)}
			}
			if i > 0 && v <= l.values[i-1] {
				return &OptionError{l.option, "must ascend"}
			}
		}
	}
	switch {
	case len(g.LocalRatios) == 0 || len(g.Windows) == 0 || len(g.Recent) == 0 || len(g.Sinks) == 0 || len(g.Masses) == 0:
		return &OptionError{"grid", "local ratios, windows, recent widths, sinks and masses need a value each"}
	case g.KeysEvery < 0:
		return &OptionError{"keys every", "is negative"}
	case g.VarianceWindow < 0:
		return &OptionError{"variance window", "is negative"}
	case g.MapSamples < 0:
		return &OptionError{"map samples", "is negative"}
	case g.MapSize < 1 || g.MapSize > 4096:
		return &OptionError{"map size", "is not in 1..4096"}
	}
	for _, s := range g.ExactSamples {
		if s < 0 || s >= samples {
			return &OptionError{"exact samples", fmt.Sprintf("there is no sample %d among %d", s, samples)}
		}
	}
	for _, h := range g.ExactHeads {
		if h.Layer < 0 || h.Layer >= layers || h.Head < 0 || h.Head >= heads {
			return &OptionError{"exact heads", fmt.Sprintf("there is no query head %d:%d among %d layers of %d", h.Layer, h.Head, layers, heads)}
		}
	}
	return nil
}

// maxSink is the number of first columns that are kept of the lists for streaming policies.
func (g Grid) maxSink() int { return g.Sinks[len(g.Sinks)-1] }

// Tokens returns ceil(ratio * n): how many tokens a ratio of n tokens is. Products that are whole but for rounding
// (0.07 * 100) count as whole.
func Tokens(ratio float64, n int) int {
	x := ratio * float64(n)
	if r := math.Round(x); math.Abs(x-r) < 1e-9*max(1, r) {
		return int(r)
	}
	return int(math.Ceil(x))
}

// HalfRow is the first row of the second half of a prompt.
func HalfRow(prompt int) int { return prompt / 2 }

// Class is a token's class in FastGen's sense.
type Class uint8

// The classes exclude one another: a special token is not punctuation.
const (
	Other Class = iota
	Special
	Punctuation
)

// Classes tells the class of token ids.
type Classes interface {
	IsSpecial(id int32) bool
	IsPunctuation(id int32) bool
}

func classify(tokens []int32, c Classes) []Class {
	out := make([]Class, len(tokens))
	for i, id := range tokens {
		switch {
		case c.IsSpecial(id):
			out[i] = Special
		case c.IsPunctuation(id):
			out[i] = Punctuation
		}
	}
	return out
}

// Sample is one prompt with its answers, as recorded.
type Sample struct {
	ID      int // index in the dataset
	Task    string
	Seed    uint64
	Tokens  []int32
	Classes []Class // one per token
	Spans   []datasets.Span
	// Prompt is the number of prompt rows, n below: the tokens before the first answer.
	Prompt int
	// Answers are the query rows that write answer tokens, ascending. The first is Prompt-1.
	Answers []int
}

// HeadStats are the scalar statistics of one query head on one sample. Masses are shares of the attention of a row,
// mean over the prompt's rows.
type HeadStats struct {
	Layer, Head, KVHead int
	Sink                []float64 // per Grid.Sinks: mass on the first tokens
	Recent              []float64 // per Grid.Recent: mass on keys at a distance below the width
	Special             float64   // mass on special tokens
	Punctuation         float64
	Needle              float64 // mass on needle tokens
	// AnswerNeedle is the mass on needle tokens, mean over the answer rows; Copy the share of answer rows whose
	// largest probability is on a token of their own needle that is the very token being written (retrieval score,
	// Wu et al. 2024). Both are 0 for samples without answers.
	AnswerNeedle, Copy float64
	Entropy            float64   // of a row, nats, mean over the prompt's rows
	Keys               []float64 // per Grid.Masses: smallest number of keys that hold the mass, mean over sampled rows
	Variance           float64   // see engine.HeadStats
	// ValueNorm and ValueNormMax are of the KV head's value vectors over the prompt's tokens.
	ValueNorm, ValueNormMax float64
	// SinkFar[x][j], j below the largest of Grid.Sinks (and n): attention that token j received from prompt rows at a
	// distance of at least Grid.Recent[x]. With it the recovery of streaming policies is exact.
	SinkFar [][]float32
}

// Columns are the statistics of one query head on one sample by token: sums over rows of the attention received. Lists
// over prompt rows have n entries: later tokens receive nothing from them.
type Columns struct {
	Total  []float32   // from all prompt rows
	Far    [][]float32 // per Grid.LocalRatios: from prompt rows at a distance of at least Tokens(r_l, n)
	Window [][]float32 // per Grid.Windows: from the last prompt rows
	Half   []float32   // from the prompt rows of the second half, [HalfRow(n), n)
	// FirstFar per Grid.LocalRatios, one entry per token of the first half h = HalfRow(n): from rows of the first half
	// at a distance of at least Tokens(r_l, h). It is Far of the first half as a prompt of its own.
	FirstFar [][]float32
	Answer   []float32 // from the answer rows, one entry per token of the sample; empty without answers
}

// SplitFar divides a far list at the middle of the prompt: what came from rows of the first half and of the second.
// No further sums are needed: every row of the second half is far from the columns before HalfRow(n) - distance, and
// no row of the first half from those after.
func SplitFar(far, half []float32, distance int) (first, second []float32) {
	n := len(far)
	first, second = make([]float32, n), slices.Clone(far)
	for j := range max(HalfRow(n)-distance, 0) {
		second[j] = half[j]
		first[j] = max(far[j]-half[j], 0)
	}
	return first, second
}

// Map is an attention map of one query head over the prompt of one sample.
type Map struct {
	Layer, Head int
	// Size x Size cells, row-major, of Tile x Tile tokens: mean over the tile's rows of the mass on the tile's keys.
	Size, Tile int
	Cells      []float32
}

// ratioName writes a ratio as part of a column's name: 0.3 as 0_3.
func ratioName(r float64) string {
	return strings.ReplaceAll(strconv.FormatFloat(r, 'g', -1, 64), ".", "_")
}
