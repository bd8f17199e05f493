package compile

import (
	"fmt"

	"github.com/kvprofile/kvprofile/plan"
)

// AddEvidence writes results of a plan into it. planSHA is the digest of the plan that was measured (plan.Plan.Digest);
// results of another plan are a *MismatchError. Results of the same task and data take the place of older ones. p is left
// as it was when there is an error.
func AddEvidence(p *plan.Plan, evaluations []plan.Evaluation, divergences []plan.Divergence, planSHA string) error {
	digest := p.Digest()
	if planSHA != digest {
		return &MismatchError{"evidence", fmt.Sprintf("is about plan %.12s, this plan is %.12s: measure this one", planSHA, digest)}
	}
	old := p.Evidence
	var e plan.Evidence
	if old != nil {
		e = *old
	}
	e.PlanSHA256 = digest
	e.Evaluations = replace(e.Evaluations, evaluations, func(a, b plan.Evaluation) bool { return a.Task == b.Task && a.DatasetSHA256 == b.DatasetSHA256 })
	e.Divergences = replace(e.Divergences, divergences, func(a, b plan.Divergence) bool { return a.Text == b.Text && a.DatasetSHA256 == b.DatasetSHA256 })
	p.Evidence = &e
	if v := p.Validate(); len(v) > 0 {
		p.Evidence = old
		return fmt.Errorf("evidence: the plan would not be valid: %s", v[0])
	}
	return nil
}

// replace returns the old values, less those that a new one is the same as, and the new ones after them.
func replace[T any](old, fresh []T, same func(a, b T) bool) []T {
	var out []T
	for _, a := range old {
		stays := true
		for _, b := range fresh {
			stays = stays && !same(a, b)
		}
		if stays {
			out = append(out, a)
		}
	}
	return append(out, fresh...)
}
