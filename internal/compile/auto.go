package compile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/internal/stats"
	"github.com/kvprofile/kvprofile/plan"
)

// Measure runs the model over the search prompts with every plan, and returns a score for each. A call reads every
// prompt once, so that many plans in a call cost little more than one; those whose streaming heads evict always cost a
// reading of the prompts each.
type Measure func(ctx context.Context, plans []*plan.Plan) ([]Score, error)

// Score is what a plan gives on the search prompts.
type Score struct {
	// M prompts are right with the full cache, K of them also with the plan.
	M, K int
	// LogProb is per prompt the mean log-probability of the expected answer's tokens with the plan, FullLogProb with the
	// full cache, in nats.
	LogProb, FullLogProb []float64
}

// Retention is K / M, 0 where M is 0.
func (s *Score) Retention() float64 {
	if s.M == 0 {
		return 0
	}
	return float64(s.K) / float64(s.M)
}

// Loss is what a prompt's answer loses in log-probability, mean over prompts: the finer signal where retention says
// nothing. Infinite where a number is missing.
func (s *Score) Loss() float64 {
	if len(s.LogProb) == 0 || len(s.LogProb) != len(s.FullLogProb) {
		return math.Inf(1)
	}
	sum := 0.0
	for i, x := range s.LogProb {
		sum += s.FullLogProb[i] - x
	}
	if sum /= float64(len(s.LogProb)); !math.IsNaN(sum) {
		return sum
	}
	return math.Inf(1)
}

// lower95 is the lower bound of retention; 0 without prompts that are right.
func lower95(k, m int) float64 {
	bound, _ := stats.Lower95(k, m)
	return bound
}

// AutoOptions of Auto. Zero fields take the defaults that are given here.
type AutoOptions struct {
	// MethodOptions say what plans are for. Budget is used where Retention is 0; Evict is that of all streaming heads:
	// the end of the prefill here, so that all plans share one reading of a prompt.
	MethodOptions
	// Retention R in (0,1) that the plan has to reach. With 0 the best plan of the Budget is searched.
	Retention float64
	// Ladder of budgets, falling, kept bytes / full bytes: .75 .5 .375 .25 .1875 .125 .09375 .0625 .03125. The search
	// starts at the first that is at most .25.
	Ladder []float64
	// Keep is the number of families that are followed: 8.
	Keep int
	// Tolerance is the finest step of the search for the smallest budget, as a share of it: .02.
	Tolerance float64
	// Calls of Measure at most: 24.
	Calls int
	// Plans of a call at most: 192.
	Plans int
	// Rounds of polishing single heads: 6.
	Rounds int
	// Report is told what is tried; nil for nobody.
	Report func(Tried)
}

// Tried is a plan that was measured.
type Tried struct {
	Name string `json:"name"`
	// Budget asked for and Kept, kept bytes / full bytes at the context.
	Budget float64 `json:"budget"`
	Kept   float64 `json:"kept"`
	Bytes  int64   `json:"bytes"`
	M      int     `json:"m"`
	K      int     `json:"k"`
	Lower  float64 `json:"lower95"`
	Loss   float64 `json:"loss"` // mean over prompts, nats per token
	// Probe says that the plan was measured to learn about a head, not to be chosen.
	Probe bool `json:"probe,omitempty"`
}

// AutoResult is what a search found.
type AutoResult struct {
	// Plan that was chosen: the full cache where nothing less is enough.
	Plan *plan.Plan
	// Name says how it came about.
	Name string
	// Kept is kept bytes / full bytes at the context.
	Kept  float64
	Score Score
	// Lower is the lower bound of the plan's retention on the search prompts. They were used to choose it: what the plan
	// is worth has to be measured on others.
	Lower float64
	// Point says that there are too few prompts for the bound to reach R whatever happens, and that the retention
	// itself was asked to.
	Point bool
	// Calls of Measure; Cut says that they were used up before the search was done.
	Calls int
	Cut   bool
	// Tried lists all that was measured, in order.
	Tried []Tried
}

// SearchError says why there is nothing to search for.
type SearchError struct{ Reason string }

func (e *SearchError) Error() string { return "search: " + e.Reason }

// errCut says that no further call is allowed.
var errCut = errors.New("no calls are left")

func (o AutoOptions) resolve() (AutoOptions, error) {
	if o.Ladder == nil {
		o.Ladder = []float64{0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.09375, 0.0625, 0.03125}
	}
	for _, d := range []struct {
		to    *int
		value int
	}{{&o.Keep, 8}, {&o.Calls, 24}, {&o.Plans, 192}, {&o.Rounds, 6}} {
		if *d.to == 0 {
			*d.to = d.value
		}
	}
	if o.Tolerance == 0 {
		o.Tolerance = 0.02
	}
	if o.Evict == "" {
		o.Evict = plan.EvictPrefillEnd
	}
	fail := func(option, format string, args ...any) (AutoOptions, error) {
		return o, &OptionError{option, fmt.Sprintf(format, args...)}
	}
	switch {
	case (o.Retention != 0) == (o.Budget != 0):
		return fail("request", "give a retention or a budget, one of them")
	case o.Retention != 0 && !(o.Retention > 0 && o.Retention < 1):
		return fail("retention", "%g is not in (0, 1)", o.Retention)
	case !(o.Tolerance > 0 && o.Tolerance < 1):
		return fail("tolerance", "%g is not in (0, 1)", o.Tolerance)
	case o.Keep < 1 || o.Calls < 1 || o.Plans < 1 || o.Rounds < 0:
		return fail("search", "%d families, %d calls, %d plans, %d rounds", o.Keep, o.Calls, o.Plans, o.Rounds)
	case len(o.Ladder) == 0:
		return fail("ladder", "is empty")
	}
	for i, x := range o.Ladder {
		if !(x > 0 && x < 1) || i > 0 && x >= o.Ladder[i-1] {
			return fail("ladder", "%v: budgets must fall, and lie in (0, 1)", o.Ladder)
		}
	}
	if o.Retention != 0 {
		o.Budget = 1
	}
	return o, nil
}

// Auto searches for the smallest plan whose measured retention reaches R: the one-sided 95 % lower bound of (K, M), or
// the share itself where M is too small for the bound ever to reach it. With a budget in place of R it searches the
// best plan of that many bytes.
//
// It measures all families of plans (every method, and mixtures of full, streaming and top-k heads by several orders of
// the heads) at a budget in the middle, and around the best of them what each head is worth, which makes further
// families and moves bytes to where they are worth most. With the best families it goes down a ladder of budgets while
// any clears R (up while none does), narrows the budget between the last that clears and the first that does not, and
// improves single heads again, with fewer bytes as long as that clears R. Of two plans of the same bytes the better is
// the one whose answers lose less log-probability, among those that keep about as many answers right.
//
// The same inputs and scores give the same plan. On an error of Measure or a cancelled ctx the result holds what was
// tried so far.
//
// Errors: *OptionError, *MismatchError, *SearchError where the full cache gets no prompt right, those of ctx and Measure.
func Auto(ctx context.Context, in Inputs, o AutoOptions, measure Measure) (*AutoResult, error) {
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	b, err := newBuilder(&in, o.MethodOptions)
	if err != nil {
		return nil, err
	}
	s := &search{builder: b, o: o, measure: measure, known: map[string]Score{}, targets: map[int]bool{}, result: &AutoResult{}}
	if s.families, err = b.candidates(); err != nil {
		return nil, err
	}
	err = s.run(ctx)
	if errors.Is(err, errCut) {
		s.result.Cut, err = true, nil
	}
	if err == nil {
		err = s.finish()
	}
	return s.result, err
}

// search is a search under way.
type search struct {
	*builder
	o        AutoOptions
	measure  Measure
	families []*candidate
	known    map[string]Score // by digest of the plan
	result   *AutoResult
	// points are all plans that were measured and can be chosen; targets the budgets in blocks that were tried.
	points  []*point
	targets map[int]bool
	// worth orders heads, the one that needs most first: by a prior, and by what was measured once it was.
	worth []int
}

// point is a plan with its score.
type point struct {
	name     string
	target   int // blocks that it may keep
	blocks   int // blocks that it keeps
	policies []plan.Policy
	plan     *plan.Plan
	probe    bool       // not to be chosen
	family   *candidate // that made it, nil for none

	score Score
	loss  float64
	lower float64
}

// point makes a plan of policies. It keeps at most the target, unless it is a probe.
func (s *search) point(name string, target int, policies []plan.Policy, probe bool) (*point, error) {
	p := &point{name: name, target: target, policies: policies, probe: probe, blocks: s.used(policies)}
	if p.blocks > target && !probe {
		return nil, fmt.Errorf("search: %s keeps %d blocks of at most %d", name, p.blocks, target)
	}
	p.plan = assemble(s.in, s.cache, policies)
	addTotals(p.plan, []int{s.context})
	if v := p.plan.Validate(); len(v) > 0 {
		return nil, fmt.Errorf("search: %s is not valid: %s", name, v[0])
	}
	return p, nil
}

// grid makes the plans of families for budgets in blocks, as far as the families can keep as little.
func (s *search) grid(families []*candidate, targets ...int) ([]*point, error) {
	var out []*point
	for _, t := range targets {
		s.targets[t] = true
		for _, f := range families {
			m, err := f.make(t)
			if err != nil {
				return nil, fmt.Errorf("search: %s: %w", f.name, err)
			}
			if m.policies == nil {
				continue
			}
			p, err := s.point(f.name, t, m.policies, false)
			if err != nil {
				return nil, err
			}
			p.family = f
			out = append(out, p)
		}
	}
	return out, nil
}

// score measures points; plans that were measured before are not measured again. It returns those that have a score,
// and fails with errCut where calls were used up before all had one.
func (s *search) score(ctx context.Context, points []*point) ([]*point, error) {
	var fresh []*point
	queued := map[string]bool{}
	for _, p := range points {
		d := p.plan.Digest()
		if _, ok := s.known[d]; !ok && !queued[d] {
			queued[d] = true
			fresh = append(fresh, p)
		}
	}
	var stop error
	for chunk := range slices.Chunk(fresh, s.o.Plans) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if s.result.Calls >= s.o.Calls {
			stop = errCut
			break
		}
		if err := s.call(ctx, chunk); err != nil {
			return nil, err
		}
	}
	var out []*point
	for _, p := range points {
		x, ok := s.known[p.plan.Digest()]
		if !ok {
			continue
		}
		p.score, p.loss, p.lower = x, x.Loss(), lower95(x.K, x.M)
		out = append(out, p)
		if !p.probe {
			s.points = append(s.points, p)
		}
	}
	return out, stop
}

// call measures points that have no score yet.
func (s *search) call(ctx context.Context, points []*point) error {
	s.result.Calls++
	plans := make([]*plan.Plan, len(points))
	for i, p := range points {
		plans[i] = p.plan
	}
	scores, err := s.measure(ctx, plans)
	if err != nil {
		return fmt.Errorf("search: measuring %d plans: %w", len(plans), err)
	}
	if len(scores) != len(plans) {
		return fmt.Errorf("search: %d scores of %d plans", len(scores), len(plans))
	}
	for i, p := range points {
		x := scores[i]
		switch {
		case x.M <= 0:
			return &SearchError{"the full cache gets none of the prompts right: there is nothing to retain"}
		case x.K < 0 || x.K > x.M || len(x.LogProb) == 0 || len(x.LogProb) != len(x.FullLogProb):
			return fmt.Errorf("search: %s: %d of %d prompts right, %d and %d log-probabilities", p.name, x.K, x.M, len(x.LogProb), len(x.FullLogProb))
		}
		s.known[p.plan.Digest()] = x
		t := Tried{Name: p.name, Budget: float64(p.target) / float64(s.total), Kept: float64(p.blocks) / float64(s.total),
			Bytes: p.plan.Totals[0].KeptBytes, M: x.M, K: x.K, Lower: lower95(x.K, x.M), Loss: x.Loss(), Probe: p.probe}
		s.result.Tried = append(s.result.Tried, t)
		if s.o.Report != nil {
			s.o.Report(t)
		}
	}
	return nil
}

// clears reports whether a point's retention is enough.
func (s *search) clears(p *point) bool {
	if pointOnly(p.score.M, s.o.Retention) {
		return p.score.Retention() >= s.o.Retention
	}
	return p.lower >= s.o.Retention
}

// pointOnly reports whether the bound cannot reach r even if all of m are right.
func pointOnly(m int, r float64) bool { return lower95(m, m) < r }

// best is the best point so far: of those that clear R the smallest, or of all where a budget was asked for. nil where
// there is none.
func (s *search) best() *point {
	var least []*point
	for _, p := range s.points {
		switch {
		case s.o.Retention > 0 && !s.clears(p):
		case s.o.Retention == 0 || least == nil || p.blocks == least[0].blocks:
			least = append(least, p)
		case p.blocks < least[0].blocks:
			least = append(least[:0], p)
		}
	}
	if least == nil {
		return nil
	}
	return ranked(least)[0]
}

// top is the number of blocks of the smallest plan that clears R: the full cache where none does.
func (s *search) top() int {
	if p := s.best(); p != nil {
		return p.blocks
	}
	return s.total
}

// failed is the largest budget in blocks that was tried and is less than what clears R needs.
func (s *search) failed() int {
	most, top := 0, s.top()
	for t := range s.targets {
		if t < top {
			most = max(most, t)
		}
	}
	return most
}

// ranked sorts points of about the same bytes, the best first: those with about as many answers right as the best by what
// they lose in log-probability, then the others. Points that are equal stay in order.
func ranked(points []*point) []*point {
	most := &points[0].score
	for _, p := range points {
		if p.score.K > most.K {
			most = &p.score
		}
	}
	// A standard deviation of the number of right answers is no difference.
	slack := max(1, math.Sqrt(float64(most.K)*float64(most.M-most.K)/float64(most.M)))
	few := func(p *point) int {
		if float64(p.score.K) < float64(most.K)-slack {
			return 1
		}
		return 0
	}
	out := slices.Clone(points)
	slices.SortStableFunc(out, func(a, b *point) int {
		return cmp.Or(cmp.Compare(few(a), few(b)), cmp.Compare(a.loss, b.loss), cmp.Compare(b.score.K, a.score.K))
	})
	return out
}

// keep returns the families of the best points of the smallest budget, at most n, each once; those of the next budget
// where there are too few.
func keep(points []*point, n int) []*candidate {
	var out []*candidate
	byTarget := map[int][]*point{}
	var targets []int
	for _, p := range points {
		if byTarget[p.target] == nil {
			targets = append(targets, p.target)
		}
		byTarget[p.target] = append(byTarget[p.target], p)
	}
	slices.Sort(targets)
	for _, t := range targets {
		for _, p := range ranked(byTarget[t]) {
			if len(out) < n && p.family != nil && !slices.Contains(out, p.family) {
				out = append(out, p.family)
			}
		}
	}
	return out
}

// only lists the families for which ok holds.
func (s *search) only(ok func(f *candidate) bool) []*candidate {
	var out []*candidate
	for _, f := range s.families {
		if ok(f) {
			out = append(out, f)
		}
	}
	return out
}

// run searches. It fails with errCut when calls are used up: what is best so far is then the result.
func (s *search) run(ctx context.Context) error {
	if s.worth = s.all(); s.in.Gates != nil {
		p, err := priorOf(s.in.Gates, OrderGate)
		if err != nil {
			return err
		}
		s.worth = p.rank()
	}
	if s.o.Retention == 0 {
		return s.forBudget(ctx)
	}
	families, err := s.ladder(ctx)
	if err != nil {
		return err
	}
	if err := s.narrow(ctx, families); err != nil {
		return err
	}
	if s.best() == nil {
		return nil // nothing below the full cache clears R
	}
	if err := s.squeeze(ctx); err != nil {
		return err
	}
	// What the plan is up against.
	points, err := s.grid(s.only(func(f *candidate) bool { return f.single }), s.top())
	if err == nil {
		_, err = s.score(ctx, points)
	}
	return err
}

// forBudget searches the best plan of a budget.
func (s *search) forBudget(ctx context.Context) error {
	points, err := s.grid(s.only(func(*candidate) bool { return true }), s.target(s.o.Budget))
	if err != nil {
		return err
	}
	if len(points) == 0 {
		return &SearchError{fmt.Sprintf("no method can keep as little as %g of the bytes at %d tokens", s.o.Budget, s.context)}
	}
	if _, err := s.score(ctx, points); err != nil {
		return err
	}
	p := s.best()
	p.target = s.target(s.o.Budget)
	for round := range s.o.Rounds {
		next, err := s.polish(ctx, p, false)
		if err != nil {
			return err
		}
		if round == 0 {
			points, err := s.grid(s.learned(), p.target)
			if err == nil {
				points, err = s.score(ctx, points)
			}
			if err != nil {
				return err
			}
			next = ranked(append(points, next))[0]
		}
		if next == p {
			return nil
		}
		p = next
	}
	return nil
}

// learned makes families of the heads' measured worth, and adds them to the others.
func (s *search) learned() []*candidate {
	p := prior{value: make([]float64, s.heads())}
	for i, h := range s.worth {
		p.value[h] = float64(len(s.worth) - i)
	}
	fresh := s.orderedBy("worth", p)
	s.families = append(s.families, fresh...)
	return fresh
}

// ladder goes down the ladder while something clears R, or up while nothing does, and returns the families that do best.
func (s *search) ladder(ctx context.Context) ([]*candidate, error) {
	rungs := s.o.Ladder
	at := slices.IndexFunc(rungs, func(x float64) bool { return x <= 0.25 })
	if at < 0 {
		at = len(rungs) - 1
	}
	points, err := s.grid(s.only(func(*candidate) bool { return true }), s.target(rungs[at]))
	if err != nil {
		return nil, err
	}
	if points, err = s.score(ctx, points); err != nil {
		return nil, err
	}
	// Ranks change with the budget: at first more go along.
	families := keep(points, 2*s.o.Keep)
	if len(points) > 0 {
		// Priors may be wrong about the heads. What the heads of the best plan are worth is measured now, and makes
		// further families.
		if _, err := s.polish(ctx, ranked(points)[0], true); err != nil {
			return nil, err
		}
		families = append(families, s.learned()...)
		if s.best() == nil {
			if points, err = s.rungs(ctx, families, rungs[at:at+1]); err != nil {
				return nil, err
			}
			families = keep(points, 2*s.o.Keep)
		}
	} else {
		families = s.only(func(*candidate) bool { return true })
	}
	for step := 2; s.best() == nil && at > 0; step++ { // up
		low := max(at-step, 0)
		if _, err := s.rungs(ctx, families, rungs[low:at]); err != nil {
			return nil, err
		}
		at = low
	}
	for s.top() <= s.target(rungs[at]) && at+1 < len(rungs) { // down
		next := min(at+2, len(rungs)-1)
		if points, err = s.rungs(ctx, families, rungs[at+1:next+1]); err != nil {
			return nil, err
		}
		at = next
		if len(points) == 0 {
			break
		}
		families = keep(points, s.o.Keep)
	}
	return families[:min(len(families), s.o.Keep)], nil
}

// rungs measures families at budgets.
func (s *search) rungs(ctx context.Context, families []*candidate, budgets []float64) ([]*point, error) {
	var targets []int
	for _, x := range budgets {
		targets = append(targets, s.target(x))
	}
	points, err := s.grid(families, targets...)
	if err != nil {
		return nil, err
	}
	return s.score(ctx, points)
}

// coarse is how near families alone are narrowed down, as a share of the budget: improving heads changes more than that.
const coarse = 0.1

// narrow divides what lies between the largest budget that failed and the smallest that did not, with the best families.
func (s *search) narrow(ctx context.Context, families []*candidate) error {
	families = families[:min(len(families), (s.o.Keep+1)/2)]
	for {
		low, high := s.failed(), s.top()
		if float64(high-low) <= max(1, max(coarse, s.o.Tolerance)*float64(high)) {
			return nil
		}
		var targets []int
		for i := 1; i <= 3; i++ {
			if t := low + (high-low)*i/4; t > low && !slices.Contains(targets, t) {
				targets = append(targets, t)
			}
		}
		points, err := s.grid(families, targets...)
		if err != nil {
			return err
		}
		if _, err := s.score(ctx, points); err != nil {
			return err
		}
	}
}

// finish writes the plan of the best point.
func (s *search) finish() error {
	p, r := s.best(), s.result
	if p == nil {
		x := Score{}
		for _, q := range s.points {
			if x = q.score; x.M > 0 {
				break
			}
		}
		x.K, x.LogProb = x.M, x.FullLogProb
		var err error
		if p, err = s.point("full", s.total, slices.Repeat([]plan.Policy{plan.Full{}}, s.heads()), false); err != nil {
			return err
		}
		p.score, p.loss, p.lower = x, x.Loss(), lower95(x.K, x.M)
	}
	r.Name, r.Kept, r.Score, r.Lower = p.name, float64(p.blocks)/float64(s.total), p.score, p.lower
	r.Point = s.o.Retention > 0 && pointOnly(p.score.M, s.o.Retention)
	figures := map[string]float64{"plans_tried": float64(len(r.Tried)), "search_m": float64(p.score.M), "search_k": float64(p.score.K), "search_lower95": p.lower, "search_loss": p.loss}
	budget := s.o.Budget
	if s.o.Retention > 0 {
		figures["min_retention"] = s.o.Retention
		budget = 0
	}
	q, err := s.plan("auto: "+p.name, &made{policies: p.policies, figures: figures, uses: uses{gates: s.in.Gates != nil, policies: s.in.FastGen != nil, budgets: s.in.Budgets != nil}})
	if err != nil {
		return err
	}
	q.Evidence.Recipe.Budget = budget
	if r.Point {
		q.Warnings = append(q.Warnings, fmt.Sprintf("%d prompts are too few to bound a retention of %g: the share of answers that stay right was asked to reach it, not its lower bound.", p.score.M, s.o.Retention))
	}
	if r.Cut {
		q.Warnings = append(q.Warnings, fmt.Sprintf("The search was cut off after %d measurements; a smaller plan may do.", r.Calls))
	}
	r.Plan = q
	return nil
}
