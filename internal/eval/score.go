package eval

import (
	"math"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Scored says how well a generated text answers.
type Scored struct {
	Right bool    // all expected answers occur
	Exact bool    // the text is the gold answer, white space around it aside
	Share float64 // which part of the expected answers occur, in [0,1]
}

// Score compares a generated text with the answers that are expected in it; gold is the whole answer as it should read.
//
// An expected answer occurs if it is a part of the text when both are normalised: to Unicode's form NFC, to lower case,
// every run of white space to one blank, none at the ends. It occurs too if it does once the commas between groups of
// three digits are gone from both ("1,234,567"; in "123,456" they may also part two numbers, hence both readings). An
// answer that begins or ends with a digit must not stand in a longer run of digits: 12 does not occur in 312. Each
// expected answer is looked for by itself, so that the same place may do for two; an empty one never occurs, and a
// prompt that expects nothing is never right.
func Score(text, gold string, expected []string) Scored {
	var s Scored
	s.Exact = strings.TrimSpace(text) == strings.TrimSpace(gold) && strings.TrimSpace(gold) != ""
	plain := normalise(text)
	joined := joinNumbers(plain)
	found := 0
	for _, e := range expected {
		e = normalise(e)
		if occurs(plain, e) || occurs(joined, joinNumbers(e)) {
			found++
		}
	}
	if len(expected) > 0 {
		s.Share = float64(found) / float64(len(expected))
	}
	s.Right = found > 0 && found == len(expected)
	return s
}

// normalise lowers the case and makes every run of white space one blank.
func normalise(s string) string {
	return strings.Join(strings.FieldsFunc(strings.ToLower(norm.NFC.String(s)), unicode.IsSpace), " ")
}

func isDigit(b byte) bool { return b >= '0' && b <= '9' }

// joinNumbers takes the commas out of numbers that are written in groups of three digits. A run of digits and commas of
// any other form, such as 12345,67890 or 1,2,3, stays as it is.
func joinNumbers(s string) string {
	if !strings.Contains(s, ",") {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); {
		if !isDigit(s[i]) {
			out.WriteByte(s[i])
			i++
			continue
		}
		end := i
		for end < len(s) && (isDigit(s[end]) || s[end] == ',' && end+1 < len(s) && isDigit(s[end+1])) {
			end++
		}
		groups := strings.Split(s[i:end], ",")
		grouped := len(groups[0]) <= 3
		for _, g := range groups[1:] {
			grouped = grouped && len(g) == 3
		}
		if grouped {
			out.WriteString(strings.Join(groups, ""))
		} else {
			out.WriteString(s[i:end])
		}
		i = end
	}
	return out.String()
}

// occurs says whether part stands in text, not within a longer run of digits where it begins or ends with one.
func occurs(text, part string) bool {
	if part == "" {
		return false
	}
	for from := 0; from <= len(text); {
		i := strings.Index(text[from:], part)
		if i < 0 {
			return false
		}
		start := from + i
		end := start + len(part)
		cutBefore := start > 0 && isDigit(part[0]) && isDigit(text[start-1])
		cutAfter := end < len(text) && isDigit(part[len(part)-1]) && isDigit(text[end])
		if !cutBefore && !cutAfter {
			return true
		}
		_, size := utf8.DecodeRuneInString(text[start:])
		from = start + size
	}
	return false
}

type float interface{ ~float32 | ~float64 }

// expFloor is the distance below the largest logit, in nats, from which on a token's probability counts as 0: all tokens
// of a vocabulary of a million together then have less than 1e-15.
const expFloor = -50

// LogProbRank returns the natural logarithm of the probability that the logits of a step give to a token, at most 0,
// and the token's rank: 1 + the number of tokens with a higher logit. A logit of -Inf is a probability of 0. With a NaN
// or +Inf among the logits, none that is finite, or a token that is not in them, the logarithm is NaN and the rank 0.
func LogProbRank[F float](logits []F, gold int32) (logprob float64, rank int) {
	if gold < 0 || int(gold) >= len(logits) {
		return math.NaN(), 0
	}
	top := largest(logits)
	z := sumExp(logits, top)
	if math.IsNaN(z) {
		return math.NaN(), 0
	}
	g := logits[gold]
	rank = 1
	for _, v := range logits {
		if v > g {
			rank++
		}
	}
	// The largest term of z is 1, so that its logarithm is at least 0, and g is at most top.
	return float64(g) - top - math.Log(z), rank
}

// KL is the Kullback-Leibler divergence in nats of the predictions of two steps, given by their logits: the sum over
// tokens of p ln(p/q), p with the full cache and q with the plan. It is at least 0, and 0 for equal logits; +Inf if q
// excludes a token that p does not, NaN where [LogProbRank] has no value or the numbers of logits differ. Tokens with
// less than e^-50 of the probability of p's most probable one count as excluded by p.
func KL[F float](full, planned []F) float64 {
	if len(full) != len(planned) {
		return math.NaN()
	}
	// With p = e^a / zp and q = e^b / zq, a and b relative to their largest, the sum is
	// (sum of e^a (a - b)) / zp - ln zp + ln zq.
	topP, topQ := largest(full), largest(planned)
	zq := sumExp(planned, topQ)
	if math.IsNaN(zq) {
		return math.NaN()
	}
	var zp, sum float64
	for i, v := range full {
		a := float64(v) - topP
		if a < expFloor {
			continue // also keeps 0 * Inf out
		}
		e := math.Exp(a)
		zp += e
		sum += e * (a - (float64(planned[i]) - topQ))
	}
	return max(0, sum/zp-math.Log(zp)+math.Log(zq)) // of NaN: NaN
}

// Argmax returns the index of the largest logit, of equal ones the lowest; -1 if none is above -Inf. NaN is not above
// anything.
func Argmax[F float](logits []F) int {
	best, at := F(math.Inf(-1)), -1
	for i, v := range logits {
		if v > best {
			best, at = v, i
		}
	}
	return at
}

// largest is the largest logit that is no NaN, -Inf for none.
func largest[F float](logits []F) float64 {
	best := F(math.Inf(-1))
	for _, v := range logits {
		if v > best {
			best = v
		}
	}
	return float64(best)
}

// sumExp is the sum of e^(logit - top); NaN if top is infinite or a logit is NaN.
func sumExp[F float](logits []F, top float64) float64 {
	if math.IsInf(top, 0) {
		return math.NaN()
	}
	var sum float64
	for _, v := range logits {
		if d := float64(v) - top; !(d < expFloor) {
			sum += math.Exp(d)
		}
	}
	return sum
}
