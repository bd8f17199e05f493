package plan

// Evidence says what a plan rests on and how well it does.
type Evidence struct {
	// PlanSHA256 is the [Plan.Digest] of the plan that the evidence is about: of this one.
	PlanSHA256 string `json:"plan_sha256,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// Recipe says how the policies were chosen.
	Recipe *Recipe `json:"recipe,omitempty"`
	// Calibration names the data that the scores come from.
	Calibration *Calibration `json:"calibration,omitempty"`
	// Agreement holds the rank correlations of scores of the heads.
	Agreement []Agreement `json:"agreement,omitempty"`
	// Evaluations hold results of tasks run with the plan applied.
	Evaluations []Evaluation `json:"evaluations,omitempty"`
	// Divergences compare the model's predictions with the plan applied to those with the full cache.
	Divergences []Divergence `json:"divergences,omitempty"`
}

// Recipe says how the policies were chosen.
type Recipe struct {
	// Name of the recipe.
	Name string `json:"name" jsonschema:"minLength=1"`
	// Budget asked for: kept bytes / full bytes at the context.
	Budget float64 `json:"budget,omitempty" jsonschema:"exclusiveMinimum=0,maximum=1"`
	// Recovery asked for: share of the attention mass on what is kept.
	Recovery float64 `json:"recovery,omitempty" jsonschema:"exclusiveMinimum=0,maximum=1"`
	// ContextTokens is the length that the request is about.
	ContextTokens int `json:"context_tokens,omitempty" jsonschema:"minimum=1,maximum=134217728"`
	// GateThreshold is the lowest gate of a head that was treated as a retrieval head.
	GateThreshold *float64 `json:"gate_threshold,omitempty"`
	// TiedHeads are those among which the rule for ties decided, not the scores.
	TiedHeads []HeadRef `json:"tied_heads,omitempty"`
	// Figures are further numbers of the recipe, by name.
	Figures map[string]float64 `json:"figures,omitempty"`
}

// HeadRef names a KV head.
type HeadRef struct {
	// Layer from 0.
	Layer int `json:"layer" jsonschema:"minimum=0"`
	// KVHead from 0.
	KVHead int `json:"kv_head" jsonschema:"minimum=0"`
}

// Calibration names the data that the scores come from. Hashes are SHA-256 in hexadecimal digits.
type Calibration struct {
	// Datasets that the model was run over.
	Datasets []DatasetRef `json:"datasets,omitempty"`
	// RecordSHA256 is of the attention record.
	RecordSHA256 string `json:"record_sha256,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// GatesSHA256 is of the trained gates.
	GatesSHA256 string `json:"gates_sha256,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// PoliciesSHA256 is of the FastGen policies.
	PoliciesSHA256 string `json:"policies_sha256,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// BudgetsSHA256 is of the layer budgets.
	BudgetsSHA256 string `json:"budgets_sha256,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
}

// DatasetRef names a dataset.
type DatasetRef struct {
	// Use of the dataset, such as profile or distill.
	Use string `json:"use,omitempty" jsonschema:"minLength=1"`
	// Task of its samples.
	Task string `json:"task" jsonschema:"minLength=1"`
	// Samples in it.
	Samples int `json:"samples" jsonschema:"minimum=1,maximum=134217728"`
	// MinTokens is the length of its shortest sample.
	MinTokens int `json:"min_tokens" jsonschema:"minimum=1,maximum=134217728"`
	// MaxTokens is the length of its longest sample.
	MaxTokens int `json:"max_tokens" jsonschema:"minimum=1,maximum=134217728"`
	// Seed that it was made with.
	Seed uint64 `json:"seed" jsonschema:"minimum=0"`
	// SHA256 of its content.
	SHA256 string `json:"sha256" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
}

// Agreement is Spearman's rank correlation of two scores over the KV heads.
type Agreement struct {
	// A names a score.
	A string `json:"a" jsonschema:"minLength=1"`
	// B names the other.
	B string `json:"b" jsonschema:"minLength=1"`
	// KVHeads is the number of KV heads compared.
	KVHeads int `json:"kv_heads" jsonschema:"minimum=1"`
	// Spearman is the correlation in [-1, 1]; left out when one of the scores is the same everywhere.
	Spearman *float64 `json:"spearman,omitempty" jsonschema:"minimum=-1,maximum=1"`
	// Low is the lower end of a 95 % bootstrap interval over KV heads.
	Low *float64 `json:"low,omitempty" jsonschema:"minimum=-1,maximum=1"`
	// High is its upper end.
	High *float64 `json:"high,omitempty" jsonschema:"minimum=-1,maximum=1"`
}

// Evaluation is the result of a task. Units are whole prompts.
type Evaluation struct {
	// Task that was run.
	Task string `json:"task" jsonschema:"minLength=1"`
	// DatasetSHA256 is of the prompts.
	DatasetSHA256 string `json:"dataset_sha256,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// MinTokens is the length of the shortest prompt.
	MinTokens int `json:"min_tokens,omitempty" jsonschema:"minimum=1,maximum=134217728"`
	// MaxTokens is the length of the longest prompt.
	MaxTokens int `json:"max_tokens,omitempty" jsonschema:"minimum=1,maximum=134217728"`
	// N is the number of prompts.
	N int `json:"n" jsonschema:"minimum=1,maximum=134217728"`
	// M is the number of prompts that the full cache gets right.
	M int `json:"m" jsonschema:"minimum=0,maximum=134217728"`
	// K is the number of those that are also right with the plan.
	K int `json:"k" jsonschema:"minimum=0,maximum=134217728"`
	// Retention is k / m; left out when m is 0.
	Retention *float64 `json:"retention,omitempty" jsonschema:"minimum=0,maximum=1"`
	// Lower95 is the one-sided 95 % Clopper-Pearson lower bound of retention; left out when m is 0.
	Lower95 *float64 `json:"lower95,omitempty" jsonschema:"minimum=0,maximum=1"`
	// Certified is set when the prompts were used for nothing else, and for this plan once.
	Certified bool `json:"certified,omitempty"`
	// FullLogProb is the mean log-probability per token (natural logarithm) of the expected answers with the full cache.
	FullLogProb *float64 `json:"full_logprob,omitempty"`
	// PlanLogProb is the same with the plan.
	PlanLogProb *float64 `json:"plan_logprob,omitempty"`
}

// Divergence compares predictions with the plan to those with the full cache on held-out text.
type Divergence struct {
	// Text names the text.
	Text string `json:"text" jsonschema:"minLength=1"`
	// DatasetSHA256 is of the text.
	DatasetSHA256 string `json:"dataset_sha256,omitempty" jsonschema:"pattern=^[0-9a-f]{64}$,maxLength=64"`
	// Tokens predicted.
	Tokens int `json:"tokens" jsonschema:"minimum=1,maximum=134217728"`
	// FullPerplexity is with the full cache.
	FullPerplexity float64 `json:"full_perplexity" jsonschema:"minimum=1"`
	// PlanPerplexity is with the plan.
	PlanPerplexity float64 `json:"plan_perplexity" jsonschema:"minimum=1"`
	// KL is the mean over tokens of KL(full || plan) in nats.
	KL float64 `json:"kl" jsonschema:"minimum=0"`
}
