package distill

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Head names a KV head.
type Head struct {
	Layer  int `json:"layer"`
	KVHead int `json:"kv_head"`
}

// Selection is the choice of the heads that keep the whole cache.
type Selection struct {
	Full [][]bool // [layer][KV head]
	// Count is the number of them.
	Count int
	// Cut is the lowest value among them (1 when there are none).
	Cut float64
	// Tied lists, in order of layer and KV head, the heads that have the value Cut when some of them are full and some
	// are not: among these only the stated rule decided, not the value.
	Tied []Head
}

// Threshold makes full every head with a value >= tau.
func Threshold(values [][]float64, tau float64) Selection {
	n := 0
	for _, vs := range values {
		for _, v := range vs {
			if v >= tau {
				n++
			}
		}
	}
	return top(values, n)
}

// Sparsest makes streaming the share sparsity in [0,1] of the heads, rounded to the nearest number of them, and full
// the others: those with the largest values. Among equal values the lower layer, then the lower KV head, is full.
// Sparsity is a share of heads, not of the bytes of a cache.
func Sparsest(values [][]float64, sparsity float64) (Selection, error) {
	if !(sparsity >= 0 && sparsity <= 1) {
		return Selection{}, fmt.Errorf("sparsity must lie in [0,1], not %g", sparsity)
	}
	n := 0
	for _, vs := range values {
		n += len(vs)
	}
	return top(values, n-int(math.Round(sparsity*float64(n)))), nil
}

// ranked lists all heads, the largest value first; equal values in order of layer and KV head.
func ranked(values [][]float64) []Head {
	var heads []Head
	for l, vs := range values {
		for k := range vs {
			heads = append(heads, Head{l, k})
		}
	}
	slices.SortStableFunc(heads, func(a, b Head) int {
		return cmp.Compare(values[b.Layer][b.KVHead], values[a.Layer][a.KVHead])
	})
	return heads
}

// top makes full the n first of the ranked heads.
func top(values [][]float64, n int) Selection {
	s := Selection{Count: n, Cut: 1, Full: make([][]bool, len(values))}
	for l := range values {
		s.Full[l] = make([]bool, len(values[l]))
	}
	heads := ranked(values)
	at := func(i int) float64 { return values[heads[i].Layer][heads[i].KVHead] }
	for i := range n {
		s.Full[heads[i].Layer][heads[i].KVHead] = true
		s.Cut = at(i)
	}
	if n > 0 && n < len(heads) && at(n) == s.Cut {
		for i, h := range heads {
			if at(i) == s.Cut {
				s.Tied = append(s.Tied, h)
			}
		}
	}
	return s
}

// Ties lists the values that more than one head has, the most frequent first, then the largest.
func Ties(values [][]float64) []Tie {
	var ties []Tie
	for _, h := range ranked(values) {
		v := values[h.Layer][h.KVHead]
		if n := len(ties); n > 0 && ties[n-1].Value == v {
			ties[n-1].Heads = append(ties[n-1].Heads, h)
			continue
		}
		ties = append(ties, Tie{Value: v, Heads: []Head{h}})
	}
	ties = slices.DeleteFunc(ties, func(t Tie) bool { return len(t.Heads) < 2 })
	slices.SortStableFunc(ties, func(a, b Tie) int { return cmp.Compare(len(b.Heads), len(a.Heads)) })
	return ties
}
