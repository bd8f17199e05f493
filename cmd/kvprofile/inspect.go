package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// inspection is what inspect says with --json. Bytes are those of a bf16 cache, one sequence.
type inspection struct {
	Name          string            `json:"name"`
	Path          string            `json:"path"`
	Kind          string            `json:"kind"`
	Architecture  string            `json:"architecture"`
	Layers        int               `json:"n_layers"`
	Heads         int               `json:"n_heads"`
	KVHeads       int               `json:"n_kv_heads"`
	HeadDim       int               `json:"head_dim"`
	Hidden        int               `json:"hidden"`
	Intermediate  int               `json:"intermediate"`
	Vocab         int               `json:"vocab"`
	MaxPosition   int               `json:"max_position"`
	RoPE          string            `json:"rope"`
	SlidingWindow []int             `json:"sliding_window,omitempty"`
	WeightBytes   int64             `json:"weight_bytes"`
	BytesPerToken int64             `json:"kv_bytes_per_token"`
	CacheBytes    map[string]int64  `json:"kv_cache_bytes"`
	SHA256        map[string]string `json:"sha256"`
}

// inspectLengths are the context lengths in tokens at which inspect shows the size of the cache.
var inspectLengths = [...]int{4096, 32768, 131072}

func (a *app) inspectCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "inspect MODEL",
		Short: "Show what of a model matters for its KV cache",
		Long: `inspect opens a model and shows its architecture, layers and heads, the size of its KV
cache, and the hashes that plans know it by. A model that is missing, damaged or
unsupported ends with exit code 10 and the reason.`,
		Example: `  kvprofile inspect SmolLM2-135M-Instruct.Q4_1.gguf
  kvprofile inspect HuggingFaceTB/SmolLM2-135M-Instruct --json`,
		Args: exactly(1, "a model"),
		RunE: func(cmd *cobra.Command, args []string) error { return a.inspect(args[0]) },
	}
}

func (a *app) inspect(name string) error {
	m, err := a.openModel(name)
	if err != nil {
		return err
	}
	defer m.Close()
	c := m.Config
	v := inspection{Name: m.Name, Path: m.Path, Kind: m.Kind, Architecture: c.Architecture, Layers: c.Layers, Heads: c.Heads,
		KVHeads: c.KVHeads, HeadDim: c.HeadDim, Hidden: c.Hidden, Intermediate: c.Intermediate, Vocab: c.Vocab, MaxPosition: c.MaxPosition,
		RoPE: describeRoPE(c.RoPE), SlidingWindow: c.SlidingWindow, BytesPerToken: bytesPerToken(c), CacheBytes: map[string]int64{}}
	for _, n := range inspectLengths {
		v.CacheBytes[fmt.Sprint(n)] = cacheBytes(c, n)
	}
	if a.ui.JSON() {
		return a.ui.PrintJSON(v)
	}
	t := ui.Table{Left: []int{1}}
	t.Add("model", v.Name)
	t.Add("file", fmt.Sprintf("%s (%s)", v.Path, v.Kind))
	t.Add("architecture", v.Architecture)
	t.Add("layers", v.Layers)
	t.Add("query heads", v.Heads)
	t.Add("KV heads", fmt.Sprintf("%d (groups of %d)", v.KVHeads, c.Group()))
	t.Add("head dimension", v.HeadDim)
	t.Add("hidden, MLP, vocabulary", fmt.Sprintf("%d, %d, %d", v.Hidden, v.Intermediate, v.Vocab))
	t.Add("context", fmt.Sprintf("%d tokens", v.MaxPosition))
	t.Add("RoPE", v.RoPE)
	t.Add("attention", describeWindows(c))
	t.Add("KV bytes per token", fmt.Sprintf("%s in bf16", ui.Bytes(v.BytesPerToken)))
	for _, n := range inspectLengths {
		note := ""
		if c.MaxPosition > 0 && n > c.MaxPosition {
			note = " (beyond the model's context)"
		}
		t.Add("KV cache at "+ui.Tokens(n), ui.Bytes(v.CacheBytes[fmt.Sprint(n)])+note)
	}
	t.Add("supported", "yes")
	return t.Render(a.ui.Out())
}

// bytesPerToken is the size of one token's keys and values in bf16 in all layers that keep it.
func bytesPerToken(c engine.Config) int64 { return int64(c.Layers) * int64(c.KVWidth()) * 2 * 2 }

// cacheBytes is the size of the full cache of n tokens in bf16; a layer with a sliding window keeps no more than that.
func cacheBytes(c engine.Config, n int) int64 {
	var tokens int64
	for l := range c.Layers {
		kept := n
		if w := c.Window(l); w > 0 {
			kept = min(n, w)
		}
		tokens += int64(kept)
	}
	return tokens * int64(c.KVWidth()) * 2 * 2
}

func describeRoPE(r engine.RoPE) string {
	text := fmt.Sprintf("theta %.10g", r.Theta)
	if s := r.Scaling; s != nil {
		text += ", " + s.Kind
		if s.Factor > 0 {
			text += fmt.Sprintf(" x%g", s.Factor)
		}
	}
	return text
}

func describeWindows(c engine.Config) string {
	counts := map[int]int{}
	var order []int
	for l := range c.Layers {
		w := c.Window(l)
		if counts[w] == 0 {
			order = append(order, w)
		}
		counts[w]++
	}
	var parts []string
	for _, w := range order {
		text := "full"
		if w > 0 {
			text = fmt.Sprintf("sliding window of %d", w)
		}
		if len(order) > 1 {
			text += fmt.Sprintf(" in %d layers", counts[w])
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}
