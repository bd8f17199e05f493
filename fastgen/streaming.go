package fastgen

import (
	"fmt"
	"slices"
)

// StreamingHead is what a record says of a streaming policy for one KV head.
type StreamingHead struct {
	// Recovery by the rules of Options.
	Recovery float64
	// Kept is the share of a prompt's tokens that is kept at its end, mean over samples.
	Kept float64
}

// Streaming judges the policy that keeps the first sink and the last recent tokens, for every layer and KV head. It
// keeps key j for row i when j < sink or i-j < recent. That is the mass on the recent keys, and what the sink columns
// receive from rows that are further away. recent must be one of the record's widths, sink at most its largest.
func Streaming(rec Record, sink, recent int, o Options) ([][]StreamingHead, error) {
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	meta := rec.Meta()
	x := slices.Index(meta.Grid.Recent, recent)
	if x < 0 {
		return nil, &OptionError{"recent", fmt.Sprintf("%d tokens are not in the record, which has %v; record the attention again with it", recent, meta.Grid.Recent)}
	}
	if most := slices.Max(meta.Grid.Sinks); sink < 0 || sink > most {
		return nil, &OptionError{"sink", fmt.Sprintf("%d tokens are not within the %d that the record has", sink, most)}
	}
	m := meta.Model
	samples := rec.Samples()
	recovery := make([][]float64, m.Layers*m.KVHeads) // by sample
	var kept float64
	for i := range samples {
		heads, err := rec.Heads(i)
		if err != nil {
			return nil, err
		}
		rows := float64(samples[i].Prompt)
		for kv := range recovery {
			group := make([]float64, 0, m.Group())
			for _, h := range heads[kv*m.Group() : (kv+1)*m.Group()] {
				var far float64
				for _, v := range h.SinkFar[x][:min(sink, len(h.SinkFar[x]))] {
					far += float64(v)
				}
				group = append(group, min(h.Recent[x]+far/rows, 1))
			}
			recovery[kv] = append(recovery[kv], o.Group.over(group))
		}
		kept += min(float64(sink+recent)/rows, 1) / float64(len(samples))
	}
	out := make([][]StreamingHead, m.Layers)
	for l := range out {
		for kv := range m.KVHeads {
			out[l] = append(out[l], StreamingHead{Recovery: o.Samples.over(recovery[l*m.KVHeads+kv]), Kept: kept})
		}
	}
	return out, nil
}
