package distill

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// set is the fixture's model on so many oracle backends.
func (f *fixture) set(t testing.TB, n int) *devices.Set {
	t.Helper()
	var backends []engine.Backend
	for range n {
		backends = append(backends, ref.New[float64]())
	}
	s, err := devices.New(f.model(t, backends[0]).Config, f, backends...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// lossOf returns loss and gradient of one step over samples.
func (f *fixture) lossOf(t *testing.T, set *devices.Set, opt Options, samples ...int) (float64, []float64) {
	t.Helper()
	opt.Batch = len(samples)
	s := newStudentLoss(set, f.dataset(), opt, samples)
	defer s.free()
	gates := slices.Concat(f.Gates...)
	loss, err := s.forward(context.Background(), gates)
	if err != nil {
		t.Fatal(err)
	}
	grad, err := s.vjp(context.Background(), gates, 1)
	if err != nil {
		t.Fatal(err)
	}
	return loss, grad
}

// The loss and the gradient of a batch are the means of its samples', and the same bits on any number of devices and with any memory.
// Another order of the samples is another order of the sums: it may change the last bits.
func TestBatchIsTheMeanOfItsSamples(t *testing.T) {
	for _, name := range fixtures {
		f := loadFixture(t, name)
		opt := f.options(1)
		one := f.set(t, 1)
		batch := []int{2, 0, 1, 0}
		mean, meanGrad := 0., make([]float64, f.Config.Layers*f.Config.KVHeads)
		for _, i := range batch {
			l, g := f.lossOf(t, one, opt, i)
			mean += l / float64(len(batch))
			for x, v := range g {
				meanGrad[x] += v / float64(len(batch))
			}
		}
		loss, grad := f.lossOf(t, one, opt, batch...)
		off := math.Abs(loss/mean-1) + worst(t, [][]float64{grad}, [][]float64{meanGrad})
		reversed := slices.Clone(batch)
		slices.Reverse(reversed)
		l, g := f.lossOf(t, one, opt, reversed...)
		turned := math.Abs(l/mean-1) + worst(t, [][]float64{g}, [][]float64{meanGrad})
		t.Logf("%s: off by %.1e, in another order by %.1e", name, off, turned)
		if off > 1e-12 || turned > 1e-12 {
			t.Errorf("%s: a batch is off from the mean of its samples by %g, in another order by %g", name, off, turned)
		}
		for devices := 1; devices <= 5; devices++ {
			for _, limit := range []int64{0, 1 << 40} {
				opt.StashLimit, opt.TeacherLimit = limit, limit
				if l, g := f.lossOf(t, f.set(t, devices), opt, batch...); l != loss || !slices.Equal(g, grad) {
					t.Errorf("%s: %d devices with memory limits of %d bytes give other bits", name, devices, limit)
				}
			}
		}
	}
}

// streaming is a backend that has room for four weights, those of a layer: it counts how often one that is not there is asked for.
type streaming struct {
	*ref.Backend[float64]
	here  []engine.Weight
	reads int
}

func (s *streaming) Streamed() int64 { return 1 }

func (s *streaming) read(w engine.Weight) {
	if !slices.Contains(s.here, w) {
		s.here, s.reads = append(s.here, w), s.reads+1
		s.here = s.here[max(0, len(s.here)-4):]
	}
}

func (s *streaming) MatMul(dst, x engine.Tensor, w engine.Weight, accumulate bool) {
	s.read(w)
	s.Backend.MatMul(dst, x, w, accumulate)
}

func (s *streaming) MatMulBackward(dx, dy engine.Tensor, w engine.Weight, accumulate bool) {
	s.read(w)
	s.Backend.MatMulBackward(dx, dy, w, accumulate)
}

// Where weights are read anew, the samples of a batch go through each layer together, as many as memory allows, to the same bits. A layer
// has four weights: each is read for the teachers, for the students, and backward, but for the last layer, which is still there then.
func TestStreamedWeightsAreReadOncePerBatch(t *testing.T) {
	f := loadFixture(t, "llama")
	opt := f.options(1)
	batch := []int{2, 0, 1}
	loss, grad := f.lossOf(t, f.set(t, 1), opt, batch...)
	b := &streaming{Backend: ref.New[float64]()}
	m := f.model(t, b)
	var all int64
	for _, i := range batch {
		all += m.Config.LessonBytes(len(f.Samples[i].Tokens))
	}
	const large = 1 << 40
	pass := 4 * m.Config.Layers
	for _, c := range []struct {
		name           string
		teacher, stash int64
		samples        []int
		want           int
	}{
		// The next samples begin with the first layer, which is still there. Backward, no gradient is wanted of what comes before the first layer's gates.
		{"one sample", large, large, []int{2}, 3*pass - 4 - 1},
		{"three together", large, large, batch, 3*pass - 4 - 1},
		{"three together, activations computed again", all, 0, batch, 3*pass - 4},
		{"two together", all - 1, 0, batch, 2*(3*pass-4) - 4},
		{"one by one", 0, 0, batch, 3*(3*pass-4) - 2*4},
	} {
		b.reads, b.here = 0, nil
		opt.TeacherLimit, opt.StashLimit = c.teacher, c.stash
		l, g := f.lossOf(t, devices.Of(m), opt, c.samples...)
		if len(c.samples) == len(batch) && (l != loss || !slices.Equal(g, grad)) {
			t.Errorf("%s: other bits", c.name)
		}
		if b.reads != c.want {
			t.Errorf("%s: %d weights read, want %d", c.name, b.reads, c.want)
		}
	}
}

// Batches that go over the end of the data set, stopped and taken up on another number of devices, end with the same bytes.
func TestBatchesResumeExactlyOnAnyNumberOfDevices(t *testing.T) {
	f := loadFixture(t, "llama")
	ds := f.dataset()
	options := func() Options {
		o := f.options(7)
		o.Batch, o.TeacherLimit = 2, f.model(t, ref.New[float64]()).Config.TeacherBytes(96)
		return o
	}
	whole, err := TrainOn(context.Background(), f.set(t, 1), ds, options(), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := files(t, whole)
	if p := whole.Curve[1]; len(p.Others) != 1 || p.Tokens != len(f.Samples[p.Sample].Tokens)+len(f.Samples[p.Others[0]].Tokens) {
		t.Errorf("the curve says %+v", p)
	}
	for _, n := range []int{2, 3} {
		g, err := TrainOn(context.Background(), f.set(t, n), ds, options(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(files(t, g), want) {
			t.Errorf("%d devices give other bytes", n)
		}
		opt := options()
		opt.Checkpoint, opt.CheckpointEvery = t.TempDir(), 100
		ctx, cancel := context.WithCancel(context.Background())
		_, err = TrainOn(ctx, f.set(t, n), ds, opt, func(p Progress) {
			if p.Step == 3 {
				cancel()
			}
		})
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("a stopped training returned %v", err)
		}
		g, err = TrainOn(context.Background(), f.set(t, 3-n%3), ds, opt, func(p Progress) {
			if p.Resumed != 3 {
				t.Errorf("resumed at %d", p.Resumed)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(files(t, g), want) {
			t.Errorf("a training that was stopped on %d devices ends with other bytes", n)
		}
		opt.Batch = 3
		var e *CheckpointError
		if _, err = TrainOn(context.Background(), f.set(t, n), ds, opt, nil); !errors.As(err, &e) {
			t.Errorf("a checkpoint of another batch: %v", err)
		}
	}
}

// A value that is not finite names its sample, among others that go through the model with it, and on any device.
func TestBatchNamesTheBadSample(t *testing.T) {
	f := loadFixture(t, "llama")
	f.Samples[1].Tokens = slices.Clone(f.Samples[1].Tokens)
	only := int32(f.Config.Vocab - 1) // made the token of one sample alone
	for i := range f.Samples {
		for x, id := range f.Samples[i].Tokens {
			if id == only {
				f.Samples[i].Tokens[x] = 0
			}
		}
	}
	f.Samples[1].Tokens[4] = only
	const name = "model.embed_tokens.weight"
	bad := f.tensors[name]
	bad.Data = slices.Clone(bad.Data)
	binary.LittleEndian.PutUint32(bad.Data[int(only)*bad.RowBytes():], math.Float32bits(float32(math.NaN())))
	f.tensors[name] = bad
	ds := f.dataset()
	for name, set := range map[string]*devices.Set{
		"one": f.set(t, 1), "two": f.set(t, 2), "three": f.set(t, 3), "streaming": devices.Of(f.model(t, &streaming{Backend: ref.New[float64]()})),
	} {
		opt := f.options(2)
		opt.Batch = 3
		_, err := TrainOn(context.Background(), set, ds, opt, nil)
		var e *NonFiniteError
		if !errors.As(err, &e) || e.Sample != 1 || e.Step != 0 || e.Layer != 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A batch of one is what a training without batches is, bytes and hashes alike.
func TestBatchOfOne(t *testing.T) {
	f := loadFixture(t, "qwen")
	var made []map[string]string
	for _, batch := range []int{0, 1} {
		opt := f.options(4)
		opt.Batch = batch
		g, err := Train(context.Background(), f.model(t, ref.New[float64]()), f.dataset(), opt, nil)
		if err != nil {
			t.Fatal(err)
		}
		made = append(made, files(t, g))
	}
	if !reflect.DeepEqual(made[0], made[1]) {
		t.Error("a batch of one differs from none")
	}
}
