package ref

import (
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// visible reports whether query position i sees key j.
func visible(spec engine.AttentionSpec, m engine.Mask, i, j int) bool {
	return j <= i && (spec.Window == 0 || i-j < spec.Window) && (m.Full() || j < m.Sink || i-j < m.Recent)
}

// probabilities returns the softmax row of query row s of a query head over all keys, in the backend's type.
func probabilities[T Float](q, k *Tensor[T], spec engine.AttentionSpec, head, s int) []T {
	kv := head / (spec.Heads / spec.KVHeads)
	mask := spec.Mask(kv)
	i, d := spec.Start+s, spec.HeadDim
	p := make([]T, k.rows)
	scale, top := T(1/math.Sqrt(float64(d))), T(math.Inf(-1))
	for j := 0; j <= i; j++ {
		if visible(spec, mask, i, j) {
			p[j] = scale * dot(q.row(s)[head*d:(head+1)*d], k.row(j)[kv*d:(kv+1)*d])
			top = max(top, p[j])
		}
	}
	var z T
	for j := range p {
		if visible(spec, mask, i, j) {
			p[j] = T(math.Exp(float64(p[j] - top)))
			z += p[j]
		}
	}
	for j := range p {
		p[j] /= z
	}
	return p
}

func (b *Backend[T]) Attention(out, q, k, v engine.Tensor, spec engine.AttentionSpec, tap *engine.Tap) {
	o, qs, ks, vs := host[T](out), host[T](q), host[T](k), host[T](v)
	clear(o.Data)
	d := spec.HeadDim
	if tap != nil {
		tap.Heads, tap.KV = make([]engine.HeadStats, spec.Heads), make([]engine.KVStats, spec.KVHeads)
		for kv := range tap.KV {
			tap.KV[kv] = valueNorms(vs, kv*d, d, tap.Prompt)
		}
	}
	for h := range spec.Heads {
		kv := h / (spec.Heads / spec.KVHeads)
		maps := make([][]float64, 0, o.rows)
		for s := range o.rows {
			p := probabilities(qs, ks, spec, h, s)
			row := o.row(s)[h*d : (h+1)*d]
			for j, w := range p {
				axpy(row, w, vs.row(j)[kv*d:(kv+1)*d])
			}
			if tap != nil && spec.Mask(kv).Full() {
				full := make([]float64, len(p))
				for j, w := range p {
					full[j] = float64(w)
				}
				maps = append(maps, full)
			}
		}
		if tap != nil && spec.Mask(kv).Full() {
			tap.Heads[h] = Statistics(tap, maps, slices.Contains(tap.Exact, h))
		}
	}
}

func valueNorms[T Float](v *Tensor[T], from, d, prompt int) (s engine.KVStats) {
	for i := range prompt {
		x := v.row(i)[from : from+d]
		n := math.Sqrt(float64(dot(x, x)))
		s.ValueNorm += n / float64(prompt)
		s.ValueNormMax = max(s.ValueNormMax, n)
	}
	return s
}

// Statistics computes what a tap asks for from one head's whole attention map, by the definitions.
func Statistics(tap *engine.Tap, rows [][]float64, exact bool) engine.HeadStats {
	keys, n := len(rows[0]), tap.Prompt
	sums := func(weight func(i, j int) float64) []float32 {
		out := make([]float32, keys)
		for j := range out {
			var s float64
			for i := range rows {
				if w := weight(i, j); w != 0 {
					s += w * rows[i][j]
				}
			}
			out[j] = float32(s)
		}
		return out
	}
	in := func(ok bool) float64 {
		if ok {
			return 1
		}
		return 0
	}
	st := engine.HeadStats{Total: sums(func(i, _ int) float64 { return in(i < n) })}
	for _, far := range tap.Far {
		st.Far = append(st.Far, sums(func(i, j int) float64 { return in(i < n && i-j >= far) }))
	}
	for _, w := range tap.Windows {
		st.Window = append(st.Window, sums(func(i, _ int) float64 { return in(i < n && i >= n-w) }))
	}
	if len(tap.Answer) > 0 {
		st.Answer = sums(func(i, _ int) float64 { return in(slices.Contains(tap.Answer, i)) })
		for _, i := range tap.Answer {
			best := 0
			for j, p := range rows[i] {
				if p > rows[i][best] {
					best = j
				}
			}
			st.Top = append(st.Top, int32(best))
		}
	}
	for _, w := range tap.Recent {
		var mass float64
		for i := range n {
			for j := max(0, i-w+1); j <= i; j++ {
				mass += rows[i][j] / float64(n)
			}
		}
		st.Recent = append(st.Recent, mass)
	}
	for i := range n {
		for _, p := range rows[i] {
			if p > 0 {
				st.Entropy -= p * math.Log(p) / float64(n)
			}
		}
	}
	if lo := max(0, n-tap.VarianceWindow); tap.VarianceWindow > 0 {
		m := float64(n - lo)
		for j := range keys {
			var s, s2 float64
			for i := lo; i < n; i++ {
				s += rows[i][j] / m
			}
			for i := lo; i < n; i++ {
				s2 += (rows[i][j] - s) * (rows[i][j] - s) / m
			}
			st.Variance += s2
		}
	}
	if tap.KeysEvery > 0 {
		st.Keys = make([]float64, len(tap.Masses))
		sampled := 0
		for i := tap.KeysEvery - 1; i < n; i += tap.KeysEvery {
			sampled++
			sorted := slices.Clone(rows[i])
			slices.SortFunc(sorted, func(a, b float64) int {
				switch {
				case a > b:
					return -1
				case a < b:
					return 1
				}
				return 0
			})
			for x, mass := range tap.Masses {
				var s float64
				count := 0
				for count < len(sorted) && s < mass {
					s += sorted[count]
					count++
				}
				st.Keys[x] += float64(count)
			}
		}
		for x := range st.Keys {
			st.Keys[x] /= float64(max(1, sampled))
		}
	}
	if tiles, width := engine.MapGrid(n, tap.Map); tiles > 0 {
		st.Map, st.MapSize, st.MapTile = make([]float32, tiles*tiles), tiles, width
		for a := range tiles {
			for c := range tiles {
				hi := min((a+1)*width, n)
				var s float64
				for i := a * width; i < hi; i++ {
					for j := c * width; j < min((c+1)*width, n); j++ {
						s += rows[i][j]
					}
				}
				st.Map[a*tiles+c] = float32(s / float64(hi-a*width))
			}
		}
	}
	if exact {
		for i := range n {
			for _, p := range rows[i][:n] {
				st.Exact = append(st.Exact, float32(p))
			}
		}
	}
	return st
}

// With P the probabilities and dP = dout v^T: dS = P * (dP - sum_j P dP), dq = dS k / sqrt(d), dk = dS^T q / sqrt(d).
func (b *Backend[T]) AttentionBackward(dq, dk, dv, dout, q, k, v, out engine.Tensor, spec engine.AttentionSpec) {
	gq, gk, gv, g := host[T](dq), host[T](dk), host[T](dv), host[T](dout)
	qs, ks, vs := host[T](q), host[T](k), host[T](v)
	clear(gq.Data)
	clear(gk.Data)
	clear(gv.Data)
	d := spec.HeadDim
	scale := T(1 / math.Sqrt(float64(d)))
	for h := range spec.Heads {
		kv := h / (spec.Heads / spec.KVHeads)
		at := func(t *Tensor[T], i, head int) []T { return t.row(i)[head*d : (head+1)*d] }
		for i := range qs.rows {
			p := probabilities(qs, ks, spec, h, i)
			dp := make([]T, len(p))
			var mean T
			for j := range p {
				dp[j] = dot(at(g, i, h), at(vs, j, kv))
				mean += p[j] * dp[j]
			}
			for j, w := range p {
				if w == 0 {
					continue
				}
				ds := w * (dp[j] - mean) * scale
				axpy(at(gq, i, h), ds, at(ks, j, kv))
				axpy(at(gk, j, kv), ds, at(qs, i, h))
				axpy(at(gv, j, kv), w, at(g, i, h))
			}
		}
	}
}
