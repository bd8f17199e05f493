package ref

import (
	"math"

	"github.com/kvprofile/kvprofile/internal/engine"
)

func (b *Backend[T]) StorePages(pages *engine.Pages, table []int32, rows []int32, k, v engine.Tensor, kvHead int) {
	keys, values := host[T](pages.Keys), host[T](pages.Values)
	d := keys.cols
	lane := engine.Lane{Table: table}
	for slot, row := range rows {
		if row >= 0 {
			at := lane.Row(slot, pages.Block)
			copy(keys.row(at), host[T](k).row(int(row))[kvHead*d:])
			copy(values.row(at), host[T](v).row(int(row))[kvHead*d:])
		}
	}
}

func (b *Backend[T]) MovePages(pages *engine.Pages, from, to []int) {
	for _, t := range []*Tensor[T]{host[T](pages.Keys), host[T](pages.Values)} {
		old := append([]T(nil), t.Data...)
		for i, f := range from {
			copy(t.row(to[i]), old[f*t.cols:(f+1)*t.cols])
		}
	}
}

func (b *Backend[T]) PagedAttention(out, q, k, v engine.Tensor, pages *engine.Pages, lanes [][]engine.Lane, table *engine.Rotary, spec engine.AttentionSpec) {
	o, qs, ks, vs := host[T](out), host[T](q), host[T](k), host[T](v)
	keys, values := host[T](pages.Keys), host[T](pages.Values)
	d, group := spec.HeadDim, spec.Heads/spec.KVHeads
	rotated := func(x []T, position int) []T {
		y := append([]T(nil), x...)
		if position >= 0 {
			rotate(y, table, position, 1)
		}
		return y
	}
	for r, row := range lanes {
		for kv := range row {
			at := row[kv].Row(row[kv].Write, pages.Block)
			copy(keys.row(at), rotated(ks.row(r)[kv*d:(kv+1)*d], row[kv].Key))
			copy(values.row(at), vs.row(r)[kv*d:(kv+1)*d])
		}
	}
	clear(o.Data)
	for r, row := range lanes {
		for h := range spec.Heads {
			lane := &row[h/group]
			query := rotated(qs.row(r)[h*d:(h+1)*d], lane.Query)
			var scores []T
			top := T(math.Inf(-1))
			each(lane, func(slot int) {
				key := keys.row(lane.Row(slot, pages.Block))
				if lane.Rotate != nil {
					key = rotated(key, int(lane.Rotate[slot]))
				}
				scores = append(scores, T(1/math.Sqrt(float64(d)))*dot(query, key))
				top = max(top, scores[len(scores)-1])
			})
			var z T
			for i, s := range scores {
				scores[i] = T(math.Exp(float64(s - top)))
				z += scores[i]
			}
			i := 0
			each(lane, func(slot int) {
				p := scores[i] / z
				i++
				axpy(o.row(r)[h*d:(h+1)*d], p, values.row(lane.Row(slot, pages.Block)))
				if lane.Probabilities != nil {
					lane.Probabilities[h%group][slot] = float32(p)
				}
			})
		}
	}
}

// each calls f for every slot that a lane sees.
func each(l *engine.Lane, f func(slot int)) {
	for _, s := range l.Spans {
		for slot := s.Lo; slot < s.Hi; slot++ {
			f(slot)
		}
	}
}
