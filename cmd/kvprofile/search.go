package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/compile"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
)

// methodAuto is the method of compile that runs the model.
const methodAuto = "auto"

// searchFlags bound the search of compile --method auto.
type searchFlags struct {
	retention          float64
	samples            int
	tasks              []string
	calls, plans, keep int
	rounds             int
	changed            func(string) bool
}

func (s *searchFlags) add(f *pflag.FlagSet) {
	f.Float64Var(&s.retention, "retention", 0, "auto: in place of a budget, the retention that the lower bound has to clear on the search prompts")
	f.IntVar(&s.samples, "search-samples", 8, "auto: prompts of each task, of the length --context")
	f.StringSliceVar(&s.tasks, "search-tasks", evalTasks(), "auto: tasks of the prompts")
	f.IntVar(&s.calls, "search-calls", 12, "auto: passes over the prompts at most")
	f.IntVar(&s.plans, "search-plans", 48, "auto: plans that are tested in a pass at most")
	f.IntVar(&s.keep, "search-keep", 6, "auto: families of plans that are followed")
	f.IntVar(&s.rounds, "search-rounds", 3, "auto: rounds of exchanging the policies of single heads")
	s.changed = f.Changed
}

func (s *searchFlags) check(method string, c *compileFlags) error {
	if method != methodAuto {
		for _, name := range []string{"retention", "search-samples", "search-tasks", "search-calls", "search-plans", "search-keep", "search-rounds"} {
			if s.changed(name) {
				return usagef("--%s needs --method %s", name, methodAuto)
			}
		}
		return nil
	}
	switch {
	case s.retention < 0 || s.retention >= 1:
		return usagef("--retention must lie in (0, 1), not %g", s.retention)
	case s.retention > 0 && c.changed("budget"):
		return usagef("--retention and --budget exclude one another")
	case s.samples < 1 || s.calls < 1 || s.plans < 1 || s.keep < 1 || s.rounds < 0:
		return usagef("--search-samples, --search-calls, --search-plans and --search-keep must be positive")
	}
	return nil
}

// search finds a plan by running the model over prompts that serve nothing else.
func (a *app) search(ctx context.Context, from compileInputs, path string, s *searchFlags, o compile.MethodOptions) (*plan.Plan, error) {
	in, err := a.readInputs(from)
	if err != nil {
		return nil, err
	}
	name := from.model
	if strings.HasSuffix(name, ".json") { // a run folder says where its model was
		manifest, err := run.Read(filepath.Dir(name))
		if err != nil {
			return nil, ui.Hint(err, "--model names the model, which the search runs")
		}
		name = manifest.Model.Path
	}
	m, err := a.openWithTokenizer(name)
	if err != nil {
		return nil, ui.Hint(err, "--model names the model, which the search runs")
	}
	defer m.Close()
	if in.Model.SHA256 != planModel(m, m.Fingerprint()).SHA256 {
		return nil, &otherModelError{fmt.Errorf("the scores are of another model than %s", name)}
	}
	if o.Context == 0 {
		for _, x := range in.Record.Samples() {
			o.Context = max(o.Context, len(x.Tokens))
		}
	}
	sets, err := taskSets(m, taskOptions{tasks: s.tasks, lengths: []int{o.Context}, samples: s.samples, seed: a.shared.seed, purpose: datasets.Search, haystack: datasets.Prose()})
	if err != nil {
		return nil, err
	}
	set, release, err := a.loadOn(math.MaxInt, m)
	if err != nil {
		return nil, err
	}
	defer release()
	if s.retention > 0 {
		o.Budget = 0
	}
	prompts := 0
	for _, d := range sets {
		prompts += len(d.Samples)
	}
	task := a.ui.Begin("search", 0)
	pass := 0
	measure := func(ctx context.Context, plans []*plan.Plan) ([]compile.Score, error) {
		pass++
		var contenders []eval.Contender
		for i, p := range plans {
			contenders = append(contenders, eval.Contender{Name: fmt.Sprintf("plan %d", i), Plan: p})
		}
		eo := eval.DefaultOptions()
		eo.GoldOnly = true
		eo.Progress = func(done, all int) {
			task.Set((pass-1)*prompts+done, s.calls*prompts, fmt.Sprintf("pass %d, %d plans", pass, len(plans)))
		}
		r, err := eval.EvaluateOn(ctx, set, m.Tokenizer, sets, contenders, eo)
		if err != nil {
			return nil, err
		}
		return scores(r), nil
	}
	r, err := compile.Auto(ctx, *in, compile.AutoOptions{MethodOptions: o, Retention: s.retention, Keep: s.keep, Calls: s.calls, Plans: s.plans, Rounds: s.rounds,
		Report: func(t compile.Tried) {
			if !t.Probe {
				a.ui.Detail("search: %s: %s of the bytes, %d of %d right, loss %.3f", t.Name, percent(t.Kept), t.K, t.M, t.Loss)
			}
		}}, measure)
	task.End(err)
	if err != nil {
		return nil, err
	}
	a.ui.Note("search: %s, of %d plans tried in %d passes: %s of the bytes, %d of %d prompts right that the full cache gets right", r.Name, len(r.Tried), r.Calls,
		percent(r.Kept), r.Score.K, r.Score.M)
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, err
	}
	if err := run.WriteJSON(strings.TrimSuffix(path, ".json")+".search.json", struct {
		Chosen string          `json:"chosen"`
		Tried  []compile.Tried `json:"tried"`
	}{r.Name, r.Tried}); err != nil {
		return nil, err
	}
	return r.Plan, r.Plan.Write(path)
}

// scores are what a search needs of an evaluation.
func scores(r *eval.Result) []compile.Score {
	var out []compile.Score
	for i := range r.Runs {
		var s compile.Score
		for j, o := range r.Runs[i].Outcomes {
			f := r.Full.Outcomes[j]
			if f.Right {
				s.M++
				if o.Right {
					s.K++
				}
			}
			s.LogProb, s.FullLogProb = append(s.LogProb, o.LogProb), append(s.FullLogProb, f.LogProb)
		}
		out = append(out, s)
	}
	return out
}

// addEvidence writes results into the plan that they are about, in place.
func (a *app) addEvidence(args, results []string) error {
	if len(args) != 1 {
		return usagef("--evidence needs a plan, or a run folder with one")
	}
	path := args[0]
	if _, err := os.Stat(filepath.Join(path, planFile)); err == nil {
		path = filepath.Join(path, planFile)
	} else if !errors.Is(err, fs.ErrNotExist) && !strings.HasSuffix(path, ".json") {
		return err
	}
	if a.shared.out == "" {
		a.shared.out, a.shared.force = path, true // what is added changes nothing that the plan says
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	p, err := plan.Parse(data)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, name := range results {
		r, err := eval.Load(name)
		if err != nil {
			return err
		}
		found, err := addResults(p, r)
		if err != nil {
			return err
		}
		if !found {
			return &compile.MismatchError{Input: name, Reason: fmt.Sprintf("says nothing about %s (plan %.12s)", path, p.Digest())}
		}
	}
	to, release, err := a.output(path)
	if err != nil {
		return err
	}
	defer release()
	// The plan of a run stays up to date.
	if err := run.AmendIn(filepath.Dir(to), "compile", filepath.Base(to), p.Write); err != nil {
		return err
	}
	return a.ui.Printf("evidence added to %s\n", to)
}

// addResults adds to a plan what an evaluation says of it, if anything.
func addResults(p *plan.Plan, r *eval.Result) (found bool, err error) {
	digest := p.Digest()
	for i := range r.Runs {
		if x := &r.Runs[i]; x.PlanSHA256 == digest {
			found = true
			if err := compile.AddEvidence(p, r.Evaluations(x), r.Divergences(x), digest); err != nil {
				return found, err
			}
		}
	}
	return found, nil
}
