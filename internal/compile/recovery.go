package compile

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/profile"
)

// Record is what is read of an attention record; *profile.Record is one.
type Record interface {
	Meta() profile.Meta
	Samples() []profile.Sample
	Heads(sample int) ([]profile.HeadStats, error)
	Columns(sample, layer int) ([]profile.Columns, error)
	Digest() (string, error)
}

// topKCurves returns for every layer and KV head the recovery of the top-k policy by blocks kept at the context, from
// 0 to blocks. A budget stands for the same share of a sample that is shorter or longer than the context.
//
// Recovery is the share of the attention of the rows that write the answers, which see what the policy left, that falls
// on what is kept and on tokens after the prompt; of the last rows of the prompt where a sample has no answers. Of a
// group the query head with the least counts; samples are averaged.
func topKCurves(rec Record, policy plan.TopK, context, block, blocks int) ([][][]float64, error) {
	meta := rec.Meta()
	m := meta.Model
	at := slices.Index(meta.Grid.Windows, policy.ObservationWindow)
	if at < 0 {
		return nil, &OptionError{"observation window", fmt.Sprintf("%d tokens are not in the record, which has %v", policy.ObservationWindow, meta.Grid.Windows)}
	}
	curves := make([][][]float64, m.Layers)
	for l := range curves {
		curves[l] = make([][]float64, m.KVHeads)
		for k := range curves[l] {
			curves[l][k] = make([]float64, blocks+1)
		}
	}
	samples := rec.Samples()
	for i := range samples {
		for l := range m.Layers {
			columns, err := rec.Columns(i, l)
			if err != nil {
				return nil, err
			}
			if len(columns) != m.Heads {
				return nil, fmt.Errorf("sample %d, layer %d: %d query heads in the record, the model has %d", samples[i].ID, l, len(columns), m.Heads)
			}
			for k := range m.KVHeads {
				group := columns[k*m.Group() : (k+1)*m.Group()]
				gains := topKGains(group, &samples[i], policy, at)
				for b := 1; b <= blocks; b++ {
					tokens := min(int(int64(b)*int64(block)*int64(samples[i].Prompt)/int64(context)), samples[i].Prompt)
					if b == blocks {
						tokens = samples[i].Prompt
					}
					curves[l][k][b] += gains[tokens] / float64(len(samples))
				}
			}
		}
	}
	return curves, nil
}

// topKGains returns the recovery of a group's worst query head by tokens kept of the prompt, from 0 to all.
func topKGains(group []profile.Columns, s *profile.Sample, policy plan.TopK, window int) []float64 {
	n := s.Prompt
	votes := make([]float64, n)
	for _, c := range group {
		for j, v := range c.Window[window][:n] {
			votes[j] += float64(v)
		}
	}
	order := topKOrder(votes, policy)
	least := make([]float64, n+1)
	for q, c := range group {
		mass, after := c.Window[window][:n], 0.0
		if len(c.Answer) >= n && len(s.Answers) > 0 {
			mass = c.Answer[:n]
			for _, v := range c.Answer[n:] {
				after += float64(v)
			}
		}
		total := after
		for _, v := range mass {
			total += float64(v)
		}
		kept := after
		for t := 0; t <= n; t++ {
			if t > 0 {
				kept += float64(mass[order[t-1]])
			}
			share := 1.0 // a head that pays no attention loses none
			if total > 0 {
				share = min(kept/total, 1)
			}
			if q == 0 || share < least[t] {
				least[t] = share
			}
		}
	}
	return least
}

// topKOrder lists the tokens of a prompt in the order in which a growing budget takes them: the observation window from
// its end, the sinks, then the others by pooled votes, ties by position.
func topKOrder(votes []float64, policy plan.TopK) []int {
	n := len(votes)
	window := min(policy.ObservationWindow, n)
	prefix := n - window
	pooled := policy.Pool.Smooth(votes[:prefix])
	order := make([]int, 0, n)
	for j := n - 1; j >= prefix; j-- {
		order = append(order, j)
	}
	sinks := min(policy.SinkTokens, prefix)
	for j := range sinks {
		order = append(order, j)
	}
	for j := sinks; j < prefix; j++ {
		order = append(order, j)
	}
	slices.SortStableFunc(order[window+sinks:], func(a, b int) int { return cmp.Compare(pooled[b], pooled[a]) })
	return order
}
