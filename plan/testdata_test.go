package plan

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the files in testdata anew")

// everyKind is the sample with more of everything: a file of testdata.
func everyKind() *Plan {
	p := sample()
	p.Tool.Commit = "9fceb02"
	p.Evidence.Recipe.TiedHeads = []HeadRef{{1, 2}, {3, 0}}
	p.Evidence.PlanSHA256 = p.Digest()
	return p
}

// llama31 is a plan of the shape of an 8B model: 32 layers, 8 KV heads, llama3 scaling.
func llama31() *Plan {
	p := &Plan{
		Format: Format, Version: Version, Tool: Tool{Name: "kvprofile", Version: "0.1.0"},
		Model: Model{Name: "Llama-3.1-8B-Instruct", Architecture: "llama", NLayers: 32, NHeads: 32, NKVHeads: 8, HeadDim: 128, MaxPosition: 131072,
			RoPE:   RoPE{Theta: 500000, Scaling: &RoPEScaling{Kind: ScalingLlama3, Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPosition: 8192}},
			SHA256: Hashes{Config: hashC, Weights: hashA, Tokenizer: hashB}},
		Cache: Cache{Dtype: BF16, Granularity: PerKVHead, BlockSize: 16, GroupRule: GroupMin, Prefill: PrefillChunked, ChunkTokens: 2048},
		Ties:  Ties{Heads: LowerLayerThenKVHead, Tokens: LowerPosition},
		Policies: map[string]Policy{
			"full":   Full{},
			"stream": Streaming{SinkTokens: 64, RecentTokens: 256, Evict: EvictAlways, Decode: DecodeRolling, Positions: PositionsOriginal},
		},
	}
	for l := range p.Model.NLayers {
		row := make([]string, p.Model.NKVHeads)
		for h := range row {
			row[h] = "stream"
			if (l*7+h*3)%2 == 0 {
				row[h] = "full"
			}
		}
		p.Layers = append(p.Layers, row)
	}
	for _, n := range []int{4096, 32768, 131072 - 256} {
		p.Totals = append(p.Totals, p.ComputeTotals(n, 256))
	}
	return p
}

// sliding is a plan for a model in which every other layer has a sliding window, with a policy per layer.
func sliding() *Plan {
	p := &Plan{
		Format: Format, Version: Version, Tool: Tool{Name: "kvprofile", Version: "0.1.0"},
		// The name has what a canonical form may get wrong.
		Model: Model{Name: "sliding \"é\" <&> \u2028 \\ \t \x01 \U0001F600", Architecture: "mistral", NLayers: 4, NHeads: 8, NKVHeads: 2, HeadDim: 128, MaxPosition: 32768,
			SlidingWindow: []int{0, 4096, 0, 4096}, RoPE: RoPE{Theta: 10000, Scaling: &RoPEScaling{Kind: ScalingYaRN, Factor: 4, OriginalMaxPosition: 8192}},
			SHA256: Hashes{Config: hashB, Weights: hashC}},
		Cache: Cache{Dtype: FP8E4M3, Granularity: PerLayer, BlockSize: 32, GroupRule: GroupMean, Prefill: PrefillDense},
		Ties:  Ties{Heads: LowerLayerThenKVHead, Tokens: LowerPosition},
		Policies: map[string]Policy{
			"full": Full{},
			"topk": TopK{BudgetRatio: 0.25, ObservationWindow: 32, Pool: Pool{PoolNone, 1}, Aggregate: AggregateMax, SinkTokens: 4, Evict: EvictPrefillEnd,
				Decode: DecodeRolling, Positions: PositionsOriginal},
			"slots": Streaming{SinkTokens: 32, RecentTokens: 1024, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsCacheSlot},
		},
		Layers: [][]string{{"full", "full"}, {"full", "full"}, {"topk", "topk"}, {"slots", "slots"}},
	}
	for _, n := range []int{1024, 16384} {
		p.Totals = append(p.Totals, p.ComputeTotals(n, 0), p.ComputeTotals(n, 512))
	}
	return p
}

// TestValidFiles keeps the files as they are: a change of the format's look, of the totals or of the digest is seen.
func TestValidFiles(t *testing.T) {
	for name, p := range map[string]*Plan{"every-kind": everyKind(), "llama-3.1-8b": llama31(), "sliding": sliding()} {
		path := filepath.Join("testdata", "valid", name+".json")
		data := mustMarshal(t, p)
		if *update {
			if err := os.WriteFile(path, data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(data, want) {
			t.Errorf("%s differs from what is written now:\n%s", path, data)
		}
		if _, err := Parse(want); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		digests, err := os.ReadFile(filepath.Join("testdata", "valid", "SHA256"))
		if err != nil || !strings.Contains(string(digests), p.Digest()+"  "+name+".json\n") {
			t.Errorf("digest of %s is %s, not as in testdata/valid/SHA256 (%v)", name, p.Digest(), err)
		}
	}
}
