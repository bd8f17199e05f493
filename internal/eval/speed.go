package eval

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/plan"
)

// Speed is what decoding costs with the full cache and with a plan, in the same run, steps taking turns.
type Speed struct {
	Prompt, Batch, Steps int
	// Full and Plan are the median times of a step of the whole batch, FullAttention and PlanAttention those of the
	// attention in it, which reads the caches.
	Full, Plan                   time.Duration
	FullAttention, PlanAttention time.Duration
	// FullBytes and PlanBytes are held by the caches of the batch at the end, in the plan's type.
	FullBytes, PlanBytes int64
}

// MeasureSpeed reads a prompt, makes batch copies of its cache with everything in it and as many with a plan applied, and
// decodes steps tokens with both.
func MeasureSpeed(ctx context.Context, m *engine.Model, tok Tokenizer, prompt []int32, p *plan.Plan, batch, steps int) (*Speed, error) {
	if batch < 1 || steps < 1 || len(prompt) == 0 {
		return nil, fmt.Errorf("a batch of %d for %d steps after %d tokens: all must be positive", batch, steps, len(prompt))
	}
	e := &evaluator{ctx: ctx, model: m, tok: tok}
	for _, c := range []Contender{{Name: NameFull, Plan: FullPlan(p)}, {Name: "plan", Plan: p}} {
		x, err := newEntry(&m.Config, c)
		if err != nil {
			return nil, err
		}
		for range batch {
			e.entries = append(e.entries, x)
		}
	}
	state, err := e.prefill(&datasets.Sample{Task: "speed"}, prompt, steps)
	if err != nil {
		return nil, err
	}
	defer state.free()
	ids := same(prompt[len(prompt)-1], 2*batch)
	clock := &attentionClock{Backend: m.Backend}
	m.Backend = clock
	defer func() { m.Backend = clock.Backend }()
	var times, attention [2][]time.Duration
	for range steps {
		for side := range times {
			active := make([]bool, 2*batch)
			for i := range batch {
				active[side*batch+i] = true
			}
			clock.spent = 0
			begin := time.Now()
			if err := state.step(e, ids, active); err != nil {
				return nil, err
			}
			times[side] = append(times[side], time.Since(begin))
			attention[side] = append(attention[side], clock.spent)
		}
	}
	s := &Speed{Prompt: len(prompt), Batch: batch, Steps: steps, Full: median(times[0]), Plan: median(times[1]),
		FullAttention: median(attention[0]), PlanAttention: median(attention[1])}
	for i, q := range state.sequences {
		if i < batch {
			s.FullBytes += q.held()
		} else {
			s.PlanBytes += q.held()
		}
	}
	return s, nil
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// attentionClock sums up the time that a backend spends in attention over caches.
type attentionClock struct {
	engine.Backend
	spent time.Duration
}

func (c *attentionClock) PagedAttention(out, q, k, v engine.Tensor, pages *engine.Pages, lanes [][]engine.Lane, table *engine.Rotary, spec engine.AttentionSpec) {
	begin := time.Now()
	c.Backend.PagedAttention(out, q, k, v, pages, lanes, table, spec)
	c.spent += time.Since(begin)
}
