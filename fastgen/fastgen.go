// Package fastgen picks a cache policy for every KV head from an attention record, as FastGen does (Ge et al. 2023,
// "Model Tells You What to Discard"): the cheapest policy of a lattice whose recovery reaches a threshold. The model is
// not needed: the record's sums make the recovery of every policy exact.
package fastgen

import (
	"fmt"

	"github.com/kvprofile/kvprofile/profile"
)

const (
	formatName    = "kvprofile.fastgen"
	formatVersion = 1
)

// Record is what is read of an attention record; *profile.Record is one.
type Record interface {
	Meta() profile.Meta
	Samples() []profile.Sample
	Heads(sample int) ([]profile.HeadStats, error)
	Columns(sample, layer int) ([]profile.Columns, error)
	Digest() (string, error)
}

// Rule says how several recoveries become one.
type Rule string

// The rules: every one counts, or their mean does.
const (
	Min  Rule = "min"
	Mean Rule = "mean"
)

// over applies a rule to at least one value.
func (r Rule) over(values []float64) float64 {
	least, sum := values[0], 0.0
	for _, v := range values {
		least = min(least, v)
		sum += v
	}
	if r == Mean {
		return sum / float64(len(values))
	}
	return least
}

// Options of Analyze. Zero fields take the defaults that are given here.
type Options struct {
	// Threshold is the recovery T that a policy has to reach: .95.
	Threshold float64 `json:"threshold"`
	// FrequentRatio is r_f: frequent columns are ceil(r_f * tokens) of those not kept already. .3.
	FrequentRatio float64 `json:"frequent_ratio"`
	// LocalRatio is r_l, one of the record's: keys at a distance below ceil(r_l * tokens) are local. .3.
	LocalRatio float64 `json:"local_ratio"`
	// Group says how the query heads of a group agree on a sample: Min.
	Group Rule `json:"group_rule"`
	// Samples says how samples agree: Mean.
	Samples Rule `json:"sample_rule"`
	// Threads bounds the number of layers that are looked at together, 1 by default; it changes no result.
	Threads int `json:"-"`
}

func (o Options) resolve() (Options, error) {
	if o.Threshold == 0 {
		o.Threshold = 0.95
	}
	if o.FrequentRatio == 0 {
		o.FrequentRatio = 0.3
	}
	if o.LocalRatio == 0 {
		o.LocalRatio = 0.3
	}
	if o.Group == "" {
		o.Group = Min
	}
	if o.Samples == "" {
		o.Samples = Mean
	}
	o.Threads = max(o.Threads, 1)
	return o, o.check()
}

func (o Options) check() error {
	for _, x := range []struct {
		name  string
		value float64
	}{{"threshold", o.Threshold}, {"frequent ratio", o.FrequentRatio}, {"local ratio", o.LocalRatio}} {
		if !(x.value > 0 && x.value <= 1) {
			return &OptionError{x.name, fmt.Sprintf("%g is not in (0, 1]", x.value)}
		}
	}
	for _, r := range []Rule{o.Group, o.Samples} {
		if r != Min && r != Mean {
			return &OptionError{"rule", fmt.Sprintf("%q is neither %q nor %q", r, Min, Mean)}
		}
	}
	return nil
}

// OptionError says which option is wrong, and why.
type OptionError struct{ Option, Reason string }

func (e *OptionError) Error() string { return fmt.Sprintf("fastgen: %s: %s", e.Option, e.Reason) }

// Policy is a point of the lattice: which keys are kept. Full keeps all, whatever the rest says.
type Policy struct {
	Name          string  `json:"name"`
	Special       bool    `json:"special"`
	Punctuation   bool    `json:"punctuation"`
	FrequentRatio float64 `json:"frequent_ratio"`
	LocalRatio    float64 `json:"local_ratio"`
	Full          bool    `json:"full"`
}

// The places of the policies in a lattice.
const (
	StepSpecial = iota
	StepPunctuation
	StepFrequent
	StepLocal
	StepFull
	steps
)

// Lattice returns the policies from the cheapest to the full cache; each keeps what the one before keeps.
func (o Options) Lattice() []Policy {
	return []Policy{
		{Name: "special", Special: true},
		{Name: "special+punctuation", Special: true, Punctuation: true},
		{Name: "special+punctuation+frequent", Special: true, Punctuation: true, FrequentRatio: o.FrequentRatio},
		{Name: "special+punctuation+frequent+local", Special: true, Punctuation: true, FrequentRatio: o.FrequentRatio, LocalRatio: o.LocalRatio},
		{Name: "full", Full: true},
	}
}

// Result is what Analyze finds, and the artefact fastgen.json.
type Result struct {
	Format  string        `json:"format"`
	Version int           `json:"version"`
	Tool    string        `json:"tool"`
	Record  string        `json:"record_sha256"` // digest of the attention record
	Model   profile.Model `json:"model"`
	Options Options       `json:"options"`
	Lattice []Policy      `json:"lattice"`
	// Shares of the prompts' tokens that belong to the classes.
	Special     Share `json:"special_tokens"`
	Punctuation Share `json:"punctuation_tokens"`
	// Layers[layer][KV head].
	Layers    [][]Head  `json:"layers"`
	Agreement Agreement `json:"agreement"`
}

// Share is a share of tokens over the samples.
type Share struct {
	Mean float64 `json:"mean"`
	Max  float64 `json:"max"`
}

// Head is one KV head's policy with its evidence.
type Head struct {
	// Policy is the place in the lattice of the first policy with a recovery of at least the threshold.
	Policy int `json:"policy"`
	// Recovery of every lattice point: share of the attention on what it keeps, by the rules of Options.
	Recovery []float64 `json:"recovery"`
	// Kept is what every lattice point keeps at the end of a prompt / its tokens, mean over samples; KeptMax the
	// largest over samples.
	Kept    []float64 `json:"kept"`
	KeptMax []float64 `json:"kept_max"`
	// FirstHalf is the policy of the first half as a prompt of its own, SecondHalf the one that the rows of the second
	// half ask for, Answers the one that is enough for the answer rows, with the columns that the prompt chose. -1 where
	// there are no such rows.
	FirstHalf  int `json:"first_half"`
	SecondHalf int `json:"second_half"`
	Answers    int `json:"answers"`
	// Alone is the share of samples which alone ask for the same policy.
	Alone float64 `json:"alone"`
}

// Agreement is how stable the policies are: shares of all KV heads.
type Agreement struct {
	Halves     float64 `json:"halves"`      // first and second half agree
	FirstHalf  float64 `json:"first_half"`  // the first half and the whole prompt agree
	SecondHalf float64 `json:"second_half"` // the second half and the whole prompt agree
	Answers    float64 `json:"answers"`     // answer rows and prompt agree
	Samples    float64 `json:"samples"`     // a sample alone and all samples agree
	// Enough: share of KV heads whose policy reaches the threshold at the answer rows too. Unlike Answers it does not
	// count against a policy that answers would ask for less.
	Enough float64 `json:"enough"`
}
