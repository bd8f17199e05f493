package plan

// Format is the value of a plan's "format" member.
const Format = "kvprofile.cache-plan"

// Version is the version of the format that this package writes. All versions up to it can be read.
const Version = 1

// Plan is a cache plan.
type Plan struct {
	// Format says what the file is.
	Format string `json:"format"`
	// Version of the format. A change of meaning is a new version.
	Version int `json:"version"`
	// Tool that made the plan.
	Tool Tool `json:"tool"`
	// Model that the plan belongs to.
	Model Model `json:"model"`
	// Cache says what the plan assumes of the server's KV cache.
	Cache Cache `json:"cache"`
	// Ties says how ties were and are broken.
	Ties Ties `json:"ties"`
	// TokenClasses holds the token ids of the classes that policies of kind fastgen use.
	TokenClasses *TokenClasses `json:"token_classes,omitempty"`
	// Policies by name. Layers refers to them.
	Policies map[string]Policy `json:"policies"`
	// Layers has one row per layer, and in it the name of a policy per KV head.
	Layers [][]string `json:"layers" jsonschema:"minItems=1,maxItems=1024"`
	// Pins are spans of the prompt that every head keeps.
	Pins []Pin `json:"pins,omitempty"`
	// Totals says what the cache holds at stated lengths, one sequence each, in rising order of the lengths.
	Totals []Totals `json:"totals" jsonschema:"minItems=1,maxItems=64"`
	// Evidence says what the plan rests on and how well it does. Readers ignore members in it that they do not know.
	Evidence *Evidence `json:"evidence,omitempty"`
	// Warnings for people, in full sentences.
	Warnings []string `json:"warnings,omitempty"`
}

// Tool names the program that made a plan.
type Tool struct {
	// Name of the program.
	Name string `json:"name" jsonschema:"minLength=1"`
	// Version of the program.
	Version string `json:"version" jsonschema:"minLength=1"`
	// Commit that it was built from, when known.
	Commit string `json:"commit,omitempty" jsonschema:"minLength=1"`
}

// Model identifies a model and has what its cache's layout depends on.
type Model struct {
	// Name for people; not compared.
	Name string `json:"name" jsonschema:"minLength=1"`
	// Architecture for people, such as llama or qwen3; not compared.
	Architecture string `json:"architecture" jsonschema:"minLength=1"`
	// NLayers is the number of transformer layers.
	NLayers int `json:"n_layers" jsonschema:"minimum=1,maximum=1024"`
	// NHeads is the number of query heads of a layer, a multiple of n_kv_heads.
	NHeads int `json:"n_heads" jsonschema:"minimum=1,maximum=4096"`
	// NKVHeads is the number of KV heads of a layer.
	NKVHeads int `json:"n_kv_heads" jsonschema:"minimum=1,maximum=512"`
	// HeadDim is the number of elements of a key, and of a value.
	HeadDim int `json:"head_dim" jsonschema:"minimum=2,maximum=2048,multipleOf=2"`
	// MaxPosition is the context length in tokens that the model was made for.
	MaxPosition int `json:"max_position" jsonschema:"minimum=1,maximum=134217728"`
	// SlidingWindow holds per layer the model's own attention window in tokens, 0 for full attention. Left out when all
	// layers have full attention.
	SlidingWindow []int `json:"sliding_window,omitempty"`
	// RoPE is the rotary position embedding.
	RoPE RoPE `json:"rope"`
	// SHA256 holds the hashes that identify the model.
	SHA256 Hashes `json:"sha256"`
}

// Window is the sliding window of a layer in tokens, 0 for full attention.
func (m *Model) Window(layer int) int {
	if layer < 0 || layer >= len(m.SlidingWindow) {
		return 0
	}
	return m.SlidingWindow[layer]
}

// Hashes are SHA-256 hashes as 64 lower-case hexadecimal digits.
type Hashes struct {
	// Config hashes what the model's configuration means.
	Config string `json:"config" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// Weights hashes the names, types, shapes and bytes of the stored tensors.
	Weights string `json:"weights" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// Tokenizer hashes what the tokenizer means. Left out for a model without one.
	Tokenizer string `json:"tokenizer,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
}

// RoPE is a rotary position embedding.
type RoPE struct {
	// Theta is the base of the frequencies.
	Theta float64 `json:"theta" jsonschema:"exclusiveMinimum=0"`
	// Scaling of the frequencies, null for none.
	Scaling *RoPEScaling `json:"scaling"`
}

// RoPEScaling stretches the frequencies of a rotary position embedding. Members that a kind does not use are left out.
type RoPEScaling struct {
	// Kind of scaling.
	Kind ScalingKind `json:"kind"`
	// Factor by which the context is stretched; all kinds, unless divisors are given.
	Factor float64 `json:"factor,omitempty" jsonschema:"minimum=1"`
	// LowFreqFactor of llama3.
	LowFreqFactor float64 `json:"low_freq_factor,omitempty" jsonschema:"exclusiveMinimum=0"`
	// HighFreqFactor of llama3.
	HighFreqFactor float64 `json:"high_freq_factor,omitempty" jsonschema:"exclusiveMinimum=0"`
	// OriginalMaxPosition is the context in tokens before stretching; llama3 and yarn.
	OriginalMaxPosition int `json:"original_max_position,omitempty" jsonschema:"minimum=1,maximum=134217728"`
	// BetaFast of yarn, 32 when left out.
	BetaFast float64 `json:"beta_fast,omitempty" jsonschema:"exclusiveMinimum=0"`
	// BetaSlow of yarn, 1 when left out.
	BetaSlow float64 `json:"beta_slow,omitempty" jsonschema:"exclusiveMinimum=0"`
	// AttentionFactor of yarn scales cosine and sine, 0.1 ln(factor) + 1 when left out.
	AttentionFactor float64 `json:"attention_factor,omitempty" jsonschema:"exclusiveMinimum=0"`
	// Divisors of the head_dim/2 plain frequencies, for models that store these in place of parameters. The other
	// numbers are then not used.
	Divisors []float64 `json:"divisors,omitempty"`
}

// ScalingKind names a way to stretch rotary frequencies.
type ScalingKind string

// The scaling kinds.
const (
	ScalingLinear ScalingKind = "linear"
	ScalingLlama3 ScalingKind = "llama3"
	ScalingYaRN   ScalingKind = "yarn"
)

// Cache says what a plan assumes of the server's KV cache.
type Cache struct {
	// Dtype of the stored keys and values.
	Dtype Dtype `json:"dtype"`
	// Granularity of the policies and of a block of the cache.
	Granularity Granularity `json:"granularity"`
	// BlockSize is the number of tokens of a block (page) of the cache.
	BlockSize int `json:"block_size" jsonschema:"minimum=1,maximum=4096"`
	// GroupRule says how the query heads of a group were made to agree on their KV head's policy.
	GroupRule GroupRule `json:"group_rule"`
	// Prefill says how the prompt is processed.
	Prefill Prefill `json:"prefill"`
	// ChunkTokens is the length of a chunk; with chunked prefill only.
	ChunkTokens int `json:"chunk_tokens,omitempty" jsonschema:"minimum=1,maximum=134217728"`
}

// Dtype is the type of the elements of a KV cache.
type Dtype string

// The element types. The quantised ones are counted without their scales.
const (
	F32     Dtype = "f32"
	F16     Dtype = "f16"
	BF16    Dtype = "bf16"
	FP8E4M3 Dtype = "fp8_e4m3"
	FP8E5M2 Dtype = "fp8_e5m2"
	Int8    Dtype = "int8"
)

// Size is the size of an element in bytes, 0 for an unknown type.
func (d Dtype) Size() int {
	switch d {
	case F32:
		return 4
	case F16, BF16:
		return 2
	case FP8E4M3, FP8E5M2, Int8:
		return 1
	}
	return 0
}

// Granularity is the unit that policies and blocks are for.
type Granularity string

// The granularities.
const (
	// PerKVHead lets every KV head have its own policy; a block holds tokens of one KV head.
	PerKVHead Granularity = "kv_head"
	// PerLayer has all KV heads of a layer share a policy; a block holds tokens of all of them.
	PerLayer Granularity = "layer"
)

// GroupRule says how the query heads of a group were made to agree.
type GroupRule string

// The group rules.
const (
	GroupMin  GroupRule = "min"  // a policy had to do for every query head of the group
	GroupMean GroupRule = "mean" // a policy had to do for the mean of the group
)

// Prefill is a way to process the prompt.
type Prefill string

// The ways to process the prompt.
const (
	PrefillDense   Prefill = "dense"   // layer by layer, the whole prompt at once
	PrefillChunked Prefill = "chunked" // in chunks of tokens, each through all layers
)

// Ties says how ties are broken: never by noise or by order of execution.
type Ties struct {
	// Heads with equal scores, when the plan was made: the one named first was treated as if it had the higher score.
	Heads HeadTies `json:"heads"`
	// Tokens with equal scores, when a policy selects tokens: the one named first is kept.
	Tokens TokenTies `json:"tokens"`
}

// HeadTies is a rule for heads with equal scores.
type HeadTies string

// LowerLayerThenKVHead prefers the lower layer, then the lower KV head.
const LowerLayerThenKVHead HeadTies = "lower_layer_then_kv_head"

// TokenTies is a rule for tokens with equal scores.
type TokenTies string

// LowerPosition prefers the token that comes first.
const LowerPosition TokenTies = "lower_position"

// TokenClasses lists token ids in rising order.
type TokenClasses struct {
	// Special tokens, such as those of the chat format.
	Special []int `json:"special,omitempty"`
	// Punctuation tokens.
	Punctuation []int `json:"punctuation,omitempty"`
}

// Pin keeps in every head the tokens of the prompt that a pattern matches, and those after them. It is for text that
// gets little attention until it is asked for, such as credentials.
type Pin struct {
	// Pattern is a regular expression in RE2 syntax, matched against the text of the prompt.
	Pattern string `json:"pattern" jsonschema:"minLength=1,maxLength=1000"`
	// TokensAfter is the number of tokens after a match that are kept with it.
	TokensAfter int `json:"tokens_after" jsonschema:"minimum=0,maximum=134217728"`
	// MaxTokens bounds the tokens that this pin keeps of one prompt.
	MaxTokens int `json:"max_tokens" jsonschema:"minimum=1,maximum=134217728"`
	// Overflow says what happens beyond max_tokens: drop_oldest or refuse.
	Overflow Overflow `json:"overflow"`
}

// Overflow says what happens when more tokens would be kept than a bound allows.
type Overflow string

// The overflow rules.
const (
	// DropOldest drops the tokens with the lowest positions.
	DropOldest Overflow = "drop_oldest"
	// DropLowest drops the tokens that received the least attention.
	DropLowest Overflow = "drop_lowest"
	// Refuse has the server refuse the request.
	Refuse Overflow = "refuse"
)

// Totals says what the cache of one sequence holds once prompt_tokens + generated_tokens tokens are in it. See
// docs/plan.md for how it is computed.
type Totals struct {
	// PromptTokens is the length of the prompt.
	PromptTokens int `json:"prompt_tokens" jsonschema:"minimum=1,maximum=134217728"`
	// GeneratedTokens is the number of tokens generated after it.
	GeneratedTokens int `json:"generated_tokens" jsonschema:"minimum=0,maximum=134217728"`
	// KeptTokens is the sum over layers and KV heads of the tokens kept.
	KeptTokens int64 `json:"kept_tokens" jsonschema:"minimum=0"`
	// KeptBlocks is the number of blocks that hold them: of one KV head each, or of one layer each where the granularity
	// is layer.
	KeptBlocks int64 `json:"kept_blocks" jsonschema:"minimum=0"`
	// KeptBytes is the size of those blocks.
	KeptBytes int64 `json:"kept_bytes" jsonschema:"minimum=0"`
	// PeakPrefillBytes is the most that the cache holds at any time in the prefill.
	PeakPrefillBytes int64 `json:"peak_prefill_bytes" jsonschema:"minimum=0"`
	// FullBytes is the size of the blocks of a cache that keeps everything that the model itself can attend to.
	FullBytes int64 `json:"full_bytes" jsonschema:"minimum=0"`
	// WorstCase is set when what is kept depends on the prompt's content: the figures are then upper bounds.
	WorstCase bool `json:"worst_case,omitempty"`
}
