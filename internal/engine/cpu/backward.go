package cpu

import (
	"fmt"
	"math"
	"sort"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// partial is a chunk's share of the gradients of its KV head's keys and values, of the keys that its rows see only:
// sinks in front, then the others.
type partial struct {
	chunk
	keys   [2]span // the second follows the first in dk and dv
	dk, dv *storage
}

// at is the row of dk and dv for a key.
func (p *partial) at(key int) int {
	if key < p.keys[0].hi {
		return key - p.keys[0].lo
	}
	return p.keys[0].hi - p.keys[0].lo + key - p.keys[1].lo
}

// AttentionBackward computes the probabilities again, a strip of rows at a time, from q and k (as FlashAttention does;
// Dao et al. 2022, appendix B): with P the probabilities and dP = dout v^T, dS = P * (dP - <dout, out>) / sqrt(d),
// dq = dS k, dk = dS^T q, dv = P^T dout.
func (b *Backend) AttentionBackward(dq, dk, dv, dout, q, k, v, out engine.Tensor, spec engine.AttentionSpec) {
	n, d := q.Rows(), spec.HeadDim
	if spec.Start != 0 || k.Rows() != n || v.Rows() != n || q.Cols() != spec.Heads*d || k.Cols() != spec.KVHeads*d {
		panic(fmt.Sprintf("attention backward of %d queries at %d, %d keys, widths %d and %d", n, spec.Start, k.Rows(), q.Cols(), k.Cols()))
	}
	qs, ks, vs, os, gs := values(q), values(k), values(v), values(out), values(dout)
	gq, gk, gv := whole(dq), whole(dk), whole(dv)
	kc, kr, vc := b.packColumns(ks, n, spec.KVHeads, d), b.packRows(ks, n, spec.KVHeads, d), b.packColumns(vs, n, spec.KVHeads, d)
	defer func() { b.free(kc); b.free(kr); b.free(vc) }()

	group, width, kvWidth := spec.Heads/spec.KVHeads, spec.Heads*d, spec.KVHeads*d
	wide := b.panels(d) * b.k.cols // head dimension in whole panels
	ld := wide + 16
	parts := b.partials(&spec, n, wide)
	b.parallel(len(parts), func(ws *workspace, t int) {
		p := &parts[t]
		clear(p.dk.floats)
		clear(p.dv.floats)
		h, kv := p.head, p.head/group
		mask := spec.Mask(kv)
		var segments [2]span
		scaled, plain, grad := ws.buffer(bufQ, b.k.strip*ld), ws.buffer(bufPlain, b.k.strip*ld), ws.buffer(bufGrad, b.k.strip*ld)
		clear(plain) // columns from d on stay 0
		clear(grad)
		dqs := ws.buffer(bufOut, b.k.strip*wide)
		c := float32(1 / math.Sqrt(float64(d)))
		for row := p.lo; row < p.hi; row += b.k.strip {
			s := b.newStrip(&spec, mask, row, min(b.k.strip, p.hi-row), segments[:])
			e, dp := ws.buffer(bufScores, b.k.strip*s.ld), ws.buffer(bufGradScores, b.k.strip*s.ld)
			b.copyRows(scaled, ld, qs, width, row, s.rows, h, d, scoreScale(d))
			b.copyRows(plain, ld, qs, width, row, s.rows, h, d, 1)
			b.copyRows(grad, ld, gs, width, row, s.rows, h, d, 1)
			b.scores(&s, scaled, ld, d, kc.heads[kv].floats, e)
			b.scores(&s, grad, ld, d, vc.heads[kv].floats, dp)
			for r := range s.rows {
				z, _ := b.softmax(&spec, mask, &s, e, r, nil, nil)
				at := (row+r)*width + h*d
				mean := b.k.dot(gs[at:at+d], os[at:at+d])
				b.k.softmaxBack(e[r*s.ld:r*s.ld+s.width], dp[r*s.ld:r*s.ld+s.width], float32(1/z), mean, c)
			}
			b.apply(&s, dp, kr.heads[kv].floats, n, d, dqs, wide)
			for r := range s.rows {
				copy(gq[(row+r)*width+h*d:][:d], dqs[r*wide:])
			}
			for i, g := range s.segments {
				keys, at := min(g.hi, n)-g.lo, p.at(g.lo)*wide
				for x := 0; x < wide; x += b.k.cols {
					b.k.gemmT(keys, s.rows, dp[s.at[i]:], s.ld, plain[x:], ld, p.dk.floats[at+x:], wide, true)
					b.k.gemmT(keys, s.rows, e[s.at[i]:], s.ld, grad[x:], ld, p.dv.floats[at+x:], wide, true)
				}
			}
		}
	})

	// Add up: every key takes the shares of its group's heads and their chunks in order.
	perKV := make([][]*partial, spec.KVHeads)
	for i := range parts {
		p := &parts[i]
		perKV[p.head/group] = append(perKV[p.head/group], p)
	}
	for _, ps := range perKV {
		sort.Slice(ps, func(i, j int) bool {
			if ps[i].head != ps[j].head {
				return ps[i].head < ps[j].head
			}
			return ps[i].lo < ps[j].lo
		})
	}
	b.ranges(n, 2*width, func(lo, hi int) {
		for j := lo; j < hi; j++ {
			for kv, ps := range perKV {
				sk, sv := gk[j*kvWidth+kv*d:][:d], gv[j*kvWidth+kv*d:][:d]
				clear(sk)
				clear(sv)
				for _, p := range ps {
					if (j >= p.keys[0].lo && j < p.keys[0].hi) || (j >= p.keys[1].lo && j < p.keys[1].hi) {
						at := p.at(j) * wide
						b.k.add(sk, p.dk.floats[at:at+d])
						b.k.add(sv, p.dv.floats[at:at+d])
					}
				}
			}
		}
	})
	for _, p := range parts {
		b.memory.put(p.dk)
		b.memory.put(p.dv)
	}
}

// partials divides the rows into chunks and finds the keys that each sees.
func (b *Backend) partials(spec *engine.AttentionSpec, n, wide int) []partial {
	chunks := b.chunks(spec, n, 16)
	ps := make([]partial, len(chunks))
	for i, c := range chunks {
		var segments [2]span
		mask := spec.Mask(c.head / (spec.Heads / spec.KVHeads))
		sink, rest := span{}, span{n, 0}
		for row := c.lo; row < c.hi; row += b.k.strip {
			g := b.newStrip(spec, mask, row, min(b.k.strip, c.hi-row), segments[:]).segments
			last := g[len(g)-1]
			rest = span{min(rest.lo, last.lo), max(rest.hi, min(last.hi, n))}
			if len(g) == 2 && sink.hi == 0 {
				sink = g[0]
			} else if len(g) == 2 {
				sink = span{min(sink.lo, g[0].lo), max(sink.hi, g[0].hi)}
			}
		}
		if sink.hi > rest.lo {
			sink, rest.lo = span{}, min(sink.lo, rest.lo)
		}
		ps[i].chunk, ps[i].keys = c, [2]span{sink, rest}
		rows := ps[i].keys[0].hi - ps[i].keys[0].lo + rest.hi - rest.lo
		ps[i].dk, ps[i].dv = b.memory.get(rows*wide), b.memory.get(rows*wide)
	}
	return ps
}
