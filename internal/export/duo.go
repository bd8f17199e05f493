package export

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/kvprofile/kvprofile/plan"
)

// duoConfig is the part of DuoAttention's config.json that its loader reads, and what else a user needs: with sparsity,
// DuoAttention's sparsify_attention_heads and kvpress choose exactly the heads of the plan.
type duoConfig struct {
	ModelName string  `json:"model_name"`
	Sink      int     `json:"sink_size"`
	Recent    int     `json:"recent_size"`
	Threshold float64 `json:"threshold"`
	Sparsity  float64 `json:"sparsity"` // share of streaming heads
}

// duoPattern is the one pattern that DuoAttention's files have: full heads, and streaming heads of one size.
type duoPattern struct {
	full         [][]bool
	sink, recent int
	streaming    int // heads
}

// Sizes that a file without any streaming head has; nothing depends on them.
const (
	idleSink   = 64
	idleRecent = 256
)

// pattern makes every head full or streaming. stream says whether a streaming policy can be said.
func (d *draft) pattern(stream func(plan.Streaming) bool) duoPattern {
	t := duoPattern{full: make([][]bool, len(d.p.Layers))}
	d.each(func(_, _ int, q plan.Policy) {
		if s, ok := q.(plan.Streaming); ok && stream(s) {
			t.sink, t.recent = max(t.sink, s.SinkTokens), max(t.recent, s.RecentTokens)
			t.streaming++
		}
	})
	d.each(func(l, k int, q plan.Policy) {
		s, ok := q.(plan.Streaming)
		streams := ok && stream(s)
		t.full[l] = append(t.full[l], !streams)
		switch {
		case streams && (s.SinkTokens != t.sink || s.RecentTokens != t.recent):
			wider := s
			wider.SinkTokens, wider.RecentTokens = t.sink, t.recent
			d.replace(l, k, wider, Loss{Of: "streaming", Effect: More,
				Reason: fmt.Sprintf("all streaming heads have one size: %d sink and %d recent tokens", t.sink, t.recent)})
		case ok && !streams:
			d.replace(l, k, plan.Full{}, Loss{Of: "evict", Effect: More,
				Reason: "streaming heads evict while the prompt is read, so heads that evict after it keep everything"})
		case !streams && q.Kind() != plan.KindFull:
			d.replace(l, k, plan.Full{}, Loss{Of: string(q.Kind()), Effect: More,
				Reason: "heads are full or streaming, so these keep everything"})
		}
		if streams {
			d.slots(l, k, s.Positions)
		}
	})
	if t.streaming == 0 {
		t.sink, t.recent = idleSink, idleRecent
	}
	return t
}

// files writes the pattern as DuoAttention does: rows are layers, columns KV heads, 1 for full and 0 for streaming.
func (t duoPattern) files(model string) ([]File, error) {
	var b strings.Builder
	heads := 0
	for _, row := range t.full {
		for k, full := range row {
			if k > 0 {
				b.WriteByte('\t')
			}
			gate := 0.0
			if full {
				gate = 1
			}
			fmt.Fprintf(&b, "%.18e", gate)
			heads++
		}
		b.WriteByte('\n')
	}
	config, err := json.Marshal(duoConfig{ModelName: model, Sink: t.sink, Recent: t.recent, Threshold: 0.5, Sparsity: t.sparsity()})
	if err != nil {
		return nil, err
	}
	return []File{{"full_attention_heads.tsv", []byte(b.String())}, {"config.json", append(config, '\n')}}, nil
}

// sparsity is the share of streaming heads.
func (t duoPattern) sparsity() float64 {
	heads := 0
	for _, row := range t.full {
		heads += len(row)
	}
	return float64(t.streaming) / float64(heads)
}

// duo writes DuoAttention's files. Streaming heads of DuoAttention evict while the prompt is read.
func duo(d *draft, _ Options) ([]File, error) {
	t := d.pattern(func(s plan.Streaming) bool { return s.Evict == plan.EvictAlways })
	d.common()
	return t.files(d.p.Model.Name)
}
