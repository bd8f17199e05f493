package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/ui"
)

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
	v, print := m.Inspect(), m.Fingerprint()
	if a.ui.JSON() {
		return a.ui.PrintJSON(struct {
			model.Info
			SHA256 model.Fingerprint `json:"sha256"`
		}{v, print})
	}
	t := ui.Table{Left: []int{1}}
	t.Add("model", v.Name)
	t.Add("file", fmt.Sprintf("%s (%s)", v.Path, v.Format))
	t.Add("architecture", v.Architecture+", supported")
	t.Add("parameters", fmt.Sprintf("%.4g million, %s (%s)", float64(v.Parameters)/1e6, ui.Bytes(v.WeightBytes), types(v.WeightTypes)))
	t.Add("layers", v.Layers)
	t.Add("query heads", v.Heads)
	t.Add("KV heads", fmt.Sprintf("%d, each shared by %d query heads", v.KVHeads, v.Group))
	t.Add("head dimension", v.HeadDim)
	t.Add("context", fmt.Sprintf("%d tokens", v.MaxPosition))
	t.Add("RoPE", describeRoPE(v.RoPETheta, v.RoPEScaling))
	t.Add("attention", describeWindows(v.Layers, v.SlidingWindow))
	t.Add("tokenizer", yesNo(v.Tokenizer)+", chat template: "+yesNo(v.ChatTemplate))
	t.Add("KV bytes per token", ui.Bytes(v.KVBytesPerToken)+" in bf16")
	for _, size := range v.CacheBytes {
		note := ""
		if v.MaxPosition > 0 && size.Tokens > v.MaxPosition {
			note = " (beyond the model's context)"
		}
		t.Add("KV cache at "+ui.Tokens(size.Tokens), ui.Bytes(size.Bytes)+note)
	}
	t.Add("sha256 of config", print.Config)
	t.Add("sha256 of weights", print.Weights)
	t.Add("sha256 of tokenizer", print.Tokenizer)
	return t.Render(a.ui.Out())
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// types lists number formats, the one with the most bytes first.
func types(bytes map[string]int64) string {
	var names []string
	for name := range bytes {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if bytes[a] != bytes[b] {
			return int(max(min(bytes[b]-bytes[a], 1), -1))
		}
		return strings.Compare(a, b)
	})
	return strings.Join(names, ", ")
}

func describeRoPE(theta float64, s *engine.RoPEScaling) string {
	text := fmt.Sprintf("theta %.10g", theta)
	if s != nil {
		text += ", " + s.Kind
		if s.Factor > 0 {
			text += fmt.Sprintf(" x%g", s.Factor)
		}
	}
	return text
}

// describeWindows says which layers attend to everything and which to a sliding window.
func describeWindows(layers int, windows []int) string {
	counts := map[int]int{}
	var order []int
	for l := range layers {
		w := 0
		if l < len(windows) {
			w = windows[l]
		}
		if counts[w] == 0 {
			order = append(order, w)
		}
		counts[w]++
	}
	var parts []string
	for _, w := range order {
		text := "full"
		if w > 0 {
			text = fmt.Sprintf("sliding window of %d tokens", w)
		}
		if len(order) > 1 {
			text += fmt.Sprintf(" in %d layers", counts[w])
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}
