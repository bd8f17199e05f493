//go:build linux

package cuda

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// A whole model agrees with float64: logits with and without cache, taps, loss and gate gradients of the student.
func TestModel(t *testing.T) {
	ctx := context.Background()
	variants := map[string]engine.Config{}
	for _, name := range []string{"llama", "mistral", "qwen2", "qwen3"} {
		c := enginetest.Tiny()
		switch name {
		case "llama":
			c.TiedEmbeddings = true
		case "mistral":
			c.SlidingWindow = []int{15, 0, 27}
		case "qwen2":
			c.QKVBias = true
		case "qwen3":
			c.QKNorm, c.HeadDim = true, 10
		}
		variants[name] = c
	}
	const n = 60
	rows := []int{40, 52, 59}
	gates := [][]float64{{.3, .9}, {.5, .2}, {.7, .4}}
	type result struct{ logits, cached, decoded, taps, loss, gradient []float64 }
	run := func(cfg engine.Config, b engine.Backend) (r result) {
		tokens := enginetest.Tokens(cfg, n, 3)
		m, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 4}, b)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		check := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		s := &engine.Sequence{Tokens: tokens, LogitRows: rows,
			Tap: func(int) *engine.Tap {
				return &engine.Tap{Prompt: n - 4, Far: []int{9}, Windows: []int{8}, Recent: []int{4, 16}, Answer: rows[2:], VarianceWindow: 8, Map: 10}
			},
			Tapped: func(_ int, tap *engine.Tap) error {
				for _, h := range tap.Heads {
					for _, list := range [][]float32{h.Total, h.Far[0], h.Window[0], h.Answer, h.Map} {
						for _, v := range list {
							r.taps = append(r.taps, float64(v))
						}
					}
					r.taps = append(append(r.taps, h.Recent...), h.Entropy, h.Variance)
				}
				return nil
			}}
		check(m.Forward(ctx, s))
		for _, l := range s.Logits {
			r.logits = append(r.logits, l...)
		}
		cache := m.NewCache(len(tokens))
		defer cache.Free()
		for lo := 0; lo < len(tokens); {
			hi := min(len(tokens), lo+1+lo/2) // 1, 1, 2, 3, 5, ... tokens at a time
			step := &engine.Sequence{Tokens: tokens[lo:hi], Cache: cache, LogitRows: []int{hi - lo - 1}}
			check(m.Forward(ctx, step))
			r.cached = append(r.cached, step.Logits[0]...)
			lo = hi
		}
		r.decoded = decode(t, m, tokens, n-5)
		teacher, err := m.Teach(ctx, tokens)
		check(err)
		defer teacher.Free()
		for _, limit := range []int64{0, 1 << 30} { // activations computed again, and kept
			student, err := m.Study(ctx, tokens, teacher, gates, engine.Mask{Sink: 2, Recent: 9}, rows, limit)
			check(err)
			g, err := student.Backward(ctx, 1)
			check(err)
			r.loss = append(r.loss, student.Loss)
			for _, x := range g {
				r.gradient = append(r.gradient, x...)
			}
			student.Free()
		}
		return r
	}
	both(t, func(t *testing.T, b *Backend) {
		for name, cfg := range variants {
			t.Run(name, func(t *testing.T) {
				before, _ := b.Memory()
				want, got := run(cfg, ref.New[float64]()), run(cfg, b)
				f32, gradient := 1e-5, 1e-4
				if b.half { // bfloat16 has 8 bits
					f32, gradient = 6e-2, 1e-1
				}
				within(t, "logits", got.logits, want.logits, f32)
				within(t, "logits with a cache", got.cached, want.cached, f32)
				within(t, "logits over pages", got.decoded, want.decoded, f32)
				within(t, "statistics", got.taps, want.taps, f32)
				within(t, "loss", got.loss, want.loss, 2*f32)
				within(t, "gates' gradient", got.gradient, want.gradient, gradient)
				within(t, "gradient without stash", got.gradient[:6], got.gradient[6:], 0)
				after, _ := b.Memory()
				if table := int64(2048 * cfg.HeadDim / 2 * 4 * 2); after > before+table+4096 && before > 0 || before == 0 && after > table+4096 {
					t.Errorf("%d bytes in use before, %d after: tensors or weights were not given back", before, after)
				}
			})
		}
	})
}

// decode puts the keys and values of a prompt into pages, unrotated in odd layers, and decodes the rest of the tokens in one step; it
// returns their logits.
func decode(t *testing.T, m *engine.Model, tokens []int32, prompt int) (logits []float64) {
	t.Helper()
	ctx, cfg := context.Background(), m.Config
	const block = 8
	per := (len(tokens) + block - 1) / block
	pages := m.NewPages(per*cfg.Layers*cfg.KVHeads, block)
	defer m.FreePages(pages)
	rows := make([]int32, prompt)
	for i := range rows {
		rows[i] = int32(i)
	}
	table := func(l, h int) (pages []int32) {
		for p := range per {
			pages = append(pages, int32(((per-1-p)*cfg.KVHeads+h)*cfg.Layers+l))
		}
		return pages
	}
	err := m.Forward(ctx, &engine.Sequence{Tokens: tokens[:prompt], RawKeys: true, Cached: func(l int, raw, k, v engine.Tensor, _ *engine.Tap) error {
		if l%2 == 1 {
			k = raw
		}
		for h := range cfg.KVHeads {
			m.Backend.StorePages(pages, table(l, h), rows, k, v, h)
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	var step []engine.Token
	for at := prompt; at < len(tokens); at++ {
		token := engine.Token{ID: tokens[at], Logits: true}
		for l := range cfg.Layers {
			lo := 0
			if w := cfg.Window(l); w > 0 {
				lo = max(0, at-w+1)
			}
			var lanes []engine.Lane
			for h := range cfg.KVHeads {
				lane := engine.Lane{Table: table(l, h), Spans: []engine.Span{{Lo: lo, Hi: at + 1}}, Write: at, Key: at, Query: at}
				if l%2 == 1 {
					lane.Key = -1
					for p := range at + 1 {
						lane.Rotate = append(lane.Rotate, int32(p))
					}
				}
				lanes = append(lanes, lane)
			}
			token.Lanes = append(token.Lanes, lanes)
		}
		step = append(step, token)
	}
	out, err := m.Decode(ctx, pages, step)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range out {
		logits = append(logits, l...)
	}
	return logits
}

// The same work twice gives the same bits, whether memory is fresh or used again.
func TestSameBits(t *testing.T) {
	cfg := enginetest.Tiny()
	run := func(segment int64) (all []float64) {
		b, _ := simulated(t, fakecuda.Options{}, Options{Precision: "bf16", Segment: segment, Staging: 1 << 16})
		m, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 4}, b)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		for range 2 {
			s := &engine.Sequence{Tokens: enginetest.Tokens(cfg, 40, 3), LogitRows: []int{39}}
			if err := m.Forward(context.Background(), s); err != nil {
				t.Fatal(err)
			}
			all = append(all, s.Logits[0]...)
		}
		return all
	}
	fresh, reused := run(-1), run(1<<20)
	if !slices.Equal(fresh, reused) || !slices.Equal(fresh[:len(fresh)/2], fresh[len(fresh)/2:]) {
		t.Error("bits depend on what the memory was used for before")
	}
}

// A GPU that runs full or breaks in the middle ends the pass with an error that says so, and does not hang.
func TestFailures(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("failures are simulated")
	}
	cfg := enginetest.Tiny()
	ctx := context.Background()
	open := func(memory int64) (*engine.Model, *Backend, *fakecuda.Driver) {
		fake := machine(t, fakecuda.Options{Memory: memory})
		b, err := New(Options{Precision: "f32", Symbols: resolver(fake), Segment: -1, Staging: 1 << 16})
		if err != nil {
			t.Fatal(err)
		}
		m, err := engine.New(cfg, enginetest.Weights{Config: cfg, Seed: 4}, b)
		if err != nil {
			t.Fatal(err)
		}
		return m, b, fake
	}

	m, b, fake := open(600 << 10)
	err := m.Forward(ctx, &engine.Sequence{Tokens: enginetest.Tokens(cfg, 500, 1)})
	var full *OutOfMemoryError
	if !errors.As(err, &full) {
		t.Fatalf("got %v, want an OutOfMemoryError", err)
	}
	if full.Asked <= full.Free || full.Total != 600<<10 || full.InUse <= 0 || full.Free <= 0 {
		t.Errorf("%+v makes no sense", *full)
	}
	t.Log(err)
	if err := m.Forward(ctx, &engine.Sequence{Tokens: enginetest.Tokens(cfg, 2, 1)}); err != nil {
		t.Errorf("nothing works any more after the memory was full once: %v", err)
	}
	if _, err := b.Load(engine.Matrix{Name: "large", Rows: 1000, Cols: 1000, DType: 1, Data: make([]byte, 4000000)}); !errors.As(err, &full) {
		t.Errorf("loading: got %v, want an OutOfMemoryError", err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := errors.Join(fake.Err(), fake.Leaks()); err != nil {
		t.Error(err)
	}

	m, b, fake = open(1 << 30)
	fake.Break(0, 20)
	teacher, err := m.Teach(ctx, enginetest.Tokens(cfg, 10, 1))
	var lost *LostError
	if !errors.As(err, &lost) || teacher != nil {
		t.Fatalf("got %v, want a LostError", err)
	}
	t.Log(err)
	if err := m.Forward(ctx, &engine.Sequence{Tokens: []int32{1}}); !errors.As(err, &lost) {
		t.Errorf("afterwards: got %v, want the same LostError", err)
	}
	if err := b.Close(); !errors.As(err, &lost) {
		t.Errorf("closing: got %v, want the same LostError", err)
	}
}

func TestNewRefuses(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("machines are simulated")
	}
	open := func(of fakecuda.Options, o Options) error {
		fake := machine(t, of)
		o.Symbols = resolver(fake)
		b, err := New(o)
		if err == nil {
			b.Close()
		}
		if leaks := fake.Leaks(); leaks != nil {
			t.Error(leaks)
		}
		return err
	}
	var old *TooOldError
	var none *NoDeviceError
	var full *CallError
	if err := open(fakecuda.Options{Driver: 10020}, Options{}); !errors.As(err, &old) {
		t.Errorf("an old driver: %v", err)
	}
	if err := open(fakecuda.Options{Capability: 75}, Options{}); !errors.As(err, &old) {
		t.Errorf("an old GPU: %v", err)
	}
	for _, index := range []int{-1, 1} {
		if err := open(fakecuda.Options{}, Options{Device: index}); !errors.As(err, &none) || none.Count != 1 {
			t.Errorf("GPU %d of 1: %v", index, err)
		}
	}
	if err := open(fakecuda.Options{Count: 2}, Options{Device: 1}); err != nil {
		t.Errorf("the second GPU of two: %v", err)
	}
	if err := open(fakecuda.Options{}, Options{Precision: "fp8"}); err == nil {
		t.Error("precision fp8 is accepted")
	}
	missing := func(_ Library, name string) (uintptr, error) {
		if name == "cublasGemmStridedBatchedEx" {
			return 0, errors.New("undefined symbol")
		}
		return 1, nil
	}
	if _, err := New(Options{Symbols: missing}); err == nil || errors.As(err, &full) {
		t.Errorf("a library without a function: %v", err)
	}
}

func TestDevices(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("machines are simulated")
	}
	gpus, version, err := Devices(resolver(machine(t, fakecuda.Options{Count: 2, Memory: 5 << 30})))
	want := []Info{{0, "simulated GPU", "9.0", 5 << 30, 132}, {1, "simulated GPU", "9.0", 5 << 30, 132}}
	if err != nil || version != "12.8" || !slices.Equal(gpus, want) {
		t.Errorf("got %+v, %s, %v", gpus, version, err)
	}
}

// Without the libraries the errors say what was looked for.
func TestLibraries(t *testing.T) {
	if _, ok := realDevice(t); ok {
		t.Skip("the libraries are there")
	}
	_, err := Libraries("/nonexistent")
	var driver *NoDriverError
	var blas *NoCUBLASError
	switch {
	case errors.As(err, &driver):
		if len(driver.Tried) == 0 {
			t.Error("the error does not say what was tried")
		}
	case errors.As(err, &blas):
		if len(blas.Tried) < 2 {
			t.Error("the error does not say what was tried")
		}
	default:
		t.Errorf("got %v", err)
	}
	if files := cublasFiles("/some/where"); files[0] != "/some/where" || files[1] != "/some/where/libcublas.so.13" {
		t.Errorf("a chosen folder is looked into as %v", files)
	}
}
