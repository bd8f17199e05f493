package export

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/plan"
)

func stream(sink, recent int) plan.Streaming {
	return plan.Streaming{SinkTokens: sink, RecentTokens: recent, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
}

func snap(budget int) plan.TopK { return topk(budget, idle) }

// newPlan is a valid plan of the given policies; group is the number of query heads of a KV head.
func newPlan(t testing.TB, group int, windows []int, layers [][]plan.Policy) *plan.Plan {
	t.Helper()
	p := &plan.Plan{
		Format: plan.Format, Version: plan.Version, Tool: plan.Tool{Name: "test", Version: "1"},
		Model: plan.Model{Name: "tiny", Architecture: "llama", NLayers: len(layers), NHeads: group * len(layers[0]), NKVHeads: len(layers[0]), HeadDim: 64,
			MaxPosition: 1024, SlidingWindow: windows, RoPE: plan.RoPE{Theta: 1e4},
			SHA256: plan.Hashes{Config: strings.Repeat("a", 64), Weights: strings.Repeat("b", 64), Tokenizer: strings.Repeat("c", 64)}},
		Cache:    plan.Cache{Dtype: plan.BF16, Granularity: plan.PerKVHead, BlockSize: 16, GroupRule: plan.GroupMin, Prefill: plan.PrefillDense},
		Ties:     plan.Ties{Heads: plan.LowerLayerThenKVHead, Tokens: plan.LowerPosition},
		Policies: map[string]plan.Policy{},
	}
	names := map[string]string{}
	for _, row := range layers {
		var line []string
		for _, q := range row {
			id := fmt.Sprintf("%#v", q)
			if names[id] == "" {
				names[id] = fmt.Sprintf("%s-%d", q.Kind(), len(names))
				p.Policies[names[id]] = q
			}
			line = append(line, names[id])
			if f, ok := q.(plan.FastGen); ok {
				p.TokenClasses = &plan.TokenClasses{Special: []int{1, 2}}
				if slices.Contains(f.Classes, plan.ClassPunctuation) {
					p.TokenClasses.Punctuation = []int{3}
				}
			}
		}
		p.Layers = append(p.Layers, line)
	}
	for _, n := range []int{100, 900} {
		p.Totals = append(p.Totals, p.ComputeTotals(n, 40))
	}
	if v := p.Validate(); len(v) > 0 {
		t.Fatalf("the test's plan is not valid: %v", v)
	}
	return p
}

// randomPlan has policies of all kinds and sizes.
func randomPlan(t testing.TB, r *rand.Rand) *plan.Plan {
	pool := []plan.Policy{plan.Full{}}
	pick := func(n int) bool { return r.IntN(n) == 0 }
	kinds := r.IntN(31) + 1
	if pick(3) {
		kinds = 1 << r.IntN(5)
	}
	for range 1 + r.IntN(4) {
		if kinds&1 != 0 {
			s := stream(r.IntN(3)*20, 1+r.IntN(200))
			if pick(4) {
				s.Evict = plan.EvictPrefillEnd
			}
			if pick(4) {
				s.Positions = plan.PositionsCacheSlot
			}
			pool = append(pool, s)
		}
		if kinds&2 != 0 {
			q := topk(60+r.IntN(400), voting{32, 7, !pick(4)})
			if pick(4) {
				q.ObservationWindow = 16
			}
			if pick(4) {
				q.SinkTokens = 4
			}
			if pick(4) {
				q.Decode = plan.DecodeRolling
			}
			if pick(4) {
				q.BudgetTokens, q.BudgetRatio = 0, r.Float64()
			}
			if pick(4) {
				q.Aggregate = plan.AggregateMax
			}
			pool = append(pool, q)
		}
		if kinds&4 != 0 {
			pool = append(pool, plan.FastGen{Classes: []plan.Class{plan.ClassSpecial}, FrequentRatio: 0.2, MaxRatio: 0.4, Overflow: plan.DropOldest,
				Evict: plan.EvictPrefillEnd, Decode: plan.DecodeStatic, Positions: plan.PositionsOriginal})
		}
		if kinds&8 != 0 {
			pool = append(pool, plan.H2O{SinkTokens: 4, HeavyTokens: 50, RecentTokens: 60, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling,
				Positions: plan.PositionsOriginal})
		}
	}
	layers, heads := 1+r.IntN(6), 1+r.IntN(4)
	var windows []int
	if pick(3) {
		windows = make([]int, layers)
		for l := range windows {
			windows[l] = r.IntN(3) * 150
		}
	}
	rows := make([][]plan.Policy, layers)
	for l := range rows {
		one := pool[r.IntN(len(pool))]
		for range heads {
			if kinds&16 != 0 {
				one = pool[r.IntN(len(pool))]
			}
			rows[l] = append(rows[l], one)
		}
	}
	return newPlan(t, 1+r.IntN(3), windows, rows)
}

// held is what a tool holds of one KV head: the first tokens and the last ones of a text whose prompt it has read, or a
// number of tokens of the prompt chosen by votes.
type held struct {
	all          bool
	sink, recent int // sinks and a window that moves
	prompt       int // tokens of the prompt, and all that is generated
	voted        bool
}

// tokens is how many of p + g tokens are held.
func (h held) tokens(p, g int) int {
	switch {
	case h.all:
		return p + g
	case h.prompt > 0:
		return min(h.prompt, p) + g
	}
	return min(h.sink+h.recent, p+g)
}

// tool reads the files of an export as the tool does, and says what it holds of each KV head [layer][KV head].
func tool(t *testing.T, p *plan.Plan, r *Result, length int) [][]held {
	t.Helper()
	out := make([][]held, p.Model.NLayers)
	for l := range out {
		out[l] = make([]held, p.Model.NKVHeads)
	}
	file := func(name string) []byte {
		i := slices.IndexFunc(r.Files, func(f File) bool { return f.Name == name })
		if i < 0 {
			t.Fatalf("%s has no file %s", r.Format, name)
		}
		return r.Files[i].Data
	}
	read := func(name string, into any) {
		if err := json.Unmarshal(file(name), into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	switch r.Format {
	case Duo, KVPress:
		var gates []float64 // as numpy.loadtxt flattens them
		for _, cell := range strings.Fields(string(file("full_attention_heads.tsv"))) {
			x, err := strconv.ParseFloat(cell, 64)
			if err != nil {
				t.Fatal(err)
			}
			gates = append(gates, x)
		}
		var c struct {
			Sink     int     `json:"sink_size"`
			Recent   int     `json:"recent_size"`
			Sparsity float64 `json:"sparsity"`
		}
		read("config.json", &c)
		streams := make([]bool, len(gates))
		if r.Format == Duo {
			// sparsify_attention_heads: full are the gates at or above the quantile, unless all or none are to be.
			threshold := quantile(gates, c.Sparsity)
			if c.Sparsity >= 1 {
				threshold = 2
			} else if c.Sparsity <= 0 {
				threshold = -1
			}
			for i, x := range gates {
				streams[i] = x < threshold
			}
		} else {
			// DuoAttentionPress: the round(size * ratio) smallest.
			var k struct {
				Ratio float64 `json:"head_compression_ratio"`
			}
			read("kvpress.json", &k)
			order := make([]int, len(gates))
			for i := range order {
				order[i] = i
			}
			slices.SortFunc(order, func(a, b int) int { // descending among equals: any order will do
				switch {
				case gates[a] < gates[b]:
					return -1
				case gates[a] > gates[b]:
					return 1
				}
				return b - a
			})
			for _, i := range order[:int(math.RoundToEven(float64(len(gates))*k.Ratio))] {
				streams[i] = true
			}
		}
		for l := range out {
			for k := range out[l] {
				switch {
				case !streams[l*p.Model.NKVHeads+k]:
					out[l][k] = held{all: true}
				case r.Format == KVPress: // masked once, when the prompt has been read
					out[l][k] = held{sink: c.Sink, recent: c.Recent, prompt: c.Sink + c.Recent}
				default:
					out[l][k] = held{sink: c.Sink, recent: c.Recent}
				}
			}
		}
	case SnapKV:
		var c struct {
			Capacities []int  `json:"max_capacity_prompts"`
			Windows    []int  `json:"window_sizes"`
			Kernels    []int  `json:"kernel_sizes"`
			Pooling    string `json:"pooling"`
		}
		read("snapkv.json", &c)
		for l := range out {
			if c.Capacities[l] <= c.Windows[l] {
				t.Fatalf("layer %d: capacity %d, window %d: SnapKV refuses that", l, c.Capacities[l], c.Windows[l])
			}
			for k := range out[l] {
				out[l][k] = held{prompt: c.Capacities[l], voted: true}
			}
		}
	case HeadKV:
		var scores map[string][]float64
		line, _, _ := strings.Cut(string(file("head_scores.json")), "\n")
		if err := json.Unmarshal([]byte(line), &scores); err != nil {
			t.Fatal(err)
		}
		var c struct {
			Window     int     `json:"window_size"`
			Base       int     `json:"base_capacity"`
			Beta       int     `json:"beta"`
			Capacities [][]int `json:"head_capacity"`
		}
		read("headkv.json", &c)
		sum := 0.0
		for _, s := range scores {
			sum += s[0]
		}
		base := c.Base - c.Window
		pool, floor := float64(base/c.Beta*p.Model.NLayers*p.Model.NHeads), float64(base-base/c.Beta)
		group := p.Model.NHeads / p.Model.NKVHeads
		for l := range out {
			for k := range out[l] {
				out[l][k] = held{prompt: 1 << 30, voted: true}
				for h := k * group; h < (k+1)*group; h++ {
					n := int(math.RoundToEven(scores[fmt.Sprintf("%d-%d", l, h)][0]/sum*pool + floor))
					if want := c.Capacities[l][h]; n < want {
						t.Errorf("HeadKV gives query head %d:%d %d tokens, the plan asks for %d", l, h, n, want)
					}
					out[l][k].prompt = min(out[l][k].prompt, n+c.Window)
				}
			}
		}
	case TensorRTLLM:
		var c struct {
			KV struct {
				Windows []int `json:"max_attention_window"`
				Sink    int   `json:"sink_token_length"`
			} `json:"kv_cache_config"`
		}
		read("kv_cache_config.json", &c)
		for l := range out {
			for k := range out[l] {
				out[l][k] = held{sink: c.KV.Sink, recent: c.KV.Windows[l] - c.KV.Sink, all: c.KV.Windows[l] >= length}
			}
		}
	case Layers:
		var c struct {
			Layers []struct {
				Kind   string `json:"kind"`
				Window int    `json:"sliding_window"`
				Sink   int    `json:"sink_tokens"`
			} `json:"layers"`
			Transformers struct {
				Types  []string `json:"layer_types"`
				Window int      `json:"sliding_window"`
			} `json:"transformers"`
		}
		read("layers.json", &c)
		for l := range out {
			for k := range out[l] {
				x := c.Layers[l]
				out[l][k] = held{all: x.Kind == "full_attention", sink: x.Sink, recent: x.Window}
				if c.Transformers.Types[l] == "sliding_attention" && (x.Kind != "sliding_attention" || x.Sink > 0 || c.Transformers.Window < x.Window) {
					t.Errorf("layer %d: transformers would keep less: %v, window %d", l, x, c.Transformers.Window)
				}
			}
		}
	}
	return out
}

// quantile is numpy's.
func quantile(values []float64, q float64) float64 {
	v := slices.Sorted(slices.Values(values))
	at := q * float64(len(v)-1)
	i := int(at)
	if i+1 >= len(v) {
		return v[len(v)-1]
	}
	return v[i] + (v[i+1]-v[i])*(at-float64(i))
}

// No tool ends up with fewer tokens than the plan, or without one that the plan keeps for sure, and the losses account for
// every byte.
func TestExportsKeepWhatThePlanKeeps(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 400 {
		p := randomPlan(t, r)
		for _, to := range []Format{Duo, KVPress, SnapKV, HeadKV, TensorRTLLM, Layers} {
			x, err := Export(p, to, Options{})
			if err != nil {
				t.Fatalf("plan %d to %s: %v", i, to, err)
			}
			holds := tool(t, p, x, p.Model.MaxPosition)
			for l, row := range p.Layers {
				for k, name := range row {
					checkHead(t, fmt.Sprintf("plan %d to %s, layer %d, KV head %d, %+v", i, to, l, k, p.Policies[name]), p, x, holds[l][k], l, k)
				}
			}
			checkBytes(t, fmt.Sprintf("plan %d to %s", i, to), p, x)
			if t.Failed() {
				for _, f := range x.Files {
					t.Logf("%s:\n%s", f.Name, f.Data)
				}
				t.FailNow()
			}
		}
	}
}

func checkHead(t *testing.T, what string, p *plan.Plan, x *Result, h held, l, k int) {
	t.Helper()
	q, window := p.Policies[p.Layers[l][k]], p.Model.Window(l)
	_, rationed := shared[plan.TopK](q)
	for _, at := range [][2]int{{30, 0}, {30, 50}, {200, 1}, {400, 100}, {1000, 24}} {
		prompt, generated := at[0], at[1]
		n := prompt + generated
		a := plan.At{PromptTokens: prompt, GeneratedTokens: generated, Window: window}
		want, as := p.Cache.Kept(q, a).Tokens, p.Cache.Kept(x.As[l][k], a).Tokens
		got := h.tokens(prompt, generated)
		if got < want {
			t.Errorf("%s: keeps %d tokens of %d + %d, the plan keeps %d", what, got, prompt, generated, want)
		}
		// HeadKV's rounding may give a few tokens more.
		if slack := map[bool]int{true: 2}[x.Format == HeadKV]; window == 0 && (got < as || got > as+slack) {
			t.Errorf("%s: keeps %d tokens of %d + %d, is said to keep %d", what, got, prompt, generated, as)
		}
		if as < want && !(rationed && prompt > p.Model.MaxPosition) {
			t.Errorf("%s: is said to keep %d tokens of %d + %d, the plan keeps %d", what, as, prompt, generated, want)
		}
		kept, err := p.Keep(l, k, n)
		if err != nil {
			continue // what is kept depends on the text
		}
		for _, in := range kept {
			for pos := in.From; pos < in.To; pos++ {
				switch {
				case window > 0 && pos < n-window: // hidden by the model's own mask
				case h.all, pos < h.sink, pos >= n-h.recent, h.voted && h.prompt >= prompt:
				case h.prompt > 0 && !h.voted && pos >= prompt-h.recent:
				default:
					t.Errorf("%s: position %d of %d + %d is not sure to be kept", what, pos, prompt, generated)
					return
				}
			}
		}
	}
}

// shared reports whether a policy is of a type.
func shared[T plan.Policy](q plan.Policy) (T, bool) {
	x, ok := q.(T)
	return x, ok
}

func checkBytes(t *testing.T, what string, p *plan.Plan, x *Result) {
	t.Helper()
	exported := &plan.Plan{Model: p.Model, Cache: p.Cache, Policies: map[string]plan.Policy{}}
	for l, row := range x.As {
		var names []string
		for k, q := range row {
			name := fmt.Sprintf("%d.%d", l, k)
			exported.Policies[name] = q
			names = append(names, name)
		}
		exported.Layers = append(exported.Layers, names)
	}
	var sum int64
	for _, loss := range x.Losses {
		sum += loss.Bytes
		// Sinks and recent tokens that are one region need a block less than two.
		if loss.Bytes < 0 && loss.Effect != Less && (x.Format != KVPress || loss.Of != "decode") || loss.Reason == "" || loss.Of == "" || loss.Effect == "" {
			t.Errorf("%s: unsound loss %+v", what, loss)
		}
	}
	if d := exported.Usage(x.At).Bytes - p.Usage(x.At).Bytes; sum != d {
		t.Errorf("%s: the losses account for %d bytes, the export holds %d more: %+v", what, sum, d, x.Losses)
	}
	for i, total := range p.Totals {
		u := exported.Usage(plan.Request{PromptTokens: total.PromptTokens, GeneratedTokens: total.GeneratedTokens})
		if b := x.Totals[i]; b.Plan != total.KeptBytes || b.Export != u.Bytes || b.Full != total.FullBytes {
			t.Errorf("%s: totals %+v, want %d, %d, %d", what, b, total.KeptBytes, u.Bytes, total.FullBytes)
		}
	}
}

func contents(t *testing.T, p *plan.Plan, to Format, o Options) (map[string]string, []Loss) {
	t.Helper()
	x, err := Export(p, to, o)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range x.Files {
		out[f.Name] = string(f.Data)
	}
	return out, x.Losses
}

// lossesOf lists effect and part of the losses that change what is kept.
func lossesOf(losses []Loss) []string {
	var out []string
	for _, x := range losses {
		if x.Effect != None {
			out = append(out, string(x.Effect)+" "+x.Of)
		}
	}
	return out
}

// What a format can say is said exactly, and nothing is lost.
func TestExactExports(t *testing.T) {
	full, small := plan.Full{}, stream(4, 60)
	heads := newPlan(t, 2, nil, [][]plan.Policy{{full, small}, {small, small}})
	files, losses := contents(t, heads, Duo, Options{})
	if want := "1.000000000000000000e+00\t0.000000000000000000e+00\n0.000000000000000000e+00\t0.000000000000000000e+00\n"; files["full_attention_heads.tsv"] != want {
		t.Errorf("DuoAttention: %q, want %q", files["full_attention_heads.tsv"], want)
	}
	if want := `{"model_name":"tiny","sink_size":4,"recent_size":60,"threshold":0.5,"sparsity":0.75}` + "\n"; files["config.json"] != want {
		t.Errorf("DuoAttention: %s, want %s", files["config.json"], want)
	}
	if l := lossesOf(losses); l != nil {
		t.Errorf("DuoAttention: losses %v", l)
	}

	layers := newPlan(t, 2, nil, [][]plan.Policy{{full, full}, {small, small}, {stream(0, 128), stream(0, 128)}})
	files, losses = contents(t, layers, TensorRTLLM, Options{Length: 512})
	if want := "{\n  \"kv_cache_config\": {\n    \"max_attention_window\": [512, 64, 132],\n    \"sink_token_length\": 4\n  }\n}\n"; files["kv_cache_config.json"] != want {
		t.Errorf("TensorRT-LLM: %s, want %s", files["kv_cache_config.json"], want)
	}
	if l := lossesOf(losses); !slices.Equal(l, []string{"less sink_tokens", "less full", "more sink_tokens"}) {
		t.Errorf("TensorRT-LLM: losses %v", l)
	}
	files, losses = contents(t, layers, Layers, Options{})
	for _, want := range []string{`"layer_types": ["full_attention", "full_attention", "sliding_attention"],` + "\n    \"sliding_window\": 128",
		"\"kind\": \"sliding_attention\",\n      \"sliding_window\": 60,\n      \"sink_tokens\": 4,\n      \"num_kv_heads\": 2,"} {
		if !strings.Contains(files["layers.json"], want) {
			t.Errorf("layers: %s lacks %s", files["layers.json"], want)
		}
	}
	if l := lossesOf(losses); !slices.Equal(l, []string{"more sink_tokens"}) {
		t.Errorf("layers: losses %v", l)
	}

	budgets := newPlan(t, 2, nil, [][]plan.Policy{{snap(100), snap(100)}, {full, full}})
	files, losses = contents(t, budgets, SnapKV, Options{})
	if want := "{\n  \"max_capacity_prompts\": [100, 1024],\n  \"window_sizes\": [32, 32],\n  \"kernel_sizes\": [7, 7],\n  \"pooling\": \"maxpool\"\n}\n"; files["snapkv.json"] != want {
		t.Errorf("SnapKV: %s, want %s", files["snapkv.json"], want)
	}
	if l := lossesOf(losses); !slices.Equal(l, []string{"less full", "other aggregate"}) {
		t.Errorf("SnapKV: losses %v", l)
	}
	files, _ = contents(t, newPlan(t, 2, nil, [][]plan.Policy{{snap(100), snap(132)}}), HeadKV, Options{})
	if want := `{"0-0": [68], "0-1": [68], "0-2": [100], "0-3": [100]}` + "\n"; files["head_scores.json"] != want {
		t.Errorf("HeadKV: %s, want %s", files["head_scores.json"], want)
	}
	// (68 + 100) / 2 tokens beside the window on average.
	if want := `"base_capacity": 116`; !strings.Contains(files["headkv.json"], want) {
		t.Errorf("HeadKV: %s, want %s", files["headkv.json"], want)
	}
}

// kvpress keeps int(n * (1 - ratio)) tokens: never fewer than the plan at the length asked for, and at most as many.
func TestRatios(t *testing.T) {
	for n := 1; n < 3000; n += 7 {
		for kept := 1; kept <= n; kept += 1 + n/50 {
			if got := int(float64(n) * (1 - removedShare(kept, n))); got != kept {
				t.Fatalf("%d of %d tokens: kvpress keeps %d", kept, n, got)
			}
		}
	}
	p := newPlan(t, 1, nil, [][]plan.Policy{{snap(100), snap(300)}, {plan.Full{}, snap(100)}, {stream(4, 60), snap(50)}})
	files, losses := contents(t, p, KVPress, Options{Length: 500})
	var c kvpressConfig
	if err := json.Unmarshal([]byte(files["kvpress.json"]), &c); err != nil {
		t.Fatal(err)
	}
	var kept []int
	for _, r := range c.Ratios {
		kept = append(kept, int(500*(1-r)))
	}
	if !slices.Equal(kept, []int{300, 500, 64}) || c.Length != 500 {
		t.Errorf("ratios keep %v of %d tokens, want 300, 500, 64 of 500", kept, c.Length)
	}
	if l := lossesOf(losses); !slices.Contains(l, "less compression_ratios") || !slices.Contains(l, "other compression_ratios") {
		t.Errorf("losses %v", l)
	}
}

func TestPins(t *testing.T) {
	p := newPlan(t, 1, nil, [][]plan.Policy{{stream(4, 60), plan.Full{}}})
	p.Pins = []plan.Pin{{Pattern: "key", TokensAfter: 8, MaxTokens: 32, Overflow: plan.DropOldest}}
	p.Totals = []plan.Totals{p.ComputeTotals(900, 0)}
	for _, to := range Formats() {
		_, err := Export(p, to, Options{})
		if errors.Is(err, ErrPins) != (to != CSV) {
			t.Errorf("%s: %v", to, err)
		}
		x, err := Export(p, to, Options{WithoutPins: true})
		if err != nil {
			t.Fatal(err)
		}
		if to == CSV {
			continue
		}
		i := slices.IndexFunc(x.Losses, func(l Loss) bool { return l.Of == "pins" })
		// Two blocks of 16 tokens of 256 bytes.
		if i < 0 || x.Losses[i].Effect != Less || x.Losses[i].KVHeads != 1 || x.Losses[i].Bytes != -2*16*256 {
			t.Errorf("%s: losses %+v", to, x.Losses)
		}
		checkBytes(t, string(to), p, x)
	}
}

func TestErrors(t *testing.T) {
	p := newPlan(t, 1, nil, [][]plan.Policy{{snap(100)}})
	if _, err := Export(p, "gguf", Options{}); err == nil || !strings.Contains(err.Error(), "expected one of duo, kvpress") {
		t.Errorf("unknown format: %v", err)
	}
	for _, n := range []int{-1, 1 << 28} {
		if _, err := Export(p, CSV, Options{Length: n}); err == nil {
			t.Errorf("length %d: no error", n)
		}
	}
	if _, err := Export(p, HeadKV, Options{Length: 32}); err == nil {
		t.Error("HeadKV: no error for a length within the observation window")
	}
}

// The table has every number of the plan: it is read back and compared.
func TestCSV(t *testing.T) {
	fast := plan.FastGen{Classes: []plan.Class{plan.ClassSpecial, plan.ClassPunctuation}, FrequentRatio: 0.3, LocalRatio: 0.1, MaxTokens: 300, MaxRatio: 0.6,
		Overflow: plan.DropLowest, Evict: plan.EvictPrefillEnd, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	h2o := plan.H2O{SinkTokens: 4, HeavyTokens: 50, RecentTokens: 60, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	ratio := snap(100)
	ratio.BudgetTokens, ratio.BudgetRatio = 0, 0.25
	p := newPlan(t, 3, []int{0, 500}, [][]plan.Policy{{plan.Full{}, stream(4, 60), fast}, {h2o, ratio, snap(200)}})
	files, _ := contents(t, p, CSV, Options{})
	rows, err := csv.NewReader(strings.NewReader(files["plan.csv"])).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 7 {
		t.Fatalf("%d rows, want 7", len(rows))
	}
	for i, row := range rows[1:] {
		cell := map[string]string{}
		for c, name := range rows[0] {
			cell[name] = row[c]
		}
		number := func(name string) float64 {
			if cell[name] == "" {
				return 0
			}
			x, err := strconv.ParseFloat(cell[name], 64)
			if err != nil {
				t.Fatal(err)
			}
			return x
		}
		tokens := func(name string) int { return int(number(name)) }
		evict, decode, positions := plan.Evict(cell["evict"]), plan.Decode(cell["decode"]), plan.Positions(cell["positions"])
		var q plan.Policy = plan.Full{}
		switch plan.Kind(cell["kind"]) {
		case plan.KindStreaming:
			q = plan.Streaming{SinkTokens: tokens("sink_tokens"), RecentTokens: tokens("recent_tokens"), Evict: evict, Decode: decode, Positions: positions}
		case plan.KindH2O:
			q = plan.H2O{SinkTokens: tokens("sink_tokens"), HeavyTokens: tokens("heavy_tokens"), RecentTokens: tokens("recent_tokens"), Evict: evict, Decode: decode,
				Positions: positions}
		case plan.KindTopK:
			q = plan.TopK{BudgetTokens: tokens("budget_tokens"), BudgetRatio: number("budget_ratio"), ObservationWindow: tokens("observation_window"),
				Pool: plan.Pool{Kind: plan.PoolKind(cell["pool"]), Kernel: tokens("kernel")}, Aggregate: plan.Aggregate(cell["aggregate"]),
				SinkTokens: tokens("sink_tokens"), Evict: evict, Decode: decode, Positions: positions}
		case plan.KindFastGen:
			var classes []plan.Class
			for _, c := range strings.Fields(cell["classes"]) {
				classes = append(classes, plan.Class(c))
			}
			q = plan.FastGen{Classes: classes, FrequentRatio: number("frequent_ratio"), LocalRatio: number("local_ratio"), MaxTokens: tokens("max_tokens"),
				MaxRatio: number("max_ratio"), Overflow: plan.Overflow(cell["overflow"]), Evict: evict, Decode: decode, Positions: positions}
		}
		l, k := tokens("layer"), tokens("kv_head")
		if l != i/3 || k != i%3 || cell["policy"] != p.Layers[l][k] || fmt.Sprintf("%#v", q) != fmt.Sprintf("%#v", p.Policies[p.Layers[l][k]]) {
			t.Errorf("row %d is %v: %#v, want %#v", i, cell, q, p.Policies[p.Layers[l][k]])
		}
		u, err := p.HeadUsage(l, k, plan.Request{PromptTokens: 900, GeneratedTokens: 40})
		if err != nil {
			t.Fatal(err)
		}
		if int64(tokens("kept_tokens_900_40")) != u.Tokens || int64(tokens("kept_bytes_900_40")) != u.Bytes || int64(tokens("full_bytes_900_40")) != u.FullBytes ||
			int64(tokens("kept_blocks_900_40")) != u.Blocks || (cell["worst_case"] == "true") != u.WorstCase {
			t.Errorf("row %d says %v, want %+v", i, cell, u)
		}
	}
}

// A plan with streaming and full heads comes back from DuoAttention's files as it was.
func TestDuoRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 50 {
		rows := make([][]plan.Policy, 1+r.IntN(8))
		for l := range rows {
			for range 4 {
				var q plan.Policy = plan.Full{}
				if r.IntN(2) == 0 {
					q = stream(64, 256)
				}
				rows[l] = append(rows[l], q)
			}
		}
		p := newPlan(t, 2, nil, rows)
		checkDuoRoundTrip(t, p)
	}
}

func checkDuoRoundTrip(t *testing.T, p *plan.Plan) {
	t.Helper()
	x, err := Export(p, Duo, Options{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, f := range x.Files {
		if err := os.WriteFile(filepath.Join(dir, f.Name), f.Data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	g, im, err := distill.LoadDuo(dir)
	if err != nil {
		t.Fatal(err)
	}
	if im.Clamped != 0 || g.Meta.Source != p.Model.Name {
		t.Errorf("import: %+v, %+v", im, g.Meta)
	}
	s := distill.Threshold(g.Values, 0.5)
	for l, row := range p.Layers {
		for k, name := range row {
			q, streams := p.Policies[name].(plan.Streaming)
			if s.Full[l][k] == streams {
				t.Fatalf("layer %d, KV head %d: full %v, the plan has %v", l, k, s.Full[l][k], name)
			}
			if streams && (q.SinkTokens != g.Meta.Sink || q.RecentTokens != g.Meta.Recent) {
				t.Fatalf("sizes %d and %d, the plan has %+v", g.Meta.Sink, g.Meta.Recent, q)
			}
		}
	}
}

// The files that DuoAttention's authors publish: all are read, and a plan made of one gives it back as heads.
func TestPublishedPatterns(t *testing.T) {
	root := os.Getenv("KVPROFILE_TEST_DUO_PATTERNS")
	if root == "" {
		t.Skip("set KVPROFILE_TEST_DUO_PATTERNS to a folder with DuoAttention's attn_patterns, one folder per model")
	}
	files, err := filepath.Glob(filepath.Join(root, "*", distill.DuoFile))
	if err != nil || len(files) == 0 {
		t.Fatalf("no patterns in %s (%v)", root, err)
	}
	want := map[string][2]int{"Llama-2-7B-32K-Instruct": {32, 32}, "Llama-3-8B-Instruct-Gradient-1048k": {32, 8}, "Llama-3-8B-Instruct-Gradient-4194k": {32, 8},
		"Meta-Llama-3.1-8B-Instruct": {32, 8}, "Mistral-7B-Instruct-v0.2": {32, 8}, "Mistral-7B-Instruct-v0.3": {32, 8}}
	for _, file := range files {
		name := filepath.Base(filepath.Dir(file))
		g, im, err := distill.LoadDuo(filepath.Dir(file))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		t.Logf("%s: %d x %d gates, %d clamped, %d ties", name, len(g.Values), len(g.Values[0]), im.Clamped, len(im.Ties))
		if shape, ok := want[name]; ok && (len(g.Values) != shape[0] || len(g.Values[0]) != shape[1]) {
			t.Errorf("%s has %d x %d gates, want %v", name, len(g.Values), len(g.Values[0]), shape)
		}
		delete(want, name)
		s, err := distill.Sparsest(g.Values, 0.5)
		if err != nil {
			t.Fatal(err)
		}
		rows := make([][]plan.Policy, len(s.Full))
		for l, row := range s.Full {
			for _, full := range row {
				if full {
					rows[l] = append(rows[l], plan.Full{})
				} else {
					rows[l] = append(rows[l], stream(g.Meta.Sink, g.Meta.Recent))
				}
			}
		}
		checkDuoRoundTrip(t, newPlan(t, 4, nil, rows))
	}
	for name := range want {
		t.Errorf("%s is missing", name)
	}
}

// The reference plan goes to every format; the same plan gives the same bytes.
func TestReferencePlan(t *testing.T) {
	data, err := os.ReadFile("../../out/reference/smollm2-135m-instruct/plan.json")
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range Formats() {
		a, _ := contents(t, p, to, Options{WithoutPins: true})
		b, _ := contents(t, p, to, Options{WithoutPins: true})
		for name, text := range a {
			if text != b[name] || text == "" {
				t.Errorf("%s: %s is not the same twice", to, name)
			}
		}
	}
}
