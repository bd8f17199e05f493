package plan

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Bounds of what a plan may say. They keep every sum that the package computes below 2^63.
const (
	maxLayers    = 1024
	maxHeads     = 4096
	maxKVHeads   = 512
	maxHeadDim   = 2048
	maxBlockSize = 4096
	maxTokens    = 1 << 27
	maxTotals    = 64
	maxTokenID   = 1<<31 - 1
)

// Validate returns every rule of the format that the plan breaks, in order of the pointers; none for a valid plan.
func (p *Plan) Validate() []Violation {
	c := &checker{plan: p}
	if p.Format != Format {
		c.fail("/format", "is %q, must be %q", p.Format, Format)
	}
	if p.Version != Version {
		c.fail("/version", "is %d, must be %d", p.Version, Version)
	}
	c.text("/tool/name", p.Tool.Name)
	c.text("/tool/version", p.Tool.Version)
	c.model()
	c.cache()
	c.policies()
	c.layers()
	c.tokenClasses()
	c.pins()
	// What follows from the parts can be said when the parts are right.
	sound := len(c.found) == 0
	c.totals(sound)
	c.evidence(len(c.found) == 0)
	return SortViolations(c.found)
}

// checker gathers violations.
type checker struct {
	plan  *Plan
	found []Violation
}

func (c *checker) fail(pointer, format string, args ...any) {
	c.found = append(c.found, Violation{pointer, fmt.Sprintf(format, args...)})
}

// between reports a number outside [low, high].
func (c *checker) between(pointer string, n, low, high int) bool {
	if n < low || n > high {
		c.fail(pointer, "is %d, must lie between %d and %d", n, low, high)
		return false
	}
	return true
}

// ratio reports a number outside (0,1], or [0,1] where zero is allowed.
func (c *checker) ratio(pointer string, r float64, zero bool) {
	switch {
	case zero && r == 0, r > 0 && r <= 1:
	case zero:
		c.fail(pointer, "is %v, must lie in [0,1]", r)
	default:
		c.fail(pointer, "is %v, must lie in (0,1]", r)
	}
}

func (c *checker) text(pointer, s string) {
	if s == "" {
		c.fail(pointer, "is empty")
	}
}

// oneOf reports a value that its type does not have.
func oneOf[T ~string](c *checker, pointer string, v T, allowed ...T) {
	if slices.Contains(allowed, v) {
		return
	}
	names := make([]string, len(allowed))
	for i, a := range allowed {
		names[i] = strconv.Quote(string(a))
	}
	c.fail(pointer, "is %q, must be %s", string(v), strings.Join(names, " or "))
}

func isHash(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

func (c *checker) hash(pointer, s string) {
	if !isHash(s) {
		c.fail(pointer, "is %q, must be 64 lower-case hexadecimal digits", shorten(s))
	}
}

// shorten keeps a message readable whatever the value.
func shorten(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:77], "") + "..."
	}
	return s
}

func (c *checker) model() {
	m := &c.plan.Model
	c.text("/model/name", m.Name)
	c.text("/model/architecture", m.Architecture)
	layers := c.between("/model/n_layers", m.NLayers, 1, maxLayers)
	heads := c.between("/model/n_heads", m.NHeads, 1, maxHeads)
	if c.between("/model/n_kv_heads", m.NKVHeads, 1, maxKVHeads) && heads && m.NHeads%m.NKVHeads != 0 {
		c.fail("/model/n_heads", "is %d, must be a multiple of n_kv_heads %d", m.NHeads, m.NKVHeads)
	}
	if c.between("/model/head_dim", m.HeadDim, 2, maxHeadDim) && m.HeadDim%2 != 0 {
		c.fail("/model/head_dim", "is %d, must be even", m.HeadDim)
	}
	c.between("/model/max_position", m.MaxPosition, 1, maxTokens)
	if w := m.SlidingWindow; w != nil {
		if layers && len(w) != m.NLayers {
			c.fail("/model/sliding_window", "has %d entries, must have one for each of %d layers", len(w), m.NLayers)
		}
		for i, n := range w {
			c.between("/model/sliding_window/"+strconv.Itoa(i), n, 0, maxTokens)
		}
	}
	c.rope(&m.RoPE)
	c.hash("/model/sha256/config", m.SHA256.Config)
	c.hash("/model/sha256/weights", m.SHA256.Weights)
	if m.SHA256.Tokenizer != "" {
		c.hash("/model/sha256/tokenizer", m.SHA256.Tokenizer)
	}
}

func (c *checker) rope(r *RoPE) {
	positive := func(pointer string, x float64) {
		if !(x > 0) || math.IsInf(x, 0) {
			c.fail(pointer, "is %v, must be positive", x)
		}
	}
	positive("/model/rope/theta", r.Theta)
	s, at := r.Scaling, "/model/rope/scaling"
	if s == nil {
		return
	}
	oneOf(c, at+"/kind", s.Kind, ScalingLinear, ScalingLlama3, ScalingYaRN)
	if s.Divisors != nil {
		if d := c.plan.Model.HeadDim; len(s.Divisors) != d/2 {
			c.fail(at+"/divisors", "has %d entries, must have head_dim/2 = %d", len(s.Divisors), d/2)
		}
		for i, x := range s.Divisors {
			positive(at+"/divisors/"+strconv.Itoa(i), x)
		}
		return
	}
	if !(s.Factor >= 1) || math.IsInf(s.Factor, 0) {
		c.fail(at+"/factor", "is %v, must be at least 1", s.Factor)
	}
	used := map[string]bool{}
	switch s.Kind {
	case ScalingLlama3:
		used["low_freq_factor"], used["high_freq_factor"], used["original_max_position"] = true, true, true
		positive(at+"/low_freq_factor", s.LowFreqFactor)
		if !(s.HighFreqFactor > s.LowFreqFactor) || math.IsInf(s.HighFreqFactor, 0) {
			c.fail(at+"/high_freq_factor", "is %v, must be greater than low_freq_factor %v", s.HighFreqFactor, s.LowFreqFactor)
		}
		c.between(at+"/original_max_position", s.OriginalMaxPosition, 1, maxTokens)
	case ScalingYaRN:
		used["beta_fast"], used["beta_slow"], used["attention_factor"], used["original_max_position"] = true, true, true, true
		c.between(at+"/original_max_position", s.OriginalMaxPosition, 1, maxTokens)
		for name, x := range map[string]float64{"beta_fast": s.BetaFast, "beta_slow": s.BetaSlow, "attention_factor": s.AttentionFactor} {
			if x != 0 {
				positive(at+"/"+name, x)
			}
		}
	}
	for name, x := range map[string]float64{"low_freq_factor": s.LowFreqFactor, "high_freq_factor": s.HighFreqFactor, "beta_fast": s.BetaFast,
		"beta_slow": s.BetaSlow, "attention_factor": s.AttentionFactor, "original_max_position": float64(s.OriginalMaxPosition)} {
		if x != 0 && !used[name] {
			c.fail(at+"/"+name, "is not used by kind %q", string(s.Kind))
		}
	}
}

func (c *checker) cache() {
	k := &c.plan.Cache
	oneOf(c, "/cache/dtype", k.Dtype, F32, F16, BF16, FP8E4M3, FP8E5M2, Int8)
	oneOf(c, "/cache/granularity", k.Granularity, PerKVHead, PerLayer)
	c.between("/cache/block_size", k.BlockSize, 1, maxBlockSize)
	oneOf(c, "/cache/group_rule", k.GroupRule, GroupMin, GroupMean)
	oneOf(c, "/cache/prefill", k.Prefill, PrefillDense, PrefillChunked)
	if k.Prefill == PrefillChunked {
		if k.ChunkTokens == 0 {
			c.fail("/cache/chunk_tokens", "is missing: chunked prefill needs it")
		} else {
			c.between("/cache/chunk_tokens", k.ChunkTokens, 1, maxTokens)
		}
	} else if k.ChunkTokens != 0 {
		c.fail("/cache/chunk_tokens", "is %d, must be left out unless prefill is %q", k.ChunkTokens, string(PrefillChunked))
	}
	oneOf(c, "/ties/heads", c.plan.Ties.Heads, LowerLayerThenKVHead)
	oneOf(c, "/ties/tokens", c.plan.Ties.Tokens, LowerPosition)
}

// isName reports whether s can name a policy: letters, digits, '.', '_' and '-', at most 64, the first a letter or digit.
func isName(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for i, r := range s {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		case i > 0 && (r == '.' || r == '_' || r == '-'):
		default:
			return false
		}
	}
	return true
}

func (c *checker) policies() {
	if len(c.plan.Policies) == 0 {
		c.fail("/policies", "has no policy")
	}
	used := map[string]bool{}
	for _, row := range c.plan.Layers {
		for _, name := range row {
			used[name] = true
		}
	}
	for name, policy := range c.plan.Policies {
		at := PointerTo("/policies", name)
		if !isName(name) {
			c.fail(at, "name %q must be letters, digits, '.', '_' and '-', at most 64, the first a letter or digit", shorten(name))
		}
		if !used[name] {
			c.fail(at, "no KV head uses policy %q", shorten(name))
		}
		switch q := policy.(type) {
		case Full:
		case Streaming:
			c.between(at+"/sink_tokens", q.SinkTokens, 0, maxTokens)
			c.between(at+"/recent_tokens", q.RecentTokens, 1, maxTokens)
			oneOf(c, at+"/evict", q.Evict, EvictAlways, EvictPrefillEnd)
			oneOf(c, at+"/decode", q.Decode, DecodeRolling)
			c.positions(at, q.Positions)
		case FastGen:
			c.fastgen(at, &q)
		case TopK:
			c.topk(at, &q)
		case H2O:
			c.between(at+"/sink_tokens", q.SinkTokens, 0, maxTokens)
			c.between(at+"/heavy_tokens", q.HeavyTokens, 1, maxTokens)
			c.between(at+"/recent_tokens", q.RecentTokens, 1, maxTokens)
			oneOf(c, at+"/evict", q.Evict, EvictAlways, EvictPrefillEnd)
			oneOf(c, at+"/decode", q.Decode, DecodeRolling)
			c.positions(at, q.Positions)
		default:
			c.fail(at, "has no policy")
		}
	}
}

func (c *checker) positions(at string, p Positions) {
	oneOf(c, at+"/positions", p, PositionsOriginal, PositionsCacheSlot)
}

func (c *checker) fastgen(at string, q *FastGen) {
	switch {
	case slices.Equal(q.Classes, []Class{ClassSpecial}), slices.Equal(q.Classes, []Class{ClassSpecial, ClassPunctuation}):
	default:
		c.fail(at+"/classes", "is %q, must be [\"special\"] or [\"special\",\"punctuation\"]", q.Classes)
	}
	c.ratio(at+"/frequent_ratio", q.FrequentRatio, true)
	c.ratio(at+"/local_ratio", q.LocalRatio, true)
	if q.MaxTokens != 0 {
		c.between(at+"/max_tokens", q.MaxTokens, 1, maxTokens)
	}
	if q.MaxRatio != 0 {
		c.ratio(at+"/max_ratio", q.MaxRatio, false)
	}
	if q.MaxTokens != 0 || q.MaxRatio != 0 {
		oneOf(c, at+"/overflow", q.Overflow, DropOldest, DropLowest, Refuse)
	} else if q.Overflow != "" {
		c.fail(at+"/overflow", "is %q, must be left out where there is neither max_tokens nor max_ratio", string(q.Overflow))
	}
	oneOf(c, at+"/evict", q.Evict, EvictPrefillEnd)
	oneOf(c, at+"/decode", q.Decode, DecodeStatic, DecodeRolling)
	c.positions(at, q.Positions)
}

func (c *checker) topk(at string, q *TopK) {
	sinks := c.between(at+"/sink_tokens", q.SinkTokens, 0, maxTokens)
	window := c.between(at+"/observation_window", q.ObservationWindow, 1, maxTokens)
	switch {
	case q.BudgetTokens != 0 && q.BudgetRatio != 0:
		c.fail(at+"/budget_ratio", "stands beside budget_tokens: exactly one of them must be given")
	case q.BudgetRatio != 0:
		c.ratio(at+"/budget_ratio", q.BudgetRatio, false)
	case q.BudgetTokens == 0:
		c.fail(at, "has no budget: one of budget_tokens and budget_ratio must be given")
	case c.between(at+"/budget_tokens", q.BudgetTokens, 1, maxTokens) && sinks && window && q.BudgetTokens <= q.SinkTokens+q.ObservationWindow:
		c.fail(at+"/budget_tokens", "is %d, must be greater than sink_tokens + observation_window = %d", q.BudgetTokens, q.SinkTokens+q.ObservationWindow)
	}
	oneOf(c, at+"/pool/kind", q.Pool.Kind, PoolNone, PoolMax, PoolAvg)
	if c.between(at+"/pool/kernel", q.Pool.Kernel, 1, 1023) {
		switch {
		case q.Pool.Kernel%2 == 0:
			c.fail(at+"/pool/kernel", "is %d, must be odd", q.Pool.Kernel)
		case q.Pool.Kind == PoolNone && q.Pool.Kernel != 1:
			c.fail(at+"/pool/kernel", "is %d, must be 1 without pooling", q.Pool.Kernel)
		}
	}
	oneOf(c, at+"/aggregate", q.Aggregate, AggregateMean, AggregateMax, AggregateUnion)
	oneOf(c, at+"/evict", q.Evict, EvictPrefillEnd)
	oneOf(c, at+"/decode", q.Decode, DecodeStatic, DecodeRolling)
	c.positions(at, q.Positions)
}

func (c *checker) layers() {
	m := &c.plan.Model
	if n := m.NLayers; n >= 1 && n <= maxLayers && len(c.plan.Layers) != n {
		c.fail("/layers", "has %d rows, must have one for each of %d layers", len(c.plan.Layers), n)
	}
	for l, row := range c.plan.Layers {
		at := "/layers/" + strconv.Itoa(l)
		if n := m.NKVHeads; n >= 1 && n <= maxKVHeads && len(row) != n {
			c.fail(at, "has %d entries, must have one for each of %d KV heads", len(row), n)
		}
		for h, name := range row {
			if _, ok := c.plan.Policies[name]; !ok {
				c.fail(at+"/"+strconv.Itoa(h), "unknown policy %q", shorten(name))
			} else if c.plan.Cache.Granularity == PerLayer && name != row[0] {
				c.fail(at+"/"+strconv.Itoa(h), "is %q, must be %q as the layer's first: granularity is %q", name, row[0], string(PerLayer))
			}
		}
	}
}

func (c *checker) tokenClasses() {
	classes := c.plan.TokenClasses
	switch {
	case classes == nil:
		classes = &TokenClasses{}
	case len(classes.Special) == 0 && len(classes.Punctuation) == 0:
		c.fail("/token_classes", "is empty and must be left out")
	}
	uses := map[Class]bool{}
	for _, q := range c.plan.Policies {
		if f, ok := q.(FastGen); ok {
			for _, class := range f.Classes {
				uses[class] = true
			}
		}
	}
	for _, list := range []struct {
		class Class
		ids   []int
	}{{ClassSpecial, classes.Special}, {ClassPunctuation, classes.Punctuation}} {
		at := "/token_classes/" + string(list.class)
		switch {
		case uses[list.class] && len(list.ids) == 0:
			c.fail("/token_classes", "has no %s token ids, and a policy uses them", list.class)
		case !uses[list.class] && len(list.ids) > 0:
			c.fail(at, "is used by no policy and must be left out")
		}
		for i, id := range list.ids {
			if id < 0 || id > maxTokenID {
				c.fail(at+"/"+strconv.Itoa(i), "is %d, must lie between 0 and %d", id, maxTokenID)
			}
			if i > 0 && list.ids[i-1] >= id {
				c.fail(at+"/"+strconv.Itoa(i), "is %d after %d: token ids must rise", id, list.ids[i-1])
			}
		}
	}
	if c.plan.Model.SHA256.Tokenizer == "" && (len(uses) > 0 || len(c.plan.Pins) > 0) {
		c.fail("/model/sha256/tokenizer", "is missing, and token ids or pins mean nothing without it")
	}
}

func (c *checker) pins() {
	for i, pin := range c.plan.Pins {
		at := "/pins/" + strconv.Itoa(i)
		c.text(at+"/pattern", pin.Pattern)
		if len(pin.Pattern) > 1000 {
			c.fail(at+"/pattern", "is %d bytes long, at most 1000 are allowed", len(pin.Pattern))
		} else if re, err := regexp.Compile(pin.Pattern); err != nil {
			c.fail(at+"/pattern", "%s", err)
		} else if pin.Pattern != "" && re.MatchString("") {
			c.fail(at+"/pattern", "matches the empty text, and so everywhere")
		}
		c.between(at+"/tokens_after", pin.TokensAfter, 0, maxTokens)
		c.between(at+"/max_tokens", pin.MaxTokens, 1, maxTokens)
		oneOf(c, at+"/overflow", pin.Overflow, DropOldest, Refuse)
	}
}

func (c *checker) totals(sound bool) {
	totals := c.plan.Totals
	if len(totals) == 0 || len(totals) > maxTotals {
		c.fail("/totals", "has %d entries, must have between 1 and %d", len(totals), maxTotals)
		return
	}
	for i, t := range totals {
		at := "/totals/" + strconv.Itoa(i)
		ok := c.between(at+"/prompt_tokens", t.PromptTokens, 1, maxTokens)
		ok = c.between(at+"/generated_tokens", t.GeneratedTokens, 0, maxTokens) && ok
		if ok && t.PromptTokens+t.GeneratedTokens > maxTokens {
			c.fail(at, "is for %d tokens, more than %d", t.PromptTokens+t.GeneratedTokens, maxTokens)
			ok = false
		}
		if i > 0 {
			last := totals[i-1]
			switch {
			case last.PromptTokens == t.PromptTokens && last.GeneratedTokens == t.GeneratedTokens:
				c.fail(at, "has the same lengths as the entry before")
			case last.PromptTokens > t.PromptTokens, last.PromptTokens == t.PromptTokens && last.GeneratedTokens > t.GeneratedTokens:
				c.fail(at, "has lower lengths than the entry before: lengths must rise")
			}
		}
		if !ok || !sound {
			continue
		}
		want := c.plan.ComputeTotals(t.PromptTokens, t.GeneratedTokens)
		for _, f := range []struct {
			name      string
			got, want int64
		}{{"kept_tokens", t.KeptTokens, want.KeptTokens}, {"kept_blocks", t.KeptBlocks, want.KeptBlocks}, {"kept_bytes", t.KeptBytes, want.KeptBytes},
			{"peak_prefill_bytes", t.PeakPrefillBytes, want.PeakPrefillBytes}, {"full_bytes", t.FullBytes, want.FullBytes}} {
			if f.got != f.want {
				c.fail(at+"/"+f.name, "is %d, the policies give %d", f.got, f.want)
			}
		}
		if t.WorstCase != want.WorstCase {
			c.fail(at+"/worst_case", "is %v, the policies give %v", t.WorstCase, want.WorstCase)
		}
	}
}

func (c *checker) evidence(sound bool) {
	e := c.plan.Evidence
	if e == nil {
		return
	}
	if e.PlanSHA256 != "" {
		c.hash("/evidence/plan_sha256", e.PlanSHA256)
		if digest := c.plan.Digest(); sound && isHash(e.PlanSHA256) && e.PlanSHA256 != digest {
			c.fail("/evidence/plan_sha256", "is %s, this plan is %s: the evidence belongs to another plan", e.PlanSHA256, digest)
		}
	} else if len(e.Evaluations) > 0 || len(e.Divergences) > 0 {
		c.fail("/evidence/plan_sha256", "is missing, and there are results of a plan")
	}
	hash := func(at, s string) {
		if s != "" {
			c.hash(at, s)
		}
	}
	if r := e.Recipe; r != nil {
		c.text("/evidence/recipe/name", r.Name)
		c.ratio("/evidence/recipe/budget", r.Budget, true)
		c.ratio("/evidence/recipe/recovery", r.Recovery, true)
		c.between("/evidence/recipe/context_tokens", r.ContextTokens, 0, maxTokens)
		for i, h := range r.TiedHeads {
			at := "/evidence/recipe/tied_heads/" + strconv.Itoa(i)
			// What is no number of layers or KV heads is reported where it stands.
			if n := c.plan.Model.NLayers; n >= 1 {
				c.between(at+"/layer", h.Layer, 0, n-1)
			}
			if n := c.plan.Model.NKVHeads; n >= 1 {
				c.between(at+"/kv_head", h.KVHead, 0, n-1)
			}
		}
	}
	if k := e.Calibration; k != nil {
		hash("/evidence/calibration/record_sha256", k.RecordSHA256)
		hash("/evidence/calibration/gates_sha256", k.GatesSHA256)
		hash("/evidence/calibration/policies_sha256", k.PoliciesSHA256)
		hash("/evidence/calibration/budgets_sha256", k.BudgetsSHA256)
		for i, d := range k.Datasets {
			at := "/evidence/calibration/datasets/" + strconv.Itoa(i)
			c.text(at+"/task", d.Task)
			c.hash(at+"/sha256", d.SHA256)
			c.between(at+"/samples", d.Samples, 1, maxTokens)
			c.lengths(at, d.MinTokens, d.MaxTokens, 1)
		}
	}
	for i, a := range e.Agreement {
		at := "/evidence/agreement/" + strconv.Itoa(i)
		c.text(at+"/a", a.A)
		c.text(at+"/b", a.B)
		c.between(at+"/kv_heads", a.KVHeads, 1, maxLayers*maxKVHeads)
		for name, x := range map[string]*float64{"spearman": a.Spearman, "low": a.Low, "high": a.High} {
			if x != nil && !(*x >= -1 && *x <= 1) {
				c.fail(at+"/"+name, "is %v, must lie in [-1,1]", *x)
			}
		}
	}
	for i, v := range e.Evaluations {
		at := "/evidence/evaluations/" + strconv.Itoa(i)
		c.text(at+"/task", v.Task)
		hash(at+"/dataset_sha256", v.DatasetSHA256)
		if v.MinTokens != 0 || v.MaxTokens != 0 {
			c.lengths(at, v.MinTokens, v.MaxTokens, 1)
		}
		if c.between(at+"/n", v.N, 1, maxTokens) && c.between(at+"/m", v.M, 0, v.N) && c.between(at+"/k", v.K, 0, v.M) {
			c.retention(at, &v)
		}
	}
	for i, d := range e.Divergences {
		at := "/evidence/divergences/" + strconv.Itoa(i)
		c.text(at+"/text", d.Text)
		hash(at+"/dataset_sha256", d.DatasetSHA256)
		c.between(at+"/tokens", d.Tokens, 1, maxTokens)
		for name, x := range map[string]float64{"full_perplexity": d.FullPerplexity, "plan_perplexity": d.PlanPerplexity} {
			if !(x >= 1) || math.IsInf(x, 0) {
				c.fail(at+"/"+name, "is %v, must be at least 1", x)
			}
		}
		if !(d.KL >= 0) || math.IsInf(d.KL, 0) {
			c.fail(at+"/kl", "is %v, must be at least 0", d.KL)
		}
	}
}

func (c *checker) lengths(at string, low, high, least int) {
	if c.between(at+"/min_tokens", low, least, maxTokens) && c.between(at+"/max_tokens", high, least, maxTokens) && low > high {
		c.fail(at+"/min_tokens", "is %d, more than max_tokens %d", low, high)
	}
}

// retention checks a share and its bound against the counts that they come from.
func (c *checker) retention(at string, v *Evaluation) {
	if v.M == 0 {
		if v.Retention != nil || v.Lower95 != nil || v.Certified {
			c.fail(at, "says a retention, but the full cache gets no prompt right (m is 0)")
		}
		return
	}
	share := float64(v.K) / float64(v.M)
	if v.Retention != nil && !(math.Abs(*v.Retention-share) <= 1e-6) {
		c.fail(at+"/retention", "is %v, k / m is %v", *v.Retention, share)
	}
	if v.Lower95 != nil && !(*v.Lower95 >= 0 && *v.Lower95 <= share+1e-6) {
		c.fail(at+"/lower95", "is %v, must lie between 0 and k / m = %v", *v.Lower95, share)
	}
}

// SortViolations orders violations by pointer, numbers in it by value, then by reason, and drops repetitions.
func SortViolations(vs []Violation) []Violation {
	slices.SortFunc(vs, func(a, b Violation) int {
		if n := comparePointers(a.Pointer, b.Pointer); n != 0 {
			return n
		}
		return strings.Compare(a.Reason, b.Reason)
	})
	return slices.Compact(vs)
}

func comparePointers(a, b string) int {
	x, y := strings.Split(a, "/"), strings.Split(b, "/")
	for i := range min(len(x), len(y)) {
		n, errX := strconv.Atoi(x[i])
		m, errY := strconv.Atoi(y[i])
		switch {
		case errX == nil && errY == nil && n != m:
			return n - m
		case x[i] != y[i]:
			return strings.Compare(x[i], y[i])
		}
	}
	return len(x) - len(y)
}
