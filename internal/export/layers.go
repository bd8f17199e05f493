package export

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"github.com/kvprofile/kvprofile/plan"
)

// span is what all KV heads of a layer keep when a layer is either full or a window with sinks before it.
type span struct {
	full         bool
	sink, recent int
}

// spans gives every layer one span that holds what each of its heads holds.
func (d *draft) spans() []span {
	out := make([]span, len(d.p.Layers))
	for l, row := range d.p.Layers {
		window := d.p.Model.Window(l)
		s := &out[l]
		why := make([]Loss, len(row))
		for k := range row {
			switch q := d.policy(l, k).(type) {
			case plan.Full:
				s.full = s.full || window == 0
				s.recent = max(s.recent, window)
			case plan.Streaming:
				if q.Evict != plan.EvictAlways {
					s.full = true
					why[k] = Loss{Of: "evict", Reason: "windows hold while the prompt is read, so layers with heads that evict after it keep everything"}
				}
				s.sink, s.recent = max(s.sink, q.SinkTokens), max(s.recent, q.RecentTokens)
				d.slots(l, k, q.Positions)
			default:
				s.full = true
				why[k] = Loss{Of: string(q.Kind()), Reason: "layers are full or have a window, so layers with these heads keep everything"}
			}
		}
		// A layer's own window is the most that a head of it can use.
		if window > 0 && (s.full || s.recent >= window) {
			*s = span{recent: window}
		}
		for k := range row {
			as := s.policy(window)
			if alike(as, d.policy(l, k)) {
				continue
			}
			loss := why[k]
			if loss.Of == "" {
				loss = Loss{Of: "layers", Reason: "all KV heads of a layer keep the same, so the largest of them decides"}
			}
			loss.Effect = More
			d.replace(l, k, as, loss)
		}
	}
	return out
}

// policy is the span in the words of plans.
func (s span) policy(window int) plan.Policy {
	if s.full || window > 0 && s.recent == window {
		return plan.Full{}
	}
	return plan.Streaming{SinkTokens: s.sink, RecentTokens: s.recent, Evict: plan.EvictAlways, Decode: plan.DecodeRolling, Positions: plan.PositionsOriginal}
}

// alike reports whether a span is what a policy keeps, whatever its keys are rotated to.
func alike(span, q plan.Policy) bool {
	if s, ok := q.(plan.Streaming); ok {
		s.Positions = plan.PositionsOriginal
		return span == plan.Policy(s)
	}
	return span.Kind() == plan.KindFull && q.Kind() == plan.KindFull
}

// tensorRTLLM writes kv_cache_config. A window of TensorRT-LLM counts the sinks, of which all layers have the same number.
func tensorRTLLM(d *draft, o Options) ([]File, error) {
	length := d.length(o)
	spans := d.spans()
	sink := 0
	for _, s := range spans {
		if !s.full {
			sink = max(sink, s.sink)
		}
	}
	type kvCache struct {
		Windows []int `json:"max_attention_window"`
		Sink    int   `json:"sink_token_length"`
	}
	var c struct {
		KVCache kvCache `json:"kv_cache_config"`
	}
	c.KVCache.Sink = sink
	for l, s := range spans {
		w := s.recent + sink
		if s.full || w >= length {
			w = length
		}
		c.KVCache.Windows = append(c.KVCache.Windows, w)
		if s.full || s.sink == sink || d.p.Model.Window(l) == s.recent {
			continue
		}
		as := span{sink: sink, recent: s.recent}.policy(d.p.Model.Window(l))
		for k := range d.as[l] {
			d.replace(l, k, as, Loss{Of: "sink_tokens", Effect: More, Reason: fmt.Sprintf("all layers have the same number of sink tokens, %d", sink)})
		}
	}
	if sink > 0 {
		d.lose(Loss{Of: "sink_tokens", Effect: Less, Reason: "versions whose backend ignores sink_token_length drop the sink tokens: make sure that yours does not"})
	}
	d.beyond(length)
	d.common()
	return jsonFile("kv_cache_config.json", c)
}

// layerSpec is a layer of the layers format. The names are vLLM's (KVCacheSpec) and transformers' (layer_types).
type layerSpec struct {
	Layer     int    `json:"layer"`
	Kind      string `json:"kind"`
	Window    int    `json:"sliding_window,omitempty"` // last tokens, without the sinks
	Sink      int    `json:"sink_tokens,omitempty"`    // first tokens kept beside them
	KVHeads   int    `json:"num_kv_heads"`
	HeadDim   int    `json:"head_size"`
	Dtype     string `json:"dtype"`
	BlockSize int    `json:"block_size"`
}

const (
	fullAttention    = "full_attention"
	slidingAttention = "sliding_attention"
)

// transformersConfig are members of a transformers config.json. It has no sinks and one window for all layers.
type transformersConfig struct {
	LayerTypes []string `json:"layer_types"`
	Window     *int     `json:"sliding_window"`
}

// layerSpecs writes the kind of every layer.
func layerSpecs(d *draft, _ Options) ([]File, error) {
	m, c := &d.p.Model, d.p.Cache
	spans := d.spans()
	var out struct {
		Format       string             `json:"format"`
		Version      int                `json:"version"`
		Plan         string             `json:"plan_sha256"`
		Model        plan.Hashes        `json:"model_sha256"`
		Layers       []layerSpec        `json:"layers"`
		Transformers transformersConfig `json:"transformers"`
	}
	out.Format, out.Version, out.Plan, out.Model = "kvprofile.layer-specs", 1, d.p.Digest(), m.SHA256
	widest, sinks, narrower := 0, 0, 0
	for l, s := range spans {
		x := layerSpec{Layer: l, Kind: fullAttention, KVHeads: m.NKVHeads, HeadDim: m.HeadDim, Dtype: string(c.Dtype), BlockSize: c.BlockSize}
		kind := fullAttention
		if !s.full {
			x.Kind, x.Window, x.Sink = slidingAttention, s.recent, s.sink
			if s.sink > 0 {
				sinks++
			} else {
				kind, widest = slidingAttention, max(widest, s.recent)
			}
		}
		out.Layers = append(out.Layers, x)
		out.Transformers.LayerTypes = append(out.Transformers.LayerTypes, kind)
	}
	for _, s := range spans {
		if !s.full && s.sink == 0 && s.recent < widest {
			narrower++
		}
	}
	if widest > 0 {
		out.Transformers.Window = &widest
	}
	if sinks > 0 {
		d.lose(Loss{Of: "sink_tokens", Effect: More,
			Reason: fmt.Sprintf("transformers' layer_types have no sinks: there %s with sinks and a window are full; a reader of the layers that has no sinks must do the same", count(sinks, "layer"))})
	}
	if narrower > 0 {
		d.lose(Loss{Of: "recent_tokens", Effect: More,
			Reason: fmt.Sprintf("transformers has one sliding_window for all layers: there %s have the widest one, %d tokens", count(narrower, "layer"), widest)})
	}
	d.common("model", "cache")
	return jsonFile("layers.json", out)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// jsonFile writes a value as JSON with lists of numbers and of names on one line each.
func jsonFile(name string, v any) ([]File, error) {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, err
	}
	list := regexp.MustCompile(`\[[^][{}]*\]`)
	text = list.ReplaceAllFunc(text, func(lines []byte) []byte {
		return []byte("[" + strings.Join(strings.Fields(strings.Trim(string(lines), "[]")), " ") + "]")
	})
	return []File{{name, append(text, '\n')}}, nil
}

// length is the longest prompt that the export is for.
func (d *draft) length(o Options) int {
	if o.Length > 0 {
		return o.Length
	}
	return d.p.Model.MaxPosition
}

// beyond notes that full heads are bounded.
func (d *draft) beyond(length int) {
	for _, row := range d.as {
		for _, q := range row {
			if q.Kind() == plan.KindFull {
				d.lose(Loss{Of: "full", Effect: Less, Reason: fmt.Sprintf("everything is written as %d tokens: longer texts keep less than the plan", length)})
				return
			}
		}
	}
}
