package eval

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/internal/stats"
)

// near compares with what SciPy computed, by relative difference.
func near(a, b, tolerance float64) bool {
	return a == b || math.Abs(a-b) <= tolerance*max(math.Abs(a), math.Abs(b))
}

// TestSciPy compares with scripts/fixtures_stats.py.
func TestSciPy(t *testing.T) {
	text, err := os.ReadFile("testdata/stats.json")
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Lower []struct {
			K, M    int
			Lower95 float64
		}
		McNemar []struct {
			OnlyA    int `json:"only_a"`
			OnlyB    int `json:"only_b"`
			Greater  float64
			TwoSided float64 `json:"two_sided"`
		}
		SignFlip []struct {
			Differences   []float64
			Exact         bool
			Greater, Less float64
		} `json:"sign_flip"`
		Logits []struct {
			Full, Planned []float64
			Gold          int32
			LogProb       float64
			Rank          int
			KL            float64
		}
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	if len(want.Lower) < 50 || len(want.McNemar) < 10 || len(want.SignFlip) < 9 || len(want.Logits) < 6 {
		t.Fatalf("the fixture has %d, %d, %d and %d cases", len(want.Lower), len(want.McNemar), len(want.SignFlip), len(want.Logits))
	}
	for _, c := range want.Lower {
		if got, ok := stats.Lower95(c.K, c.M); !ok || !near(got, c.Lower95, 1e-8) {
			t.Errorf("Lower95(%d, %d) = %v, %v, SciPy has %v", c.K, c.M, got, ok, c.Lower95)
		}
	}
	for _, c := range want.McNemar {
		if greater, both := McNemar(c.OnlyA, c.OnlyB); !near(greater, c.Greater, 1e-9) || !near(both, c.TwoSided, 1e-9) {
			t.Errorf("McNemar(%d, %d) = %v, %v, SciPy has %v, %v", c.OnlyA, c.OnlyB, greater, both, c.Greater, c.TwoSided)
		}
	}
	for i, c := range want.SignFlip {
		greater, less := SignFlip(c.Differences, 1)
		tolerance := 1e-12
		if !c.Exact { // both are drawn: within 4 standard errors of the smaller sample
			tolerance = 4 * math.Sqrt(c.Greater*c.Less/drawnSigns)
		}
		if math.Abs(greater-c.Greater) > tolerance || math.Abs(less-c.Less) > tolerance {
			t.Errorf("SignFlip of case %d = %v, %v, SciPy has %v, %v", i, greater, less, c.Greater, c.Less)
		}
	}
	for i, c := range want.Logits {
		if lp, rank := LogProbRank(c.Full, c.Gold); math.Abs(lp-c.LogProb) > 1e-12*(1+math.Abs(c.LogProb)) || rank != c.Rank {
			t.Errorf("LogProbRank of case %d = %v, %d, SciPy has %v, %d", i, lp, rank, c.LogProb, c.Rank)
		}
		if kl := KL(c.Full, c.Planned); math.Abs(kl-c.KL) > 1e-12*(1+c.KL) {
			t.Errorf("KL of case %d = %v, SciPy has %v", i, kl, c.KL)
		}
	}
}

func TestLower95(t *testing.T) {
	for _, c := range [][2]int{{0, 0}, {1, 0}, {-1, 3}, {4, 3}, {0, -1}} {
		if b, ok := stats.Lower95(c[0], c[1]); ok || b != 0 {
			t.Errorf("Lower95(%d, %d) = %v, %v", c[0], c[1], b, ok)
		}
	}
	// The bound is the share with which k or more successes have a probability of 5 %: summed from the definition.
	tail := func(k, m int, p float64) float64 {
		sum := 0.0
		for i := k; i <= m; i++ {
			a, _ := math.Lgamma(float64(m + 1))
			b, _ := math.Lgamma(float64(i + 1))
			c, _ := math.Lgamma(float64(m - i + 1))
			sum += math.Exp(a - b - c + float64(i)*math.Log(p) + float64(m-i)*math.Log1p(-p))
		}
		return sum
	}
	for m := 1; m <= 70; m++ {
		before := -1.0
		for k := 0; k <= m; k++ {
			b, ok := stats.Lower95(k, m)
			if !ok || !(b > before) || b > float64(k)/float64(m) {
				t.Fatalf("Lower95(%d, %d) = %v after %v", k, m, b, before)
			}
			if k > 0 && math.Abs(tail(k, m, b)-stats.Alpha) > 1e-9 {
				t.Fatalf("Lower95(%d, %d) = %v, where the tail is %v", k, m, b, tail(k, m, b))
			}
			before = b
		}
	}
}

func TestLeastTrials(t *testing.T) {
	for share, want := range map[float64]int{0.95: 59, 0.98: 149, 0.9: 29, 0.5: 5, 0.05: 1, 0.01: 1, 0.99: 299, 0.999: 2995} {
		if got := LeastTrials(share); got != want {
			t.Errorf("LeastTrials(%v) = %d, want %d", share, got, want)
		}
	}
}

// TestHolm: by the closure principle a hypothesis is rejected when every set that holds it is rejected by Bonferroni's
// rule, so that its corrected p-value is the largest over these sets of |S| times their least p-value.
func TestHolm(t *testing.T) {
	if got := Holm(nil); len(got) != 0 {
		t.Errorf("of nothing: %v", got)
	}
	r := rand.New(rand.NewPCG(5, 6))
	for range 300 {
		p := make([]float64, 1+r.IntN(8))
		for i := range p {
			p[i] = math.Round(100*math.Pow(r.Float64(), 3)) / 100 // with ties, 0 and 1
		}
		got := Holm(p)
		for i := range p {
			want := 0.0
			for set := range 1 << len(p) {
				if set>>i&1 == 0 {
					continue
				}
				size, least := 0.0, 1.0
				for j, v := range p {
					if set>>j&1 == 1 {
						size++
						least = min(least, v)
					}
				}
				want = max(want, min(1, size*least))
			}
			if math.Abs(got[i]-want) > 1e-12 {
				t.Fatalf("Holm(%v) = %v, [%d] must be %v", p, got, i, want)
			}
		}
	}
}

func TestSignFlip(t *testing.T) {
	if a, b := SignFlip(nil, 1); a != 1 || b != 1 {
		t.Errorf("of nothing: %v, %v", a, b)
	}
	if a, b := SignFlip(make([]float64, 100), 1); a != 1 || b != 1 {
		t.Errorf("of zeros: %v, %v", a, b)
	}
	if a, b := SignFlip([]float64{1, math.NaN()}, 1); !math.IsNaN(a) || !math.IsNaN(b) {
		t.Errorf("of NaN: %v, %v", a, b)
	}
	if a, _ := SignFlip([]float64{1, math.Inf(1)}, 1); !math.IsNaN(a) {
		t.Errorf("of Inf: %v", a)
	}
	r := rand.New(rand.NewPCG(7, 8))
	for _, n := range []int{3, 14, 15, 64, 65, 300} {
		d, negated := make([]float64, n), make([]float64, n)
		for i := range d {
			d[i] = r.NormFloat64() + 0.1
			negated[i] = -d[i]
		}
		a, b := SignFlip(d, 1)
		c, e := SignFlip(negated, 1)
		if n <= exactPairs && (a != e || b != c) {
			t.Errorf("%d: %v, %v and with other signs %v, %v", n, a, b, c, e)
		}
		if again, _ := SignFlip(d, 1); again != a {
			t.Errorf("%d: not reproducible", n)
		}
		if a < 1.0/(drawnSigns+1) || a+b < 1 {
			t.Errorf("%d: %v, %v", n, a, b)
		}
	}
}

// TestLevels: where there is no difference, tests reject at most as often as they promise.
func TestLevels(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	const trials = 1500
	var flips, mcnemar, uncovered int
	for range trials {
		d := make([]float64, 13)
		for i := range d {
			d[i] = r.NormFloat64() * (1 + float64(i))
		}
		if p, _ := SignFlip(d, 1); p < stats.Alpha {
			flips++
		}
		var a, k int
		for range 40 {
			a += r.IntN(2)
		}
		if p, _ := McNemar(a, 40-a); p < stats.Alpha {
			mcnemar++
		}
		for range 60 {
			if r.Float64() < 0.9 {
				k++
			}
		}
		if b, _ := stats.Lower95(k, 60); b > 0.9 {
			uncovered++
		}
	}
	// 5 % of 1500 are 75, with a standard deviation of 8.4.
	for name, n := range map[string]int{"sign flips": flips, "McNemar": mcnemar, "lower bound": uncovered} {
		if n > 75+26 {
			t.Errorf("%s: %d of %d rejections", name, n, trials)
		}
	}
	if flips < 75-26 {
		t.Errorf("sign flips: only %d of %d rejections", flips, trials)
	}
}

func TestCompare(t *testing.T) {
	r := synthetic()
	good, bad := r.Find("steady", 0.25), r.Find("window", 0.25)
	c, err := Compare(good, bad, 1)
	if err != nil {
		t.Fatal(err)
	}
	var only, lost int
	var gain float64
	for i, o := range good.Outcomes {
		if o.Right && !bad.Outcomes[i].Right {
			only++
		}
		if !o.Right && bad.Outcomes[i].Right {
			lost++
		}
		gain += o.LogProb - bad.Outcomes[i].LogProb
	}
	if c.N != len(good.Outcomes) || c.OnlyA != only || c.OnlyB != lost || !near(c.Gain, gain/float64(c.N), 1e-9) || c.A != "steady at 25 %" {
		t.Errorf("%+v", c)
	}
	if !(c.RightMore < 1e-3 && c.LikelierGold < 1e-3 && c.RightFewer > 0.9 && c.UnlikelierGold > 0.9) {
		t.Errorf("the better one is not seen as better: %+v", c)
	}
	short := *bad
	short.Outcomes = short.Outcomes[1:]
	if _, err := Compare(good, &short, 1); err == nil {
		t.Error("runs over other prompts are compared")
	}
	moved := *bad
	moved.Outcomes = slices.Clone(bad.Outcomes)
	moved.Outcomes[3].Sample++
	if _, err := Compare(good, &moved, 1); err == nil {
		t.Error("runs over another prompt are compared")
	}
}

func BenchmarkSignFlip(b *testing.B) {
	r := rand.New(rand.NewPCG(7, 8))
	d := make([]float64, 400)
	for i := range d {
		d[i] = r.NormFloat64()
	}
	for b.Loop() {
		SignFlip(d, 1)
	}
}
