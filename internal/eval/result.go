package eval

import (
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/plan"
)

// Format and Version stand at the head of an evaluation file.
const (
	Format  = "kvprofile.evaluation"
	Version = 1
)

// File is the usual name of an evaluation in a run folder.
const File = "eval.json"

// NameFull is the name of the run with the full cache.
const NameFull = "full"

// Outcome is what one prompt gave under one plan.
type Outcome struct {
	Sample int     `json:"sample"` // index of the prompt in the dataset of its task
	Task   string  `json:"task"`
	Length int     `json:"length"` // tokens, as asked for: names the cell of the grid
	Prompt int     `json:"prompt"` // tokens of the prompt as it is
	Depth  float64 `json:"depth"`  // as asked for, in [0,1]
	// Right says that all expected answers occur in the text, Exact that the text is the answer and nothing else, Share
	// which part of the expected answers occur: see [Score].
	Right bool    `json:"right"`
	Exact bool    `json:"exact"`
	Share float64 `json:"share"`
	Text  string  `json:"text"` // as generated
	// LogProb is the mean over the gold answer's tokens of the natural logarithm of their probability, each after the gold
	// tokens before it; Rank the mean of their ranks, 1 being the best.
	LogProb float64 `json:"logprob"`
	Rank    float64 `json:"rank"`
	// Bytes of the KV cache in whole blocks that the plan keeps, and the full cache's at the same point.
	Bytes     int64 `json:"bytes"`
	FullBytes int64 `json:"full_bytes"`
}

// TextOutcome is what one text gave under one plan: a prompt was read, then the tokens after it were predicted one by
// one, each after the true ones.
type TextOutcome struct {
	Sample int `json:"sample"` // index of the text in its dataset
	Prompt int `json:"prompt"` // tokens that were read before the first prediction
	Tokens int `json:"tokens"` // tokens predicted
	// NLL is the sum over these tokens of -ln p with the plan, FullNLL with the full cache, KL that of KL(full || plan) of
	// the two predictions, all in nats.
	NLL     float64 `json:"nll"`
	FullNLL float64 `json:"full_nll"`
	KL      float64 `json:"kl"`
	// Bytes and FullBytes are as in [Outcome].
	Bytes     int64 `json:"bytes"`
	FullBytes int64 `json:"full_bytes"`
}

// Run is one plan over all prompts and texts.
type Run struct {
	Name       string        `json:"name"`                  // of the method; "full" for the full cache
	Budget     float64       `json:"budget"`                // asked for, kept bytes / full bytes; 0 for a plan that was given
	PlanSHA256 string        `json:"plan_sha256,omitempty"` // [plan.Plan.Digest]
	Outcomes   []Outcome     `json:"outcomes"`
	Texts      []TextOutcome `json:"texts"`
}

// Label names a run for people: the method, and the budget where one was asked for.
func (r *Run) Label() string {
	if r.Budget == 0 {
		return r.Name
	}
	return fmt.Sprintf("%s at %s", r.Name, percent(r.Budget))
}

// Result is an evaluation: the full cache and any number of plans on the same prompts and texts, in the same order.
type Result struct {
	Format   string            `json:"format"`
	Version  int               `json:"version"`
	Tool     plan.Tool         `json:"tool"`
	Model    plan.Model        `json:"model"`
	Device   string            `json:"device"`   // for people, such as "cpu avx2"
	Datasets []plan.DatasetRef `json:"datasets"` // at most one per task
	Purpose  datasets.Purpose  `json:"purpose"`  // of all prompts
	// Question says when the questions were read, "in-prompt" or "after"; "" if that is not known.
	Question string `json:"question,omitempty"`
	Full     Run    `json:"full"`
	Runs     []Run  `json:"runs"`

	Seconds float64 `json:"-"` // wall-clock time; not written: the same evaluation gives the same file
}

// Dataset returns what is known of a task's dataset, or nil.
func (r *Result) Dataset(task string) *plan.DatasetRef {
	for i := range r.Datasets {
		if r.Datasets[i].Task == task {
			return &r.Datasets[i]
		}
	}
	return nil
}

// Join adds the runs of another evaluation of the same prompts and texts: with the same full cache they can be compared.
// Where a run of that name and budget is there already, the other one's takes its place. It is false, and nothing is
// done, for another model, device, purpose or question, or for other prompts.
func (r *Result) Join(o *Result) bool {
	if r.Question != o.Question || r.Purpose != o.Purpose || r.Device != o.Device || !reflect.DeepEqual(r.Model, o.Model) ||
		!reflect.DeepEqual(r.Datasets, o.Datasets) || !slices.Equal(r.Full.Outcomes, o.Full.Outcomes) || !slices.Equal(r.Full.Texts, o.Full.Texts) {
		return false
	}
	for _, x := range o.Runs {
		if old := r.Find(x.Name, x.Budget); old != nil {
			*old = x
		} else {
			r.Runs = append(r.Runs, x)
		}
	}
	return true
}

// Find returns the run of a method at a budget, or nil.
func (r *Result) Find(name string, budget float64) *Run {
	for i := range r.Runs {
		if r.Runs[i].Name == name && r.Runs[i].Budget == budget {
			return &r.Runs[i]
		}
	}
	return nil
}

// Load reads and checks an evaluation. What is no valid evaluation is a *run.FormatError.
func Load(path string) (*Result, error) {
	return run.LoadJSON(path, "no evaluation", Read)
}

// Read reads and checks an evaluation. Unknown members are errors.
func Read(from io.Reader) (*Result, error) {
	var r Result
	if err := run.ReadJSON(from, Format, Version, &r); err != nil {
		return nil, err
	}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	return &r, nil
}

// Write checks the evaluation and writes it whole or not at all. Format and Version are filled in. Bytes of generated
// texts that are no UTF-8 are written as U+FFFD.
func (r *Result) Write(path string) error {
	w := *r
	w.Format, w.Version = Format, Version
	if err := w.Validate(); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return run.WriteJSON(path, &w)
}

// Validate says what is wrong with an evaluation: the first thing found.
func (r *Result) Validate() error {
	if r.Format != Format || r.Version != Version {
		return fmt.Errorf("format %q version %d, must be %q version %d", r.Format, r.Version, Format, Version)
	}
	if r.Model.Name == "" {
		return fmt.Errorf("model.name is empty")
	}
	switch r.Purpose {
	case datasets.Calibration, datasets.Search, datasets.Certification:
	default:
		return fmt.Errorf("purpose is %q, must be %s, %s or %s", r.Purpose, datasets.Calibration, datasets.Search, datasets.Certification)
	}
	tasks := map[string]bool{}
	for i, d := range r.Datasets {
		at := fmt.Sprintf("datasets[%d]", i)
		switch {
		case d.Task == "":
			return fmt.Errorf("%s: no task", at)
		case tasks[d.Task]:
			return fmt.Errorf("%s: a second dataset of task %q", at, d.Task)
		case d.SHA256 != "" && !isHash(d.SHA256):
			return fmt.Errorf("%s: sha256 is not 64 lower-case hexadecimal digits", at)
		}
		tasks[d.Task] = true
	}
	if r.Full.Name != NameFull || r.Full.Budget != 0 {
		return fmt.Errorf("full: is named %q with a budget of %v, must be named %q without one", r.Full.Name, r.Full.Budget, NameFull)
	}
	if err := r.Full.validate(); err != nil {
		return fmt.Errorf("full: %w", err)
	}
	if len(r.Full.Outcomes)+len(r.Full.Texts) == 0 {
		return fmt.Errorf("full: neither outcomes nor texts")
	}
	if err := r.validateFull(); err != nil {
		return fmt.Errorf("full: %w", err)
	}
	type key struct {
		name   string
		budget float64
	}
	seen := map[key]bool{}
	for i := range r.Runs {
		x := &r.Runs[i]
		at := fmt.Sprintf("runs[%d] (%s)", i, shorten(x.Name))
		k := key{x.Name, x.Budget}
		if seen[k] {
			return fmt.Errorf("%s: a second run of this name and budget", at)
		}
		seen[k] = true
		if err := x.validate(); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
		if err := r.Full.pairs(x); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	return nil
}

// validateFull checks what holds for the full cache alone: no prompt twice, and no bytes but its own.
func (r *Result) validateFull() error {
	type key struct {
		task           string
		length, sample int
	}
	seen := map[key]bool{}
	for i, o := range r.Full.Outcomes {
		k := key{o.Task, o.Length, o.Sample}
		switch {
		case seen[k]:
			return fmt.Errorf("outcomes[%d]: sample %d of %s at %d tokens a second time", i, o.Sample, shorten(o.Task), o.Length)
		case o.Bytes != o.FullBytes:
			return fmt.Errorf("outcomes[%d]: %d bytes, full_bytes says %d", i, o.Bytes, o.FullBytes)
		}
		seen[k] = true
	}
	texts := map[[3]int]bool{}
	for i, t := range r.Full.Texts {
		k := [3]int{t.Sample, t.Prompt, t.Tokens}
		switch {
		case texts[k]:
			return fmt.Errorf("texts[%d]: text %d of %d and %d tokens a second time", i, t.Sample, t.Prompt, t.Tokens)
		case t.NLL != t.FullNLL || t.KL != 0 || t.Bytes != t.FullBytes:
			return fmt.Errorf("texts[%d]: differs from the full cache, which it is", i)
		}
		texts[k] = true
	}
	return nil
}

// validate checks a run by itself.
func (x *Run) validate() error {
	if x.Name == "" {
		return fmt.Errorf("no name")
	}
	if !(x.Budget >= 0 && x.Budget <= 1) {
		return fmt.Errorf("budget is %v, must lie in [0,1]", x.Budget)
	}
	if x.PlanSHA256 != "" && !isHash(x.PlanSHA256) {
		return fmt.Errorf("plan_sha256 is not 64 lower-case hexadecimal digits")
	}
	for i, o := range x.Outcomes {
		at := fmt.Sprintf("outcomes[%d]", i)
		switch {
		case o.Task == "" || o.Task == datasets.TaskText:
			return fmt.Errorf("%s: task is %q", at, o.Task)
		case o.Sample < 0 || o.Length < 1 || o.Prompt < 1:
			return fmt.Errorf("%s: sample %d, length %d, prompt %d: sample must be at least 0, the others 1", at, o.Sample, o.Length, o.Prompt)
		case !(o.Depth >= 0 && o.Depth <= 1):
			return fmt.Errorf("%s: depth is %v, must lie in [0,1]", at, o.Depth)
		case !(o.Share >= 0 && o.Share <= 1):
			return fmt.Errorf("%s: share is %v, must lie in [0,1]", at, o.Share)
		case o.Right != (o.Share == 1):
			return fmt.Errorf("%s: right is %v with a share of %v", at, o.Right, o.Share)
		case !(o.LogProb <= 0) || math.IsInf(o.LogProb, 0):
			return fmt.Errorf("%s: logprob is %v, must be finite and at most 0", at, o.LogProb)
		case !(o.Rank >= 1) || math.IsInf(o.Rank, 0):
			return fmt.Errorf("%s: rank is %v, must be finite and at least 1", at, o.Rank)
		case o.Bytes < 0 || o.FullBytes < 1:
			return fmt.Errorf("%s: %d bytes of %d", at, o.Bytes, o.FullBytes)
		}
	}
	for i, t := range x.Texts {
		at := fmt.Sprintf("texts[%d]", i)
		switch {
		case t.Sample < 0 || t.Prompt < 0 || t.Tokens < 1:
			return fmt.Errorf("%s: sample %d, prompt %d, tokens %d: tokens must be at least 1, the others 0", at, t.Sample, t.Prompt, t.Tokens)
		case t.Bytes < 0 || t.FullBytes < 1:
			return fmt.Errorf("%s: %d bytes of %d", at, t.Bytes, t.FullBytes)
		}
		for _, v := range []struct {
			name string
			sum  float64
		}{{"nll", t.NLL}, {"full_nll", t.FullNLL}, {"kl", t.KL}} {
			if !(v.sum >= 0) || math.IsInf(v.sum, 0) {
				return fmt.Errorf("%s: %s is %v, must be finite and at least 0", at, v.name, v.sum)
			}
		}
	}
	return nil
}

// pairs checks that a run went over the same prompts and texts as the full cache, in the same order.
func (x *Run) pairs(other *Run) error {
	if err := x.samePrompts(other); err != nil {
		return err
	}
	if len(x.Texts) != len(other.Texts) {
		return fmt.Errorf("%d texts, %s has %d", len(other.Texts), x.Name, len(x.Texts))
	}
	for i, a := range x.Texts {
		b := other.Texts[i]
		if a.Sample != b.Sample || a.Prompt != b.Prompt || a.Tokens != b.Tokens || a.FullNLL != b.FullNLL || a.FullBytes != b.FullBytes {
			return fmt.Errorf("texts[%d]: another text than that of %s", i, x.Name)
		}
	}
	return nil
}

// samePrompts checks that two runs went over the same prompts in the same order.
func (x *Run) samePrompts(other *Run) error {
	if len(x.Outcomes) != len(other.Outcomes) {
		return fmt.Errorf("%d outcomes, %s has %d", len(other.Outcomes), x.Name, len(x.Outcomes))
	}
	for i, a := range x.Outcomes {
		b := other.Outcomes[i]
		if a.Sample != b.Sample || a.Task != b.Task || a.Length != b.Length || a.Prompt != b.Prompt || a.Depth != b.Depth || a.FullBytes != b.FullBytes {
			return fmt.Errorf("outcomes[%d]: another prompt than that of %s", i, x.Name)
		}
	}
	return nil
}

// Tasks returns the tasks of the prompts in the order in which they come.
func (x *Run) Tasks() []string {
	var out []string
	for _, o := range x.Outcomes {
		if !slices.Contains(out, o.Task) {
			out = append(out, o.Task)
		}
	}
	return out
}

func isHash(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// shorten keeps a message readable whatever the value.
func shorten(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:77], "") + "..."
	}
	return s
}

// percent shows a share, with a tenth where it says something.
func percent(v float64) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", 100*v), ".0") + " %"
}
