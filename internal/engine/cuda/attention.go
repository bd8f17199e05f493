package cuda

import (
	"fmt"
	"math"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Attention in bfloat16 is one kernel where head dimensions allow it (flash). All other goes through tiles: some consecutive queries of all heads against the keys that any of them sees. The scores of a tile are a
// matrix product, and so is what is done with the probabilities. Keys that no query of a tile sees are never looked at, so
// streaming attention, whose tiles have two ranges of keys (sink and recent), takes time and memory linear in the length.

// tileRows is the most queries in a tile. Larger ones compute more scores above the diagonal, smaller ones fill the GPU less.
const tileRows = 256

// fewRows is the number of queries below which products are in float32 whatever the precision: they are bound by reading keys and
// values, and rounding those first would read them once more.
const fewRows = 16

// heads is a range of KV heads with one mask.
type heads struct {
	first, count int
	mask         engine.Mask
}

// masked groups neighbouring KV heads with equal masks.
func masked(spec *engine.AttentionSpec) (all []heads) {
	for kv := range spec.KVHeads {
		m := spec.Mask(kv)
		if m.Full() {
			m = engine.Mask{}
		}
		if n := len(all); n > 0 && all[n-1].mask == m {
			all[n-1].count++
		} else {
			all = append(all, heads{kv, 1, m})
		}
	}
	return all
}

// span is a range of keys and its first column in the tile's scores.
type span struct{ lo, hi, column int }

// tile is queries row, row+step ... and one or two spans of keys.
type tile struct {
	row, rows, step int
	spans           []span
	width, ld       int // columns in use, and from row to row
}

// newTile finds the keys that queries [row, row+rows) see.
func newTile(spec *engine.AttentionSpec, m engine.Mask, row, rows int) tile {
	return sparseTile(spec, m, row, rows, 1)
}

// sparseTile finds the keys that rows queries see, step apart.
func sparseTile(spec *engine.AttentionSpec, m engine.Mask, row, rows, step int) tile {
	i0, end := spec.Start+row, spec.Start+row+(rows-1)*step+1
	lo := 0
	if spec.Window > 0 {
		lo = max(0, i0-spec.Window+1)
	}
	t := tile{row: row, rows: rows, step: step}
	if m.Full() {
		t.spans = []span{{lo, end, 0}}
	} else {
		sinkEnd, near := min(m.Sink, end), max(lo, i0-m.Recent+1)
		switch {
		case lo >= sinkEnd:
			t.spans = []span{{near, end, 0}}
		case near <= sinkEnd:
			t.spans = []span{{lo, end, 0}}
		default:
			t.spans = []span{{lo, sinkEnd, 0}, {near, end, sinkEnd - lo}}
		}
	}
	last := t.spans[len(t.spans)-1]
	t.width = last.column + last.hi - last.lo
	t.ld = (t.width + 7) / 8 * 8 // tensor cores want rows of whole 16 bytes
	return t
}

// columns are the arguments by which kernels know the key of a column: the first span, its width, and the second.
func (t *tile) columns() (a, na, b int) {
	if len(t.spans) == 1 {
		return 0, 0, t.spans[0].lo
	}
	return t.spans[0].lo, t.spans[0].hi - t.spans[0].lo, t.spans[1].lo
}

// rowsFor is the number of queries in a tile such that the scores of all heads fit the scratch memory. It depends on shapes only.
func (b *Backend) rowsFor(spec *engine.AttentionSpec, h heads, n, bytesPerScore int) int {
	keys := spec.Start + n
	if !h.mask.Full() {
		keys = min(keys, h.mask.Sink+h.mask.Recent+tileRows)
	}
	fit := b.scratch / (int64(keys+8) * int64(h.count*spec.Heads/spec.KVHeads) * int64(bytesPerScore))
	return int(min(max(1, fit), tileRows, int64(n)))
}

// attention is the state of one operation.
type attention struct {
	b     *Backend
	tmp   *temporaries
	spec  *engine.AttentionSpec
	n     int // query rows
	group int // query heads per KV head
	kind  number
	keys  operand // all keys, in the precision of products; and values
	vals  operand

	// Memory of the largest tile: packed rows of queries and of results, scores.
	query, packed operand
	scores        pointer // float32
	probs         operand // what products read of the probabilities: scores, or their copy in bfloat16
}

func checkAttention(q, k, v engine.Tensor, spec *engine.AttentionSpec) {
	n, keys, d := q.Rows(), k.Rows(), spec.HeadDim
	if keys != spec.Start+n || v.Rows() != keys || q.Cols() != spec.Heads*d || k.Cols() != spec.KVHeads*d || v.Cols() != k.Cols() || spec.Heads%spec.KVHeads != 0 ||
		spec.Masks != nil && len(spec.Masks) != spec.KVHeads {
		panic(fmt.Sprintf("attention of %d queries at %d, %d keys, widths %d and %d, %d and %d heads of %d, %d masks", n, spec.Start, keys, q.Cols(), k.Cols(),
			spec.Heads, spec.KVHeads, d, len(spec.Masks)))
	}
}

// newAttention prepares keys and values.
func (b *Backend) newAttention(tmp *temporaries, k, v engine.Tensor, spec *engine.AttentionSpec, n int) (*attention, error) {
	a := &attention{b: b, tmp: tmp, spec: spec, n: n, group: spec.Heads / spec.KVHeads}
	if b.half && n >= fewRows {
		a.kind = bf16
	}
	for _, x := range []struct {
		t  engine.Tensor
		to *operand
	}{{k, &a.keys}, {v, &a.vals}} {
		o, err := b.left(tmp, x.t, a.kind)
		if err != nil {
			return nil, err
		}
		o.stride = spec.HeadDim
		*x.to = o
	}
	return a, nil
}

// room allocates the memory of tiles of rows queries, whose rows of scores have at most widest values.
func (a *attention) room(h heads, rows, widest int) (err error) {
	d, count := a.spec.HeadDim, h.count*a.group
	get := func(bytes int) (p pointer) {
		if err == nil {
			p, err = a.tmp.get(bytes)
		}
		return p
	}
	a.query = operand{at: get(count * rows * d * a.kind.bytes()), kind: a.kind, ld: d}
	a.packed = operand{at: get(count * rows * d * 4), kind: f32, ld: d}
	a.scores = get(count * rows * widest * 4)
	a.probs = operand{at: a.scores, kind: f32}
	if a.kind == bf16 {
		a.probs = operand{at: get(count * rows * widest * 2), kind: bf16}
	}
	return err
}

// widest is the longest row of scores of any tile of rows queries.
func (a *attention) widest(h heads, rows int) (ld int) {
	for row := 0; row < a.n; row += rows {
		ld = max(ld, newTile(a.spec, h.mask, row, min(rows, a.n-row)).ld)
	}
	return ld
}

// strided gives an operand of packed rows the distances of a tile.
func (a *attention) strided(o operand, t *tile, ld int) operand {
	o.ld, o.stride = ld, a.group*t.rows*ld
	return o
}

// pack gathers the tile's rows of x, one query head after the other, in the precision of products.
func (a *attention) pack(to operand, x pointer, h heads, t *tile) error {
	name, d := "kv_pack_f32", a.spec.HeadDim
	if to.kind == bf16 {
		name = "kv_pack_bf16"
	}
	return a.b.dev.launch(name, grid{x: t.rows, y: h.count * a.group}, threadsFor(d), to.at, x, t.row, t.step, h.first*a.group, a.spec.Heads*d, d)
}

// unpack puts packed rows, times c, to their places in x.
func (a *attention) unpack(x pointer, h heads, t *tile, c float32) error {
	d := a.spec.HeadDim
	return a.b.dev.launch("kv_unpack", grid{x: t.rows, y: h.count * a.group}, threadsFor(d), x, a.packed.at, t.row, h.first*a.group, a.spec.Heads*d, d, c)
}

// against: to[packed rows, columns] = alpha * rows * transpose(keys or values of the tile).
func (a *attention) against(to pointer, rows, of operand, h heads, t *tile, alpha float32) error {
	for _, s := range t.spans {
		err := a.b.dev.multiply(product{m: a.group * t.rows, n: s.hi - s.lo, k: a.spec.HeadDim,
			a: a.strided(rows, t, a.spec.HeadDim), b: of.shifted(s.lo*of.ld + h.first*of.stride), tb: true,
			c: a.strided(operand{at: to, kind: f32}.shifted(s.column), t, t.ld), alpha: alpha, batch: h.count})
		if err != nil {
			return err
		}
	}
	return nil
}

// apply: packed[packed rows, d] = x[packed rows, columns] * (keys or values of the tile).
func (a *attention) apply(x, of operand, h heads, t *tile) error {
	for i, s := range t.spans {
		err := a.b.dev.multiply(product{m: a.group * t.rows, n: a.spec.HeadDim, k: s.hi - s.lo,
			a: a.strided(x.shifted(s.column), t, t.ld), b: of.shifted(s.lo*of.ld + h.first*of.stride),
			c: a.strided(a.packed, t, a.spec.HeadDim), alpha: 1, accumulate: i > 0, batch: h.count})
		if err != nil {
			return err
		}
	}
	return nil
}

// gather: to[keys of the tile, d] += alpha * transpose(x[packed rows, columns]) * rows, summed over the group's heads.
func (a *attention) gather(to pointer, x, rows operand, h heads, t *tile, alpha float32) error {
	d, width := a.spec.HeadDim, a.spec.KVHeads*a.spec.HeadDim
	for _, s := range t.spans {
		err := a.b.dev.multiply(product{m: s.hi - s.lo, n: d, k: a.group * t.rows,
			a: a.strided(x.shifted(s.column), t, t.ld), ta: true, b: a.strided(rows, t, d),
			c: operand{at: to, kind: f32, ld: width, stride: d}.shifted(s.lo*width + h.first*d), alpha: alpha, accumulate: true, batch: h.count})
		if err != nil {
			return err
		}
	}
	return nil
}

// softmax turns scores into probabilities: where products read bfloat16, into those, and in float32 too if both is set.
func (a *attention) softmax(h heads, t *tile, both bool) error {
	var rounded pointer
	if a.kind == bf16 {
		rounded = a.probs.at
	}
	flag := 0
	if both {
		flag = 1
	}
	ca, cna, cb := t.columns()
	return a.b.dev.launch("kv_softmax", grid{x: h.count * a.group * t.rows}, threadsFor(t.width), a.scores, rounded, flag, t.ld, t.width, t.rows, a.spec.Start+t.row,
		ca, cna, cb, a.spec.Window, h.mask.Sink, h.mask.Recent)
}

// scoreScale is log2(e) / sqrt(d): scores are in units of log2.
func scoreScale(d int) float32 { return float32(math.Log2E / math.Sqrt(float64(d))) }

func (b *Backend) Attention(out, q, k, v engine.Tensor, spec engine.AttentionSpec, tap *engine.Tap) {
	checkAttention(q, k, v, &spec)
	if tap != nil && spec.Start != 0 {
		panic("attention statistics are of whole prompts")
	}
	n := q.Rows()
	b.op(func(tmp *temporaries) error {
		a, err := b.newAttention(tmp, k, v, &spec, n)
		if err != nil {
			return err
		}
		qs, to := b.read(q), b.write(out)
		fused := a.kind == bf16 && (spec.HeadDim == 64 || spec.HeadDim == 128)
		if fused && tap == nil {
			return a.flash(to, qs)
		}
		var taps *taps
		if tap != nil {
			if taps, err = newTaps(a, tap, b.read(v)); err != nil {
				return err
			}
		}
		if fused && taps.fusible() {
			if err := taps.fused(to, qs); err != nil {
				return err
			}
			return taps.finish()
		}
		for _, h := range masked(&spec) {
			rows := b.rowsFor(&spec, h, n, 4+2)
			if err := a.room(h, rows, a.widest(h, rows)); err != nil {
				return err
			}
			for row := 0; row < n; row += rows {
				t := newTile(&spec, h.mask, row, min(rows, n-row))
				if err := a.pack(a.query, qs, h, &t); err != nil {
					return err
				}
				if err := a.against(a.scores, a.query, a.keys, h, &t, scoreScale(spec.HeadDim)); err != nil {
					return err
				}
				if taps != nil && h.mask.Full() {
					err = taps.tile(h, &t)
				} else {
					err = a.softmax(h, &t, false)
				}
				if err != nil {
					return err
				}
				if err := a.apply(a.probs, a.vals, h, &t); err != nil {
					return err
				}
				if err := a.unpack(to, h, &t, 1); err != nil {
					return err
				}
			}
		}
		if taps != nil {
			return taps.finish()
		}
		return nil
	})
}

// flashRows is the number of queries of a block of the fused kernels, and of keys of a step.
const flashRows = 64

// flashOperands are the queries in bfloat16, and the masks.
func (a *attention) flashOperands(qs pointer) (query, masks pointer, err error) {
	if query, err = a.b.rounded(a.tmp, qs, a.n*a.spec.Heads*a.spec.HeadDim); err != nil {
		return 0, 0, err
	}
	var list []int32
	for kv := range a.spec.KVHeads {
		m := a.spec.Mask(kv)
		list = append(list, int32(m.Sink), int32(m.Recent))
	}
	masks, err = a.tmp.ints(list)
	return query, masks, err
}

// flash computes attention in one kernel, on keys and values in bfloat16.
func (a *attention) flash(to, qs pointer) error {
	query, masks, err := a.flashOperands(qs)
	if err != nil {
		return err
	}
	d := a.spec.HeadDim
	shared := 5 * flashRows * d * 2 // queries, and keys and values of two steps
	return a.b.dev.launchShared(fmt.Sprintf("kv_flash_%d", d), grid{x: (a.n + flashRows - 1) / flashRows, y: a.spec.Heads}, 128, shared, to, query, a.keys.at, a.vals.at,
		masks, a.n, a.spec.Start+a.n, a.spec.Start, a.spec.Heads, a.spec.KVHeads, a.spec.Window, scoreScale(d))
}

// With P the probabilities and dP = dout v^T: dS = P * (dP - sum_j P dP), dq = dS k / sqrt(d), dk = dS^T q / sqrt(d), dv = P^T dout.
// Probabilities are computed again, tile by tile.
func (b *Backend) AttentionBackward(dq, dk, dv, dout, q, k, v, out engine.Tensor, spec engine.AttentionSpec) {
	checkAttention(q, k, v, &spec)
	if spec.Start != 0 {
		panic("the gradient of attention is of whole prompts")
	}
	n := q.Rows()
	c := float32(1 / math.Sqrt(float64(spec.HeadDim)))
	b.op(func(tmp *temporaries) error {
		a, err := b.newAttention(tmp, k, v, &spec, n)
		if err != nil {
			return err
		}
		qs, grad := b.read(q), b.read(dout)
		toQ, toK, toV := b.write(dq), b.write(dk), b.write(dv)
		for _, p := range []pointer{toK, toV} {
			if err := b.dev.fill(p, 0, 4*n*k.Cols()); err != nil {
				return err
			}
		}
		for _, h := range masked(&spec) {
			rows := b.rowsFor(&spec, h, n, 4+2+4+2)
			if err := a.room(h, rows, a.widest(h, rows)); err != nil {
				return err
			}
			if err := a.backward(h, rows, qs, grad, toQ, toK, toV, c); err != nil {
				return err
			}
		}
		return nil
	})
}

func (a *attention) backward(h heads, rows int, qs, grad, toQ, toK, toV pointer, c float32) error {
	count, d, n, widest := h.count*a.group, a.spec.HeadDim, a.n, a.widest(h, rows)
	gradient := operand{kind: a.kind, ld: d}
	var err error
	if gradient.at, err = a.tmp.get(count * rows * d * a.kind.bytes()); err != nil {
		return err
	}
	dscores, err := a.tmp.get(count * rows * widest * 4)
	if err != nil {
		return err
	}
	ds, rounded := operand{at: dscores, kind: f32}, pointer(0)
	if a.kind == bf16 {
		if rounded, err = a.tmp.get(count * rows * widest * 2); err != nil {
			return err
		}
		ds = operand{at: rounded, kind: bf16}
	}
	for row := 0; row < n; row += rows {
		t := newTile(a.spec, h.mask, row, min(rows, n-row))
		for _, step := range []func() error{
			func() error { return a.pack(a.query, qs, h, &t) },
			func() error { return a.pack(gradient, grad, h, &t) },
			func() error { return a.against(a.scores, a.query, a.keys, h, &t, scoreScale(d)) },
			func() error { return a.softmax(h, &t, true) },
			func() error { return a.against(dscores, gradient, a.vals, h, &t, 1) },
			func() error { return a.gather(toV, a.probs, gradient, h, &t, 1) },
			func() error {
				return a.b.dev.launch("kv_softmax_back", grid{x: count * t.rows}, threadsFor(t.width), dscores, rounded, a.scores, t.ld, t.width)
			},
			func() error { return a.apply(ds, a.keys, h, &t) },
			func() error { return a.unpack(toQ, h, &t, c) },
			func() error { return a.gather(toK, ds, a.query, h, &t, c) },
		} {
			if err := step(); err != nil {
				return err
			}
		}
	}
	return nil
}
