package plan_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/plan"
)

const llama = "testdata/valid/llama-3.1-8b.json"

// server is the model that the plan in a file was made for.
func server(t testing.TB, path string) plan.Want {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return plan.Want{Model: p.Model}
}

func TestLoadChecksTheModel(t *testing.T) {
	if _, err := plan.Load(llama, server(t, llama)); err != nil {
		t.Fatal(err)
	}
	other := strings.Repeat("0", 64)
	for _, c := range []struct {
		change  func(*plan.Want)
		pointer string // of the mismatch, "" for none
	}{
		{func(w *plan.Want) {
			w.Model.Name, w.Model.Architecture, w.Model.MaxPosition = "mine", "LlamaForCausalLM", 4096
		}, ""},
		{func(w *plan.Want) { w.Model.NLayers = 30 }, "/model/n_layers"},
		{func(w *plan.Want) { w.Model.NHeads = 64 }, "/model/n_heads"},
		{func(w *plan.Want) { w.Model.NKVHeads = 4 }, "/model/n_kv_heads"},
		{func(w *plan.Want) { w.Model.HeadDim = 64 }, "/model/head_dim"},
		{func(w *plan.Want) { w.Model.SlidingWindow = make([]int, 32) }, ""},
		{func(w *plan.Want) { w.Model.SlidingWindow = append(make([]int, 31), 4096) }, "/model/sliding_window"},
		{func(w *plan.Want) { w.Model.RoPE.Theta = 10000 }, "/model/rope"},
		{func(w *plan.Want) { w.Model.RoPE.Scaling = nil }, "/model/rope"},
		{func(w *plan.Want) {
			s := *w.Model.RoPE.Scaling
			s.Factor = 32
			w.Model.RoPE.Scaling = &s
		}, "/model/rope"},
		{func(w *plan.Want) { w.Model.SHA256.Config = other }, "/model/sha256/config"},
		{func(w *plan.Want) { w.Model.SHA256.Config = "" }, ""},
		{func(w *plan.Want) { w.Model.SHA256.Tokenizer = other }, "/model/sha256/tokenizer"},
		{func(w *plan.Want) { w.Model.SHA256.Tokenizer = "" }, "/model/sha256/tokenizer"},
		{func(w *plan.Want) { w.Model.SHA256.Weights = other }, "/model/sha256/weights"},
		{func(w *plan.Want) { w.Model.SHA256.Weights, w.AllowWeights = other, true }, ""},
	} {
		want := server(t, llama)
		c.change(&want)
		p, err := plan.Load(llama, want)
		var model *plan.ModelError
		switch {
		case c.pointer == "":
			if err != nil || p == nil {
				t.Errorf("%v", err)
			}
		case !errors.Is(err, plan.ErrModel) || !errors.As(err, &model) || p != nil:
			t.Errorf("%s: %v", c.pointer, err)
		case len(model.Mismatches) != 1 || model.Mismatches[0].Pointer != c.pointer:
			t.Errorf("%s: %+v", c.pointer, model.Mismatches)
		case !strings.Contains(err.Error(), llama):
			t.Errorf("the error does not name the file: %v", err)
		}
	}
}

func TestLoadOfWhatIsNoPlan(t *testing.T) {
	valid, err := os.ReadFile(llama)
	if err != nil {
		t.Fatal(err)
	}
	replace := func(old, new string) []byte {
		if !strings.Contains(string(valid), old) {
			t.Fatalf("no %s", old)
		}
		return []byte(strings.Replace(string(valid), old, new, 1))
	}
	for name, c := range map[string]struct {
		data []byte
		want error
	}{
		"empty":           {nil, plan.ErrFormat},
		"cut off":         {valid[:len(valid)/2], plan.ErrFormat},
		"two documents":   {append(valid[:len(valid):len(valid)], "{}"...), plan.ErrFormat},
		"list":            {[]byte("[]"), plan.ErrFormat},
		"other format":    {[]byte(`{"format": "gates", "version": 1}`), plan.ErrFormat},
		"no version":      {[]byte(`{"format": "kvprofile.cache-plan"}`), plan.ErrVersion},
		"version 2":       {replace(`"version": 1`, `"version": 2`), plan.ErrVersion},
		"version 1.5":     {replace(`"version": 1`, `"version": 1.5`), plan.ErrVersion},
		"version 1 text":  {replace(`"version": 1`, `"version": "1"`), plan.ErrVersion},
		"unknown kind":    {replace(`"kind": "full"`, `"kind": "quest"`), plan.ErrKind},
		"unknown member":  {replace(`"block_size": 16`, `"block_size": 16, "swap": true`), plan.ErrMember},
		"case":            {replace(`"block_size": 16`, `"Block_size": 16`), plan.ErrMember},
		"wrong type":      {replace(`"block_size": 16`, `"block_size": "16"`), plan.ErrInvalid},
		"null":            {replace(`"block_size": 16`, `"block_size": null`), plan.ErrInvalid},
		"layers":          {replace(`"n_layers": 32`, `"n_layers": 31`), plan.ErrInvalid},
		"same key twice":  {replace(`"block_size": 16`, `"block_size": 16, "block_size": 32`), plan.ErrFormat},
		"invalid UTF-8":   {replace(`"name": "Llama`, "\"name\": \"\xffLlama"), plan.ErrFormat},
		"deep":            {[]byte(strings.Repeat("[", 100000)), plan.ErrFormat},
		"deep in version": {[]byte(`{"format": "kvprofile.cache-plan", "version": ` + strings.Repeat("[", 5000)), plan.ErrFormat},
	} {
		path := filepath.Join(t.TempDir(), "plan.json")
		if err := os.WriteFile(path, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := plan.Load(path, server(t, llama))
		if !errors.Is(err, c.want) || p != nil {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		} else if strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: message %q", name, err)
		}
	}
	if _, err := plan.Load(filepath.Join(t.TempDir(), "none.json"), plan.Want{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

// Unknown members are ignored under evidence, at every depth, and nowhere else.
func TestEvidenceIsOpen(t *testing.T) {
	data, err := os.ReadFile("testdata/valid/every-kind.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, old := range []string{`"evidence": {`, `"recipe": {`, `"calibration": {`, `"seed": 7,`, `"evaluations": [{`} {
		doc := strings.Replace(string(data), old, old+` "of_a_later_version": [1, {"a": null}],`, 1)
		if _, err := plan.Parse([]byte(doc)); err != nil || doc == string(data) {
			t.Errorf("%s: %v", old, err)
		}
	}
	for _, old := range []string{`"cache": {`, `"model": {`, `"rope": {`, `"sha256": {`, `"ties": {`, `"token_classes": {`, `"tool": {`, `"pins": [{`, `"kind": "full"`} {
		doc := strings.Replace(string(data), old, old+` "of_a_later_version": 1,`, 1)
		if old == `"kind": "full"` {
			doc = strings.Replace(string(data), old, old+`, "of_a_later_version": 1`, 1)
		}
		if _, err := plan.Parse([]byte(doc)); !errors.Is(err, plan.ErrMember) || doc == string(data) {
			t.Errorf("%s: %v", old, err)
		}
	}
}

// Two forms of one rotary embedding are the same model: parameters as in a configuration, divisors as in a GGUF. The
// frequencies are the engine's, which are checked against transformers.
func TestRoPEIsComparedByMeaning(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		c := engine.Config{HeadDim: 2 * (8 + r.IntN(60)), RoPE: engine.RoPE{Theta: 1000 * (1 + 500*r.Float64())}}
		plain, _, err := c.Frequencies()
		if err != nil {
			t.Fatal(err)
		}
		c.RoPE.Scaling = []*engine.RoPEScaling{nil, {Kind: "linear", Factor: 1 + 7*r.Float64()},
			{Kind: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPosition: 8192},
			{Kind: "yarn", Factor: 1 + 7*r.Float64(), OriginalMaxPosition: 4096, AttentionFactor: 1}}[r.IntN(4)]
		scaled, _, err := c.Frequencies()
		if err != nil {
			t.Fatal(err)
		}
		rope := plan.RoPE{Theta: c.RoPE.Theta}
		divisors := &plan.RoPEScaling{Kind: plan.ScalingLlama3}
		if s := c.RoPE.Scaling; s != nil {
			rope.Scaling = &plan.RoPEScaling{Kind: plan.ScalingKind(s.Kind), Factor: s.Factor, LowFreqFactor: s.LowFreqFactor, HighFreqFactor: s.HighFreqFactor,
				OriginalMaxPosition: s.OriginalMaxPosition, AttentionFactor: s.AttentionFactor}
		}
		for j := range plain {
			divisors.Divisors = append(divisors.Divisors, float64(float32(plain[j]/scaled[j])))
		}
		p := &plan.Plan{Model: plan.Model{HeadDim: c.HeadDim, RoPE: rope}}
		want := plan.Want{Model: plan.Model{HeadDim: c.HeadDim, RoPE: plan.RoPE{Theta: c.RoPE.Theta, Scaling: divisors}}}
		if err := p.Matches(want); err != nil {
			t.Errorf("%+v %+v: %v", c.RoPE, c.RoPE.Scaling, err)
		}
		divisors.Divisors[r.IntN(len(divisors.Divisors))] *= 1.001
		if err := p.Matches(want); !errors.Is(err, plan.ErrModel) {
			t.Errorf("%+v: a frequency that is off by a thousandth is taken for the same", c.RoPE)
		}
	}
}

func TestAdvice(t *testing.T) {
	data, err := os.ReadFile("testdata/valid/sliding.json")
	if err != nil {
		t.Fatal(err)
	}
	doc := strings.NewReplacer(`"sink_tokens": 32, "recent_tokens": 1024`, `"sink_tokens": 4, "recent_tokens": 5000`).Replace(string(data))
	p := &plan.Plan{}
	if err := p.UnmarshalJSON([]byte(doc)); err == nil {
		t.Fatal("the totals cannot be right")
	}
	p, err = plan.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	slots := p.Policies["slots"].(plan.Streaming)
	slots.SinkTokens, slots.RecentTokens = 4, 5000
	p.Policies["slots"] = slots
	for i, x := range p.Totals {
		p.Totals[i] = p.ComputeTotals(x.PromptTokens, x.GeneratedTokens)
	}
	if vs := p.Validate(); len(vs) > 0 {
		t.Fatal(vs)
	}
	got := fmt.Sprint(p.Advice())
	for _, want := range []string{"/policies/slots/sink_tokens: is 4, no multiple of block_size 32", "/policies/slots/recent_tokens: is 5000, no multiple",
		"/policies/slots: keeps 5004 tokens, and a layer's sliding window has 4096", "/: has no evaluation"} {
		if !strings.Contains(got, want) {
			t.Errorf("no advice %q in %s", want, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/valid/*.json", "testdata/invalid/*.json"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			f.Fatal(pattern, err)
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _, _ = plan.Check(data)
		p, err := plan.Parse(data)
		if err != nil {
			return
		}
		// What was read is written, and what is written says the same.
		first, err := p.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		q, err := plan.Parse(first)
		if err != nil {
			t.Fatalf("%v\n%s", err, first)
		}
		second, err := q.Marshal()
		if err != nil || string(first) != string(second) {
			t.Fatalf("%v\n%s\nthen\n%s", err, first, second)
		}
		if p.Digest() != q.Digest() || p.Digest() == "" {
			t.Fatal("digests differ")
		}
		p.Advice()
		for l := range min(len(p.Layers), 3) {
			for h := range min(len(p.Layers[l]), 3) {
				for _, n := range []int{-1, 0, 1, 1000, 1 << 27} {
					_, _ = p.Keep(l, h, n)
					_, _ = p.Slot(l, h, n)
					_, _ = p.RotaryPosition(l, h, n, n-1)
				}
			}
		}
		if err := p.Matches(plan.Want{Model: p.Model}); err != nil {
			t.Fatal(err)
		}
	})
}
