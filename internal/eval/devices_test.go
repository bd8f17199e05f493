package eval_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
	"github.com/kvprofile/kvprofile/internal/eval"
	"github.com/kvprofile/kvprofile/plan"
)

// Any number of devices gives the result of one, with policies that keep the whole cache, stream, choose by content, and with
// prompts that come token by token.
func TestResultIsTheSameOnAnyNumberOfDevices(t *testing.T) {
	w := enginetest.Weights{Config: enginetest.Tiny(), Seed: 4}
	c := w.Config
	contenders := []eval.Contender{
		{Name: "streaming", Plan: newPlan(t, &c, 4, everywhere(plan.Streaming{SinkTokens: 2, RecentTokens: 6, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}))},
		{Name: "chunked", Plan: newPlan(t, &c, 4, everywhere(plan.Streaming{SinkTokens: 1, RecentTokens: 5, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsCacheSlot}), chunked)},
		{Name: "all", Plan: newPlan(t, &c, 4, everywhere(plan.Full{}))},
	}
	sets := set(text(90, enginetest.Tokens(c, 21, 90)))
	for i := range 7 {
		sets = append(sets, set(sample(i, enginetest.Tokens(c, 18+i%4, uint64(i)), 12, 15))...)
	}
	o := eval.Options{Extra: 3, TextTokens: 8}
	want := evaluate(t, newModel(t, w, ref.New[float32]()), sets, o, contenders...)
	for _, n := range []int{2, 3, 9} {
		var backends []engine.Backend
		for range n {
			backends = append(backends, ref.New[float32]())
		}
		s, err := devices.New(c, w, backends...)
		if err != nil {
			t.Fatal(err)
		}
		last := 0
		o.Progress = func(done, all int) {
			if done != last+1 || all != 8 {
				t.Errorf("%d devices: %d of %d after %d", n, done, all, last)
			}
			last = done
		}
		got, err := eval.EvaluateOn(context.Background(), s, letters{}, sets, contenders, o)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%d devices give another result than one", n)
		}
		// One prompt is not of this model.
		bad := set(sample(50, append([]int32{1000}, enginetest.Tokens(c, 17, 3)...), 12, 15))
		o.Progress = nil
		if r, err := eval.EvaluateOn(context.Background(), s, letters{}, append(append(sets[:5:5], bad...), sets[5:]...), contenders, o); r != nil || err == nil || !strings.Contains(err.Error(), "vocabulary") {
			t.Errorf("%d devices: a bad prompt: %v", n, err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		o.Progress = func(int, int) { cancel() }
		if _, err := eval.EvaluateOn(ctx, s, letters{}, sets, contenders, o); !errors.Is(err, context.Canceled) {
			t.Errorf("%d devices: interrupted: %v", n, err)
		}
		cancel()
	}
}
