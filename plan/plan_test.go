package plan

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const (
	hashA = "3e9c1f0a5b7d2468ace013579bdf02468ace13579bdf02468ace13579bdf0246"
	hashB = "b0c4de1122334455667788990a1b2c3d4e5f60718293a4b5c6d7e8f901234567"
	hashC = "0f1e2d3c4b5a69788796a5b4c3d2e1f00112233445566778899aabbccddeeff0"
)

// sample is a valid plan with one policy of every kind.
func sample() *Plan {
	share, low := 0.95, 0.8
	p := &Plan{
		Format: Format, Version: Version, Tool: Tool{Name: "kvprofile", Version: "0.1.0"},
		Model: Model{Name: "tiny", Architecture: "llama", NLayers: 4, NHeads: 6, NKVHeads: 3, HeadDim: 64, MaxPosition: 8192,
			RoPE: RoPE{Theta: 100000}, SHA256: Hashes{Config: hashA, Weights: hashB, Tokenizer: hashC}},
		Cache:        Cache{Dtype: BF16, Granularity: PerKVHead, BlockSize: 16, GroupRule: GroupMin, Prefill: PrefillDense},
		Ties:         Ties{Heads: LowerLayerThenKVHead, Tokens: LowerPosition},
		TokenClasses: &TokenClasses{Special: []int{0, 1, 2}, Punctuation: []int{11, 13, 25}},
		Policies: map[string]Policy{
			"full":   Full{},
			"stream": Streaming{SinkTokens: 64, RecentTokens: 256, Evict: EvictAlways, Decode: DecodeRolling, Positions: PositionsOriginal},
			"topk": TopK{BudgetTokens: 512, ObservationWindow: 32, Pool: Pool{PoolMax, 7}, Aggregate: AggregateMean, Evict: EvictPrefillEnd,
				Decode: DecodeStatic, Positions: PositionsOriginal},
			"fastgen": FastGen{Classes: []Class{ClassSpecial, ClassPunctuation}, FrequentRatio: 0.3, MaxTokens: 2048, Overflow: DropOldest,
				Evict: EvictPrefillEnd, Decode: DecodeStatic, Positions: PositionsOriginal},
			"h2o": H2O{SinkTokens: 4, HeavyTokens: 124, RecentTokens: 128, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal},
		},
		Layers: [][]string{{"full", "stream", "stream"}, {"full", "topk", "stream"}, {"fastgen", "topk", "h2o"}, {"full", "full", "stream"}},
		Pins:   []Pin{{Pattern: `(?i)api[_ ]key`, TokensAfter: 48, MaxTokens: 512, Overflow: DropOldest}},
	}
	for _, n := range []int{4096, 32768} {
		p.Totals = append(p.Totals, p.ComputeTotals(n, 256))
	}
	p.Evidence = &Evidence{PlanSHA256: p.Digest(), Recipe: &Recipe{Name: "default", Budget: 0.5, ContextTokens: 4096},
		Calibration: &Calibration{Datasets: []DatasetRef{{Use: "profile", Task: "multi-passkey", Samples: 8, MinTokens: 1024, MaxTokens: 2048, Seed: 7, SHA256: hashA}},
			RecordSHA256: hashB},
		Agreement:   []Agreement{{A: "gate", B: "needle mass", KVHeads: 12, Spearman: &low}},
		Evaluations: []Evaluation{{Task: "single needle", N: 25, M: 20, K: 19, Retention: &share, Lower95: &low}}}
	p.Warnings = []string{"Trained on short samples only."}
	return p
}

func mustMarshal(t testing.TB, p *Plan) []byte {
	t.Helper()
	data, err := p.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestSampleIsValid(t *testing.T) {
	for _, v := range sample().Validate() {
		t.Error(v)
	}
}

func TestRoundTrip(t *testing.T) {
	p := sample()
	data := mustMarshal(t, p)
	q, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(p, q) {
		t.Errorf("read back:\n%+v\nwritten:\n%+v", q, p)
	}
	if again := mustMarshal(t, q); !bytes.Equal(again, data) {
		t.Errorf("written again:\n%s\nfirst:\n%s", again, data)
	}
	if p.Digest() != q.Digest() {
		t.Error("digests differ")
	}
}

func TestWriteIsWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "plan.json")
	p := sample()
	if err := p.Write(path); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	p.Layers = p.Layers[:3]
	if err := p.Write(path); err == nil || !strings.Contains(err.Error(), "/layers: has 3 rows") {
		t.Errorf("writing an invalid plan: %v", err)
	}
	after, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file changed (%v)", err)
	}
	if err := sample().Write(filepath.Join(dir, "missing", "plan.json")); err == nil {
		t.Error("no error for a missing folder")
	}
	if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 1 {
		t.Errorf("left behind: %v (%v)", names, err)
	}
	if names, err := filepath.Glob(filepath.Join(dir, ".*")); err != nil || len(names) != 0 {
		t.Errorf("left behind: %v (%v)", names, err)
	}
}
