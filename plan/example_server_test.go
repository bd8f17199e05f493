package plan_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/kvprofile/kvprofile/plan"
)

// attention stands for what a server's kernels return: a row for each query head of a KV head's group, by position of the
// prompt or by slot of the head, with the attention summed over queries.
func attention(group, n int) [][]float32 {
	rows := make([][]float32, group)
	for q := range rows {
		rows[q] = make([]float32, n)
		for i := range rows[q] {
			rows[q][i] = 1 / float32(n)
		}
	}
	return rows
}

// The loop of a server: the plan is loaded once, the pool of blocks is as large as the plan says that it has to be, and
// every request has a cache whose books say where keys and values are.
func ExampleKVCache() {
	want := plan.Want{AllowWeights: true, Model: plan.Model{NLayers: 4, NHeads: 6, NKVHeads: 3, HeadDim: 64, RoPE: plan.RoPE{Theta: 100000},
		SHA256: plan.Hashes{Tokenizer: "0f1e2d3c4b5a69788796a5b4c3d2e1f00112233445566778899aabbccddeeff0"}}}
	p, err := plan.Load("testdata/valid/every-kind.json", want)
	if err != nil {
		log.Fatal(err)
	}
	group := p.Model.NHeads / p.Model.NKVHeads
	const prompt, generated, requests = 2000, 64, 4
	u := p.Usage(plan.Request{PromptTokens: prompt, GeneratedTokens: generated, Batch: requests})
	pool := plan.NewBlockPool(int(u.Blocks))

	// A request: what the pins keep goes by its text, and what fastgen keeps by the classes of its tokens.
	text := strings.Repeat("All work. ", 100) + "The API key is 7-31-4. " + strings.Repeat("No play.. ", 698)
	starts := make([]int, prompt) // of the tokens in the text
	for i := range starts {
		starts[i] = i * 4
	}
	pinned, err := p.Pinned(text, starts)
	if err != nil {
		log.Fatal(err) // a pin refuses the request
	}
	c, err := p.NewKVCache(plan.CacheOptions{Pool: pool, Pinned: pinned, Classes: []plan.Class{plan.ClassSpecial}})
	if err != nil {
		log.Fatal(err)
	}

	// Prefill: layer by layer, and when a layer is done each of its heads keeps what its policy says.
	for l := range p.Model.NLayers {
		for k := range p.Model.NKVHeads {
			h := c.Head(l, k)
			if err := h.Prefill(prompt, plan.Attention{Window: attention(group, prompt), Total: attention(group, prompt)}); err != nil {
				log.Fatal(err) // too few blocks: the request has to wait
			}
			written := 0
			for slot, position := range h.Positions() {
				if position >= 0 {
					_, _ = slot, position // the key and value of the position go to the slot
					written++
				}
			}
			if written != h.Len() {
				log.Fatal("slots are missing")
			}
		}
	}
	fmt.Println("after the prompt:", c.Usage().Tokens, "tokens kept")

	// Decode: each head says where the newest token goes, and then attends to the slots that hold one.
	for range generated {
		c.AppendClasses("")
		for l := range p.Model.NLayers {
			for k := range p.Model.NKVHeads {
				h := c.Head(l, k)
				slot, err := h.Append()
				if err != nil {
					log.Fatal(err)
				}
				_ = h.Blocks()[slot/p.Cache.BlockSize] // key and value go there, at offset slot % block_size
				_ = h.QueryPosition()                  // to which the query is rotated
				_ = h.Spans()                          // the slots that it attends to
				h.Observe(attention(group, len(h.Positions())))
			}
		}
	}
	now, t := c.Usage(), c.Telemetry()
	fmt.Println("at the end:", now.Tokens, "tokens in", now.Blocks, "blocks, the plan allows", u.Blocks/requests)
	fmt.Printf("%d tokens came, %d left; %.0f %% of a full cache's bytes\n", t.Appended, t.Evicted, 100*float64(now.Bytes)/float64(now.FullBytes))
	c.Release()
	fmt.Println("blocks in use:", pool.InUse(), "of", pool.Size())
	// Output:
	// after the prompt: 11411 tokens kept
	// at the end: 11859 tokens in 746 blocks, the plan allows 1037
	// 24768 tokens came, 12909 left; 48 % of a full cache's bytes
	// blocks in use: 0 of 4148
}
