package compile

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
)

// priorOfHeads orders heads by their gates.
func priorOfHeads(heads []head) (p prior) {
	for _, h := range heads {
		p.value = append(p.value, h.gate)
	}
	return p
}

// randomFamily makes heads with tied gates, some low options, and layer budgets whose sums are exact.
func randomFamily(r *rand.Rand) *family {
	layers, kvHeads, block := 1+r.IntN(6), 1+r.IntN(4), 16
	blocks := 8 + r.IntN(120)
	n := blocks*block - r.IntN(block)
	full := (n + block - 1) / block * block
	least := 3
	table := make([][]int, blocks+1)
	weights := make([]float64, layers)
	for l := range weights {
		weights[l] = 0.2 + r.Float64()
	}
	for b := least; b <= blocks; b++ {
		// Any split of b*layers will do; this one is not monotone in every layer, as largest remainders are not.
		left, row := b*layers, make([]int, layers)
		for l := range row {
			row[l] = least
			left -= least
		}
		for left > 0 {
			l := r.IntN(layers)
			if row[l] < blocks {
				row[l]++
				left--
			}
		}
		table[b] = row
	}
	var heads []head
	for l := range layers {
		for k := range kvHeads {
			h := head{layer: l, kv: k, gate: float64(r.IntN(4)) / 4, full: full, curve: make([]float64, blocks+1)}
			for b := 1; b <= blocks; b++ {
				h.curve[b] = 1 - math.Pow(0.9, float64(b)*weights[l])
			}
			h.curve[blocks] = 1
			if r.IntN(2) == 0 {
				h.low = &option{kind: kindStreaming + kind(r.IntN(2)), tokens: min(full, block*(1+r.IntN(blocks))), recovery: 0.95 + r.Float64()/20}
			}
			heads = append(heads, h)
		}
	}
	return newFamily(heads, priorOfHeads(heads), block, table, least, least+r.IntN(blocks))
}

func TestBudgetIsKeptAndUsed(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		f := randomFamily(r)
		all, floor := 0, math.MaxInt
		largest := 0
		for _, h := range f.heads {
			all += h.full
			largest = max(largest, h.full)
		}
		for _, stage := range f.chain() {
			for _, s := range stage {
				floor = min(floor, tokens(f.at(s)))
			}
		}
		last := 0
		for share := 0.0; share <= 1; share += 0.01 {
			target := int(share * float64(all))
			s, met := f.forBudget(target)
			n := tokens(f.at(s))
			if met != (floor <= target) {
				t.Fatalf("target %d, floor %d: met %v", target, floor, met)
			}
			if !met {
				if n != floor {
					t.Fatalf("target %d cannot be met: keeps %d, nearest is %d", target, n, floor)
				}
				continue
			}
			if n > target {
				t.Fatalf("keeps %d of at most %d", n, target)
			}
			if n < last {
				t.Fatalf("more was asked for, less is kept: %d after %d", n, last)
			}
			last = n
			// One more step costs at most a head in full, or one more block for the heads of a layer and, where
			// the layers' budgets move against each other, for those of the others.
			step := largest
			if s.retrieval == 0 {
				step = max(step, 2*len(f.heads)*f.block)
			}
			if target-n > step && n < all {
				t.Fatalf("leaves %d unused of %d (%d heads of %d): state %+v", target-n, target, len(f.heads), largest, s)
			}
		}
		if s, met := f.forBudget(all); !met || tokens(f.at(s)) != all {
			t.Fatalf("a budget of everything keeps %d of %d", tokens(f.at(s)), all)
		}
	}
}

func TestRecoveryIsReachedAtTheLeastCost(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		f := randomFamily(r)
		for _, least := range []bool{false, true} {
			last := 0
			for target := 0.5; target <= 1; target += 0.05 {
				s, met := f.forRecovery(target, least)
				if !met {
					t.Fatalf("recovery %g is not met though full heads recover all", target)
				}
				options := f.at(s)
				n := tokens(options)
				if got := recovery(options, least); got < target {
					t.Fatalf("recovers %g, asked %g", got, target)
				}
				if n < last {
					t.Fatalf("more recovery was asked for, less is kept: %d after %d", n, last)
				}
				last = n
				for _, stage := range f.chain() {
					for _, other := range stage {
						if o := f.at(other); tokens(o) < n && recovery(o, least) >= target {
							t.Fatalf("%+v keeps less than %+v and recovers enough", other, s)
						}
					}
				}
			}
		}
	}
}

// Gates that are tied are taken by layer, then KV head.
func TestTiesAreBrokenByLayerThenHead(t *testing.T) {
	var heads []head
	for l := range 2 {
		for k := range 3 {
			heads = append(heads, head{layer: l, kv: k, gate: 0.5, full: 64, curve: make([]float64, 5)})
		}
	}
	heads[4].gate = 0.9
	table := [][]int{nil, {1, 1}, {2, 2}, {3, 3}, {4, 4}}
	f := newFamily(heads, priorOfHeads(heads), 16, table, 1, 1)
	s, _ := f.forBudget(3*64 + 3*16)
	var full []string
	for i, o := range f.at(s) {
		if o.kind == kindFull {
			full = append(full, fmt.Sprint(heads[i].layer, heads[i].kv))
		}
	}
	if want := []string{"0 0", "0 1", "1 1"}; !reflect.DeepEqual(full, want) {
		t.Errorf("full heads %v, want %v", full, want)
	}
}
