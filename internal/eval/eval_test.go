package eval_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cpu"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/plan"
)

// letters stands in for a tokenizer: every token is one letter.
type letters struct{}

func (letters) Decode(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteByte(byte('A' + id))
	}
	return b.String()
}

// tokensOf reads what letters wrote.
func tokensOf(text string) (ids []int32) {
	for _, b := range []byte(text) {
		ids = append(ids, int32(b)-'A')
	}
	return ids
}

// oracle is a Llama in float64 that keeps the keys and values of every token and attends to whatever it is told to: no
// cache, no blocks, no slots.
type oracle struct {
	c engine.Config
	w map[string][][]float64
	// frequencies of RoPE
	frequencies []float64
}

func newOracle(t *testing.T, w enginetest.Weights) *oracle {
	t.Helper()
	o := &oracle{c: w.Config, w: map[string][][]float64{}}
	for j := range w.Config.HeadDim / 2 {
		o.frequencies = append(o.frequencies, math.Pow(w.Config.RoPE.Theta, -float64(2*j)/float64(w.Config.HeadDim)))
	}
	names := []string{"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
	for l := range w.Config.Layers {
		for _, part := range []string{"input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
			"post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} {
			names = append(names, fmt.Sprintf("model.layers.%d.%s.weight", l, part))
		}
	}
	for _, name := range names {
		m, err := w.Matrix(name)
		if err != nil {
			t.Fatal(err)
		}
		row := make([]float32, m.Cols)
		for r := range m.Rows {
			m.DecodeRow(row, r)
			wide := make([]float64, m.Cols)
			for i, v := range row {
				wide[i] = float64(v)
			}
			o.w[name] = append(o.w[name], wide)
		}
	}
	return o
}

func (o *oracle) times(name string, x []float64) []float64 {
	var y []float64
	for _, row := range o.w[name] {
		var s float64
		for i, v := range row {
			s += v * x[i]
		}
		y = append(y, s)
	}
	return y
}

func (o *oracle) norm(name string, x []float64) []float64 {
	var s float64
	for _, v := range x {
		s += v * v
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = v / math.Sqrt(s/float64(len(x))+o.c.NormEps) * o.w[name][0][i]
	}
	return y
}

// rotate is RoPE with angles in single precision, as models are served.
func (o *oracle) rotate(x []float64, position int) []float64 {
	half := len(x) / 2
	y := make([]float64, len(x))
	for j, f := range o.frequencies {
		sin, cos := math.Sincos(float64(float32(position) * float32(f)))
		s, c := float64(float32(sin)), float64(float32(cos))
		y[j], y[j+half] = x[j]*c-x[j+half]*s, x[j+half]*c+x[j]*s
	}
	return y
}

// history has what a text left: [layer][KV head][position].
type history struct {
	keys, values [][][][]float64 // keys before RoPE
}

// step reads a token. see says which positions a KV head's query attends to, its own among them, and which ones their
// keys are rotated to; the query is rotated as its own key is. seen gets the attention of each query head of the group.
func (o *oracle) step(h *history, id int32, see func(l, k int) (positions, rotations []int), seen func(l, k int, positions []int, p [][]float64)) []float64 {
	d, group := o.c.HeadDim, o.c.Heads/o.c.KVHeads
	x := slices.Clone(o.w["model.embed_tokens.weight"][id])
	if h.keys == nil {
		h.keys, h.values = make([][][][]float64, o.c.Layers), make([][][][]float64, o.c.Layers)
		for l := range h.keys {
			h.keys[l], h.values[l] = make([][][]float64, o.c.KVHeads), make([][][]float64, o.c.KVHeads)
		}
	}
	for l := range o.c.Layers {
		at := fmt.Sprintf("model.layers.%d.", l)
		in := o.norm(at+"input_layernorm.weight", x)
		q, key, value := o.times(at+"self_attn.q_proj.weight", in), o.times(at+"self_attn.k_proj.weight", in), o.times(at+"self_attn.v_proj.weight", in)
		var out []float64
		for k := range o.c.KVHeads {
			h.keys[l][k] = append(h.keys[l][k], key[k*d:(k+1)*d])
			h.values[l][k] = append(h.values[l][k], value[k*d:(k+1)*d])
			positions, rotations := see(l, k)
			var all [][]float64
			for g := range group {
				query := o.rotate(q[(k*group+g)*d:(k*group+g+1)*d], rotations[len(rotations)-1])
				p, sum := make([]float64, len(positions)), 0.0
				for i, pos := range positions {
					for j, v := range o.rotate(h.keys[l][k][pos], rotations[i]) {
						p[i] += v * query[j]
					}
					p[i] = math.Exp(p[i] / math.Sqrt(float64(d)))
					sum += p[i]
				}
				a := make([]float64, d)
				for i, pos := range positions {
					p[i] /= sum
					for j, v := range h.values[l][k][pos] {
						a[j] += p[i] * v
					}
				}
				out, all = append(out, a...), append(all, p)
			}
			seen(l, k, positions, all)
		}
		for i, v := range o.times(at+"self_attn.o_proj.weight", out) {
			x[i] += v
		}
		in = o.norm(at+"post_attention_layernorm.weight", x)
		gate, up := o.times(at+"mlp.gate_proj.weight", in), o.times(at+"mlp.up_proj.weight", in)
		for i, g := range gate {
			up[i] *= g / (1 + math.Exp(-g))
		}
		for i, v := range o.times(at+"mlp.down_proj.weight", up) {
			x[i] += v
		}
	}
	return o.times("lm_head.weight", o.norm("model.norm.weight", x))
}

// keeper is one KV head that follows its policy as docs/plan.md words it, with lists of positions.
type keeper struct {
	q       plan.Policy
	window  int
	group   int
	held    []int // rising
	outside []int // of these the policy keeps no longer: pins do
	fixed   []int // what a rolling topk policy keeps for good
	fix     int   // how many that are
	pins    []int
	score   map[int]float64     // attention received, summed over queries and the group
	votes   []map[int][]float64 // by query head of the group and position: from each query, in order
	classes func(position int) plan.Class
	ended   bool
	whole   bool // the policy keeps the layer's window
}

func ceil(share float64, n int) int { return min(int(math.Ceil(share*float64(n))), n) }

// size sets whether the policy is as large as the layer's window.
func (h *keeper) size(prompt int) {
	size := 0
	switch q := h.q.(type) {
	case plan.Full:
		size = math.MaxInt
	case plan.Streaming:
		size = q.SinkTokens + q.RecentTokens
	case plan.TopK:
		size = budget(q, prompt)
	case plan.H2O:
		size = q.SinkTokens + q.HeavyTokens + q.RecentTokens
	}
	h.whole = h.window > 0 && size >= h.window || size == math.MaxInt
}

func budget(q plan.TopK, prompt int) int {
	if q.BudgetTokens > 0 {
		return q.BudgetTokens
	}
	return max(ceil(q.BudgetRatio, prompt), q.SinkTokens+q.ObservationWindow+1)
}

func always(q plan.Policy) bool {
	switch q := q.(type) {
	case plan.Streaming:
		return q.Evict == plan.EvictAlways
	case plan.H2O:
		return q.Evict == plan.EvictAlways
	}
	return false
}

func slotted(q plan.Policy) bool {
	switch q := q.(type) {
	case plan.Streaming:
		return q.Positions == plan.PositionsCacheSlot
	case plan.TopK:
		return q.Positions == plan.PositionsCacheSlot
	case plan.FastGen:
		return q.Positions == plan.PositionsCacheSlot
	case plan.H2O:
		return q.Positions == plan.PositionsCacheSlot
	}
	return false
}

// see says what the query of the newest token attends to.
func (h *keeper) see(at int) (positions, rotations []int) {
	for rank, p := range h.held {
		if h.window == 0 || at-p < h.window {
			if positions = append(positions, p); slotted(h.q) {
				rotations = append(rotations, rank)
			} else {
				rotations = append(rotations, p)
			}
		}
	}
	return positions, rotations
}

// attend takes in what the newest query looked at.
func (h *keeper) attend(positions []int, p [][]float64) {
	if h.votes == nil {
		h.votes = make([]map[int][]float64, len(p))
		for g := range p {
			h.votes[g] = map[int][]float64{}
		}
	}
	newest := positions[len(positions)-1]
	for g, row := range p {
		seen := make([]float64, newest+1)
		for i, pos := range positions {
			seen[pos] = row[i]
			h.score[pos] += float64(float32(row[i]))
		}
		h.votes[g][newest] = seen
	}
}

// best are the n positions with the highest scores, the lower position first where scores are equal.
func best(positions []int, n int, score func(p int) float64) []int {
	sorted := slices.Clone(positions)
	slices.SortStableFunc(sorted, func(a, b int) int { return cmp.Compare(score(b), score(a)) })
	return sorted[:min(max(n, 0), len(sorted))]
}

// end applies the policy to a prompt of n tokens that is held from position low on.
func (h *keeper) end(low, n int) {
	h.ended = true
	h.size(n)
	var kept []int
	switch q := h.q.(type) {
	case plan.Streaming:
		for p := low; p < n; p++ {
			if p < q.SinkTokens || p >= n-q.RecentTokens {
				kept = append(kept, p)
			}
		}
	case plan.TopK:
		kept = h.topk(q, low, n)
	case plan.FastGen:
		var others []int
		keep := map[int]bool{}
		for p := low; p < n; p++ {
			if slices.Contains(q.Classes, h.classes(p)) {
				keep[p] = true
			} else {
				others = append(others, p)
			}
			if p >= n-ceil(q.LocalRatio, n) {
				keep[p] = true
			}
		}
		for _, p := range best(others, ceil(q.FrequentRatio, n), h.scoreOf) {
			keep[p] = true
		}
		for p := low; p < n; p++ {
			if keep[p] {
				kept = append(kept, p)
			}
		}
		kept = h.bound(q, kept, n)
	case plan.H2O:
		var others []int
		for p := low; p < n; p++ {
			if p < q.SinkTokens || p >= n-q.RecentTokens {
				kept = append(kept, p)
			} else {
				others = append(others, p)
			}
		}
		kept = append(kept, best(others, q.HeavyTokens, h.scoreOf)...)
		slices.Sort(kept)
	}
	if h.whole {
		kept = nil
		for p := low; p < n; p++ {
			if h.window == 0 || n-p <= h.window {
				kept = append(kept, p)
			}
		}
	}
	h.held = kept
	h.outside = nil
	for _, p := range h.pins {
		if !h.whole && p >= low && !slices.Contains(kept, p) {
			h.held, h.outside = append(h.held, p), append(h.outside, p)
		}
	}
	h.held = slices.Sorted(slices.Values(h.held))
	if h.window > 0 {
		h.held = h.held[max(len(h.held)-h.window, 0):]
	}
	if q, ok := h.q.(plan.TopK); ok && q.Decode == plan.DecodeRolling {
		h.fix = budget(q, n) - q.ObservationWindow
		h.fixed = h.mine()
		h.fixed = h.fixed[:min(h.fix, len(h.fixed))]
	}
}

// mine are the positions that the policy keeps; pins may keep others.
func (h *keeper) mine() []int {
	return slices.DeleteFunc(slices.Clone(h.held), func(p int) bool { return slices.Contains(h.outside, p) })
}

func (h *keeper) scoreOf(p int) float64 { return h.score[p] }

func (h *keeper) bound(q plan.FastGen, kept []int, n int) []int {
	most := n
	if q.MaxTokens > 0 {
		most = min(most, q.MaxTokens)
	}
	if q.MaxRatio > 0 {
		most = min(most, ceil(q.MaxRatio, n))
	}
	if len(kept) <= most {
		return kept
	}
	if q.Overflow == plan.DropOldest {
		return kept[len(kept)-most:]
	}
	kept = best(kept, most, h.scoreOf)
	slices.Sort(kept)
	return kept
}

func (h *keeper) topk(q plan.TopK, low, n int) []int {
	most := budget(q, n)
	var kept, candidates []int
	for p := low; p < n; p++ {
		switch {
		case n-low <= most, p < q.SinkTokens, p >= n-q.ObservationWindow:
			kept = append(kept, p)
		default:
			candidates = append(candidates, p)
		}
	}
	prefix := max(n-q.ObservationWindow, 0)
	rows := make([][]float64, h.group)
	for g := range rows {
		rows[g] = make([]float64, prefix)
		for i := prefix; i < n; i++ {
			for p := range prefix {
				rows[g][p] += h.votes[g][i][p]
			}
		}
	}
	pool := func(x []float64) []float64 {
		y := make([]float64, len(x))
		for i := range x {
			lo, hi := max(i-q.Pool.Kernel/2, 0), min(i+q.Pool.Kernel/2+1, len(x))
			if q.Pool.Kind == plan.PoolMax {
				y[i] = slices.Max(x[lo:hi])
			} else {
				for _, v := range x[lo:hi] {
					y[i] += v / float64(q.Pool.Kernel)
				}
			}
		}
		return y
	}
	if q.Aggregate == plan.AggregateUnion {
		for g := 0; len(candidates) > 0 && len(kept) < most; g = (g + 1) % h.group {
			pooled := pool(rows[g])
			p := best(candidates, 1, func(p int) float64 { return pooled[p] })[0]
			kept = append(kept, p)
			candidates = slices.DeleteFunc(candidates, func(c int) bool { return c == p })
		}
	} else {
		one := make([]float64, prefix)
		for p := range one {
			for g := range rows {
				if q.Aggregate == plan.AggregateMax {
					one[p] = max(one[p], rows[g][p])
				} else {
					one[p] += rows[g][p] / float64(h.group)
				}
			}
		}
		pooled := pool(one)
		kept = append(kept, best(candidates, most-len(kept), func(p int) float64 { return pooled[p] })...)
	}
	slices.Sort(kept)
	return kept
}

// append makes room for the token at position n and takes it in.
func (h *keeper) append(n int) {
	mine := h.mine()
	var leaving []int
	if (h.ended || always(h.q)) && !h.whole {
		switch q := h.q.(type) {
		case plan.Streaming:
			for _, p := range mine {
				if p >= q.SinkTokens && p <= n-q.RecentTokens {
					leaving = append(leaving, p)
				}
			}
		case plan.TopK:
			if q.Decode == plan.DecodeRolling {
				ring := slices.DeleteFunc(slices.Clone(mine), func(p int) bool { return slices.Contains(h.fixed, p) })
				switch {
				case n < h.fix:
					h.fixed = append(h.fixed, n)
				case len(ring) >= q.ObservationWindow:
					leaving = ring[:1]
				}
			}
		case plan.FastGen:
			if q.Decode == plan.DecodeRolling {
				leaving = h.lattice(q, mine, n+1)
			}
		case plan.H2O:
			var others []int
			for _, p := range mine {
				if p >= q.SinkTokens && p <= n-q.RecentTokens {
					others = append(others, p)
				}
			}
			stay := best(others, q.HeavyTokens, h.scoreOf)
			leaving = slices.DeleteFunc(others, func(p int) bool { return slices.Contains(stay, p) })
		}
	}
	gone := slices.DeleteFunc(slices.Clone(leaving), func(p int) bool { return slices.Contains(h.pins, p) })
	for _, p := range leaving {
		if slices.Contains(h.pins, p) {
			h.outside = append(h.outside, p)
		}
	}
	h.held = slices.DeleteFunc(h.held, func(p int) bool { return slices.Contains(gone, p) })
	h.held = append(h.held, n)
	if h.window > 0 {
		h.held = h.held[max(len(h.held)-h.window, 0):]
	}
	h.score[n] = 0
}

// lattice says what a rolling fastgen policy drops so that there are n tokens with the new one.
func (h *keeper) lattice(q plan.FastGen, mine []int, n int) (leaving []int) {
	var others, staying []int
	for _, p := range mine {
		if !slices.Contains(q.Classes, h.classes(p)) {
			others = append(others, p)
		}
	}
	frequent := best(others, ceil(q.FrequentRatio, n), h.scoreOf)
	for _, p := range mine {
		local := p >= n-max(ceil(q.LocalRatio, n), 1)
		if local || slices.Contains(frequent, p) || !slices.Contains(others, p) {
			staying = append(staying, p)
		}
	}
	// The new token stays whatever the bound is.
	most := n
	if q.MaxTokens > 0 {
		most = min(most, q.MaxTokens)
	}
	if q.MaxRatio > 0 {
		most = min(most, ceil(q.MaxRatio, n))
	}
	if len(staying) > most-1 {
		if q.Overflow == plan.DropOldest {
			staying = staying[len(staying)-(most-1):]
		} else {
			staying = best(staying, most-1, h.scoreOf)
		}
	}
	return slices.DeleteFunc(mine, func(p int) bool { return slices.Contains(staying, p) })
}

// reader is a sequence under a plan.
type reader struct {
	*oracle
	history
	plan   *plan.Plan
	heads  [][]*keeper
	ids    []int32
	logits []float64
}

// read reads a prompt.
func (o *oracle) read(p *plan.Plan, prompt []int32) *reader {
	r := &reader{oracle: o, plan: p}
	stepwise := p.Cache.Prefill == plan.PrefillChunked
	pins := pinned(p, prompt)
	for l, row := range p.Layers {
		var heads []*keeper
		for k := range row {
			q, err := p.PolicyOf(l, k)
			if err != nil {
				panic(err)
			}
			h := &keeper{q: q, window: o.c.Window(l), group: o.c.Heads / o.c.KVHeads, pins: pins, score: map[int]float64{}, classes: func(at int) plan.Class {
				switch id := int(r.ids[at]); {
				case p.TokenClasses == nil:
					return ""
				case slices.Contains(p.TokenClasses.Special, id):
					return plan.ClassSpecial
				case slices.Contains(p.TokenClasses.Punctuation, id):
					return plan.ClassPunctuation
				}
				return ""
			}}
			if x, ok := q.(plan.H2O); ok && x.Evict == plan.EvictAlways {
				stepwise = true
			}
			if always(q) {
				h.size(0)
			}
			heads = append(heads, h)
		}
		r.heads = append(r.heads, heads)
	}
	if stepwise {
		for _, id := range prompt {
			r.next(id)
		}
		r.each(func(h *keeper) {
			if h.ended = true; !always(h.q) {
				h.end(h.held[0], len(prompt))
			}
		})
		return r
	}
	for i, id := range prompt {
		r.ids = append(r.ids, id)
		r.logits = o.step(&r.history, id, func(l, k int) (positions, rotations []int) {
			h := r.heads[l][k]
			s, masked := h.q.(plan.Streaming)
			masked = masked && s.Evict == plan.EvictAlways && !h.whole
			for p := range i + 1 {
				if (h.window == 0 || i-p < h.window) && (!masked || p < s.SinkTokens || i-p < s.RecentTokens) {
					positions = append(positions, p)
				}
			}
			return positions, positions
		}, func(l, k int, positions []int, p [][]float64) { r.heads[l][k].attend(positions, p) })
	}
	r.each(func(h *keeper) { h.end(0, len(prompt)) })
	return r
}

func (r *reader) each(f func(h *keeper)) {
	for _, row := range r.heads {
		for _, h := range row {
			f(h)
		}
	}
}

// next reads one token through the caches.
func (r *reader) next(id int32) {
	at := len(r.ids)
	r.ids = append(r.ids, id)
	r.each(func(h *keeper) { h.append(at) })
	r.logits = r.step(&r.history, id, func(l, k int) ([]int, []int) { return r.heads[l][k].see(at) },
		func(l, k int, positions []int, p [][]float64) { r.heads[l][k].attend(positions, p) })
}

// pinned finds pinned positions where every token is one letter.
func pinned(p *plan.Plan, prompt []int32) []int {
	var all []int
	for _, pin := range p.Pins {
		re := regexp.MustCompile(pin.Pattern)
		var mine []int
		for i := range prompt {
			for back := range min(pin.TokensAfter, i) + 1 {
				if re.MatchString(letters{}.Decode(prompt[i-back : i-back+1])) {
					mine = append(mine, i)
					break
				}
			}
		}
		all = append(all, mine[max(len(mine)-pin.MaxTokens, 0):]...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// expect are the outcomes of one sample.
type expect struct {
	logprob, rank float64
	text          []int32
	least         int64 // bytes of the tokens that are held, packed
}

func softmax(logits []float64) []float64 {
	p, sum := make([]float64, len(logits)), 0.0
	for i, v := range logits {
		p[i] = math.Exp(v)
		sum += p[i]
	}
	for i := range p {
		p[i] /= sum
	}
	return p
}

func argmax(x []float64) int32 {
	b := 0
	for i, v := range x {
		if v > x[b] {
			b = i
		}
	}
	return int32(b)
}

// quiz answers a question as an evaluation does: later tokens of the prompt come after eviction.
func (o *oracle) quiz(p *plan.Plan, prompt, gold []int32, later, most int, stop []int32) (e expect) {
	start := func() *reader {
		r := o.read(p, prompt[:len(prompt)-later])
		if e.least == 0 {
			r.each(func(h *keeper) {
				e.least += int64((len(h.held)+p.Cache.BlockSize-1)/p.Cache.BlockSize) * int64(p.Cache.BlockSize*2*o.c.HeadDim*p.Cache.Dtype.Size())
			})
		}
		for _, id := range prompt[len(prompt)-later:] {
			r.next(id)
		}
		return r
	}
	r := start()
	for i, id := range gold {
		if i > 0 {
			r.next(gold[i-1])
		}
		e.logprob += math.Log(softmax(r.logits)[id]) / float64(len(gold))
		for _, v := range r.logits {
			if v > r.logits[id] {
				e.rank += 1 / float64(len(gold))
			}
		}
	}
	e.rank++
	r = start()
	for len(e.text) < most {
		id := argmax(r.logits)
		if slices.Contains(stop, id) {
			break
		}
		e.text = append(e.text, id)
		if len(e.text) < most {
			r.next(id)
		}
	}
	return e
}

// newPlan is a valid plan for a model, with a policy for each KV head.
func newPlan(t *testing.T, c *engine.Config, block int, policy func(l, k int) plan.Policy, change ...func(p *plan.Plan)) *plan.Plan {
	t.Helper()
	hash := strings.Repeat("0", 64)
	p := &plan.Plan{Format: plan.Format, Version: plan.Version, Tool: plan.Tool{Name: "test", Version: "0"},
		Model: plan.Model{Name: "tiny", Architecture: c.Architecture, NLayers: c.Layers, NHeads: c.Heads, NKVHeads: c.KVHeads, HeadDim: c.HeadDim,
			MaxPosition: c.MaxPosition, SlidingWindow: c.SlidingWindow, RoPE: plan.RoPE{Theta: c.RoPE.Theta},
			SHA256: plan.Hashes{Config: hash, Weights: hash, Tokenizer: hash}},
		Cache:    plan.Cache{Dtype: plan.F16, Granularity: plan.PerKVHead, BlockSize: block, GroupRule: plan.GroupMin, Prefill: plan.PrefillDense},
		Ties:     plan.Ties{Heads: plan.LowerLayerThenKVHead, Tokens: plan.LowerPosition},
		Policies: map[string]plan.Policy{}}
	special, punctuation := false, false
	for l := range c.Layers {
		var row []string
		for k := range c.KVHeads {
			q := policy(l, k)
			name := string(q.Kind())
			for i := 0; p.Policies[name] != nil && fmt.Sprint(p.Policies[name]) != fmt.Sprint(q); i++ {
				name = fmt.Sprint(q.Kind(), "-", i)
			}
			p.Policies[name] = q
			row = append(row, name)
			if f, ok := q.(plan.FastGen); ok {
				special, punctuation = true, punctuation || len(f.Classes) > 1
			}
		}
		p.Layers = append(p.Layers, row)
	}
	if special {
		p.TokenClasses = &plan.TokenClasses{Special: []int{1, 2}}
		if punctuation {
			p.TokenClasses.Punctuation = []int{7, 11, 13}
		}
	}
	for _, f := range change {
		f(p)
	}
	p.Totals = []plan.Totals{p.ComputeTotals(100, 10)}
	if v := p.Validate(); len(v) > 0 {
		t.Fatalf("plan: %v", v)
	}
	return p
}

func everywhere(q plan.Policy) func(l, k int) plan.Policy {
	return func(int, int) plan.Policy { return q }
}

func chunked(p *plan.Plan) { p.Cache.Prefill, p.Cache.ChunkTokens = plan.PrefillChunked, 8 }

func newModel(t *testing.T, w enginetest.Weights, b engine.Backend) *engine.Model {
	t.Helper()
	m, err := engine.New(w.Config, w, b)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// sample has a haystack, a question of so many tokens and an answer.
func sample(id int, tokens []int32, question, answer int) datasets.Sample {
	n := len(tokens)
	return datasets.Sample{ID: id, Task: datasets.TaskNeedleGrid, Tokens: tokens, TargetTokens: n, Expected: []string{"-"}, AskedDepths: []float64{.25},
		Spans: []datasets.Span{{Kind: datasets.SpanHaystack, End: n - question - answer}, {Kind: datasets.SpanQuestion, Start: n - question - answer, End: n - answer},
			{Kind: datasets.SpanAnswer, Start: n - answer, End: n}}}
}

func text(id int, tokens []int32) datasets.Sample {
	return datasets.Sample{ID: id, Task: datasets.TaskText, Tokens: tokens, TargetTokens: len(tokens), Spans: []datasets.Span{{Kind: datasets.SpanHaystack, End: len(tokens)}}}
}

func set(samples ...datasets.Sample) []*datasets.Dataset {
	return []*datasets.Dataset{{Meta: datasets.Meta{Task: samples[0].Task, Purpose: datasets.Calibration}, Samples: samples}}
}

func evaluate(t *testing.T, m *engine.Model, sets []*datasets.Dataset, o eval.Options, contenders ...eval.Contender) *eval.Result {
	t.Helper()
	r, err := eval.Evaluate(context.Background(), m, letters{}, sets, contenders, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func near(a, b, tolerance float64) bool { return math.Abs(a-b) <= tolerance*max(1, math.Abs(b)) }

// anyPolicy draws a policy of any kind.
func anyPolicy(r *rand.Rand) plan.Policy {
	positions := []plan.Positions{plan.PositionsOriginal, plan.PositionsCacheSlot}[r.IntN(2)]
	evict := []plan.Evict{plan.EvictAlways, plan.EvictPrefillEnd}[r.IntN(2)]
	decode := []plan.Decode{plan.DecodeStatic, plan.DecodeRolling}[r.IntN(2)]
	switch r.IntN(6) {
	case 0:
		return plan.Full{}
	case 1:
		return plan.Streaming{SinkTokens: r.IntN(5), RecentTokens: 1 + r.IntN(9), Evict: evict, Decode: plan.DecodeRolling, Positions: positions}
	case 2:
		q := plan.TopK{ObservationWindow: 1 + r.IntN(5), SinkTokens: r.IntN(3), Evict: plan.EvictPrefillEnd, Decode: decode, Positions: positions,
			Pool:      plan.Pool{Kind: []plan.PoolKind{plan.PoolMax, plan.PoolAvg}[r.IntN(2)], Kernel: 1 + 2*r.IntN(4)},
			Aggregate: []plan.Aggregate{plan.AggregateMean, plan.AggregateMax, plan.AggregateUnion}[r.IntN(3)]}
		if r.IntN(4) == 0 {
			q.Pool = plan.Pool{Kind: plan.PoolNone, Kernel: 1}
		}
		if r.IntN(2) == 0 {
			q.BudgetRatio = .1 + .9*r.Float64()
		} else {
			q.BudgetTokens = q.SinkTokens + q.ObservationWindow + 1 + r.IntN(16)
		}
		return q
	case 3, 4:
		q := plan.FastGen{Classes: []plan.Class{plan.ClassSpecial, plan.ClassPunctuation}[:1+r.IntN(2)], FrequentRatio: .4 * r.Float64(), LocalRatio: .4 * r.Float64(),
			Evict: plan.EvictPrefillEnd, Decode: decode, Positions: positions}
		switch r.IntN(5) {
		case 0:
			q.FrequentRatio = 0
		case 1:
			q.LocalRatio = 0
		}
		if r.IntN(2) == 0 {
			if r.IntN(2) == 0 {
				q.MaxTokens = 1 + r.IntN(15)
			} else {
				q.MaxRatio = .05 + .5*r.Float64()
			}
			q.Overflow = []plan.Overflow{plan.DropOldest, plan.DropLowest}[r.IntN(2)]
		}
		return q
	default:
		return plan.H2O{SinkTokens: r.IntN(3), HeavyTokens: 1 + r.IntN(6), RecentTokens: 1 + r.IntN(6), Evict: evict, Decode: plan.DecodeRolling, Positions: positions}
	}
}

// anyPlan draws a plan of at most four policies.
func anyPlan(t *testing.T, r *rand.Rand, c *engine.Config, block int) *plan.Plan {
	var pool []plan.Policy
	for range 1 + r.IntN(4) {
		pool = append(pool, anyPolicy(r))
	}
	perLayer := r.IntN(4) == 0
	var last plan.Policy
	return newPlan(t, c, block, func(_, k int) plan.Policy {
		if k == 0 || !perLayer {
			last = pool[r.IntN(len(pool))]
		}
		return last
	}, func(p *plan.Plan) {
		if perLayer {
			p.Cache.Granularity = plan.PerLayer
		}
		if r.IntN(3) == 0 {
			chunked(p)
		}
		if r.IntN(3) == 0 {
			p.Pins = []plan.Pin{{Pattern: "[D-H]", TokensAfter: r.IntN(2), MaxTokens: 1 + r.IntN(5), Overflow: plan.DropOldest}}
		}
	})
}

// Whatever the plan, what comes out is what a model without any cache comes to that attends to the tokens which the
// plan's wording leaves.
func TestAnyPlanAgainstOracle(t *testing.T) {
	for seed := range uint64(60) {
		anyPlanAgainstOracle(t, seed)
	}
}

func FuzzAnyPlanAgainstOracle(f *testing.F) {
	f.Add(uint64(5))
	f.Fuzz(anyPlanAgainstOracle)
}

func anyPlanAgainstOracle(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 7))
	c := enginetest.Tiny()
	if r.IntN(3) == 0 {
		c.SlidingWindow = []int{0, 5 + r.IntN(12), 5 + r.IntN(12)}
	}
	w := enginetest.Weights{Config: c, Seed: seed}
	o, m := newOracle(t, w), newModel(t, w, ref.New[float64]())
	block := []int{1, 2, 4, 8}[r.IntN(4)]
	var contenders []eval.Contender
	for i := range 1 + r.IntN(4) {
		contenders = append(contenders, eval.Contender{Name: fmt.Sprint("plan ", i), Plan: anyPlan(t, r, &c, block)})
	}
	n, question, answer := 8+r.IntN(32), 1+r.IntN(4), 1+r.IntN(5)
	s := sample(0, enginetest.Tokens(c, n+question+answer, seed), question, answer)
	x := text(0, enginetest.Tokens(c, 12+r.IntN(24), seed+1e6))
	opts := eval.Options{Question: eval.QuestionInPrompt, Extra: r.IntN(12), TextTokens: 1 + r.IntN(8), Stop: []int32{int32(r.IntN(c.Vocab))}}
	later := 0
	if r.IntN(3) == 0 {
		opts.Question, later = eval.QuestionAfter, question
	}
	var results [2]*eval.Result
	for i := range results {
		opts.Scattered = i == 1
		var err error
		if results[i], err = eval.Evaluate(context.Background(), m, letters{}, append(set(s), set(x)...), contenders, opts); err != nil {
			t.Fatalf("seed %d, scattered %v: %v", seed, opts.Scattered, err)
		}
		if err := results[i].Validate(); err != nil {
			t.Errorf("seed %d, scattered %v: %v", seed, opts.Scattered, err)
		}
	}
	prompt, gold, _ := s.Quiz()
	full := eval.FullPlan(contenders[0].Plan)
	fullLogits := o.predictions(full, x.Tokens, opts.TextTokens)
	for i := range len(contenders) + 1 {
		p := full
		if i > 0 {
			p = contenders[i-1].Plan
		}
		want, logits := o.quiz(p, prompt, gold, later, answer+opts.Extra, opts.Stop), o.predictions(p, x.Tokens, opts.TextTokens)
		nll, kl, fullNLL := 0.0, 0.0, 0.0
		for j, row := range logits {
			id := x.Tokens[len(x.Tokens)-len(logits)+j]
			a, b := softmax(fullLogits[j]), softmax(row)
			nll, fullNLL = nll-math.Log(b[id]), fullNLL-math.Log(a[id])
			for v := range a {
				kl += a[v] * math.Log(a[v]/b[v])
			}
		}
		u := p.Usage(plan.Request{PromptTokens: len(prompt) - later})
		most := [2]int64{u.Bytes, max(u.Bytes, u.FullBytes+int64(c.Layers*c.KVHeads*block*2*c.HeadDim*p.Cache.Dtype.Size()))} // a second region may take a block more
		for scattered, got := range results {
			run := append([]eval.Run{got.Full}, got.Runs...)[i]
			at := fmt.Sprintf("seed %d, scattered %d, %s %v %v", seed, scattered, run.Name, p.Policies, p.Layers)
			out := run.Outcomes[0]
			if !near(out.LogProb, want.logprob, 1e-9) || !near(out.Rank, want.rank, 1e-12) || out.Text != (letters{}.Decode(want.text)) {
				t.Errorf("%s: log-probability %v, rank %v, text %q; want %v, %v, %q", at, out.LogProb, out.Rank, out.Text, want.logprob, want.rank, letters{}.Decode(want.text))
			}
			if out.Bytes < want.least || out.Bytes > most[scattered] {
				t.Errorf("%s: %d bytes, the tokens held need %d, at most %d may be held", at, out.Bytes, want.least, most[scattered])
			}
			if y := run.Texts[0]; !near(y.NLL, nll, 1e-9) || !near(y.KL, kl, 1e-9) || !near(y.FullNLL, fullNLL, 1e-9) || y.Tokens != len(logits) {
				t.Errorf("%s: text %+v, want NLL %v, full NLL %v, KL %v", at, y, nll, fullNLL, kl)
			}
		}
	}
}

// predictions are the logits that predict the last tokens of a text.
func (o *oracle) predictions(p *plan.Plan, tokens []int32, n int) (logits [][]float64) {
	n = min(n, len(tokens)/2)
	r := o.read(p, tokens[:len(tokens)-n])
	for i := range n {
		if i > 0 {
			r.next(tokens[len(tokens)-n+i-1])
		}
		logits = append(logits, r.logits)
	}
	return logits
}

// forward are the logits of all positions of a text from a plain pass over it.
func forward(t *testing.T, m *engine.Model, s *engine.Sequence) [][]float64 {
	t.Helper()
	s.LogitRows = nil
	for i := range s.Tokens {
		s.LogitRows = append(s.LogitRows, i)
	}
	if err := m.Forward(context.Background(), s); err != nil {
		t.Fatal(err)
	}
	return s.Logits
}

// goldOf is the mean log-probability and rank of an answer; logits[i] predict its token i.
func goldOf(logits [][]float64, gold []int32) (logprob, rank float64) {
	for i, id := range gold {
		logprob += math.Log(softmax(logits[i])[id]) / float64(len(gold))
		above := 1.0
		for _, v := range logits[i] {
			if v > logits[i][id] {
				above++
			}
		}
		rank += above / float64(len(gold))
	}
	return logprob, rank
}

// windowed is a model whose last layers have sliding windows.
func windowed() engine.Config {
	c := enginetest.Tiny()
	c.SlidingWindow = []int{0, 9, 14}
	return c
}

// What keeps everything is the full cache, and that is the model itself.
func TestEverythingIsForward(t *testing.T) {
	for name, c := range map[string]engine.Config{"full attention": enginetest.Tiny(), "windows": windowed()} {
		for _, question := range []eval.Question{eval.QuestionInPrompt, eval.QuestionAfter} {
			w := enginetest.Weights{Config: c, Seed: 3}
			m := newModel(t, w, ref.New[float64]())
			s := sample(4, enginetest.Tokens(c, 40, 5), 3, 5)
			prompt, gold, _ := s.Quiz()
			logprob, rank := goldOf(forward(t, m, &engine.Sequence{Tokens: s.Tokens})[len(prompt)-1:], gold)
			written := slices.Clone(prompt)
			for range len(gold) + 6 {
				logits := forward(t, m, &engine.Sequence{Tokens: written})
				written = append(written, argmax(logits[len(logits)-1]))
			}
			answer := letters{}.Decode(written[len(prompt):])

			policies := []plan.Policy{plan.Full{}}
			for _, at := range []plan.Positions{plan.PositionsOriginal, plan.PositionsCacheSlot} {
				for _, evict := range []plan.Evict{plan.EvictAlways, plan.EvictPrefillEnd} {
					policies = append(policies, plan.Streaming{SinkTokens: 3, RecentTokens: 50, Evict: evict, Decode: plan.DecodeRolling, Positions: at},
						plan.H2O{SinkTokens: 1, HeavyTokens: 30, RecentTokens: 30, Evict: evict, Decode: plan.DecodeRolling, Positions: at})
				}
				for _, decode := range []plan.Decode{plan.DecodeStatic, plan.DecodeRolling} {
					policies = append(policies, plan.TopK{BudgetTokens: 60, ObservationWindow: 4, Pool: plan.Pool{Kind: plan.PoolMax, Kernel: 3}, Aggregate: plan.AggregateMean,
						Evict: plan.EvictPrefillEnd, Decode: decode, Positions: at},
						plan.FastGen{Classes: []plan.Class{plan.ClassSpecial}, FrequentRatio: 1, LocalRatio: 1, Evict: plan.EvictPrefillEnd, Decode: decode, Positions: at})
				}
				policies = append(policies, plan.TopK{BudgetRatio: 1, ObservationWindow: 4, Pool: plan.Pool{Kind: plan.PoolNone, Kernel: 1}, Aggregate: plan.AggregateUnion,
					Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: at})
			}
			var contenders []eval.Contender
			for _, q := range policies {
				// Angles are rounded, so that ranks in a window that moves on give the same attention up to 1e-7 alone.
				if c.SlidingWindow != nil && slotted(q) {
					continue
				}
				for prefill, change := range []func(*plan.Plan){func(*plan.Plan) {}, chunked} {
					contenders = append(contenders, eval.Contender{Name: strings.TrimSuffix(fmt.Sprint(q.Kind(), q, prefill), "{}0"), Plan: newPlan(t, &c, 4, everywhere(q), change)})
				}
			}
			r := evaluate(t, m, set(s), eval.Options{Question: question, Extra: 6}, contenders...)
			for _, run := range append([]eval.Run{r.Full}, r.Runs...) {
				got := run.Outcomes[0]
				if !near(got.LogProb, logprob, 1e-10) || !near(got.Rank, rank, 1e-12) || got.Text != answer {
					t.Errorf("%s, question %s, %s: %+v, want log-probability %v, rank %v, text %q", name, question, run.Name, got, logprob, rank, answer)
				}
				if run.Name == "full" && (got != r.Full.Outcomes[0] || got.Bytes != got.FullBytes) {
					t.Errorf("%s: full caches give %+v and %+v", name, got, r.Full.Outcomes[0])
				}
			}
			if got := r.Full.Outcomes[0]; got.Sample != 4 || got.Length != 40 || got.Prompt != 35 || got.Depth != .25 || got.Task != datasets.TaskNeedleGrid {
				t.Errorf("outcome %+v", got)
			}
		}
	}
}

// Streaming heads among full ones see what engine.Mask lets them see: from the first token on where they evict always,
// else from the end of the prompt on.
func TestStreamingIsMask(t *testing.T) {
	for name, c := range map[string]engine.Config{"full attention": enginetest.Tiny(), "windows": windowed()} {
		m := newModel(t, enginetest.Weights{Config: c, Seed: 8}, ref.New[float64]())
		s := sample(0, enginetest.Tokens(c, 45, 6), 2, 8)
		prompt, gold, _ := s.Quiz()
		streams := func(l, k int) bool { return l == 0 && k == 0 || l == 1 || l == 2 && k == 1 }
		masks := make([][]engine.Mask, c.Layers)
		for l := range masks {
			masks[l] = make([]engine.Mask, c.KVHeads)
			for k := range masks[l] {
				if streams(l, k) {
					masks[l][k] = engine.Mask{Sink: 2, Recent: 5}
				}
			}
		}
		with := func(evict plan.Evict, change ...func(*plan.Plan)) *plan.Plan {
			return newPlan(t, &c, 4, func(l, k int) plan.Policy {
				if streams(l, k) {
					return plan.Streaming{SinkTokens: 2, RecentTokens: 5, Evict: evict, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
				}
				return plan.Full{}
			}, change...)
		}
		always, _ := goldOf(forward(t, m, &engine.Sequence{Tokens: s.Tokens, Masks: masks})[len(prompt)-1:], gold)
		cache := m.NewCache(len(s.Tokens))
		logits := forward(t, m, &engine.Sequence{Tokens: prompt, Cache: cache})[len(prompt)-1:]
		for _, id := range gold[:len(gold)-1] {
			logits = append(logits, forward(t, m, &engine.Sequence{Tokens: []int32{id}, Cache: cache, Masks: masks})[0])
		}
		end, _ := goldOf(logits, gold)
		full, _ := goldOf(forward(t, m, &engine.Sequence{Tokens: s.Tokens})[len(prompt)-1:], gold)
		if near(always, end, 1e-4) || near(always, full, 1e-4) || near(end, full, 1e-4) {
			t.Fatalf("%s: the masks make no difference: %v, %v, %v", name, always, end, full)
		}
		r := evaluate(t, m, set(s), eval.Options{Extra: 2}, eval.Contender{Name: "always", Plan: with(plan.EvictAlways)},
			eval.Contender{Name: "always, chunked", Plan: with(plan.EvictAlways, chunked)}, eval.Contender{Name: "end", Plan: with(plan.EvictPrefillEnd)})
		for i, want := range []float64{always, always, end} {
			if got := r.Runs[i].Outcomes[0]; !near(got.LogProb, want, 1e-10) {
				t.Errorf("%s, %s: log-probability %v, want %v", name, r.Runs[i].Name, got.LogProb, want)
			}
		}
		// A prompt that is a question's context is masked the same way, token by token after that.
		r = evaluate(t, m, set(s), eval.Options{Question: eval.QuestionAfter}, eval.Contender{Name: "always", Plan: with(plan.EvictAlways)})
		if got := r.Runs[0].Outcomes[0]; !near(got.LogProb, always, 1e-10) {
			t.Errorf("%s: with the question after eviction log-probability %v, want %v", name, got.LogProb, always)
		}
	}
}

// With one layer a key depends on its token and position alone. So a head that numbers what it keeps from 0 answers as
// if the tokens kept were the whole text.
func TestCacheSlotIsAShorterText(t *testing.T) {
	c := enginetest.Tiny()
	c.Layers = 1
	m := newModel(t, enginetest.Weights{Config: c, Seed: 9}, ref.New[float64]())
	s := sample(0, enginetest.Tokens(c, 50, 7), 2, 12)
	prompt, gold, _ := s.Quiz()
	const sinks, recent = 3, 7
	var logits [][]float64
	for i := range gold {
		n := len(prompt) + i
		kept := slices.Concat(s.Tokens[:sinks], s.Tokens[n-recent:n])
		if i == 0 { // the prompt's last query still saw all of it
			kept = prompt
		}
		all := forward(t, m, &engine.Sequence{Tokens: kept})
		logits = append(logits, all[len(all)-1])
	}
	end, _ := goldOf(logits, gold)
	kept := slices.Concat(s.Tokens[:sinks], prompt[len(prompt)-recent:])
	logits[0] = forward(t, m, &engine.Sequence{Tokens: kept})[len(kept)-1]
	chunks, _ := goldOf(logits, gold)
	q := plan.Streaming{SinkTokens: sinks, RecentTokens: recent, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsCacheSlot}
	forever := q
	forever.Evict = plan.EvictAlways
	r := evaluate(t, m, set(s), eval.Options{}, eval.Contender{Name: "end", Plan: newPlan(t, &c, 4, everywhere(q))},
		eval.Contender{Name: "always", Plan: newPlan(t, &c, 4, everywhere(forever), chunked)})
	for i, want := range []float64{end, chunks} {
		if got := r.Runs[i].Outcomes[0].LogProb; !near(got, want, 1e-10) {
			t.Errorf("%s: log-probability %v, want %v", r.Runs[i].Name, got, want)
		}
	}
}

// What comes out of a plan does not depend on the plans beside it, bit by bit.
func TestContendersDoNotMeet(t *testing.T) {
	for seed := range uint64(6) {
		r := rand.New(rand.NewPCG(seed, 77))
		c := enginetest.Tiny()
		m := newModel(t, enginetest.Weights{Config: c, Seed: 4}, ref.New[float64]())
		s, x := sample(0, enginetest.Tokens(c, 40, seed), 3, 4), text(0, enginetest.Tokens(c, 30, seed+100))
		sets, o := append(set(s, sample(1, enginetest.Tokens(c, 33, seed+9), 2, 3)), set(x)...), eval.Options{Extra: 5, TextTokens: 6}
		var all []eval.Contender
		for i := range 5 {
			all = append(all, eval.Contender{Name: fmt.Sprint(i), Plan: anyPlan(t, r, &c, 4)})
		}
		together := evaluate(t, m, sets, o, all...)
		reversed := slices.Clone(all)
		slices.Reverse(reversed)
		backwards := evaluate(t, m, sets, o, reversed...)
		for i, one := range all {
			alone := evaluate(t, m, sets, o, one)
			for _, other := range []eval.Run{alone.Runs[0], backwards.Runs[len(all)-1-i]} {
				if got := together.Runs[i]; fmt.Sprint(got) != fmt.Sprint(other) {
					t.Errorf("seed %d, plan %d: %+v beside others, alone or in another order %+v", seed, i, got, other)
				}
			}
			if fmt.Sprint(alone.Full.Outcomes) != fmt.Sprint(together.Full.Outcomes) && one.Plan.Cache.Granularity == all[0].Plan.Cache.Granularity {
				t.Errorf("seed %d, plan %d: the full cache gives %+v beside it, %+v beside all", seed, i, alone.Full, together.Full)
			}
		}
	}
}

// The fast backend gives what the plain one gives, and the same bits whatever the number of threads.
func TestBackends(t *testing.T) {
	c := windowed()
	w := enginetest.Weights{Config: c, Seed: 12}
	r := rand.New(rand.NewPCG(3, 33))
	var contenders []eval.Contender
	for i := range 10 {
		contenders = append(contenders, eval.Contender{Name: fmt.Sprint(i), Plan: anyPlan(t, r, &c, 8)})
	}
	sets := append(set(sample(0, enginetest.Tokens(c, 60, 1), 3, 6)), set(text(0, enginetest.Tokens(c, 40, 2)))...)
	o := eval.Options{TextTokens: 8}
	want := evaluate(t, newModel(t, w, ref.New[float64]()), sets, o, contenders...)
	var first *eval.Result
	for _, threads := range []int{1, 3, 8} {
		b, err := cpu.New(cpu.Options{Threads: threads})
		if err != nil {
			t.Fatal(err)
		}
		got := evaluate(t, newModel(t, w, b), sets, o, contenders...)
		b.Close()
		if first == nil {
			first = got
		}
		for i := range got.Runs {
			x, y, z := got.Runs[i], want.Runs[i], first.Runs[i]
			if !near(x.Outcomes[0].LogProb, y.Outcomes[0].LogProb, 1e-3) || !near(x.Texts[0].KL, y.Texts[0].KL, 1e-3) || x.Outcomes[0].Bytes != y.Outcomes[0].Bytes {
				t.Errorf("%d threads, plan %d: %+v, plain backend %+v", threads, i, x, y)
			}
			if fmt.Sprint(x) != fmt.Sprint(z) {
				t.Errorf("%d threads, plan %d: %+v, one thread %+v", threads, i, x, z)
			}
		}
	}
}

// Scattered tokens take more blocks and give the same answers.
func TestScattered(t *testing.T) {
	c := enginetest.Tiny()
	m := newModel(t, enginetest.Weights{Config: c, Seed: 5}, ref.New[float64]())
	q := plan.TopK{BudgetTokens: 12, ObservationWindow: 2, Pool: plan.Pool{Kind: plan.PoolNone, Kernel: 1}, Aggregate: plan.AggregateMean,
		Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: plan.PositionsOriginal}
	sets := set(sample(0, enginetest.Tokens(c, 90, 1), 3, 6))
	for i, change := range []func(*plan.Plan){func(*plan.Plan) {}, chunked} {
		contender := eval.Contender{Name: "topk", Plan: newPlan(t, &c, 8, everywhere(q), change)}
		packed, scattered := evaluate(t, m, sets, eval.Options{}, contender), evaluate(t, m, sets, eval.Options{Scattered: true}, contender)
		a, b := packed.Runs[0].Outcomes[0], scattered.Runs[0].Outcomes[0]
		if !near(a.LogProb, b.LogProb, 1e-12) || a.Rank != b.Rank || a.Text != b.Text || a.Bytes >= b.Bytes || b.Bytes > b.FullBytes {
			t.Errorf("%d: packed %+v, scattered %+v", i, a, b)
		}
	}
}

// An answer that is right ends where the model ends it, and one that is wrong is what the model would have written.
func TestAnswers(t *testing.T) {
	c := enginetest.Tiny()
	m := newModel(t, enginetest.Weights{Config: c, Seed: 6}, ref.New[float64]())
	prompt := enginetest.Tokens(c, 20, 3)
	written := slices.Clone(prompt)
	for range 8 {
		logits := forward(t, m, &engine.Sequence{Tokens: written})
		written = append(written, argmax(logits[len(logits)-1]))
	}
	answer := written[20:]
	contender := eval.Contender{Name: "x", Plan: newPlan(t, &c, 4, everywhere(plan.Full{}))}
	wrong := slices.Clone(answer[:4])
	wrong[2] = (wrong[2] + 1) % int32(c.Vocab)
	for name, x := range map[string]struct {
		gold  []int32
		extra int
		stop  []int32
		want  []int32
	}{
		"the model's own answer":   {answer[:4], 3, nil, answer[:7]},
		"no more than that":        {answer[:4], 0, nil, answer[:4]},
		"one of another end":       {wrong, 3, nil, answer[:7]},
		"one that ends":            {answer[:4], 3, answer[5:6], answer[:slices.Index(answer, answer[5])]},
		"one with an end in it":    {answer[:4], 3, answer[1:2], answer[:slices.Index(answer, answer[1])]},
		"one that ends before any": {wrong, 3, answer[:1], nil},
	} {
		s := sample(0, slices.Concat(prompt, x.gold), 2, len(x.gold))
		s.Expected = []string{letters{}.Decode(x.gold)}
		r := evaluate(t, m, set(s), eval.Options{Extra: x.extra, Stop: x.stop}, contender)
		for _, run := range append(r.Runs, r.Full) {
			logprob, _ := goldOf(forward(t, m, &engine.Sequence{Tokens: s.Tokens})[len(prompt)-1:], x.gold)
			got := run.Outcomes[0]
			right := len(x.want) >= len(x.gold) && slices.Equal(x.want[:len(x.gold)], x.gold)
			if got.Text != (letters{}.Decode(x.want)) || !near(got.LogProb, logprob, 1e-10) || got.Right != right || got.Exact != slices.Equal(x.want, x.gold) {
				t.Errorf("%s, %s: %+v, want text %q, right %v, log-probability %v", name, run.Name, got, letters{}.Decode(x.want), right, logprob)
			}
		}
	}
}

func TestEvaluateRefuses(t *testing.T) {
	c := enginetest.Tiny()
	m := newModel(t, enginetest.Weights{Config: c, Seed: 6}, ref.New[float64]())
	good := sample(0, enginetest.Tokens(c, 30, 3), 2, 4)
	full := func(c engine.Config, block int, change ...func(*plan.Plan)) eval.Contender {
		return eval.Contender{Name: "mine", Plan: newPlan(t, &c, block, everywhere(plan.Full{}), change...)}
	}
	shape := func(change func(c *engine.Config)) []eval.Contender {
		other := c
		change(&other)
		return []eval.Contender{full(c, 4), full(other, 4)}
	}
	unknown := full(c, 4)
	unknown.Plan.Layers[1][0] = "nothing"
	ragged := full(c, 4)
	ragged.Plan.Layers[2] = ragged.Plan.Layers[2][:1]
	refuse := plan.FastGen{Classes: []plan.Class{plan.ClassSpecial}, LocalRatio: 1, MaxTokens: 5, Overflow: plan.Refuse, Evict: plan.EvictPrefillEnd,
		Decode: plan.DecodeStatic, Positions: plan.PositionsOriginal}
	noAnswer, outside := good, good
	noAnswer.Spans = []datasets.Span{{Kind: datasets.SpanHaystack, End: 28}, {Kind: datasets.SpanQuestion, Start: 28, End: 30}}
	outside.Tokens = slices.Clone(good.Tokens)
	outside.Tokens[5] = int32(c.Vocab)
	onlyQuestion := good
	onlyQuestion.Spans = []datasets.Span{{Kind: datasets.SpanQuestion, End: 26}, {Kind: datasets.SpanAnswer, Start: 26, End: 30}}
	for name, x := range map[string]struct {
		contenders []eval.Contender
		sample     datasets.Sample
		o          eval.Options
		want       string
		is         error
	}{
		"no plans":                     {nil, good, eval.Options{}, "no plans", nil},
		"blocks of two sizes":          {[]eval.Contender{full(c, 4), full(c, 8)}, good, eval.Options{}, "blocks of 8 tokens", nil},
		"other layers":                 {shape(func(c *engine.Config) { c.Layers = 2 }), good, eval.Options{}, "mine is a plan for a model of another shape", nil},
		"other KV heads":               {shape(func(c *engine.Config) { c.KVHeads = 4 }), good, eval.Options{}, "another shape", nil},
		"other heads":                  {shape(func(c *engine.Config) { c.Heads = 8 }), good, eval.Options{}, "another shape", nil},
		"another head dimension":       {shape(func(c *engine.Config) { c.HeadDim = 16 }), good, eval.Options{}, "another shape", nil},
		"windows the model has not":    {shape(func(c *engine.Config) { c.SlidingWindow = []int{0, 0, 9} }), good, eval.Options{}, "another shape", nil},
		"the only plan is for another": {shape(func(c *engine.Config) { c.Layers = 2 })[1:], good, eval.Options{}, "mine is a plan for a model of another shape", nil},
		"an unknown policy":            {[]eval.Contender{unknown}, good, eval.Options{}, "nothing", nil},
		"a row too short":              {[]eval.Contender{ragged}, good, eval.Options{}, "another shape", nil},
		"more than a policy takes":     {[]eval.Contender{{Name: "mine", Plan: newPlan(t, &c, 4, everywhere(refuse))}}, good, eval.Options{}, "mine, layer 0, KV head 0", plan.ErrOverflow},
		"more than a pin takes": {[]eval.Contender{full(c, 4, func(p *plan.Plan) {
			p.Pins = []plan.Pin{{Pattern: ".", MaxTokens: 3, Overflow: plan.Refuse}}
		})}, good, eval.Options{}, "pin 0", plan.ErrOverflow},
		"a question without an answer":    {[]eval.Contender{full(c, 4)}, noAnswer, eval.Options{}, "without an answer", nil},
		"a token outside the vocabulary":  {[]eval.Contender{full(c, 4)}, outside, eval.Options{}, "vocabulary", nil},
		"one in a prompt token by token":  {[]eval.Contender{full(c, 4, chunked)}, outside, eval.Options{}, "vocabulary", nil},
		"a question without context":      {[]eval.Contender{full(c, 4)}, onlyQuestion, eval.Options{Question: eval.QuestionAfter}, "context", nil},
		"a text of one token":             {[]eval.Contender{full(c, 4)}, text(7, good.Tokens[:1]), eval.Options{TextTokens: 5}, "text 7", nil},
		"a text with nothing to predict":  {[]eval.Contender{full(c, 4)}, text(7, good.Tokens), eval.Options{}, "text 7", nil},
		"a budget of fewer tokens than 0": {[]eval.Contender{full(c, 4)}, good, eval.Options{Extra: -20}, "-20", nil},
	} {
		r, err := eval.Evaluate(context.Background(), m, letters{}, set(x.sample), x.contenders, x.o)
		if err == nil || r != nil || !strings.Contains(err.Error(), x.want) || x.is != nil && !errors.Is(err, x.is) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, change := range []func(*plan.Plan){func(*plan.Plan) {}, chunked} {
		ctx, cancel := context.WithCancel(context.Background())
		o := eval.Options{Progress: func(int, int) { cancel() }}
		if _, err := eval.Evaluate(ctx, m, letters{}, set(good, good), []eval.Contender{full(c, 4, change)}, o); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled after a sample: %v", err)
		}
	}
	broken, err := engine.New(c, noNumber{enginetest.Weights{Config: c, Seed: 6}}, ref.New[float64]())
	if err != nil {
		t.Fatal(err)
	}
	var bad *engine.NonFiniteError
	if _, err := eval.Evaluate(context.Background(), broken, letters{}, set(good), []eval.Contender{full(c, 4)}, eval.Options{}); !errors.As(err, &bad) || bad.Layer != 1 {
		t.Errorf("weights that are no numbers: %v", err)
	}
}

// On a real model: the full cache is the engine's own, heads that stream lose a needle out of their reach, and without
// sinks a window that moves on loses the language itself (StreamingLLM, Xiao et al. 2023, section 3.1).
func TestRealModel(t *testing.T) {
	path := os.Getenv("KVPROFILE_TEST_MODEL")
	if path == "" {
		t.Skip("set KVPROFILE_TEST_MODEL to the path that scripts/smollm2.sh prints")
	}
	files, err := model.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	b, err := cpu.New(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	m, err := engine.New(files.Config, files, b)
	if err != nil {
		t.Fatal(err)
	}
	const length = 600
	build := func(task string) *datasets.Dataset {
		d, err := datasets.Build(files.Tokenizer, nil, datasets.TaskOptions{Task: task, Lengths: []int{length}, Count: 1, Seed: 3, Purpose: datasets.Calibration})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	streaming := func(sinks, recent int) plan.Policy {
		return plan.Streaming{SinkTokens: sinks, RecentTokens: recent, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	}
	contenders := []eval.Contender{
		{Name: "sinks", Plan: newPlan(t, &files.Config, 16, everywhere(streaming(4, 60)))},
		{Name: "window", Plan: newPlan(t, &files.Config, 16, everywhere(streaming(0, 64)))},
	}
	needle := build(datasets.TaskMultiKey)
	prompt, gold, _ := needle.Samples[0].Quiz()
	r, err := eval.Evaluate(context.Background(), m, files.Tokenizer, []*datasets.Dataset{needle, build(datasets.TaskText)}, contenders,
		eval.Options{Extra: 8, TextTokens: 64})
	if err != nil {
		t.Fatal(err)
	}

	cache := m.NewCache(len(prompt) + len(gold) + 8)
	s := &engine.Sequence{Tokens: prompt, Cache: cache, LogitRows: []int{len(prompt) - 1}}
	var written []int32
	logprob := 0.0
	for {
		if err := m.Forward(context.Background(), s); err != nil {
			t.Fatal(err)
		}
		if i := len(written); i < len(gold) && slices.Equal(written, gold[:i]) {
			p, _ := eval.LogProbRank(s.Logits[0], gold[i])
			logprob += p / float64(len(gold))
		}
		if written = append(written, argmax(s.Logits[0])); len(written) == len(gold)+8 {
			break
		}
		s = &engine.Sequence{Tokens: written[len(written)-1:], Cache: cache, LogitRows: []int{0}}
	}
	full := r.Full.Outcomes[0]
	if want := files.Tokenizer.Decode(written); full.Text != want || !full.Right || !near(full.LogProb, logprob, 1e-4) {
		t.Errorf("full cache writes %q (%v), the engine %q (%v)", full.Text, full.LogProb, want, logprob)
	}
	t.Logf("needle: log-probability %.3f with the full cache, %.3f with sinks, %.3f without", full.LogProb, r.Runs[0].Outcomes[0].LogProb, r.Runs[1].Outcomes[0].LogProb)
	for _, run := range r.Runs {
		if got := run.Outcomes[0]; got.Right || full.LogProb-got.LogProb < 1 {
			t.Errorf("%s: answers %q with log-probability %v, the full cache %v", run.Name, got.Text, got.LogProb, full.LogProb)
		}
	}
	perplexity := func(run eval.Run) float64 { return math.Exp(run.Texts[0].NLL / float64(run.Texts[0].Tokens)) }
	all, sinks, window := perplexity(r.Full), perplexity(r.Runs[0]), perplexity(r.Runs[1])
	t.Logf("perplexity %.2f with the full cache, %.2f with 4 sinks and 60 recent tokens, %.2f with 64 recent tokens", all, sinks, window)
	if sinks > 2*all || window < 2*sinks {
		t.Errorf("perplexity %v with the full cache, %v with sinks, %v without", all, sinks, window)
	}
}

// noNumber are weights with a NaN in layer 1.
type noNumber struct{ enginetest.Weights }

func (w noNumber) Matrix(name string) (engine.Matrix, error) {
	m, err := w.Weights.Matrix(name)
	if strings.Contains(name, "layers.1.mlp.down_proj") {
		copy(m.Data, []byte{0, 0, 0xc0, 0x7f})
	}
	return m, err
}
