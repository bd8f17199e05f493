package distill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
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
// or Batch of them, computes in the engine the loss between the model and its gated twin on the question/answer tail, the
// mean over the samples, and moves the gates by gorgonia's gradient of
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
	return TrainOn(ctx, devices.Of(m), ds, opt, progress)
}

// TrainOn is Train with the samples of each step spread over devices: sample j of a step is computed by device j modulo their
// number. Losses and gradients are summed in the order of the samples, so the result is the same on any number.
func TrainOn(ctx context.Context, set *devices.Set, ds *datasets.Dataset, opt Options, progress func(Progress)) (*Gates, error) {
	if opt.Batch == 1 {
		opt.Batch = 0 // one form, so that hashes and files are alike
	}
	if err := opt.Validate(); err != nil {
		return nil, err
	}
	if err := usable(ds); err != nil {
		return nil, err
	}
	t, err := newTrainer(set, ds, opt, order(opt.Seed, len(ds.Samples), opt.Steps*opt.BatchSize()))
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

// newTrainer takes the indices of the samples in the order of their use, Batch for each step.
func newTrainer(set *devices.Set, ds *datasets.Dataset, opt Options, order []int) (*trainer, error) {
	m := set.First()
	layers, heads := m.Config.Layers, m.Config.KVHeads
	t := &trainer{opt: opt, ds: ds, model: m, run: &run{}, solver: newAdam(layers * heads), loss: newStudentLoss(set, ds, opt, order)}
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
	t.run.ctx, t.run.cause = ctx, nil
	t.loss.step = step
	if err := t.vm.RunAll(); err != nil {
		if t.run.cause != nil {
			err = t.run.cause
		}
		var e *NonFiniteError
		if errors.As(err, &e) || ctx.Err() != nil {
			return err
		}
		return fmt.Errorf("step %d: %w", step, err)
	}
	point := CurvePoint{Step: step, Rate: t.opt.Rate(step)}
	for j, i := range t.loss.batch() {
		s := &t.ds.Samples[i]
		point.Tokens += len(s.Tokens)
		if j == 0 {
			point.Sample = s.ID
		} else {
			point.Others = append(point.Others, s.ID)
		}
	}
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

// studentLoss is the distillation loss of a step's samples, their mean, as a function of the gates.
type studentLoss struct {
	set   *devices.Set
	ds    *datasets.Dataset
	opt   Options
	order []int // indices of samples, Batch for each step
	step  int

	teachers []*teachers // one for each device
	gradient []float64   // of the last forward
}

func newStudentLoss(set *devices.Set, ds *datasets.Dataset, opt Options, order []int) *studentLoss {
	s := &studentLoss{set: set, ds: ds, opt: opt, order: order}
	batch := opt.BatchSize()
	for d := range set.Len() {
		var own []int
		for j, i := range order {
			if j%batch%set.Len() == d {
				own = append(own, i)
			}
		}
		s.teachers = append(s.teachers, newTeachers(ds, set.First().Config, opt.TeacherLimit, own))
	}
	return s
}

func (s *studentLoss) config() engine.Config { return s.set.First().Config }

func (s *studentLoss) shape() tensor.Shape {
	return tensor.Shape{s.config().Layers, s.config().KVHeads}
}

// batch lists the indices of the step's samples.
func (s *studentLoss) batch() []int {
	n := s.opt.BatchSize()
	return s.order[s.step*n : s.step*n+n]
}

// forward also computes the gradient: activations of one sample make room for those of the next.
func (s *studentLoss) forward(ctx context.Context, gates []float64) (float64, error) {
	batch, square := s.batch(), square(gates, s.config().KVHeads)
	losses, gradients := make([]float64, len(batch)), make([][]float64, len(batch))
	err := s.set.Each(ctx, func(ctx context.Context, device int, m *engine.Model) error {
		var own []int // positions in the batch
		for j := device; j < len(batch); j += s.set.Len() {
			own = append(own, j)
		}
		at := s.step * len(own) // of the device's own samples
		for len(own) > 0 {
			n := s.together(m, batch, own)
			if err := s.study(ctx, m, s.teachers[device], at, own[:n], square, losses, gradients); err != nil {
				return err
			}
			own, at = own[n:], at+n
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	// In the order of the samples, whatever device they were on.
	loss, sum := losses[0], gradients[0]
	for j := 1; j < len(batch); j++ {
		loss += losses[j]
		for i, g := range gradients[j] {
			sum[i] += g
		}
	}
	for i := range sum {
		sum[i] /= float64(len(batch))
	}
	s.gradient = sum
	return loss / float64(len(batch)), nil
}

// together is the number of samples, of those at the given positions of the batch, that go through the model layer by layer: one, but
// where weights are read anew each time as many as fit the limits of memory.
func (s *studentLoss) together(m *engine.Model, batch, own []int) int {
	n := 1
	if !m.Streams() {
		return n
	}
	room := s.opt.TeacherLimit + s.opt.StashLimit
	for i, j := range own {
		room -= m.Config.LessonBytes(len(s.ds.Samples[batch[j]].Tokens))
		if room < 0 {
			break
		}
		n = i + 1
	}
	return n
}

// study fills in losses and gradients at the given positions of the batch, whose teachers stand from at in their device's order.
func (s *studentLoss) study(ctx context.Context, m *engine.Model, from *teachers, at int, own []int, gates [][]float64, losses []float64, gradients [][]float64) error {
	samples := make([]*datasets.Sample, len(own))
	for i, j := range own {
		samples[i] = &s.ds.Samples[s.batch()[j]]
	}
	teachers, err := from.of(ctx, m, at, len(own))
	if err != nil {
		return s.located(err, samples)
	}
	lessons := make([]engine.Lesson, len(own))
	for i, x := range samples {
		lessons[i] = engine.Lesson{Tokens: x.Tokens, Teacher: teachers[i], Rows: Labelled(x)}
	}
	students, err := m.StudyAll(ctx, lessons, gates, engine.Mask{Sink: s.opt.Sink, Recent: s.opt.Recent}, s.opt.StashLimit)
	if err != nil {
		return s.located(err, samples)
	}
	defer func() {
		for _, x := range students {
			x.Free()
		}
	}()
	for i, x := range students {
		if finite([]float64{x.Loss}) >= 0 {
			return &NonFiniteError{Step: s.step, Sample: samples[i].ID, Layer: m.Config.Layers, What: "loss"}
		}
		losses[own[i]] = x.Loss
	}
	grads, err := engine.BackwardAll(ctx, students)
	if err != nil {
		return s.located(err, samples)
	}
	for k, g := range grads {
		flat := slices.Concat(g...)
		// The backward runs from the last layer down: the highest layer with a bad value is where it started.
		for i := len(flat) - 1; i >= 0; i-- {
			if finite(flat[i:i+1]) >= 0 {
				return &NonFiniteError{Step: s.step, Sample: samples[k].ID, Layer: i / m.Config.KVHeads, What: "gradient"}
			}
		}
		gradients[own[k]] = flat
	}
	return nil
}

func (s *studentLoss) vjp(_ context.Context, _ []float64, scale float64) ([]float64, error) {
	out := make([]float64, len(s.gradient))
	for i, g := range s.gradient {
		out[i] = g * scale
	}
	return out, nil
}

// located adds step and samples to an error of the engine, and the one sample to its report of a value that is not finite.
func (s *studentLoss) located(err error, samples []*datasets.Sample) error {
	var e *engine.NonFiniteError
	if errors.As(err, &e) {
		return &NonFiniteError{Step: s.step, Sample: samples[min(e.Sequence, len(samples)-1)].ID, Layer: e.Layer, What: "activation", Err: err}
	}
	if len(samples) == 1 {
		return fmt.Errorf("sample %d: %w", samples[0].ID, err)
	}
	return fmt.Errorf("samples %d to %d: %w", samples[0].ID, samples[len(samples)-1].ID, err)
}

// free gives the teachers' memory back.
func (s *studentLoss) free() {
	for _, t := range s.teachers {
		t.free()
	}
}

// teachers keeps the results of the unmodified model, on one device, for samples that come again. The order of the samples is known,
// so what goes first when room is short is the teacher whose next use is farthest (Belady's rule; the least recently
// used one would always be the next one needed).
type teachers struct {
	ds     *datasets.Dataset
	config engine.Config
	limit  int64
	order  []int                   // of the samples that this device takes
	kept   map[int]*engine.Teacher // by index of the sample
	bytes  int64
	using  []int             // samples of the last call
	lone   []*engine.Teacher // not worth keeping: live until the next call
}

func newTeachers(ds *datasets.Dataset, config engine.Config, limit int64, order []int) *teachers {
	return &teachers{ds: ds, config: config, limit: limit, order: order, kept: map[int]*engine.Teacher{}}
}

// next is the first position after at that needs sample i; the length of the order when there is none.
func (t *teachers) next(i, at int) int {
	for s := at + 1; s < len(t.order); s++ {
		if t.order[s] == i {
			return s
		}
	}
	return len(t.order)
}

func (t *teachers) size(i int) int64 { return t.config.TeacherBytes(len(t.ds.Samples[i].Tokens)) }

// of returns the teachers of the n samples from a position on; they live until the next call. Those that are not there come out of one
// pass through the model.
func (t *teachers) of(ctx context.Context, m *engine.Model, at, n int) ([]*engine.Teacher, error) {
	t.drop()
	t.using = t.order[at : at+n]
	have := map[int]*engine.Teacher{}
	for _, i := range t.using {
		have[i] = t.kept[i]
	}
	var missing []int
	var tokens [][]int32
	keep := map[int]bool{}
	for _, i := range t.using {
		if have[i] == nil && !slices.Contains(missing, i) {
			missing, tokens = append(missing, i), append(tokens, t.ds.Samples[i].Tokens)
			if keep[i] = t.worth(i, at+n-1); keep[i] {
				t.bytes += t.size(i)
			}
		}
	}
	if len(missing) > 0 {
		taught, err := m.TeachAll(ctx, tokens...)
		if err != nil {
			for i := range keep {
				if keep[i] {
					t.bytes -= t.size(i)
				}
			}
			return nil, err
		}
		for x, i := range missing {
			have[i] = taught[x]
			if keep[i] {
				t.kept[i] = taught[x]
			} else {
				t.lone = append(t.lone, taught[x])
			}
		}
	}
	out := make([]*engine.Teacher, n)
	for x, i := range t.using {
		out[x] = have[i]
	}
	return out, nil
}

// worth decides whether sample i's teacher is to be kept after a position, and makes room for it.
func (t *teachers) worth(i, at int) bool {
	when := t.next(i, at)
	if when == len(t.order) || t.size(i) > t.limit {
		return false
	}
	for t.bytes+t.size(i) > t.limit {
		last, latest := -1, when
		for j := range t.ds.Samples { // in order, so that the choice does not depend on the map's
			if t.kept[j] != nil && t.next(j, at) > latest {
				last, latest = j, t.next(j, at)
			}
		}
		if last < 0 {
			return false // all that is kept is needed sooner
		}
		t.forget(last)
	}
	return true
}

// forget keeps a teacher no longer, but until the next call where it is in use.
func (t *teachers) forget(i int) {
	if slices.Contains(t.using, i) {
		t.lone = append(t.lone, t.kept[i])
	} else {
		t.kept[i].Free()
	}
	delete(t.kept, i)
	t.bytes -= t.size(i)
}

func (t *teachers) drop() {
	for _, x := range t.lone {
		x.Free()
	}
	t.lone, t.using = nil, nil
}

func (t *teachers) free() {
	for i := range t.ds.Samples {
		if t.kept[i] != nil {
			t.forget(i)
		}
	}
	t.drop()
}
