package enginetest

import (
	"context"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// NewModel loads a random model. The caller closes it.
func NewModel(t testing.TB, c engine.Config, seed uint64, b engine.Backend) *engine.Model {
	t.Helper()
	m, err := engine.New(c, Weights{Config: c, Seed: seed}, b)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Greedy continues a prompt by n tokens, each the likeliest, one by one from a cache. logits are those of the first.
func Greedy(t testing.TB, m *engine.Model, prompt []int32, n int) (logits []float64, tokens []int32) {
	t.Helper()
	cache := m.NewCache(len(prompt) + n)
	defer cache.Free()
	next := &engine.Sequence{Tokens: prompt, Cache: cache, LogitRows: []int{len(prompt) - 1}}
	for range n {
		if err := m.Forward(context.Background(), next); err != nil {
			t.Fatal(err)
		}
		if logits == nil {
			logits = next.Logits[0]
		}
		best := int32(slices.Index(next.Logits[0], slices.Max(next.Logits[0])))
		tokens = append(tokens, best)
		next = &engine.Sequence{Tokens: []int32{best}, Cache: cache, LogitRows: []int{0}}
	}
	return logits, tokens
}

// ModelRun is what a whole model comes to, by every way through it.
type ModelRun struct {
	logits, cached, decoded []float64 // at once, with a cache, over pages
	taps                    []float64
	loss, gradient          []float64 // of the student: activations computed again, then kept
}

// RunModel runs a model of three layers and two KV heads over a text that ends with the last of rows, whose logits it takes, and closes it.
func RunModel(t testing.TB, c engine.Config, b engine.Backend, rows ...int) (r ModelRun) {
	t.Helper()
	ctx := context.Background()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m := NewModel(t, c, 4, b)
	defer m.Close()
	last := rows[len(rows)-1]
	n := last + 1
	tokens := Tokens(c, n, 3)

	s := &engine.Sequence{Tokens: tokens, LogitRows: rows,
		Tap: func(int) *engine.Tap {
			return &engine.Tap{Prompt: n - 4, Far: []int{9}, Windows: []int{8}, Recent: []int{4, 16}, Answer: []int{last}, VarianceWindow: 8, Map: 10}
		},
		Tapped: func(_ int, tap *engine.Tap) error {
			for _, h := range tap.Heads {
				for _, list := range [][]float32{h.Total, h.Far[0], h.Window[0], h.Answer, h.Map} {
					r.taps = append(r.taps, widen(list)...)
				}
				r.taps = append(append(r.taps, h.Recent...), h.Entropy, h.Variance)
			}
			return nil
		}}
	check(m.Forward(ctx, s))
	r.logits = slices.Concat(s.Logits...)

	cache := m.NewCache(n)
	defer cache.Free()
	for lo := 0; lo < n; {
		hi := min(n, lo+1+lo/2) // 1, 1, 2, 3, 5, ... tokens at a time
		step := &engine.Sequence{Tokens: tokens[lo:hi], Cache: cache, LogitRows: []int{hi - lo - 1}}
		check(m.Forward(ctx, step))
		r.cached = append(r.cached, step.Logits[0]...)
		lo = hi
	}

	prompt := n - 5
	paged := Prefill(t, m, tokens[:prompt], n-prompt, 8, func(l int) bool { return l%2 == 1 })
	defer m.FreePages(paged.Pages)
	var step []engine.Token
	for at := prompt; at < n; at++ {
		step = append(step, paged.Token(tokens[at], at))
	}
	decoded, err := m.Decode(ctx, paged.Pages, step)
	check(err)
	r.decoded = slices.Concat(decoded...)

	teacher, err := m.Teach(ctx, tokens)
	check(err)
	defer teacher.Free()
	gates := [][]float64{{.3, .9}, {.5, .2}, {.7, .4}}
	for _, limit := range []int64{0, 1 << 30} {
		student, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 2, Recent: 9}, rows, limit)
		check(err)
		g, err := student.Backward(ctx, 1)
		check(err)
		r.loss = append(r.loss, student.Loss)
		r.gradient = append(r.gradient, slices.Concat(g...)...)
		student.Free()
	}
	return r
}

// Within compares two runs. The tolerances are of the values of a forward pass, of which a loss is a square, and of the gates' gradient,
// which must not depend on whether activations were kept.
func (r ModelRun) Within(t testing.TB, what string, want ModelRun, values, gradient float64) {
	t.Helper()
	Within(t, what+" logits", r.logits, want.logits, values)
	Within(t, what+" logits with a cache", r.cached, want.cached, values)
	Within(t, what+" logits over pages", r.decoded, want.decoded, values)
	Within(t, what+" statistics", r.taps, want.taps, values)
	Within(t, what+" loss", r.loss, want.loss, 2*values)
	Within(t, what+" gates' gradient", r.gradient, want.gradient, gradient)
	half := len(r.gradient) / 2
	Within(t, what+" gradient without stash", r.gradient[:half], r.gradient[half:], 0)
}
