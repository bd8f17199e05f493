package plan_test

import (
	"errors"
	"fmt"
	"log"
	"slices"
	"strings"

	"github.com/kvprofile/kvprofile/plan"
)

// hash stands for a real hash.
func hash(digit string) string { return strings.Repeat(digit, 64) }

// A small plan: two layers of two KV heads, half of which stream.
func small() *plan.Plan {
	p := &plan.Plan{
		Format: plan.Format, Version: plan.Version,
		Tool: plan.Tool{Name: "example", Version: "1"},
		Model: plan.Model{Name: "small", Architecture: "llama", NLayers: 2, NHeads: 4, NKVHeads: 2, HeadDim: 64, MaxPosition: 8192,
			RoPE: plan.RoPE{Theta: 10000}, SHA256: plan.Hashes{Config: hash("a"), Weights: hash("b"), Tokenizer: hash("c")}},
		Cache: plan.Cache{Dtype: plan.BF16, Granularity: plan.PerKVHead, BlockSize: 16, GroupRule: plan.GroupMin, Prefill: plan.PrefillDense},
		Ties:  plan.Ties{Heads: plan.LowerLayerThenKVHead, Tokens: plan.LowerPosition},
		Policies: map[string]plan.Policy{
			"full": plan.Full{},
			"stream": plan.Streaming{SinkTokens: 64, RecentTokens: 256, Evict: plan.EvictAlways, Decode: plan.DecodeRolling,
				Positions: plan.PositionsOriginal},
		},
		Layers: [][]string{{"full", "stream"}, {"stream", "full"}},
	}
	p.Totals = []plan.Totals{p.ComputeTotals(4096, 256)}
	return p
}

// A server loads a plan with what it knows of its own model, and lays out its cache.
func ExampleLoad() {
	want := plan.Want{
		Model: plan.Model{NLayers: 32, NHeads: 32, NKVHeads: 8, HeadDim: 128,
			RoPE: plan.RoPE{Theta: 500000, Scaling: &plan.RoPEScaling{Kind: plan.ScalingLlama3, Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4,
				OriginalMaxPosition: 8192}},
			SHA256: plan.Hashes{Tokenizer: "b0c4de1122334455667788990a1b2c3d4e5f60718293a4b5c6d7e8f901234567"}},
		AllowWeights: true, // this server runs another quantisation than the plan was made from
	}
	p, err := plan.Load("testdata/valid/llama-3.1-8b.json", want)
	if err != nil {
		log.Fatal(err)
	}
	u := p.Usage(plan.Request{PromptTokens: 32768, GeneratedTokens: 1024, Batch: 8, Dtype: plan.FP8E4M3})
	fmt.Printf("cache of 8 sequences: %d MiB, full %d MiB\n", u.Bytes>>20, u.FullBytes>>20)

	want.Model.NLayers = 40
	_, err = plan.Load("testdata/valid/llama-3.1-8b.json", want)
	fmt.Println(errors.Is(err, plan.ErrModel))
	// Output:
	// cache of 8 sequences: 8528 MiB, full 16896 MiB
	// true
}

func ExamplePlan_Keep() {
	p := small()
	kept, err := p.Keep(0, 1, 1000)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(kept)
	// Output:
	// [{0 64} {744 1000}]
}

func ExamplePlan_Slot() {
	p := small()
	// Sinks fill the first four blocks; the ring of 256 tokens lies behind them.
	for _, position := range []int{0, 63, 64, 319, 320, 321} {
		slot, err := p.Slot(0, 1, position)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("position %3d: slot %3d, block %2d\n", position, slot, slot/p.Cache.BlockSize)
	}
	// Output:
	// position   0: slot   0, block  0
	// position  63: slot  63, block  3
	// position  64: slot  64, block  4
	// position 319: slot 319, block 19
	// position 320: slot  64, block  4
	// position 321: slot  65, block  4
}

func ExamplePlan_PolicyOf() {
	p := small()
	policy, err := p.PolicyOf(1, 0)
	if err != nil {
		log.Fatal(err)
	}
	switch q := policy.(type) {
	case plan.Full:
		fmt.Println("keeps everything")
	case plan.Streaming:
		fmt.Println("keeps", q.SinkTokens, "first and", q.RecentTokens, "last tokens")
	default:
		// A kind that this server cannot run must stop it, not be ignored.
		log.Fatalf("policy of kind %s is not implemented", q.Kind())
	}
	// Output:
	// keeps 64 first and 256 last tokens
}

func ExamplePlan_Validate() {
	p := small()
	p.Layers = slices.Delete(p.Layers, 1, 2)
	for _, v := range p.Validate() {
		fmt.Println(v)
	}
	// Output:
	// /layers: has 1 rows, must have one for each of 2 layers
}

func ExamplePlan_Marshal() {
	p := small()
	p.Totals = []plan.Totals{p.ComputeTotals(1024, 0)}
	data, err := p.Marshal()
	if err != nil {
		log.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), `"policies"`)
	fmt.Print(`"policies"`, rest)
	// Output:
	// "policies": {
	//     "full": {"kind": "full"},
	//     "stream": {"kind": "streaming", "sink_tokens": 64, "recent_tokens": 256, "evict": "always", "decode": "rolling", "positions": "original"}
	//   },
	//   "layers": [
	//     ["full", "stream"],
	//     ["stream", "full"]
	//   ],
	//   "totals": [
	//     {"prompt_tokens": 1024, "generated_tokens": 0, "kept_tokens": 2688, "kept_blocks": 168, "kept_bytes": 688128, "peak_prefill_bytes": 688128, "full_bytes": 1048576}
	//   ]
	// }
}

// Policies can be compared before there is a plan.
func ExampleCache_Kept() {
	c := plan.Cache{BlockSize: 16}
	at := plan.At{PromptTokens: 4096, GeneratedTokens: 100}
	for _, q := range []plan.Policy{
		plan.Full{},
		plan.Streaming{SinkTokens: 4, RecentTokens: 250},
		plan.TopK{BudgetTokens: 512, ObservationWindow: 32, Decode: plan.DecodeStatic},
	} {
		k := c.Kept(q, at)
		fmt.Println(q.Kind(), k.Tokens, k.Blocks)
	}
	// Output:
	// full 4196 263
	// streaming 254 17
	// topk 612 39
}
