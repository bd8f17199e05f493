package eval

import (
	"cmp"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/stats"
	"github.com/kvprofile/kvprofile/plan"
)

// Grouping says what a [Summary] is about.
type Grouping int

// Groupings.
const (
	ByNothing Grouping = iota // all prompts
	ByTask
	ByLength // task and length
	ByCell   // task, length and depth
)

// Summary is what a run did on some of the prompts, beside the full cache.
type Summary struct {
	Task   string  `json:"task,omitempty"`   // "" for all tasks
	Length int     `json:"length,omitempty"` // 0 for all lengths
	Depth  float64 `json:"depth"`            // -1 for all depths

	MinTokens int `json:"min_tokens"` // of the shortest prompt
	MaxTokens int `json:"max_tokens"`
	N         int `json:"n"`     // prompts
	M         int `json:"m"`     // of these, right with the full cache
	K         int `json:"k"`     // of these, right with the plan too
	Right     int `json:"right"` // right with the plan, also of prompts that the full cache gets wrong
	Exact     int `json:"exact"` // with the plan

	FullAccuracy float64 `json:"full_accuracy"` // M / N
	Accuracy     float64 `json:"accuracy"`      // Right / N
	Share        float64 `json:"share"`         // mean share of the expected answers, with the plan
	FullShare    float64 `json:"full_share"`
	// Retention is K / M, Lower95 its one-sided 95 % lower bound; nil if the full cache gets nothing right.
	Retention *float64 `json:"retention"`
	Lower95   *float64 `json:"lower95"`
	// LogProb is the mean over prompts of the mean log-probability per token of the gold answer, Rank that of its tokens'
	// rank, with the plan.
	LogProb     float64 `json:"logprob"`
	FullLogProb float64 `json:"full_logprob"`
	Rank        float64 `json:"rank"`
	FullRank    float64 `json:"full_rank"`
	// Bytes and FullBytes are means over prompts; Kept is the sum of the plan's over the sum of the full cache's.
	Bytes     float64 `json:"bytes"`
	FullBytes float64 `json:"full_bytes"`
	Kept      float64 `json:"kept"`
}

// Loss is what the plan takes from the gold answers' log-probability, in nats per token; below 0 for a gain.
func (s *Summary) Loss() float64 { return s.FullLogProb - s.LogProb }

// Summarise sums up a run of the result by groups of prompts: tasks in the order in which they first come, lengths and
// depths rising.
func (r *Result) Summarise(x *Run, by Grouping) []Summary {
	type key struct {
		task   int
		length int
		depth  float64
	}
	tasks := r.Full.Tasks()
	groups := map[key][]int{}
	var keys []key
	for i, o := range r.Full.Outcomes {
		k := key{-1, 0, -1}
		if by >= ByTask {
			k.task = slices.Index(tasks, o.Task)
		}
		if by >= ByLength {
			k.length = o.Length
		}
		if by >= ByCell {
			k.depth = o.Depth
		}
		if groups[k] == nil {
			keys = append(keys, k)
		}
		groups[k] = append(groups[k], i)
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(a.task, b.task), cmp.Compare(a.length, b.length), cmp.Compare(a.depth, b.depth))
	})
	var out []Summary
	for _, k := range keys {
		s := r.summary(x, groups[k])
		s.Length, s.Depth = k.length, k.depth
		if k.task >= 0 {
			s.Task = tasks[k.task]
		}
		out = append(out, s)
	}
	return out
}

// Overall sums up a run over all prompts; N is 0 if there are none.
func (r *Result) Overall(x *Run) Summary {
	if all := r.Summarise(x, ByNothing); len(all) > 0 {
		return all[0]
	}
	return Summary{Depth: -1}
}

func (r *Result) summary(x *Run, samples []int) Summary {
	s := Summary{N: len(samples), MinTokens: math.MaxInt}
	n := float64(s.N)
	var bytes, fullBytes int64
	for _, i := range samples {
		o, f := x.Outcomes[i], r.Full.Outcomes[i]
		s.MinTokens, s.MaxTokens = min(s.MinTokens, o.Prompt), max(s.MaxTokens, o.Prompt)
		s.M += count(f.Right)
		s.K += count(f.Right && o.Right)
		s.Right += count(o.Right)
		s.Exact += count(o.Exact)
		s.Share += o.Share / n
		s.FullShare += f.Share / n
		s.LogProb += o.LogProb / n
		s.FullLogProb += f.LogProb / n
		s.Rank += o.Rank / n
		s.FullRank += f.Rank / n
		bytes += o.Bytes
		fullBytes += o.FullBytes
	}
	s.FullAccuracy, s.Accuracy = float64(s.M)/n, float64(s.Right)/n
	s.Bytes, s.FullBytes, s.Kept = float64(bytes)/n, float64(fullBytes)/n, float64(bytes)/float64(fullBytes)
	if bound, ok := stats.Lower95(s.K, s.M); ok {
		retention := float64(s.K) / float64(s.M)
		s.Retention, s.Lower95 = &retention, &bound
	}
	return s
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TextSummary is what a run did on running text, beside the full cache.
type TextSummary struct {
	Texts          int     `json:"texts"`
	Tokens         int     `json:"tokens"` // predicted
	Perplexity     float64 `json:"perplexity"`
	FullPerplexity float64 `json:"full_perplexity"`
	KL             float64 `json:"kl"`   // mean over tokens of KL(full || plan), nats
	Kept           float64 `json:"kept"` // bytes of all texts over the full cache's
}

// SummariseTexts sums up a run's texts; false if there are none.
func (x *Run) SummariseTexts() (TextSummary, bool) {
	s := TextSummary{Texts: len(x.Texts)}
	var nll, full float64
	var bytes, fullBytes int64
	for _, t := range x.Texts {
		s.Tokens += t.Tokens
		nll, full, s.KL = nll+t.NLL, full+t.FullNLL, s.KL+t.KL
		bytes, fullBytes = bytes+t.Bytes, fullBytes+t.FullBytes
	}
	if s.Texts == 0 {
		return s, false
	}
	n := float64(s.Tokens)
	s.Perplexity, s.FullPerplexity, s.KL = math.Exp(nll/n), math.Exp(full/n), s.KL/n
	s.Kept = float64(bytes) / float64(fullBytes)
	return s, true
}

// Evaluations are a plan's evidence from its run: one per task. They are certified if the result's purpose is
// certification, the run says of which plan it is and the full cache gets something right.
func (r *Result) Evaluations(x *Run) []plan.Evaluation {
	var out []plan.Evaluation
	for _, s := range r.Summarise(x, ByTask) {
		e := plan.Evaluation{Task: s.Task, MinTokens: s.MinTokens, MaxTokens: s.MaxTokens, N: s.N, M: s.M, K: s.K,
			Retention: s.Retention, Lower95: s.Lower95, FullLogProb: &s.FullLogProb, PlanLogProb: &s.LogProb,
			Certified: r.Purpose == datasets.Certification && x.PlanSHA256 != "" && s.M > 0}
		if d := r.Dataset(s.Task); d != nil {
			e.DatasetSHA256 = d.SHA256
		}
		out = append(out, e)
	}
	return out
}

// Divergences are a plan's evidence from its run on running text; nil without texts, or if a perplexity is beyond float64.
func (r *Result) Divergences(x *Run) []plan.Divergence {
	s, ok := x.SummariseTexts()
	if !ok || math.IsInf(s.Perplexity, 0) || math.IsInf(s.FullPerplexity, 0) {
		return nil
	}
	d := plan.Divergence{Text: datasets.TaskText, Tokens: s.Tokens, FullPerplexity: s.FullPerplexity, PlanPerplexity: s.Perplexity, KL: s.KL}
	if ref := r.Dataset(datasets.TaskText); ref != nil {
		d.DatasetSHA256 = ref.SHA256
	}
	return []plan.Divergence{d}
}
