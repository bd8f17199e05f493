package distill

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// toy is sin(<w, gates>) with faults to order.
type toy struct {
	w       []float64
	calls   []string
	failure error
	panics  bool
}

func (m *toy) shape() tensor.Shape { return tensor.Shape{2, len(m.w) / 2} }

func (m *toy) dot(x []float64) (sum float64) {
	for i, v := range x {
		sum += m.w[i] * v
	}
	return sum
}

func (m *toy) forward(_ context.Context, x []float64) (float64, error) {
	m.calls = append(m.calls, "forward")
	if m.panics {
		panic("boom")
	}
	return math.Sin(m.dot(x)), m.failure
}

func (m *toy) vjp(_ context.Context, x []float64, scale float64) ([]float64, error) {
	m.calls = append(m.calls, "vjp")
	out := make([]float64, len(x))
	for i, w := range m.w {
		out[i] = scale * math.Cos(m.dot(x)) * w
	}
	return out, nil
}

// machine builds the graph of scale * loss(gates) + mean(gates).
func machine(t testing.TB, ext external, r *run, gates []float64, scale float64) (G.VM, *G.Node, *G.Value) {
	t.Helper()
	g := G.NewGraph()
	s := ext.shape()
	node := G.NewMatrix(g, tensor.Float64, G.WithShape(s...), G.WithName("gates"),
		G.WithValue(tensor.New(tensor.WithShape(s...), tensor.WithBacking(append([]float64(nil), gates...)))))
	loss, err := newLoss("toy", ext, r, node)
	if err != nil {
		t.Fatal(err)
	}
	total := G.Must(G.Add(G.Must(G.Mul(loss, G.NewConstant(scale))), G.Must(G.Mean(node))))
	value := new(G.Value)
	G.Read(total, value)
	if _, err := G.Grad(total, node); err != nil {
		t.Fatal(err)
	}
	vm := G.NewTapeMachine(g, G.BindDualValues(node))
	t.Cleanup(func() { vm.Close() })
	return vm, node, value
}

// gradient runs a machine once and returns the total and its gradient.
func gradient(t testing.TB, ext external, gates []float64, scale float64) (float64, []float64) {
	t.Helper()
	vm, node, value := machine(t, ext, &run{ctx: context.Background()}, gates, scale)
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	grad, err := node.Grad()
	if err != nil {
		t.Fatal(err)
	}
	g, err := values(grad)
	if err != nil {
		t.Fatal(err)
	}
	total, err := values(*value)
	if err != nil {
		t.Fatal(err)
	}
	return total[0], append([]float64(nil), g...)
}

func checkDifferences(t *testing.T, ext external, gates []float64, scale float64) {
	t.Helper()
	_, grad := gradient(t, ext, gates, scale)
	const h = 1e-5
	for i := range gates {
		x := append([]float64(nil), gates...)
		x[i] += h
		up, _ := gradient(t, ext, x, scale)
		x[i] -= 2 * h
		down, _ := gradient(t, ext, x, scale)
		if fd := (up - down) / (2 * h); math.Abs(fd-grad[i]) > 1e-8*math.Max(1, math.Abs(fd)) {
			t.Errorf("gate %d: difference quotient %g, gradient %g", i, fd, grad[i])
		}
	}
}

// gorgonia's gradient through the operation equals difference quotients, for a toy and for the real student.
func TestOperationByFiniteDifferences(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	m := &toy{w: make([]float64, 8)}
	gates := make([]float64, 8)
	for i := range gates {
		m.w[i], gates[i] = r.NormFloat64(), r.Float64()
	}
	checkDifferences(t, m, gates, -1.7)
	m.calls = nil
	gradient(t, m, gates, 1)
	if fmt.Sprint(m.calls) != "[forward vjp]" {
		t.Errorf("one run made the calls %v", m.calls)
	}
	for _, name := range fixtures {
		f := loadFixture(t, name)
		ds := f.dataset()
		s := newStudentLoss(devices.Of(f.model(t, ref.New[float64]())), ds, f.options(1), []int{0, 0})
		var flat []float64
		for _, g := range f.Gates {
			flat = append(flat, g...)
		}
		checkDifferences(t, s, flat, 3)
	}
}

func TestOperationFailures(t *testing.T) {
	cause := errors.New("disk is on fire")
	r := &run{ctx: context.Background()}
	m := &toy{w: make([]float64, 4), failure: cause}
	vm, _, _ := machine(t, m, r, make([]float64, 4), 1)
	if err := vm.RunAll(); err == nil || !errors.Is(r.cause, cause) {
		t.Errorf("error %v, cause %v", err, r.cause)
	}
	m.failure, m.panics, r.cause = nil, true, nil
	vm.Reset()
	if err := vm.RunAll(); err == nil || r.cause == nil || !strings.Contains(r.cause.Error(), "boom") {
		t.Errorf("panic gave error %v, cause %v", err, r.cause)
	}
	g := G.NewGraph()
	wrong := G.NewMatrix(g, tensor.Float64, G.WithShape(3, 3), G.WithName("gates"), G.WithInit(G.Zeroes()))
	if _, err := newLoss("toy", m, r, wrong); err == nil {
		t.Error("gates of another shape were taken")
	}
}

// The solver equals gorgonia's own bit for bit over a changing learning rate, and zeroes the gradient as that does.
func TestAdamEqualsGorgonia(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	m := &toy{w: make([]float64, 12)}
	start := make([]float64, 12)
	for i := range start {
		m.w[i], start[i] = r.NormFloat64(), r.Float64()
	}
	final := make([][]float64, 2)
	theirs, ours := G.NewAdamSolver(), newAdam(12)
	for k, solver := range []G.Solver{theirs, ours} {
		vm, node, _ := machine(t, m, &run{ctx: context.Background()}, start, 1)
		for s := range 200 {
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			rate := 0.05 / float64(s%7+1)
			G.WithLearnRate(rate)(theirs)
			ours.rate = rate
			if err := solver.Step([]G.ValueGrad{node}); err != nil {
				t.Fatal(err)
			}
			vm.Reset()
		}
		final[k] = node.Value().Data().([]float64)
	}
	for i := range start {
		if final[0][i] != final[1][i] {
			t.Errorf("parameter %d: gorgonia's %v, ours %v", i, final[0][i], final[1][i])
		}
		if final[0][i] == start[i] {
			t.Errorf("parameter %d did not move", i)
		}
	}
	if err := newAdam(3).Step(nil); err == nil {
		t.Error("a step without parameters was taken")
	}
}
