package eval

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestScore(t *testing.T) {
	for _, c := range []struct {
		name, text, gold string
		expected         []string
		right, exact     bool
		share            float64
	}{
		{"plain", "orange", "orange", []string{"orange"}, true, true, 1},
		{"white space around", "  orange\n", " orange", []string{"orange"}, true, true, 1},
		{"case", "Orange", "orange", []string{"oRANGE"}, true, false, 1},
		{"within a sentence", "The key is\u00a0the\n\n red   fox.", "the red fox", []string{"the red  fox"}, true, false, 1},
		{"within a word", "oranges", "orange", []string{"orange"}, true, false, 1},
		{"nothing", "", "orange", []string{"orange"}, false, false, 0},
		{"gold empty", "", "", []string{"orange"}, false, false, 0},
		{"expects nothing", "orange", "orange", nil, false, true, 0},
		{"expects white space", "a b", "a b", []string{" "}, false, true, 0},
		{"expects white space too", "a b", "a b", []string{"a", "\n"}, false, true, 0.5},
		{"number with commas", "It is 1,234,567.", "1234567", []string{"1234567"}, true, false, 1},
		{"expected with commas", "It is 1234567", "1,234,567", []string{"1,234,567"}, true, false, 1},
		{"two numbers of three digits", "123,456", "123, 456", []string{"123", "456"}, true, false, 1},
		{"two numbers without a blank", "12345,67890", "12345 67890", []string{"12345", "67890"}, true, false, 1},
		{"no joined number from two", "12345,67890", "x", []string{"1234567890"}, false, false, 0},
		{"no joined number from short groups", "1,2,3", "x", []string{"123"}, false, false, 0},
		{"trailing comma", "12,", "12", []string{"12"}, true, false, 1},
		{"comma before a word", "12,abc", "12", []string{"12,abc"}, true, false, 1},
		{"a longer number", "3121", "12", []string{"12"}, false, false, 0},
		{"a longer number first", "312 and 12", "12", []string{"12"}, true, false, 1},
		{"overlapping tries", "111 11", "11", []string{"11"}, true, false, 1},
		{"zeros in front", "0012", "12", []string{"12"}, false, false, 0},
		{"a decimal fraction is another matter", "12.5", "12", []string{"12"}, true, false, 1},
		{"digits beside letters", "key12end", "12", []string{"12"}, true, false, 1},
		{"two of three", "red, blue", "red green blue", []string{"red", "green", "blue"}, false, false, 2.0 / 3},
		{"a place serves two", "the red fox", "", []string{"red", "red fox"}, true, false, 1},
		{"one expected twice", "7", "7 7", []string{"7", "7"}, true, false, 1},
		{"combining accent", "cafe\u0301", "caf\u00e9", []string{"CAF\u00c9"}, true, false, 1},
		{"broken UTF-8", "\xff\xfeorange\xc3", "orange", []string{"orange"}, true, false, 1},
		{"broken UTF-8 expected", "orange", "\xff", []string{"\xff"}, false, false, 0},
		{"UUID", "ID: 3F2504E0-4F89-11D3-9A0C-0305E82C3301", "", []string{"3f2504e0-4f89-11d3-9a0c-0305e82c3301"}, true, false, 1},
		{"UUID with a digit more", "3f2504e0-4f89-11d3-9a0c-0305e82c33012", "", []string{"3f2504e0-4f89-11d3-9a0c-0305e82c3301"}, false, false, 0},
		{"full stop behind", "orange.", "orange", []string{"orange"}, true, false, 1},
	} {
		if got := Score(c.text, c.gold, c.expected); got != (Scored{c.right, c.exact, c.share}) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

func FuzzScore(f *testing.F) {
	f.Add("a 1,234 b", "1234")
	f.Add("\xff,,,1,", "1,")
	f.Add("İstanbul 5", "i̇stanbul")
	f.Fuzz(func(t *testing.T, text, answer string) {
		s := Score(text, answer, []string{answer})
		if s.Right != (s.Share == 1) || s.Exact && normalise(answer) != "" && !s.Right {
			t.Errorf("Score(%q, %q) = %+v", text, answer, s)
		}
		// Words around the answer do not take it away.
		if got := Score("so: "+answer+" .", answer, []string{answer}); normalise(answer) != "" && !got.Right {
			t.Errorf("%q does not occur in itself: %+v", answer, got)
		}
		if strings.Count(joinNumbers(text), ",") > strings.Count(text, ",") {
			t.Error("more commas than before")
		}
	})
}

func TestArgmax(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct {
		logits []float64
		want   int
	}{
		{nil, -1}, {[]float64{nan}, -1}, {[]float64{-inf, -inf}, -1}, {[]float64{-5}, 0}, {[]float64{1, 3, 3, 2}, 1}, {[]float64{nan, -1, nan, -1}, 1}, {[]float64{0, inf}, 1},
		{[]float64{0, math.Copysign(0, -1)}, 0},
	} {
		if got := Argmax(c.logits); got != c.want {
			t.Errorf("Argmax(%v) = %d, want %d", c.logits, got, c.want)
		}
	}
}

func TestLogProbRankOfBadLogits(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct {
		logits []float64
		gold   int32
	}{{nil, 0}, {[]float64{1}, 1}, {[]float64{1}, -1}, {[]float64{1, nan}, 0}, {[]float64{nan, 1}, 0}, {[]float64{1, inf}, 0}, {[]float64{-inf, -inf}, 0}} {
		if lp, rank := LogProbRank(c.logits, c.gold); !math.IsNaN(lp) || rank != 0 {
			t.Errorf("LogProbRank(%v, %d) = %v, %d", c.logits, c.gold, lp, rank)
		}
	}
	if lp, rank := LogProbRank([]float64{0, -inf}, 1); !math.IsInf(lp, -1) || rank != 2 {
		t.Errorf("an excluded token: %v, %d", lp, rank)
	}
	for _, c := range []struct {
		p, q []float64
		want float64
	}{
		{[]float64{0, 0}, []float64{0}, nan}, {nil, nil, nan}, {[]float64{0, nan}, []float64{0, 0}, nan}, {[]float64{0, 0}, []float64{nan, 0}, nan}, {[]float64{inf, 0}, []float64{0, 0}, nan},
		{[]float64{0, 0}, []float64{0, -inf}, inf}, {[]float64{0, -inf}, []float64{0, -inf}, 0}, {[]float64{0, -inf}, []float64{0, 0}, math.Ln2},
	} {
		if got := KL(c.p, c.q); got != c.want && !(math.IsNaN(got) && math.IsNaN(c.want)) {
			t.Errorf("KL(%v, %v) = %v, want %v", c.p, c.q, got, c.want)
		}
	}
}

// TestLogitsProperties: probabilities sum to 1, a shift of all logits changes nothing, ranks are a sorting, KL is not
// negative and 0 of itself.
func TestLogitsProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		n := 1 + r.IntN(40)
		scale := math.Pow(10, r.Float64()*4-1)
		shift := 1e4 * r.NormFloat64()
		p, q, moved := make([]float64, n), make([]float64, n), make([]float64, n)
		for i := range p {
			p[i], q[i] = math.Round(scale*r.NormFloat64()*8)/8, scale*r.NormFloat64()
			moved[i] = p[i] + shift
		}
		var sum float64
		sorted := slices.Clone(p)
		slices.Sort(sorted)
		slices.Reverse(sorted)
		for i := range p {
			lp, rank := LogProbRank(p, int32(i))
			sum += math.Exp(lp)
			if lp > 0 || rank != slices.Index(sorted, p[i])+1 {
				t.Fatalf("token %d of %v: %v, %d", i, p, lp, rank)
			}
			if other, otherRank := LogProbRank(moved, int32(i)); math.Abs(other-lp) > 1e-10 || otherRank != rank {
				t.Fatalf("a shift by %v changes %v to %v, rank %d to %d", shift, lp, other, rank, otherRank)
			}
		}
		if math.Abs(sum-1) > 1e-12 {
			t.Fatalf("probabilities sum to %v", sum)
		}
		if lp, rank := LogProbRank(p, int32(Argmax(p))); rank != 1 || lp < -math.Log(float64(n))-1e-12 {
			t.Fatalf("the most probable token: %v, %d", lp, rank)
		}
		if kl := KL(p, p); kl != 0 {
			t.Fatalf("KL of itself is %v", kl)
		}
		if kl := KL(p, q); kl < 0 || math.IsNaN(kl) {
			t.Fatalf("KL(%v, %v) = %v", p, q, kl)
		}
		if kl := KL(p, moved); kl > 1e-9 {
			t.Fatalf("KL of shifted logits is %v", kl)
		}
	}
}

func benchmarkRows(n, rows int) [][]float64 {
	r := rand.New(rand.NewPCG(3, 4))
	out := make([][]float64, rows)
	for i := range out {
		out[i] = make([]float64, n)
		for j := range out[i] {
			out[i][j] = 3 * r.NormFloat64()
		}
	}
	return out
}

// A step of 40 sequences with a vocabulary of 49152.
func BenchmarkLogProbRank(b *testing.B) {
	rows := benchmarkRows(49152, 40)
	b.ReportAllocs()
	for b.Loop() {
		for i, row := range rows {
			LogProbRank(row, int32(i))
		}
	}
}

func BenchmarkKL(b *testing.B) {
	rows := benchmarkRows(49152, 41)
	b.ReportAllocs()
	for b.Loop() {
		for _, row := range rows[1:] {
			KL(rows[0], row)
		}
	}
}
