package distill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
)

// Progress is what is known after a step.
type Progress struct {
	Step, Steps int // steps done, of how many
	Point       CurvePoint
	// Elapsed is since this call of Train started; Left is an estimate, from the steps of this call.
	Elapsed, Left time.Duration
	// Resumed is the number of steps that were taken from a checkpoint.
	Resumed int
}

// NonFiniteError says where training met a NaN or an infinity. Layer is the number of layers when the final norm or
// the loss itself has it.
type NonFiniteError struct {
	Step, Sample, Layer int
	What                string // "activation", "loss" or "gradient"
	Err                 error  // the engine's, or nil
}

func (e *NonFiniteError) Error() string {
	text := fmt.Sprintf("step %d, sample %d: %s of layer %d is not finite; the weights or the precision are unfit", e.Step, e.Sample, e.What, e.Layer)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *NonFiniteError) Unwrap() error { return e.Err }

// Train finds one gate in [0,1] per layer and KV head: near 1 where the head needs the whole cache, near 0 where the
// first Sink and last Recent tokens do (DuoAttention, Xiao et al. 2024, section 2.2). Every step takes one sample,
// computes in the engine the loss between the model and its gated twin on the question/answer tail, and moves the
// gates by gorgonia's gradient of
//
//	loss(gates) + Regularisation * mean(gates)
//
// and an Adam solver; then they are clamped to [0,1]. On that interval mean(gates) is the paper's mean |gate|, but its
// slope at 0 is that from the right, so that a gate that nothing holds rests at 0.
//
// The samples are taken in a new order on each pass, drawn from Seed. progress may be nil. With a checkpoint
// directory, a call that takes up another's work returns the same gates and curve, bit for bit, as an unbroken one.
//
// Errors: ErrLowRate, *NonFiniteError, *CheckpointError, the context's, and the engine's.
func Train(ctx context.Context, m *engine.Model, ds *datasets.Dataset, opt Options, progress func(Progress)) (*Gates, error) {
	if err := opt.Validate(); err != nil {
		return nil, err
	}
	if err := usable(ds); err != nil {
		return nil, err
	}
	t, err := newTrainer(m, ds, opt, order(opt.Seed, len(ds.Samples), opt.Steps))
	if err != nil {
		return nil, err
	}
	defer t.close()
	return t.train(ctx, progress)
}

// train takes all steps that are left.
func (t *trainer) train(ctx context.Context, progress func(Progress)) (*Gates, error) {
	opt := t.opt
	if opt.Checkpoint != "" {
		if err := t.resume(); err != nil {
			return nil, err
		}
	}
	resumed, begin := t.solver.steps, time.Now()
	for t.solver.steps < opt.Steps {
		if err := t.step(ctx); err != nil {
			if ctx.Err() != nil && opt.Checkpoint != "" && t.solver.steps > t.saved {
				err = errors.Join(err, t.save())
			}
			return nil, err
		}
		if opt.Checkpoint != "" && (t.solver.steps%opt.CheckpointEvery == 0 || t.solver.steps == opt.Steps) {
			if err := t.save(); err != nil {
				return nil, err
			}
		}
		if progress != nil {
			done := t.solver.steps - resumed
			elapsed := time.Since(begin)
			progress(Progress{Step: t.solver.steps, Steps: opt.Steps, Point: t.curve[len(t.curve)-1], Elapsed: elapsed,
				Left: elapsed / time.Duration(done) * time.Duration(opt.Steps-t.solver.steps), Resumed: resumed})
		}
	}
	return t.gates(), nil
}

// usable reports a dataset that has nothing to train on.
func usable(ds *datasets.Dataset) error {
	if len(ds.Samples) == 0 {
		return fmt.Errorf("the dataset has no samples")
	}
	for i := range ds.Samples {
		if s := &ds.Samples[i]; s.TailStart() >= len(s.Tokens) {
			return fmt.Errorf("sample %d has no question: there are no labelled tokens to train on", s.ID)
		}
	}
	return nil
}

// Labelled lists the rows that the loss is taken on: all tokens of the question/answer tail.
func Labelled(s *datasets.Sample) []int {
	start := s.TailStart()
	rows := make([]int, len(s.Tokens)-start)
	for i := range rows {
		rows[i] = start + i
	}
	return rows
}

// trainer is the graph, its solver and what has happened so far.
type trainer struct {
	opt    Options
	ds     *datasets.Dataset
	order  []int // index of the sample of each step
	model  *engine.Model
	run    *run
	loss   *studentLoss
	node   *G.Node // gates [L,K]
	vm     G.VM
	solver *adam
	curve  []CurvePoint
	saved  int // steps in the last checkpoint

	// values of the last run
	lossValue, regValue G.Value
}

func newTrainer(m *engine.Model, ds *datasets.Dataset, opt Options, order []int) (*trainer, error) {
	layers, heads := m.Config.Layers, m.Config.KVHeads
	t := &trainer{opt: opt, ds: ds, order: order, model: m, run: &run{}, solver: newAdam(layers * heads)}
	t.loss = &studentLoss{model: m, opt: opt, teachers: newTeachers(m, ds, opt.TeacherLimit, order)}
	initial := make([]float64, layers*heads)
	for i := range initial {
		initial[i] = opt.InitialGate
	}
	g := G.NewGraph()
	t.node = G.NewMatrix(g, tensor.Float64, G.WithShape(layers, heads), G.WithName("gates"),
		G.WithValue(tensor.New(tensor.WithShape(layers, heads), tensor.WithBacking(initial))))
	loss, err := newLoss("distillation", t.loss, t.run, t.node)
	if err != nil {
		return nil, err
	}
	mean, err := G.Mean(t.node)
	if err != nil {
		return nil, err
	}
	reg, err := G.Mul(mean, G.NewConstant(opt.Regularisation))
	if err != nil {
		return nil, err
	}
	total, err := G.Add(loss, reg)
	if err != nil {
		return nil, err
	}
	G.Read(loss, &t.lossValue)
	G.Read(reg, &t.regValue)
	if _, err := G.Grad(total, t.node); err != nil {
		return nil, err
	}
	t.vm = G.NewTapeMachine(g, G.BindDualValues(t.node))
	return t, nil
}

// close gives the memory back.
func (t *trainer) close() {
	t.loss.free()
	t.loss.teachers.free()
	t.vm.Close() // its error is always nil
}

// parameters are the gates themselves, row-major: what the solver moves.
func (t *trainer) parameters() []float64 { return t.node.Value().Data().([]float64) }

// step does one step; on error gates and moments are as before.
func (t *trainer) step(ctx context.Context) error {
	step := t.solver.steps
	if err := ctx.Err(); err != nil {
		return err
	}
	s := &t.ds.Samples[t.order[step]]
	t.run.ctx, t.run.cause = ctx, nil
	t.loss.step, t.loss.sample = step, s
	defer t.loss.free()
	if err := t.vm.RunAll(); err != nil {
		if t.run.cause != nil {
			err = t.run.cause
		}
		var e *NonFiniteError
		if errors.As(err, &e) || ctx.Err() != nil {
			return err
		}
		return fmt.Errorf("step %d, sample %d: %w", step, s.ID, err)
	}
	point := CurvePoint{Step: step, Sample: s.ID, Tokens: len(s.Tokens), Rate: t.opt.Rate(step)}
	for _, v := range []struct {
		from G.Value
		to   *float64
	}{{t.lossValue, &point.Loss}, {t.regValue, &point.Regularisation}} {
		x, err := values(v.from)
		if err != nil {
			return err
		}
		*v.to = x[0]
	}
	t.solver.rate = point.Rate
	if err := t.solver.Step([]G.ValueGrad{t.node}); err != nil {
		return err
	}
	gates := t.parameters()
	for i, g := range gates {
		gates[i] = min(max(g, 0), 1)
		point.Mean += gates[i]
		if gates[i] >= 0.5 {
			point.Open++
		}
	}
	point.Mean /= float64(len(gates))
	t.curve = append(t.curve, point)
	t.vm.Reset()
	return nil
}

// order lists the index of the sample of each step: a new permutation of n on each pass.
func order(seed uint64, n, steps int) []int {
	var out []int
	for pass := uint64(0); len(out) < steps; pass++ {
		out = append(out, rand.New(rand.NewPCG(seed, pass)).Perm(n)...)
	}
	return out[:steps]
}

// gates returns the result.
func (t *trainer) gates() *Gates {
	return &Gates{
		Values: square(t.parameters(), t.model.Config.KVHeads),
		Meta: Meta{Model: t.opt.Model, Dataset: t.ds.Meta.ContentHash, Backend: t.model.Backend.Name(), Tool: t.opt.Tool,
			Sink: t.opt.Sink, Recent: t.opt.Recent, Options: &t.opt},
		Curve: append([]CurvePoint(nil), t.curve...),
	}
}

// square copies row-major values into one slice per layer.
func square(flat []float64, cols int) [][]float64 {
	out := make([][]float64, len(flat)/cols)
	for l := range out {
		out[l] = append([]float64(nil), flat[l*cols:(l+1)*cols]...)
	}
	return out
}

// studentLoss is the distillation loss of one sample as a function of the gates. forward keeps the student, whose
// activations vjp needs.
type studentLoss struct {
	model    *engine.Model
	opt      Options
	teachers *teachers
	step     int
	sample   *datasets.Sample

	student *engine.Student
}

func (s *studentLoss) shape() tensor.Shape {
	return tensor.Shape{s.model.Config.Layers, s.model.Config.KVHeads}
}

func (s *studentLoss) forward(ctx context.Context, gates []float64) (float64, error) {
	s.free()
	teacher, err := s.teachers.of(ctx, s.step)
	if err != nil {
		return 0, s.located(err)
	}
	mask := engine.Mask{Sink: s.opt.Sink, Recent: s.opt.Recent}
	s.student, err = s.model.Study(ctx, s.sample.Tokens, teacher, square(gates, s.model.Config.KVHeads), mask, Labelled(s.sample), s.opt.StashLimit)
	if err != nil {
		return 0, s.located(err)
	}
	if loss := s.student.Loss; finite([]float64{loss}) >= 0 {
		return 0, &NonFiniteError{Step: s.step, Sample: s.sample.ID, Layer: s.model.Config.Layers, What: "loss"}
	}
	return s.student.Loss, nil
}

func (s *studentLoss) vjp(ctx context.Context, gates []float64, scale float64) ([]float64, error) {
	grads, err := s.student.Backward(ctx, scale)
	if err != nil {
		return nil, s.located(err)
	}
	flat := make([]float64, 0, len(gates))
	for _, g := range grads {
		flat = append(flat, g...)
	}
	// The backward runs from the last layer down: the highest layer with a bad value is where it started.
	for i := len(flat) - 1; i >= 0; i-- {
		if finite(flat[i:i+1]) >= 0 {
			return nil, &NonFiniteError{Step: s.step, Sample: s.sample.ID, Layer: i / s.model.Config.KVHeads, What: "gradient"}
		}
	}
	return flat, nil
}

// located adds step and sample to the engine's report of a value that is not finite.
func (s *studentLoss) located(err error) error {
	var e *engine.NonFiniteError
	if errors.As(err, &e) {
		return &NonFiniteError{Step: s.step, Sample: s.sample.ID, Layer: e.Layer, What: "activation", Err: err}
	}
	return err
}

func (s *studentLoss) free() {
	if s.student != nil {
		s.student.Free()
		s.student = nil
	}
}

// teachers keeps the results of the unmodified model for samples that come again. The order of the samples is known,
// so what goes first when room is short is the teacher whose next use is farthest (Belady's rule; the least recently
// used one would always be the next one needed).
type teachers struct {
	model *engine.Model
	ds    *datasets.Dataset
	limit int64
	order []int
	kept  map[int]*engine.Teacher // by index of the sample
	bytes int64
	lone  *engine.Teacher // not worth keeping: lives for one step
}

func newTeachers(m *engine.Model, ds *datasets.Dataset, limit int64, order []int) *teachers {
	return &teachers{model: m, ds: ds, limit: limit, order: order, kept: map[int]*engine.Teacher{}}
}

// next is the first step after step that needs sample i; the number of steps when there is none.
func (t *teachers) next(i, step int) int {
	for s := step + 1; s < len(t.order); s++ {
		if t.order[s] == i {
			return s
		}
	}
	return len(t.order)
}

func (t *teachers) size(i int) int64 { return t.model.Config.TeacherBytes(len(t.ds.Samples[i].Tokens)) }

// of returns the teacher of a step's sample; it lives until the next call.
func (t *teachers) of(ctx context.Context, step int) (*engine.Teacher, error) {
	t.drop()
	i := t.order[step]
	if kept := t.kept[i]; kept != nil {
		return kept, nil
	}
	keep := t.next(i, step) < len(t.order) && t.size(i) <= t.limit
	for keep && t.bytes+t.size(i) > t.limit {
		last, when := -1, t.next(i, step)
		for j := range t.ds.Samples { // in order, so that the choice does not depend on the map's
			if t.kept[j] != nil && t.next(j, step) > when {
				last, when = j, t.next(j, step)
			}
		}
		if last < 0 {
			keep = false // all that is kept is needed sooner
			break
		}
		t.forget(last)
	}
	teacher, err := t.model.Teach(ctx, t.ds.Samples[i].Tokens)
	if err != nil {
		return nil, err
	}
	if keep {
		t.kept[i] = teacher
		t.bytes += t.size(i)
	} else {
		t.lone = teacher
	}
	return teacher, nil
}

func (t *teachers) forget(i int) {
	t.kept[i].Free()
	delete(t.kept, i)
	t.bytes -= t.size(i)
}

func (t *teachers) drop() {
	if t.lone != nil {
		t.lone.Free()
		t.lone = nil
	}
}

func (t *teachers) free() {
	t.drop()
	for i := range t.ds.Samples {
		if t.kept[i] != nil {
			t.forget(i)
		}
	}
}
