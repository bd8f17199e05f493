package distill

import (
	"context"
	"fmt"
	"math"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// dataLightPositions is the length that mean query and key are tiled over.
const dataLightPositions = 500

// DataLight scores every KV head from a few texts, without training: the mean query and the mean key of a head before
// RoPE are tiled over 500 positions and rotated there; of the softmax of the last query, the score is the mean of the
// cumulative distribution, averaged over the query heads of the group and over the texts (the on-the-fly score of
// kvpress's DuoAttention). A head that looks at what is near scores near 0, one that looks far back scores higher.
func DataLight(ctx context.Context, m *engine.Model, texts [][]int32) (Score, error) {
	cfg := m.Config
	if len(texts) == 0 {
		return Score{}, fmt.Errorf("the data-light score needs at least one text")
	}
	freq, factor, err := cfg.Frequencies()
	if err != nil {
		return Score{}, err
	}
	score := Score{Name: ScoreDataLight, Values: make([][]float64, cfg.Layers)}
	for l := range score.Values {
		score.Values[l] = make([]float64, cfg.KVHeads)
	}
	var query, key []float64
	for i, tokens := range texts {
		err := m.Forward(ctx, &engine.Sequence{Tokens: tokens, Observe: func(p engine.Point, l int, t engine.Tensor) error {
			switch p {
			case engine.PointQuery:
				query = columnMeans(m.Backend, t)
			case engine.PointKey:
				key = columnMeans(m.Backend, t)
				for h := range cfg.Heads {
					d, kv := cfg.HeadDim, h/cfg.Group()
					s := reach(query[h*d:(h+1)*d], key[kv*d:(kv+1)*d], freq, factor)
					score.Values[l][kv] += s / float64(cfg.Group()*len(texts))
				}
			}
			return nil
		}})
		if err != nil {
			return Score{}, fmt.Errorf("text %d: %w", i, err)
		}
	}
	return score, nil
}

// columnMeans downloads in blocks of rows, so that memory does not grow with the text.
func columnMeans(b engine.Backend, t engine.Tensor) []float64 {
	mean := make([]float64, t.Cols())
	const block = 256
	buf := make([]float64, block*t.Cols())
	for lo := 0; lo < t.Rows(); lo += block {
		hi := min(lo+block, t.Rows())
		part := buf[:(hi-lo)*t.Cols()]
		b.Download(part, b.Slice(t, lo, hi))
		for i, v := range part {
			mean[i%t.Cols()] += v / float64(t.Rows())
		}
	}
	return mean
}

// reach is the mean of the cumulative distribution of the last query's attention, when every position has the query q
// and the key k before RoPE. Rotating both depends on their distance only: element j and j + d/2 of the pair turn by
// distance * freq[j].
func reach(q, k, freq []float64, factor float64) float64 {
	half := len(q) / 2
	logits := make([]float64, dataLightPositions)
	for p := range logits {
		distance := float64(dataLightPositions - 1 - p)
		var dot float64
		for j, f := range freq {
			sin, cos := math.Sincos(distance * f)
			q0, q1, k0, k1 := q[j], q[j+half], k[j], k[j+half]
			dot += (q0*k0+q1*k1)*cos + (q0*k1-q1*k0)*sin
		}
		logits[p] = dot * factor * factor / math.Sqrt(float64(len(q)))
	}
	top := math.Inf(-1)
	for _, v := range logits {
		top = math.Max(top, v)
	}
	var sum float64
	for i, v := range logits {
		logits[i] = math.Exp(v - top)
		sum += logits[i]
	}
	var cumulative, mean float64
	for _, v := range logits {
		cumulative += v / sum
		mean += cumulative / dataLightPositions
	}
	return mean
}

// GroupMean turns a score per query head, [layer][query head], into one per KV head: the mean of the group.
func GroupMean(name string, perQuery [][]float64, kvHeads int) (Score, error) {
	s := Score{Name: name}
	for l, vs := range perQuery {
		if kvHeads <= 0 || len(vs) == 0 || len(vs)%kvHeads != 0 {
			return Score{}, fmt.Errorf("score %s: layer %d has %d query heads for %d KV heads", name, l, len(vs), kvHeads)
		}
		group := len(vs) / kvHeads
		out := make([]float64, kvHeads)
		for h, v := range vs {
			out[h/group] += v / float64(group)
		}
		s.Values = append(s.Values, out)
	}
	return s, nil
}
