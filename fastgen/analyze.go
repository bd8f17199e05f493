package fastgen

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvprofile/kvprofile/profile"
)

// Analyze picks the policies of all KV heads. tool is the version of the program, for the artefact.
//
// A sample's recovery of a policy is that of its group of query heads by Options.Group; what counts is the recovery
// over all samples by Options.Samples. Where no policy but full reaches the threshold the answer is full.
func Analyze(ctx context.Context, rec Record, tool string, o Options) (*Result, error) {
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	meta, samples := rec.Meta(), rec.Samples()
	local, err := localIndex(meta.Grid, o.LocalRatio)
	if err != nil {
		return nil, err
	}
	digest, err := rec.Digest()
	if err != nil {
		return nil, err
	}
	r := &Result{Format: formatName, Version: formatVersion, Tool: tool, Record: digest, Model: meta.Model, Options: o,
		Lattice: o.Lattice(), Layers: make([][]Head, meta.Model.Layers)}
	r.Options.Threads = 0
	r.Special, r.Punctuation = classShares(samples)
	enough := make([]int, meta.Model.Layers)
	err = eachLayer(ctx, meta.Model.Layers, o.Threads, func(layer int) error {
		heads := make([][]seen, meta.Model.KVHeads)
		for i := range samples {
			if err := ctx.Err(); err != nil {
				return err
			}
			columns, err := rec.Columns(i, layer)
			if err != nil {
				return err
			}
			for kv := range heads {
				group := columns[kv*meta.Model.Group() : (kv+1)*meta.Model.Group()]
				heads[kv] = append(heads[kv], look(&samples[i], group, local, o))
			}
		}
		for _, s := range heads {
			h, ok := o.judge(s)
			r.Layers[layer] = append(r.Layers[layer], h)
			if ok {
				enough[layer]++
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	r.agree(enough)
	return r, nil
}

// localIndex finds the record's lists of a local ratio.
func localIndex(g profile.Grid, ratio float64) (int, error) {
	if i := slices.Index(g.LocalRatios, ratio); i >= 0 {
		return i, nil
	}
	return 0, &OptionError{"local ratio", fmt.Sprintf("%g is not in the record, which has %v; record the attention again with it", ratio, g.LocalRatios)}
}

// eachLayer calls f for every layer on some goroutines and returns the error of the lowest layer that has one.
func eachLayer(ctx context.Context, layers, threads int, f func(layer int) error) error {
	errs := make([]error, layers)
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(threads, layers) {
		wg.Go(func() {
			for l := range next {
				errs[l] = f(l)
			}
		})
	}
	for l := range layers {
		if ctx.Err() != nil {
			errs[l] = ctx.Err()
			break
		}
		next <- l
	}
	close(next)
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func classShares(samples []profile.Sample) (special, punctuation Share) {
	for i := range samples {
		s := &samples[i]
		var count [profile.Punctuation + 1]int
		for _, c := range s.Classes[:s.Prompt] {
			count[c]++
		}
		special.add(count[profile.Special], s.Prompt, len(samples))
		punctuation.add(count[profile.Punctuation], s.Prompt, len(samples))
	}
	return special, punctuation
}

func (s *Share) add(count, of, samples int) {
	x := float64(count) / float64(of)
	s.Mean += x / float64(samples)
	s.Max = max(s.Max, x)
}

// The rows that policies are judged by.
const (
	rowsPrompt = iota
	rowsFirst
	rowsSecond
	rowsAnswers
	views
)

// seen is what one sample says of one KV head: recoveries by rows and lattice point (nil where there are no such
// rows), and the share of tokens that a lattice point keeps.
type seen struct {
	recovery [views][]float64
	kept     [steps]float64
}

// look judges the lattice on one sample for the query heads of one group.
func look(s *profile.Sample, group []profile.Columns, local int, o Options) seen {
	n := s.Prompt
	half, distance := profile.HalfRow(n), profile.Tokens(o.LocalRatio, n)
	var out seen
	var by [views][][]float64 // recoveries by query head
	var at [rowsAnswers]view
	for i := range group {
		c := &group[i]
		far := c.Far[local]
		_, second := profile.SplitFar(far, c.Half, distance)
		early := make([]float32, half)
		for j := range early {
			early[j] = max(c.Total[j]-c.Half[j], 0)
		}
		at[rowsPrompt].add(n, c.Total, far)
		at[rowsFirst].add(half, early, c.FirstFar[local])
		at[rowsSecond].add(n-half, c.Half, second)
	}
	for v := range at {
		if at[v].rows == 0 {
			continue
		}
		kept := at[v].columns(s.Classes, o.FrequentRatio)
		for h := range group {
			by[v] = append(by[v], at[v].recovery(h, kept))
		}
		if v == rowsPrompt {
			for step := range out.kept {
				out.kept[step] = float64(keptAtEnd(kept, step, distance)) / float64(n)
			}
			if len(s.Answers) > 0 {
				for h := range group {
					by[rowsAnswers] = append(by[rowsAnswers], answerRecovery(s, group[h].Answer, kept, distance))
				}
			}
		}
	}
	for v := range by {
		if by[v] == nil {
			continue
		}
		out.recovery[v] = make([]float64, steps)
		for step := range steps {
			heads := make([]float64, len(group))
			for h := range group {
				heads[h] = by[v][h][step]
			}
			out.recovery[v][step] = o.Group.over(heads)
		}
	}
	return out
}

// view is what a set of rows says: sums over them by query head and column.
type view struct {
	rows       int
	total, far [][]float32
}

func (v *view) add(rows int, total, far []float32) {
	v.rows = rows
	v.total, v.far = append(v.total, total), append(v.far, far)
}

// columns says for every column from which step of the lattice on it is kept as one; StepFull where only full keeps
// it. Frequent columns are those with the largest attention of the whole group, the lowest ones on a tie, so that the
// KV head keeps one set.
func (v *view) columns(classes []profile.Class, ratio float64) []int {
	n := len(v.total[0])
	kept := make([]int, n)
	sums := make([]float64, n)
	var rest []int
	for j := range kept {
		switch classes[j] {
		case profile.Special:
			kept[j] = StepSpecial
		case profile.Punctuation:
			kept[j] = StepPunctuation
		default:
			kept[j] = StepFull
			rest = append(rest, j)
			for _, t := range v.total {
				sums[j] += float64(t[j])
			}
		}
	}
	slices.SortFunc(rest, func(a, b int) int {
		return cmp.Or(cmp.Compare(sums[b], sums[a]), cmp.Compare(a, b))
	})
	for _, j := range rest[:min(profile.Tokens(ratio, n), len(rest))] {
		kept[j] = StepFrequent
	}
	return kept
}

// recovery returns the recovery of every lattice point for one query head. Local keys make a row's mass, less what is
// far from the row: the local point keeps all of that, and the columns' far attention.
func (v *view) recovery(head int, kept []int) []float64 {
	var total [StepLocal]float64
	var sum, lost float64
	for j, step := range kept {
		if step < StepLocal {
			total[step] += float64(v.total[head][j])
		} else {
			lost += float64(v.far[head][j])
		}
	}
	out := make([]float64, 0, steps)
	for step := range StepLocal {
		sum += total[step]
		out = append(out, sum/float64(v.rows))
	}
	return nest(append(out, 1-lost/float64(v.rows), 1))
}

// nest removes what rounding does to recoveries: each point keeps what the one before keeps, and none more than all.
func nest(recovery []float64) []float64 {
	least := 0.0
	for i, x := range recovery {
		least = min(max(least, x), 1)
		recovery[i] = least
	}
	return recovery
}

// answerRecovery is the recovery of every lattice point at the answer rows, with the columns that the prompt chose.
// Answer tokens are kept by their classes; the local point keeps them all, and the local keys of the prompt's last row.
func answerRecovery(s *profile.Sample, answer []float32, kept []int, distance int) []float64 {
	var mass [steps]float64
	for j, x := range answer {
		step := StepFull
		switch {
		case j < s.Prompt:
			step = kept[j]
		case s.Classes[j] == profile.Special:
			step = StepSpecial
		case s.Classes[j] == profile.Punctuation:
			step = StepPunctuation
		}
		if j >= s.Prompt-distance {
			step = min(step, StepLocal)
		}
		mass[step] += float64(x)
	}
	out := make([]float64, 0, steps)
	var sum float64
	for step := range StepFull {
		sum += mass[step]
		out = append(out, sum/float64(len(s.Answers)))
	}
	return nest(append(out, 1))
}

// keptAtEnd counts the tokens that a lattice point keeps when the prompt has ended.
func keptAtEnd(kept []int, step, distance int) (count int) {
	for j, from := range kept {
		if from <= step || step >= StepLocal && j >= len(kept)-distance || step == StepFull {
			count++
		}
	}
	return count
}

// pick returns the first lattice point that recovers enough; full always does.
func (o Options) pick(recovery []float64) int {
	return slices.IndexFunc(recovery[:StepFull], func(x float64) bool { return x >= o.Threshold })
}

// judge merges what the samples say, and reports whether the policy is enough for the answer rows.
func (o Options) judge(samples []seen) (h Head, enough bool) {
	var picks [views]int
	for v := range views {
		recovery := o.merge(samples, v)
		picks[v] = -1
		if recovery == nil {
			continue
		}
		if picks[v] = o.pick(recovery); picks[v] < 0 {
			picks[v] = StepFull
		}
		switch v {
		case rowsPrompt:
			h.Recovery = recovery
		case rowsAnswers:
			enough = recovery[picks[rowsPrompt]] >= o.Threshold
		}
	}
	h.Policy, h.FirstHalf, h.SecondHalf, h.Answers = picks[rowsPrompt], picks[rowsFirst], picks[rowsSecond], picks[rowsAnswers]
	h.Kept, h.KeptMax = make([]float64, steps), make([]float64, steps)
	for i := range samples {
		for step, x := range samples[i].kept {
			h.Kept[step] += x / float64(len(samples))
			h.KeptMax[step] = max(h.KeptMax[step], x)
		}
		if own := o.pick(samples[i].recovery[rowsPrompt]); own == h.Policy || own < 0 && h.Policy == StepFull {
			h.Alone += 1 / float64(len(samples))
		}
	}
	return h, enough
}

// merge returns the recovery of every lattice point over the samples that have such rows, nil if none has.
func (o Options) merge(samples []seen, v int) []float64 {
	var out []float64
	for step := range steps {
		var values []float64
		for i := range samples {
			if r := samples[i].recovery[v]; r != nil {
				values = append(values, r[step])
			}
		}
		if values == nil {
			return nil
		}
		out = append(out, o.Samples.over(values))
	}
	return out
}

// agree fills in the agreement over all KV heads; shares of what there is none of are 0.
func (r *Result) agree(enough []int) {
	var heads, answered float64
	a := &r.Agreement
	for l, layer := range r.Layers {
		a.Enough += float64(enough[l])
		for _, h := range layer {
			heads++
			a.Samples += h.Alone
			for _, x := range []struct {
				equal bool
				to    *float64
			}{{h.FirstHalf == h.SecondHalf, &a.Halves}, {h.FirstHalf == h.Policy, &a.FirstHalf}, {h.SecondHalf == h.Policy, &a.SecondHalf}, {h.Answers == h.Policy, &a.Answers}} {
				if x.equal {
					*x.to++
				}
			}
			if h.Answers >= 0 {
				answered++
			}
		}
	}
	for _, x := range []*float64{&a.Halves, &a.FirstHalf, &a.SecondHalf, &a.Samples} {
		*x /= heads
	}
	a.Answers /= max(answered, 1)
	a.Enough /= max(answered, 1)
}
