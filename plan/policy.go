package plan

import "encoding/json"

// Kind names a kind of policy.
type Kind string

// The kinds of policies.
const (
	KindFull      Kind = "full"
	KindStreaming Kind = "streaming"
	KindFastGen   Kind = "fastgen"
	KindTopK      Kind = "topk"
	KindH2O       Kind = "h2o"
)

// Policy says what a KV head keeps. It is one of [Full], [Streaming], [FastGen], [TopK] and [H2O].
type Policy interface {
	// Kind is the policy's kind.
	Kind() Kind
	// Static reports whether the positions kept depend on the number of tokens alone, and not on what they are.
	Static() bool

	isPolicy()
}

// Full keeps everything that the model itself can attend to: all tokens, or on a layer with a sliding window the last
// tokens of the window.
type Full struct{}

// Streaming keeps the first tokens (sinks) and the last ones (StreamingLLM, Xiao et al. 2023; DuoAttention, Xiao et
// al. 2024).
type Streaming struct {
	// SinkTokens is the number of first tokens kept.
	SinkTokens int `json:"sink_tokens" jsonschema:"minimum=0,maximum=134217728"`
	// RecentTokens is the number of last tokens kept.
	RecentTokens int `json:"recent_tokens" jsonschema:"minimum=1,maximum=134217728"`
	// Evict says when tokens of the prompt leave.
	Evict Evict `json:"evict"`
	// Decode is rolling.
	Decode Decode `json:"decode"`
	// Positions says which positions the kept keys are rotated to.
	Positions Positions `json:"positions"`
}

// FastGen keeps the tokens of the named classes, those that received most attention, and the last ones (Ge et al.
// 2023). With n the tokens it looks at: the prompt's where decode is static, all so far where it is rolling.
type FastGen struct {
	// Classes kept: special, or special and punctuation.
	Classes []Class `json:"classes"`
	// FrequentRatio keeps, of the tokens in no kept class, the ceil(frequent_ratio * n) that received most attention,
	// summed over the query heads of the group.
	FrequentRatio float64 `json:"frequent_ratio" jsonschema:"minimum=0,maximum=1"`
	// LocalRatio keeps the last ceil(local_ratio * n) tokens.
	LocalRatio float64 `json:"local_ratio" jsonschema:"minimum=0,maximum=1"`
	// MaxTokens bounds what is kept of the n tokens; left out for no such bound.
	MaxTokens int `json:"max_tokens,omitempty" jsonschema:"minimum=1,maximum=134217728"`
	// MaxRatio bounds what is kept of the n tokens to ceil(max_ratio * n); left out for no such bound.
	MaxRatio float64 `json:"max_ratio,omitempty" jsonschema:"exclusiveMinimum=0,maximum=1"`
	// Overflow says what happens when more would be kept. Left out when there is no bound.
	Overflow Overflow `json:"overflow,omitempty"`
	// Evict is prefill_end.
	Evict Evict `json:"evict"`
	// Decode is static or rolling.
	Decode Decode `json:"decode"`
	// Positions says which positions the kept keys are rotated to.
	Positions Positions `json:"positions"`
}

// TopK keeps a budget of tokens of the prompt, selected by the attention of the prompt's last queries (SnapKV, Li et
// al. 2024; PyramidKV, Cai et al. 2024). The budget includes sinks and observation window.
type TopK struct {
	// BudgetTokens is the number of tokens kept. Exactly one of budget_tokens and budget_ratio is given.
	BudgetTokens int `json:"budget_tokens,omitempty" jsonschema:"minimum=1,maximum=134217728"`
	// BudgetRatio keeps ceil(budget_ratio * prompt tokens), but never fewer than sinks and window and one more.
	BudgetRatio float64 `json:"budget_ratio,omitempty" jsonschema:"exclusiveMinimum=0,maximum=1"`
	// ObservationWindow is the number of last prompt tokens whose queries vote; they are kept themselves.
	ObservationWindow int `json:"observation_window" jsonschema:"minimum=1,maximum=134217728"`
	// Pool smooths the votes along the positions.
	Pool Pool `json:"pool"`
	// Aggregate says how the votes of a group's query heads become one.
	Aggregate Aggregate `json:"aggregate"`
	// SinkTokens is the number of first tokens kept in any case.
	SinkTokens int `json:"sink_tokens" jsonschema:"minimum=0,maximum=134217728"`
	// Evict is prefill_end.
	Evict Evict `json:"evict"`
	// Decode is static or rolling.
	Decode Decode `json:"decode"`
	// Positions says which positions the kept keys are rotated to.
	Positions Positions `json:"positions"`
}

// Pool is a pooling along the positions with stride 1, padded to keep the length.
type Pool struct {
	// Kind of pooling.
	Kind PoolKind `json:"kind"`
	// Kernel is the odd number of neighbouring positions pooled, 1 for kind none.
	Kernel int `json:"kernel" jsonschema:"minimum=1,maximum=1023"`
}

// H2O keeps the tokens that received most attention so far and the last ones (Zhang et al. 2023). Scores of evicted
// tokens are forgotten.
type H2O struct {
	// SinkTokens is the number of first tokens kept in any case.
	SinkTokens int `json:"sink_tokens" jsonschema:"minimum=0,maximum=134217728"`
	// HeavyTokens is the number of tokens kept for the attention that they received.
	HeavyTokens int `json:"heavy_tokens" jsonschema:"minimum=1,maximum=134217728"`
	// RecentTokens is the number of last tokens kept.
	RecentTokens int `json:"recent_tokens" jsonschema:"minimum=1,maximum=134217728"`
	// Evict says when tokens of the prompt leave.
	Evict Evict `json:"evict"`
	// Decode is rolling.
	Decode Decode `json:"decode"`
	// Positions says which positions the kept keys are rotated to.
	Positions Positions `json:"positions"`
}

// Evict says when tokens of the prompt leave the cache.
type Evict string

// The times of eviction.
const (
	// EvictAlways applies the policy from the first token on: queries of the prompt do not see what was evicted.
	EvictAlways Evict = "always"
	// EvictPrefillEnd applies the policy when the layer has processed the whole prompt: its queries saw everything.
	EvictPrefillEnd Evict = "prefill_end"
)

// Decode says what happens while tokens are generated.
type Decode string

// The decode rules.
const (
	// DecodeStatic keeps what was kept of the prompt and every generated token.
	DecodeStatic Decode = "static"
	// DecodeRolling applies the policy at every step.
	DecodeRolling Decode = "rolling"
)

// Positions says which positions kept keys are rotated to.
type Positions string

// The position rules.
const (
	// PositionsOriginal leaves keys at the positions that they had in the text.
	PositionsOriginal Positions = "original"
	// PositionsCacheSlot numbers the kept tokens from 0 without gaps; keys are cached before rotation.
	PositionsCacheSlot Positions = "cache_slot"
)

// Class is a class of tokens.
type Class string

// The classes of tokens.
const (
	ClassSpecial     Class = "special"
	ClassPunctuation Class = "punctuation"
)

// PoolKind names a pooling.
type PoolKind string

// The kinds of pooling.
const (
	PoolNone PoolKind = "none"
	PoolMax  PoolKind = "max"
	PoolAvg  PoolKind = "avg"
)

// Aggregate says how the votes of a group's query heads become one.
type Aggregate string

// The ways to aggregate votes.
const (
	// AggregateMean takes the mean of the query heads' votes.
	AggregateMean Aggregate = "mean"
	// AggregateMax takes the highest of the query heads' votes.
	AggregateMax Aggregate = "max"
	// AggregateUnion has the query heads take turns, each adding its best token, until the budget is full.
	AggregateUnion Aggregate = "union"
)

func (Full) Kind() Kind      { return KindFull }
func (Streaming) Kind() Kind { return KindStreaming }
func (FastGen) Kind() Kind   { return KindFastGen }
func (TopK) Kind() Kind      { return KindTopK }
func (H2O) Kind() Kind       { return KindH2O }

func (Full) Static() bool      { return true }
func (Streaming) Static() bool { return true }
func (FastGen) Static() bool   { return false }
func (TopK) Static() bool      { return false }
func (H2O) Static() bool       { return false }

func (Full) isPolicy()      {}
func (Streaming) isPolicy() {}
func (FastGen) isPolicy()   {}
func (TopK) isPolicy()      {}
func (H2O) isPolicy()       {}

// MarshalJSON writes the policy with its kind.
func (p Full) MarshalJSON() ([]byte, error) { return marshalPolicy(p.Kind(), struct{}{}) }

// MarshalJSON writes the policy with its kind.
func (p Streaming) MarshalJSON() ([]byte, error) {
	type members Streaming
	return marshalPolicy(p.Kind(), members(p))
}

// MarshalJSON writes the policy with its kind.
func (p FastGen) MarshalJSON() ([]byte, error) {
	type members FastGen
	return marshalPolicy(p.Kind(), members(p))
}

// MarshalJSON writes the policy with its kind.
func (p TopK) MarshalJSON() ([]byte, error) {
	type members TopK
	return marshalPolicy(p.Kind(), members(p))
}

// MarshalJSON writes the policy with its kind.
func (p H2O) MarshalJSON() ([]byte, error) {
	type members H2O
	return marshalPolicy(p.Kind(), members(p))
}

// marshalPolicy puts the kind in front of a policy's members.
func marshalPolicy(k Kind, members any) ([]byte, error) {
	rest, err := json.Marshal(members)
	if err != nil {
		return nil, err
	}
	head := `{"kind":"` + string(k) + `"`
	if len(rest) == len("{}") {
		return []byte(head + "}"), nil
	}
	return append([]byte(head+","), rest[1:]...), nil
}
