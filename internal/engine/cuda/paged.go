package cuda

import (
	"fmt"
	"math"

	"github.com/kvprofile/kvprofile/internal/engine"
)

func (b *Backend) StorePages(pages *engine.Pages, table []int32, rows []int32, k, v engine.Tensor, kvHead int) {
	lane, d := engine.Lane{Table: table}, pages.Keys.Cols()
	var from, to []int32
	for slot, row := range rows {
		if row >= 0 {
			from, to = append(from, row), append(to, int32(lane.Row(slot, pages.Block)))
		}
	}
	if len(from) == 0 {
		return
	}
	b.op(func(tmp *temporaries) error {
		f, err := tmp.ints(from)
		if err != nil {
			return err
		}
		t, err := tmp.ints(to)
		if err != nil {
			return err
		}
		for _, x := range [][2]engine.Tensor{{pages.Keys, k}, {pages.Values, v}} {
			if err := b.dev.launch("kv_copy_rows", grid{x: len(from)}, threadsFor(d), b.read(x[0]), b.read(x[1]), t, f, x[1].Cols(), kvHead*d, d); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *Backend) MovePages(pages *engine.Pages, from, to []int) {
	if len(from) == 0 {
		return
	}
	d := pages.Keys.Cols()
	narrowed := func(v []int) []int32 {
		out := make([]int32, len(v))
		for i, x := range v {
			out[i] = int32(x)
		}
		return out
	}
	b.op(func(tmp *temporaries) error {
		f, err := tmp.ints(narrowed(from))
		if err != nil {
			return err
		}
		t, err := tmp.ints(narrowed(to))
		if err != nil {
			return err
		}
		rows, err := tmp.get(4 * len(from) * d)
		if err != nil {
			return err
		}
		for _, x := range []engine.Tensor{pages.Keys, pages.Values} {
			at := b.read(x)
			if err := b.dev.launch("kv_copy_rows", grid{x: len(from)}, threadsFor(d), rows, at, pointer(0), f, d, 0, d); err != nil {
				return err
			}
			if err := b.dev.launch("kv_copy_rows", grid{x: len(from)}, threadsFor(d), at, rows, t, pointer(0), d, 0, d); err != nil {
				return err
			}
		}
		return nil
	})
}

// chunkSlots is the number of slots that a block takes of a lane. Sums are made per chunk, so that results depend on the slots but
// not on where pages lie.
const chunkSlots = 128

// decodePlan is what the kernels know of a step's lanes, [row * KV heads + KV head].
type decodePlan struct {
	write, key, query []int32 // per lane
	table, rotate     []int32 // per lane: where its page table and its positions begin; -1 without positions
	first, width      []int32 // per lane: where its scores begin, and how many slots it sees
	from              []int32 // per lane and one more: its first chunk
	chunks            []int32 // lane, first slot, slots, visible slots before; four per chunk
	tables, positions []int32
	scores            int // values in all
	wanted            bool
}

func newDecodePlan(lanes [][]engine.Lane, block, group int) *decodePlan {
	p := &decodePlan{}
	for _, row := range lanes {
		for i := range row {
			l, n := &row[i], int32(len(p.write))
			p.write = append(p.write, int32(l.Row(l.Write, block)))
			p.key, p.query = append(p.key, int32(l.Key)), append(p.query, int32(l.Query))
			p.table = append(p.table, int32(len(p.tables)))
			p.tables = append(p.tables, l.Table...)
			p.rotate = append(p.rotate, -1)
			if l.Rotate != nil {
				p.rotate[n] = int32(len(p.positions))
				p.positions = append(p.positions, l.Rotate...)
			}
			p.from, p.first = append(p.from, int32(len(p.chunks)/4)), append(p.first, int32(p.scores))
			seen := 0
			for _, s := range l.Spans {
				for lo := s.Lo; lo < s.Hi; lo += chunkSlots {
					count := min(chunkSlots, s.Hi-lo)
					p.chunks = append(p.chunks, n, int32(lo), int32(count), int32(seen))
					seen += count
				}
			}
			p.width = append(p.width, int32(seen))
			if p.scores += group * seen; p.scores > math.MaxInt32 {
				panic(fmt.Sprintf("a decoding step with more than %d scores", math.MaxInt32))
			}
			p.wanted = p.wanted || l.Probabilities != nil
		}
	}
	p.from = append(p.from, int32(len(p.chunks)/4))
	return p
}

// upload copies everything at once and returns the addresses, in the order of the lists.
func (t *temporaries) upload(lists ...[]int32) ([]pointer, error) {
	var all []int32
	for _, l := range lists {
		all = append(all, l...)
	}
	p, err := t.ints(all)
	if err != nil {
		return nil, err
	}
	at := make([]pointer, len(lists))
	for i, l := range lists {
		at[i] = p
		p += 4 * uint64(len(l))
	}
	return at, nil
}

// PagedAttention is float32 in every precision: it is bound by reading keys and values.
func (b *Backend) PagedAttention(out, q, k, v engine.Tensor, pages *engine.Pages, lanes [][]engine.Lane, table *engine.Rotary, spec engine.AttentionSpec) {
	d, group := spec.HeadDim, spec.Heads/spec.KVHeads
	if q.Rows() != len(lanes) || q.Cols() != spec.Heads*d || k.Cols() != spec.KVHeads*d || pages.Keys.Cols() != d {
		panic(fmt.Sprintf("paged attention of %d x %d queries for %d rows of lanes, pages of %d values", q.Rows(), q.Cols(), len(lanes), pages.Keys.Cols()))
	}
	p := newDecodePlan(lanes, pages.Block, group)
	n, chunks := len(p.write), len(p.chunks)/4
	var probabilities []float32
	b.op(func(tmp *temporaries) error {
		at, err := tmp.upload(p.write, p.key, p.query, p.table, p.rotate, p.first, p.width, p.from, p.chunks, p.tables, p.positions)
		if err != nil {
			return err
		}
		write, key, query, tab, rot, first, width, from, list, tables, positions := at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], at[10]
		turn, err := b.tableOf(table)
		if err != nil {
			return err
		}
		var room [3]pointer // rotated queries, scores, sums of chunks
		for i, values := range []int{n * group * d, p.scores, chunks * group * d} {
			if room[i], err = tmp.get(4 * values); err != nil {
				return err
			}
		}
		queries, scores, partial := room[0], room[1], room[2]
		keys, values, heads := b.read(pages.Keys), b.read(pages.Values), grid{x: n, y: group}
		for _, step := range []func() error{
			func() error {
				return b.dev.launch("kv_page_write", grid{x: n}, threadsFor(d), keys, values, b.read(k), b.read(v), write, key, turn.cos, turn.sin, d)
			},
			func() error {
				return b.dev.launch("kv_page_query", heads, threadsFor(d), queries, b.read(q), query, turn.cos, turn.sin, d, scoreScale(d))
			},
			func() error {
				return b.dev.launch("kv_page_scores", grid{x: chunks}, 128, scores, keys, queries, list, tables, positions, tab, rot, first, width, turn.cos, turn.sin,
					pages.Block, group, d)
			},
			func() error { return b.dev.launch("kv_page_softmax", heads, 128, scores, first, width) },
			func() error {
				return b.dev.launch("kv_page_apply", grid{x: chunks}, threadsFor(d), partial, scores, values, list, tables, tab, first, width, pages.Block, group, d)
			},
			func() error { return b.dev.launch("kv_page_sum", heads, threadsFor(d), b.write(out), partial, from, d) },
		} {
			if err := step(); err != nil {
				return err
			}
		}
		if p.wanted {
			probabilities = make([]float32, p.scores)
			return b.getFloats(scores, probabilities)
		}
		return nil
	})
	for i := range n {
		l := &lanes[i/spec.KVHeads][i%spec.KVHeads]
		for g, to := range l.Probabilities {
			row := probabilities[int(p.first[i])+g*int(p.width[i]):]
			for _, s := range l.Spans {
				row = row[copy(to[s.Lo:s.Hi], row):]
			}
		}
	}
}
