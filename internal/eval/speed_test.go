package eval_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/plan"
)

func TestMeasureSpeed(t *testing.T) {
	c := enginetest.Tiny()
	b := ref.New[float64]()
	m := newModel(t, enginetest.Weights{Config: c, Seed: 1}, b)
	prompt := enginetest.Tokens(c, 60, 1)
	streaming := plan.Streaming{SinkTokens: 2, RecentTokens: 6, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	h2o := plan.H2O{HeavyTokens: 4, RecentTokens: 4, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
	for name, p := range map[string]*plan.Plan{
		"streaming": newPlan(t, &c, 4, everywhere(streaming)),
		"h2o":       newPlan(t, &c, 4, everywhere(h2o)),
		"chunked":   newPlan(t, &c, 4, everywhere(streaming), chunked),
		"layers":    newPlan(t, &c, 4, everywhere(streaming), func(p *plan.Plan) { p.Cache.Granularity = plan.PerLayer }),
	} {
		const batch, steps = 3, 9
		s, err := eval.MeasureSpeed(context.Background(), m, letters{}, prompt, p, batch, steps)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		u := p.Usage(plan.Request{PromptTokens: len(prompt), GeneratedTokens: steps, Batch: batch})
		if s.PlanBytes != u.Bytes || s.FullBytes != u.FullBytes || s.Prompt != len(prompt) || s.Batch != batch || s.Steps != steps {
			t.Errorf("%s: %+v, want %d and %d bytes", name, s, u.Bytes, u.FullBytes)
		}
		if !(s.PlanAttention > 0 && s.FullAttention > 0 && s.PlanAttention < s.Plan && s.FullAttention < s.Full) {
			t.Errorf("%s: attention %v of %v, full %v of %v", name, s.PlanAttention, s.Plan, s.FullAttention, s.Full)
		}
		if s.PlanAttention >= s.FullAttention {
			t.Errorf("%s: attention to %d tokens takes %v, to %d %v", name, 8, s.PlanAttention, 60, s.FullAttention)
		}
		if m.Backend != engine.Backend(b) {
			t.Errorf("%s: the model has another backend", name)
		}
	}
}

func TestMeasureSpeedRefuses(t *testing.T) {
	c := enginetest.Tiny()
	m := newModel(t, enginetest.Weights{Config: c, Seed: 1}, ref.New[float64]())
	prompt, p := enginetest.Tokens(c, 20, 1), newPlan(t, &c, 4, everywhere(plan.Full{}))
	other := c
	other.KVHeads = 1
	outside := []int32{1, int32(c.Vocab)}
	for _, x := range []struct {
		prompt       []int32
		plan         *plan.Plan
		batch, steps int
		want         string
	}{
		{prompt, p, 0, 5, "batch of 0"},
		{prompt, p, 1, 0, "0 steps"},
		{nil, p, 1, 5, "after 0 tokens"},
		{prompt, newPlan(t, &other, 4, everywhere(plan.Full{})), 1, 5, "another shape"},
		{outside, p, 1, 5, "vocabulary"},
	} {
		if s, err := eval.MeasureSpeed(context.Background(), m, letters{}, x.prompt, x.plan, x.batch, x.steps); err == nil || s != nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%q wanted: %v", x.want, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := eval.MeasureSpeed(ctx, m, letters{}, prompt, p, 1, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
