package distill

import (
	"context"
	"fmt"
	"hash"
	"hash/fnv"
	"math"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// external is a scalar function of the gates that is computed outside gorgonia. Within one run of the machine
// forward is called once, then vjp once, so that activations may be kept in between. Slices are row-major [L,K] and
// must not be kept: gorgonia owns them.
type external interface {
	shape() tensor.Shape // [L,K]
	forward(ctx context.Context, gates []float64) (float64, error)
	// vjp returns the gradient of scale * forward(gates).
	vjp(ctx context.Context, gates []float64, scale float64) ([]float64, error)
}

// lossOp is external as an operation of a gorgonia graph: gates [L,K] to a scalar.
type lossOp struct {
	name string // two operations with equal names and inputs would be merged into one
	ext  external
	run  *run
}

// run is what the operations of one graph share: the context of the present step, and the first error, which
// gorgonia's machine does not unwrap.
type run struct {
	ctx   context.Context
	cause error
}

// guard keeps the first error of f, and makes a panic an error: the machine executes operations on another
// goroutine, where a panic would end the process.
func (r *run) guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("distillation loss panicked: %v", p)
		}
		if r.cause == nil {
			r.cause = err
		}
	}()
	return f()
}

// newLoss applies ext to the node of the gates.
func newLoss(name string, ext external, r *run, gates *G.Node) (*G.Node, error) {
	return G.ApplyOp(&lossOp{name: name, ext: ext, run: r}, gates)
}

func matrixType() hm.Type { return G.TensorType{Dims: 2, Of: tensor.Float64} }

func (o *lossOp) Arity() int { return 1 }

// Type is that of a scalar result: gorgonia types scalars by their bare element type.
func (o *lossOp) Type() hm.Type { return hm.NewFnType(matrixType(), tensor.Float64) }

func (o *lossOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	if s, ok := in[0].(tensor.Shape); !ok || !s.Eq(o.ext.shape()) {
		return nil, fmt.Errorf("gates have shape %v, want %v", in[0], o.ext.shape())
	}
	return tensor.ScalarShape(), nil
}

func (o *lossOp) Do(in ...G.Value) (out G.Value, err error) {
	err = o.run.guard(func() error {
		gates, err := values(in[0])
		if err != nil {
			return err
		}
		loss, err := o.ext.forward(o.run.ctx, gates)
		out = G.NewF64(loss)
		return err
	})
	return out, err
}

func (o *lossOp) ReturnsPtr() bool      { return true } // fresh memory at each Do
func (o *lossOp) CallsExtern() bool     { return false }
func (o *lossOp) OverwritesInput() int  { return -1 }
func (o *lossOp) WriteHash(h hash.Hash) { fmt.Fprintf(h, "external loss %s", o.name) }
func (o *lossOp) Hashcode() uint32      { return hashOf(o) }
func (o *lossOp) String() string        { return "loss " + o.name }

// DiffWRT and SymDiff give gorgonia's Grad the operation that computes the gradient.
func (o *lossOp) DiffWRT(int) []bool { return []bool{true} }

func (o *lossOp) SymDiff(in G.Nodes, _, grad *G.Node) (G.Nodes, error) {
	n, err := G.ApplyOp(&vjpOp{loss: o}, in[0], grad)
	if err != nil {
		return nil, err
	}
	return G.Nodes{n}, nil
}

// vjpOp is the backward of lossOp: (gates [L,K], gradient of the loss) to [L,K].
type vjpOp struct{ loss *lossOp }

func (o *vjpOp) Arity() int { return 2 }

func (o *vjpOp) Type() hm.Type { return hm.NewFnType(matrixType(), tensor.Float64, matrixType()) }

func (o *vjpOp) InferShape(...G.DimSizer) (tensor.Shape, error) {
	return o.loss.ext.shape().Clone(), nil
}

func (o *vjpOp) Do(in ...G.Value) (out G.Value, err error) {
	r := o.loss.run
	err = r.guard(func() error {
		gates, err := values(in[0])
		if err != nil {
			return err
		}
		scale, err := values(in[1])
		if err != nil {
			return err
		}
		grad, err := o.loss.ext.vjp(r.ctx, gates, scale[0])
		if err != nil {
			return err
		}
		out = tensor.New(tensor.WithShape(o.loss.ext.shape().Clone()...), tensor.WithBacking(grad))
		return nil
	})
	return out, err
}

func (o *vjpOp) ReturnsPtr() bool      { return true }
func (o *vjpOp) CallsExtern() bool     { return false }
func (o *vjpOp) OverwritesInput() int  { return -1 }
func (o *vjpOp) WriteHash(h hash.Hash) { fmt.Fprintf(h, "gradient of external loss %s", o.loss.name) }
func (o *vjpOp) Hashcode() uint32      { return hashOf(o) }
func (o *vjpOp) String() string        { return "gradient of loss " + o.loss.name }

func hashOf(o G.Op) uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}

// values returns the data behind v; scalars come bare or as a tensor.
func values(v G.Value) ([]float64, error) {
	switch d := v.Data().(type) {
	case []float64:
		return d, nil
	case float64:
		return []float64{d}, nil
	}
	return nil, fmt.Errorf("graph holds %T, want float64", v.Data())
}

// finite reports the index of the first value that is not finite, or -1.
func finite(x []float64) int {
	for i, v := range x {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return i
		}
	}
	return -1
}
