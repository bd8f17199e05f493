package distill

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

func TestSchedule(t *testing.T) {
	// 2,000 steps, as in the paper: rises over 400, falls over the last 400, never below a tenth.
	o := Options{Steps: 2000, LearningRate: 0.02}
	for s, want := range map[int]float64{0: 0.002, 38: 0.002, 39: 0.002, 199: 0.01, 399: 0.02, 1000: 0.02, 1600: 0.02, 1800: 0.01, 1999: 0.002} {
		if got := o.Rate(s); math.Abs(got-want) > 1e-15 {
			t.Errorf("rate of step %d is %g, want %g", s, got, want)
		}
	}
	if sum := (Options{Steps: 30, LearningRate: 0.02}).RateSum(); math.Abs(sum-0.5) > 0.02 {
		t.Errorf("30 steps sum to %g, want about .5", sum)
	}
	for _, name := range Recipes() {
		r, err := RecipeNamed(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Options.Validate(); err != nil {
			t.Errorf("recipe %s: %v", name, err)
		}
	}
	if _, err := RecipeNamed("soup"); err == nil {
		t.Error("an unknown recipe was found")
	}
}

func TestOptionsRefused(t *testing.T) {
	good, err := RecipeNamed("cpu")
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Options){
		"steps":      func(o *Options) { o.Steps = 0 },
		"rate":       func(o *Options) { o.LearningRate = math.NaN() },
		"infinite":   func(o *Options) { o.LearningRate = math.Inf(1) },
		"batch":      func(o *Options) { o.Batch = -1 },
		"reg":        func(o *Options) { o.Regularisation = -1 },
		"initial":    func(o *Options) { o.InitialGate = 1.5 },
		"recent":     func(o *Options) { o.Recent = 0 },
		"sink":       func(o *Options) { o.Sink = -1 },
		"memory":     func(o *Options) { o.StashLimit = -1 },
		"checkpoint": func(o *Options) { o.Checkpoint, o.CheckpointEvery = "x", 0 },
		"low rate":   func(o *Options) { o.Steps = 30 },
	} {
		o := good.Options
		change(&o)
		err := o.Validate()
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
		if errors.Is(err, ErrLowRate) != (name == "low rate") {
			t.Errorf("%s: %v", name, err)
		}
	}
	a, b := good.Options, good.Options
	b.StashLimit, b.Checkpoint = 1, "elsewhere"
	if a.Hash() != b.Hash() {
		t.Error("memory and files change the hash")
	}
	b.Seed++
	if a.Hash() == b.Hash() {
		t.Error("the seed does not change the hash")
	}
}

func TestOrderTakesEverySampleOncePerPass(t *testing.T) {
	got := order(5, 7, 30)
	for pass := range 4 {
		seen := map[int]bool{}
		for _, i := range got[pass*7 : pass*7+7] {
			seen[i] = true
		}
		if len(seen) != 7 {
			t.Errorf("pass %d takes %v", pass, got[pass*7:pass*7+7])
		}
	}
	if reflect.DeepEqual(got[:7], got[7:14]) {
		t.Error("two passes have the same order")
	}
	if !reflect.DeepEqual(got[:9], order(5, 7, 9)) {
		t.Error("the order depends on the number of steps")
	}
}

// files returns the bytes of everything that Save writes.
func files(t *testing.T, g *Gates) map[string]string {
	t.Helper()
	dir := t.TempDir()
	if err := g.Save(dir); err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[e.Name()] = string(data)
	}
	return out
}

// A training stopped at any step, with or without the chance to save, and taken up again gives the same bytes; so does
// any limit on memory.
func TestResumeIsExact(t *testing.T) {
	f := loadFixture(t, "qwen")
	m, ds := f.model(t, ref.New[float64]()), f.dataset()
	whole, err := Train(context.Background(), m, ds, f.options(12), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := files(t, whole)
	for _, stop := range []int{1, 4, 5, 11} {
		opt := f.options(12)
		opt.Checkpoint, opt.CheckpointEvery = t.TempDir(), 4
		ctx, cancel := context.WithCancel(context.Background())
		_, err := Train(ctx, m, ds, opt, func(p Progress) {
			if p.Step == stop {
				cancel()
			}
		})
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("stopped training returned %v", err)
		}
		first := -1
		g, err := Train(context.Background(), m, ds, opt, func(p Progress) {
			if first < 0 {
				first = p.Step
			}
			if p.Resumed != stop {
				t.Errorf("resumed at %d, want %d", p.Resumed, stop)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if first != stop+1 {
			t.Errorf("first step after resuming at %d is %d", stop, first)
		}
		if !reflect.DeepEqual(files(t, g), want) {
			t.Errorf("resuming at %d changed the result", stop)
		}
		// Done: nothing is left to do, the result is the same.
		g, err = Train(context.Background(), m, ds, opt, func(Progress) { t.Error("a finished training took a step") })
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(files(t, g), want) {
			t.Error("a finished training gives another result")
		}
	}

	// Killed: only what stood on the disk after a whole number of checkpoints is left.
	opt := f.options(12)
	opt.Checkpoint, opt.CheckpointEvery = t.TempDir(), 4
	var killed []byte
	_, err = Train(context.Background(), m, ds, opt, func(p Progress) {
		if p.Step == 7 {
			if killed, err = os.ReadFile(filepath.Join(opt.Checkpoint, CheckpointFile)); err != nil {
				t.Fatal(err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(opt.Checkpoint, CheckpointFile), killed, 0o644); err != nil {
		t.Fatal(err)
	}
	g, err := Train(context.Background(), m, ds, opt, func(p Progress) {
		if p.Resumed != 4 {
			t.Errorf("resumed at %d, want 4", p.Resumed)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(files(t, g), want) {
		t.Error("resuming after a kill changed the result")
	}

	for _, limits := range [][2]int64{{0, 0}, {1 << 40, m.Config.TeacherBytes(64)}, {0, m.Config.TeacherBytes(96) + m.Config.TeacherBytes(48)}} {
		opt := f.options(12)
		opt.StashLimit, opt.TeacherLimit = limits[0], limits[1]
		g, err := Train(context.Background(), m, ds, opt, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(files(t, g), want) {
			t.Errorf("limits %v changed the result", limits)
		}
	}
}

// Teachers are kept within the limit, and the one that is needed last goes first.
func TestTeachersAreKept(t *testing.T) {
	f := loadFixture(t, "llama")
	m, ds := f.model(t, ref.New[float64]()), f.dataset()
	steps := []int{0, 1, 2, 0, 1, 2, 0, 1, 2}
	for _, c := range []struct {
		limit int64
		runs  int
	}{{0, 9}, {1 << 40, 3}, {m.Config.TeacherBytes(48) + m.Config.TeacherBytes(96), 5}} {
		ts := newTeachers(ds, m.Config, c.limit, steps)
		runs := 0
		for s := range steps {
			before := ts.kept[steps[s]]
			got, err := ts.of(context.Background(), m, s, 1)
			if err != nil {
				t.Fatal(err)
			}
			if got[0] != before {
				runs++
			}
			if ts.bytes > c.limit {
				t.Errorf("%d bytes kept, the limit is %d", ts.bytes, c.limit)
			}
		}
		if runs != c.runs {
			t.Errorf("limit %d: the unmodified model ran %d times, want %d", c.limit, runs, c.runs)
		}
		ts.free()
		if ts.bytes != 0 || len(ts.kept) != 0 {
			t.Errorf("%d bytes left", ts.bytes)
		}
	}
}

func TestCheckpointOfAnotherTrainingIsRefused(t *testing.T) {
	f := loadFixture(t, "llama")
	m, ds := f.model(t, ref.New[float64]()), f.dataset()
	base := f.options(3)
	base.Checkpoint, base.CheckpointEvery = t.TempDir(), 1
	if _, err := Train(context.Background(), m, ds, base, nil); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(base.Checkpoint, CheckpointFile)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(m **engine.Model, ds *datasets.Dataset, o *Options){
		"options": func(_ **engine.Model, _ *datasets.Dataset, o *Options) { o.LearningRate *= 2 },
		"dataset": func(_ **engine.Model, ds *datasets.Dataset, _ *Options) { ds.Meta.ContentHash = "other" },
		"backend": func(m **engine.Model, _ *datasets.Dataset, _ *Options) { *m = f.model(t, ref.New[float32]()) },
		"model":   func(_ **engine.Model, _ *datasets.Dataset, o *Options) { o.Model = "other" },
	} {
		m, ds, o := m, *ds, base
		change(&m, &ds, &o)
		_, err := Train(context.Background(), m, &ds, o, nil)
		var e *CheckpointError
		if !errors.As(err, &e) {
			t.Fatalf("%s: %v", what, err)
		}
		if e.What != what && what != "model" { // the model is part of the options, too
			t.Errorf("%s: refused for its %s", what, e.What)
		}
	}
	for name, text := range map[string]string{
		"cut":      string(good[:len(good)/2]),
		"empty":    "",
		"gates":    strings.Replace(string(good), `"gates":[`, `"gates":[0.5,`, 1),
		"range":    replaceField(t, good, "gates", []float64{2, 0, 0, 0, 0, 0}),
		"moments":  replaceField(t, good, "second_moment", []float64{-1, 0, 0, 0, 0, 0}),
		"steps":    replaceField(t, good, "step", 99),
		"negative": replaceField(t, good, "step", -1),
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := Train(context.Background(), m, ds, base, nil)
		var e *CheckpointError
		if !errors.As(err, &e) || e.What != "content" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func replaceField(t *testing.T, text []byte, key string, value any) string {
	t.Helper()
	var all map[string]any
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	all[key] = value
	out, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// A weight that is not a number stops the training, and the error says where; gates and moments stay as they were.
func TestNonFiniteIsNamed(t *testing.T) {
	f := loadFixture(t, "llama")
	bad := f.tensors["model.layers.1.mlp.down_proj.weight"]
	bad.Data = append([]byte(nil), bad.Data...)
	binary.LittleEndian.PutUint32(bad.Data, math.Float32bits(float32(math.NaN())))
	f.tensors[bad.Name] = bad
	_, err := Train(context.Background(), f.model(t, ref.New[float64]()), f.dataset(), f.options(3), nil)
	var e *NonFiniteError
	if !errors.As(err, &e) {
		t.Fatalf("training returned %v", err)
	}
	if e.Layer != 1 || e.Step != 0 || e.Sample != order(7, 3, 1)[0] {
		t.Errorf("named layer %d, step %d, sample %d", e.Layer, e.Step, e.Sample)
	}
	var inner *engine.NonFiniteError
	if !errors.As(err, &inner) {
		t.Error("the engine's error is lost")
	}
}

func TestDatasetsThatCannotTrain(t *testing.T) {
	f := loadFixture(t, "llama")
	m := f.model(t, ref.New[float64]())
	if _, err := Train(context.Background(), m, &datasets.Dataset{}, f.options(3), nil); err == nil {
		t.Error("an empty dataset was taken")
	}
	ds := f.dataset()
	ds.Samples[1].Spans = ds.Samples[1].Spans[:3]
	if _, err := Train(context.Background(), m, ds, f.options(3), nil); err == nil || !strings.Contains(err.Error(), "sample 1") {
		t.Errorf("a sample without a question: %v", err)
	}
	ds = f.dataset()
	ds.Samples[0].Tokens[3] = 1000
	if _, err := Train(context.Background(), m, ds, f.options(3), nil); err == nil || !strings.Contains(err.Error(), "vocabulary") {
		t.Errorf("a token outside the vocabulary: %v", err)
	}
}

// With a mask that hides nothing there is no distillation loss: all gates follow the regularisation down alike.
func TestRegularisationAlone(t *testing.T) {
	f := loadFixture(t, "llama")
	opt := f.options(40)
	opt.Sink, opt.LearningRate = 1000, 0.05
	g, err := Train(context.Background(), f.model(t, ref.New[float64]()), f.dataset(), opt, nil)
	if err != nil {
		t.Fatal(err)
	}
	for l, vs := range g.Values {
		for k, v := range vs {
			if math.Abs(v-g.Values[0][0]) > 1e-9 || v > 0.05 {
				t.Errorf("gate of layer %d, KV head %d is %g, that of 0, 0 is %g", l, k, v, g.Values[0][0])
			}
		}
	}
	for _, p := range g.Curve {
		if p.Loss > 1e-20 {
			t.Fatalf("step %d has a loss of %g", p.Step, p.Loss)
		}
	}
}
