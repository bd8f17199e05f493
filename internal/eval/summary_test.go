package eval

import (
	"math"
	"os"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/plan"
)

func TestSummarise(t *testing.T) {
	r := synthetic()
	x := r.Find("streaming-llm", 0.25)
	cells := r.Summarise(x, ByCell)
	if len(cells) != 7 { // 2 lengths x 3 depths of one task, one cell of the other
		t.Fatalf("%d cells", len(cells))
	}
	for i, s := range cells {
		var n, m, k, right, exact, sampled int
		var logprob, fullLogprob, rank, share float64
		for j, o := range x.Outcomes {
			f := r.Full.Outcomes[j]
			if o.Task != s.Task || o.Length != s.Length || o.Depth != s.Depth {
				continue
			}
			n++
			logprob, fullLogprob, rank, share = logprob+o.LogProb, fullLogprob+f.LogProb, rank+o.Rank, share+o.Share
			if f.Right {
				m++
				if o.Right {
					k++
				}
			}
			if o.Right {
				right++
			}
			if o.Exact {
				exact++
			}
			sampled += o.Prompt
		}
		v := float64(n)
		if s.N != n || s.M != m || s.K != k || s.Right != right || s.Exact != exact || !near(s.LogProb, logprob/v, 1e-12) || !near(s.FullLogProb, fullLogprob/v, 1e-12) ||
			!near(s.Rank, rank/v, 1e-12) || !near(s.Share, share/v, 1e-9) || s.MinTokens*n > sampled || s.MaxTokens*n < sampled {
			t.Errorf("cell %d: %+v", i, s)
		}
		if !near(s.Kept, 0.25, 1e-3) || s.Bytes != s.FullBytes*s.Kept {
			t.Errorf("cell %d: %v of %v bytes, %v", i, s.Bytes, s.FullBytes, s.Kept)
		}
		if s.Retention == nil || *s.Retention != float64(k)/float64(m) || *s.Lower95 > *s.Retention {
			t.Errorf("cell %d: retention %v, %v", i, s.Retention, s.Lower95)
		}
		if s.Loss() != s.FullLogProb-s.LogProb {
			t.Errorf("cell %d: loss %v", i, s.Loss())
		}
	}
	// Coarser groups add up.
	var names []string
	for _, by := range []Grouping{ByNothing, ByTask, ByLength} {
		var n, m, k int
		for _, s := range r.Summarise(x, by) {
			n, m, k = n+s.N, m+s.M, k+s.K
			if by == ByTask {
				names = append(names, s.Task)
			}
			if by < ByCell && s.Depth != -1 || by < ByLength && s.Length != 0 || by < ByTask && s.Task != "" {
				t.Errorf("grouping %d names %q, %d, %v", by, s.Task, s.Length, s.Depth)
			}
		}
		all := r.Overall(x)
		if n != all.N || m != all.M || k != all.K || n != 80 {
			t.Errorf("grouping %d: n %d, m %d, k %d", by, n, m, k)
		}
	}
	if !slices.Equal(names, []string{"needle-grid", "multi-key"}) {
		t.Errorf("tasks %v", names)
	}
	if s := r.Overall(&r.Full); *s.Retention != 1 || s.Kept != 1 || s.Loss() != 0 || s.Right != s.M {
		t.Errorf("the full cache beside itself: %+v", s)
	}
	nothing := &Result{Full: Run{Name: NameFull}}
	if s := nothing.Overall(&nothing.Full); s.N != 0 || s.Retention != nil {
		t.Errorf("of nothing: %+v", s)
	}
	for i := range r.Full.Outcomes {
		r.Full.Outcomes[i].Right = false
	}
	if s := r.Overall(x); s.Retention != nil || s.Lower95 != nil || s.M != 0 {
		t.Errorf("a retention of nothing: %+v", s)
	}
}

func TestEvidence(t *testing.T) {
	r := synthetic()
	x := r.Find("snapkv", 0.5)
	es := r.Evaluations(x)
	if len(es) != 2 || es[0].Task != "needle-grid" || es[0].N != 60 || es[1].N != 20 || es[0].DatasetSHA256 != r.Datasets[0].SHA256 || es[1].DatasetSHA256 != r.Datasets[1].SHA256 {
		t.Fatalf("%+v", es)
	}
	ds := r.Divergences(x)
	if len(ds) != 1 || ds[0].Tokens != 768 || ds[0].DatasetSHA256 != r.Datasets[2].SHA256 {
		t.Fatalf("%+v", ds)
	}
	var nll, kl float64
	for _, o := range x.Texts {
		nll, kl = nll+o.NLL, kl+o.KL
	}
	if !near(ds[0].PlanPerplexity, math.Exp(nll/768), 1e-12) || !near(ds[0].KL, kl/768, 1e-12) || !(ds[0].FullPerplexity < ds[0].PlanPerplexity) {
		t.Errorf("%+v", ds[0])
	}
	// Package plan has no complaint about the evidence.
	text, err := os.ReadFile("../../out/reference/smollm2-135m-instruct/plan.json")
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	p.Evidence.Evaluations, p.Evidence.Divergences = es, ds
	if found := p.Validate(); len(found) > 0 {
		t.Error(found)
	}
	for _, c := range []struct {
		change func()
		want   bool
	}{
		{func() {}, true},
		{func() { r.Purpose = datasets.Search }, false},
		{func() { r.Purpose, x.PlanSHA256 = datasets.Certification, "" }, false},
		{func() {
			x.PlanSHA256 = r.Full.PlanSHA256
			for i := range r.Full.Outcomes {
				r.Full.Outcomes[i].Right = false
			}
		}, false},
	} {
		c.change()
		for _, e := range r.Evaluations(x) {
			if e.Certified != c.want {
				t.Errorf("certified is %v: %+v", e.Certified, e)
			}
		}
	}
	p.Evidence.Evaluations = r.Evaluations(x)
	if found := p.Validate(); len(found) > 0 {
		t.Error(found)
	}
	x.Texts = nil
	if ds := r.Divergences(x); ds != nil {
		t.Errorf("%+v", ds)
	}
}
