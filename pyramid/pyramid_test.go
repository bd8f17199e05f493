package pyramid

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

func codes(r Result) (out []Code) {
	for _, w := range r.Warnings {
		out = append(out, w.Code)
	}
	return out
}

func mustAllocate(t *testing.T, q Request) Result {
	t.Helper()
	r, err := Allocate(q)
	if err != nil {
		t.Fatalf("%+v: %v", q, err)
	}
	return r
}

// PyramidKV's formula in exact fractions (scripts/fixtures_pyramid.py).
func TestArithmeticReference(t *testing.T) {
	text, err := os.ReadFile("testdata/arithmetic.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Layers, Length, Total, Window int
		Beta                          float64
		Budgets                       []int
	}
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 20 {
		t.Fatalf("%d cases", len(cases))
	}
	for _, c := range cases {
		r := mustAllocate(t, Request{Mode: Arithmetic, Layers: c.Layers, Length: c.Length, Total: c.Total, Window: c.Window, Beta: c.Beta})
		if !slices.Equal(r.Budgets, c.Budgets) {
			t.Errorf("%d layers, %d of %d tokens, window %d, beta %g:\n%v, want\n%v", c.Layers, c.Total, c.Length, c.Window, c.Beta, r.Budgets, c.Budgets)
		}
	}
}

// The ends of the schedule, by the formula: the first layer gets (2 - 1/beta) b, the last b / beta, and the window.
func TestArithmeticEnds(t *testing.T) {
	r := mustAllocate(t, Request{Mode: Arithmetic, Layers: 32, Length: 1 << 20, Total: 32 * 2008})
	if r.Budgets[0] != 3900+8 || r.Budgets[31] != 100+8 || r.Warnings != nil {
		t.Errorf("%d..%d, %v", r.Budgets[0], r.Budgets[31], r.Warnings)
	}
}

// Neighbours differ by one factor, and the ends by 2 beta - 1.
func TestGeometric(t *testing.T) {
	r := mustAllocate(t, Request{Mode: Geometric, Layers: 5, Length: 1 << 30, Total: 5e6, Window: NoWindow, Beta: 8.5})
	for l := range 4 {
		if f := float64(r.Budgets[l]) / float64(r.Budgets[l+1]); math.Abs(f-2) > 1e-4 {
			t.Errorf("layers %d and %d differ by %g, want 16^(1/4)", l, l+1, f)
		}
	}
}

func TestMeasuredIsProportional(t *testing.T) {
	for _, mode := range []Mode{Keys, Variation, Entropy} {
		r := mustAllocate(t, Request{Mode: mode, Layers: 3, Length: 10000, Total: 6000, Weights: []float64{1, 2, 3}, Floor: NoFloor, Window: NoWindow})
		if !slices.Equal(r.Budgets, []int{1000, 2000, 3000}) {
			t.Errorf("%s: %v", mode, r.Budgets)
		}
		// Half of the average, 1000, to all; the rest by weight.
		r = mustAllocate(t, Request{Mode: mode, Layers: 3, Length: 10000, Total: 6000, Weights: []float64{1, 2, 3}, Floor: .5})
		if !slices.Equal(r.Budgets, []int{1500, 2000, 2500}) || r.Warnings != nil {
			t.Errorf("%s with a floor: %v %v", mode, r.Budgets, r.Warnings)
		}
		// Weights of any size.
		r = mustAllocate(t, Request{Mode: mode, Layers: 2, Length: 10000, Total: 400, Weights: []float64{math.MaxFloat64 / 2, math.MaxFloat64 / 6}, Floor: NoFloor, Window: NoWindow})
		if !slices.Equal(r.Budgets, []int{300, 100}) {
			t.Errorf("%s with large weights: %v", mode, r.Budgets)
		}
	}
}

func TestWarnings(t *testing.T) {
	for _, c := range []struct {
		name    string
		q       Request
		want    []Code
		budgets []int
	}{
		{"fits", Request{Mode: Arithmetic, Layers: 3, Length: 1000, Total: 300}, nil, nil},
		{"too much", Request{Mode: Arithmetic, Layers: 2, Length: 100, Total: 300}, []Code{AboveLength, Even}, []int{100, 100}},
		{"all", Request{Mode: Arithmetic, Layers: 2, Length: 100, Total: 200}, []Code{Even}, []int{100, 100}},
		{"too little", Request{Mode: Arithmetic, Layers: 3, Length: 100, Total: 10}, []Code{BelowWindow}, []int{4, 3, 3}},
		{"nothing", Request{Mode: Arithmetic, Layers: 2, Length: 100, Total: 0}, []Code{BelowWindow, Even}, []int{0, 0}},
		{"windows only", Request{Mode: Arithmetic, Layers: 2, Length: 100, Total: 16}, []Code{Even}, []int{8, 8}},
		{"short context", Request{Mode: Arithmetic, Layers: 2, Length: 100, Total: 150}, []Code{Flattened}, []int{100, 50}},
		{"rounded", Request{Mode: Arithmetic, Layers: 2, Length: 1000, Total: 250, Block: 16}, []Code{Rounded, Clamped}, []int{224, 16}},
		{"one layer", Request{Mode: Arithmetic, Layers: 1, Length: 1000, Total: 250}, nil, []int{250}},
		{"window above length", Request{Mode: Geometric, Layers: 2, Length: 5, Total: 9}, []Code{BelowWindow}, []int{5, 4}},
		{"sliding windows", Request{Mode: Arithmetic, Layers: 4, Length: 1000, Total: 800, Limits: []int{100, 0, 100, 0}}, []Code{Clamped}, nil},
		{"equal weights", Request{Mode: Keys, Layers: 2, Length: 1000, Total: 300, Weights: []float64{2, 2}}, []Code{Even}, []int{150, 150}},
		{"uniform", Request{Mode: Uniform, Layers: 2, Length: 1000, Total: 300}, nil, []int{150, 150}},
		{"one need", Request{Mode: Keys, Layers: 3, Length: 100, Total: 270, Weights: []float64{0, 1, 0}, Floor: NoFloor}, []Code{Clamped}, []int{85, 100, 85}},
	} {
		r := mustAllocate(t, c.q)
		if !slices.Equal(codes(r), c.want) {
			t.Errorf("%s: %v, want %v", c.name, r.Warnings, c.want)
		}
		if c.budgets != nil && !slices.Equal(r.Budgets, c.budgets) {
			t.Errorf("%s: %v, want %v", c.name, r.Budgets, c.budgets)
		}
	}
}

func TestBadRequests(t *testing.T) {
	good := Request{Mode: Keys, Layers: 2, Length: 100, Total: 50, Weights: []float64{1, 2}}
	for name, alter := range map[string]func(*Request){
		"mode":     func(q *Request) { q.Mode = "steep" },
		"layers":   func(q *Request) { q.Layers = 0 },
		"length":   func(q *Request) { q.Length = 0 },
		"total":    func(q *Request) { q.Total = -1 },
		"beta":     func(q *Request) { q.Beta = .5 },
		"beta NaN": func(q *Request) { q.Beta = math.NaN() },
		"block":    func(q *Request) { q.Block = -16 },
		"floor":    func(q *Request) { q.Floor = 1.5 },
		"weights":  func(q *Request) { q.Weights = []float64{1} },
		"negative": func(q *Request) { q.Weights = []float64{1, -1} },
		"NaN":      func(q *Request) { q.Weights = []float64{1, math.NaN()} },
		"zero":     func(q *Request) { q.Weights = []float64{0, 0} },
		"infinite": func(q *Request) { q.Weights = []float64{1, math.Inf(1)} },
		"limits":   func(q *Request) { q.Limits = []int{1, 2, 3} },
		"limit":    func(q *Request) { q.Limits = []int{1, -2} },
	} {
		q := good
		alter(&q)
		var bad *RequestError
		if _, err := Allocate(q); !errors.As(err, &bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// checkProperties: the sum is exact, budgets stay in bounds and whole blocks, the order is right, and equal budgets
// are said to be equal.
func checkProperties(t *testing.T, q Request) {
	t.Helper()
	r, err := Allocate(q)
	if err != nil {
		var bad *RequestError
		if !errors.As(err, &bad) {
			t.Errorf("%+v: %v", q, err)
		}
		return
	}
	q, _ = q.resolve()
	blocks, keep := q.Total/q.Block, 0
	equalLimits := true
	for l := range q.Layers {
		most := q.Length
		if q.Limits != nil && q.Limits[l] > 0 {
			most = min(most, q.Limits[l])
			equalLimits = false
		}
		most = (most + q.Block - 1) / q.Block
		keep += most
		if b := r.Budgets[l]; b < 0 || b%q.Block != 0 || b/q.Block > most {
			t.Errorf("%+v: layer %d gets %d", q, l, b)
		}
		below := slices.Contains(codes(r), BelowWindow)
		if least := min((q.Window+q.Block-1)/q.Block, most); !below && r.Budgets[l] < least*q.Block {
			t.Errorf("%+v: layer %d gets %d, less than its window", q, l, r.Budgets[l])
		}
	}
	if want := min(blocks, keep) * q.Block; r.Total() != want {
		t.Errorf("%+v: the sum is %d, want %d", q, r.Total(), want)
	}
	if blocks > keep && !slices.Contains(codes(r), AboveLength) || q.Total%q.Block != 0 && !slices.Contains(codes(r), Rounded) {
		t.Errorf("%+v: warnings %v", q, r.Warnings)
	}
	if even := slices.Min(r.Budgets) == slices.Max(r.Budgets) && q.Layers > 1 && q.Mode != Uniform; even != slices.Contains(codes(r), Even) {
		t.Errorf("%+v: budgets %v with warnings %v", q, r.Budgets, r.Warnings)
	}
	if equalLimits {
		for l := 1; l < q.Layers; l++ {
			if q.Mode.Measured() {
				if a, b := q.Weights[l-1], q.Weights[l]; a > b && r.Budgets[l-1] < r.Budgets[l] || a < b && r.Budgets[l-1] > r.Budgets[l]+q.Block || a == b && r.Budgets[l-1] < r.Budgets[l] {
					t.Errorf("%+v: budgets %v do not follow the weights", q, r.Budgets)
				}
			} else if r.Budgets[l] > r.Budgets[l-1] {
				t.Errorf("%+v: budgets %v grow", q, r.Budgets)
			}
		}
	}
}

func TestProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	pick := func(v ...int) int { return v[r.IntN(len(v))] }
	for range 4000 {
		q := Request{Mode: Modes()[r.IntN(len(Modes()))], Layers: 1 + r.IntN(pick(2, 40, 130)), Length: 1 + r.IntN(pick(3, 100, 5000, 200_000)),
			Window: pick(NoWindow, 1, 8, 64), Beta: 1 + r.Float64()*float64(pick(0, 1, 30)), Block: pick(1, 1, 16, 32, 1000), Floor: pickFloat(r, NoFloor, .25, 1)}
		q.Total = r.IntN(q.Layers*q.Length + q.Length + 1)
		if r.IntN(3) == 0 {
			q.Total /= 20
		}
		for range q.Layers {
			q.Weights = append(q.Weights, math.Exp(r.NormFloat64()*float64(pick(0, 1, 10))))
		}
		if r.IntN(4) == 0 {
			q.Weights[r.IntN(q.Layers)] = 0
		}
		if r.IntN(4) == 0 {
			for range q.Layers {
				q.Limits = append(q.Limits, r.IntN(pick(1, 50, 4000)))
			}
		}
		checkProperties(t, q)
		if t.Failed() {
			return
		}
	}
}

func pickFloat(r *rand.Rand, v ...float64) float64 { return v[r.IntN(len(v))] }

func FuzzAllocate(f *testing.F) {
	f.Add(uint8(1), uint16(32), uint32(4096), uint64(4096), int16(8), 20., uint16(16), .25, 1., uint32(0))
	f.Add(uint8(3), uint16(2), uint32(1), uint64(1<<40), int16(-1), 1., uint16(1), 1., 1e308, uint32(1))
	f.Add(uint8(2), uint16(1000), uint32(1<<31), uint64(12345678901), int16(999), 1e300, uint16(7), -1., 0., uint32(77))
	f.Fuzz(func(t *testing.T, mode uint8, layers uint16, length uint32, total uint64, window int16, beta float64, block uint16, floor, weight float64, limit uint32) {
		q := Request{Mode: Modes()[int(mode)%len(Modes())], Layers: int(layers) % 2000, Length: int(length), Total: int(total % (largest + 2)),
			Window: int(window), Beta: beta, Block: int(block), Floor: floor}
		for l := range q.Layers {
			q.Weights = append(q.Weights, math.Abs(math.Sin(float64(l)))*weight)
			if limit > 0 {
				q.Limits = append(q.Limits, int(limit)*(l%3))
			}
		}
		checkProperties(t, q)
	})
}
