package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
)

func (a *app) diffCommand() *cobra.Command {
	var lengths []int
	var anyModel bool
	c := &cobra.Command{
		Use:   "diff PLAN PLAN",
		Short: "Compare two plans, head by head",
		Long: `diff compares what two plans mean: names of policies, evidence and warnings do not count.
It lists the KV heads that keep otherwise, with the bytes that they hold.

It ends with exit code 0 if the plans mean the same, 3 if they differ, and 12 if they are of
different models and --any-model is not given.`,
		Example: `  kvprofile diff old.json new.json
  kvprofile diff old.json new.json --lengths 8192,131072 --json`,
		Args: exactly(2, "two plans"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var plans [2]*plan.Plan
			for i, path := range args {
				p, err := readPlan(path)
				if err != nil {
					return err
				}
				plans[i] = p
			}
			if err := plans[0].Matches(plan.Want{Model: plans[1].Model}); err != nil && !anyModel {
				return ui.Hint(&otherModelError{fmt.Errorf("%s and %s: %w", args[0], args[1], err)}, "--any-model compares them nevertheless")
			}
			at, err := requests(lengths, plans)
			if err != nil {
				return err
			}
			return a.diff(args, plan.Compare(plans[0], plans[1], at))
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.IntSliceVar(&lengths, "lengths", nil, "prompts in tokens to show bytes for (default: the lengths that the plans state)")
	f.BoolVar(&anyModel, "any-model", false, "compare plans of different models, too")
	return c
}

// requests are the lengths that bytes are shown for, in rising order.
func requests(lengths []int, plans [2]*plan.Plan) ([]plan.Request, error) {
	var at []plan.Request
	for _, n := range lengths {
		if n < 1 || n > 1<<27 {
			return nil, usagef("--lengths: %d is no length of a prompt", n)
		}
		at = append(at, plan.Request{PromptTokens: n})
	}
	if lengths == nil {
		for _, p := range plans {
			for _, t := range p.Totals {
				at = append(at, plan.Request{PromptTokens: t.PromptTokens, GeneratedTokens: t.GeneratedTokens})
			}
		}
	}
	slices.SortFunc(at, func(x, y plan.Request) int {
		if x.PromptTokens != y.PromptTokens {
			return x.PromptTokens - y.PromptTokens
		}
		return x.GeneratedTokens - y.GeneratedTokens
	})
	return slices.Compact(at), nil
}

func (a *app) diff(paths []string, d *plan.Diff) error {
	if a.ui.JSON() {
		if err := a.ui.PrintJSON(struct {
			A     string `json:"a"`
			B     string `json:"b"`
			Equal bool   `json:"equal"`
			*plan.Diff
		}{paths[0], paths[1], d.Equal(), d}); err != nil {
			return err
		}
	} else if err := a.showDiff(d); err != nil {
		return err
	}
	if d.Equal() {
		return nil
	}
	return &findingsError{fmt.Sprintf("the plans differ in %d of %d KV heads and in %d other members", len(d.Heads), d.KVHeads, len(d.Members))}
}

func (a *app) showDiff(d *plan.Diff) error {
	if d.Equal() {
		return a.ui.Printf("the plans mean the same: %d KV heads\n", d.KVHeads)
	}
	for _, m := range d.Members {
		was, is := excerpts(m.A, m.B)
		if err := a.ui.Printf("%s: %s, then %s\n", m.Pointer, was, is); err != nil {
			return err
		}
	}
	if len(d.Heads) > 0 {
		last := len(d.Totals) - 1
		header := []string{"layer", "KV head", "policy", "then"}
		if last >= 0 {
			header = append(header, "bytes at "+lengthOf(d.Totals[last]), "then", "difference")
		}
		t := ui.Table{Header: header, Left: []int{2, 3}}
		for _, h := range d.Heads {
			row := []any{h.Layer, h.KVHead, policyText(h.A, h.PolicyA), policyText(h.B, h.PolicyB)}
			if last >= 0 {
				row = append(row, ui.Bytes(h.BytesA[last]), ui.Bytes(h.BytesB[last]), signed(h.BytesB[last]-h.BytesA[last]))
			}
			t.Add(row...)
		}
		if err := t.Render(a.ui.Out()); err != nil {
			return err
		}
	}
	t := ui.Table{Header: []string{"tokens", "bytes", "then", "difference", "share of full", "then"}}
	for _, x := range d.Totals {
		t.Add(lengthOf(x), ui.Bytes(x.BytesA), ui.Bytes(x.BytesB), signed(x.BytesB-x.BytesA),
			percent(float64(x.BytesA)/float64(x.FullBytesA)), percent(float64(x.BytesB)/float64(x.FullBytesB)))
	}
	if err := a.ui.Printf("\n"); err != nil {
		return err
	}
	return t.Render(a.ui.Out())
}

// excerpts shortens two long texts to where they begin to differ.
func excerpts(a, b string) (string, string) {
	const width, before = 80, 20
	if len(a) <= width && len(b) <= width {
		return a, b
	}
	from := 0
	for from < min(len(a), len(b)) && a[from] == b[from] {
		from++
	}
	from = max(from-before, 0)
	cut := func(s string) string {
		text := s[from:]
		if from > 0 {
			text = "..." + text
		}
		if len(text) > width {
			text = text[:width] + "..."
		}
		return strings.ToValidUTF8(text, "")
	}
	return cut(a), cut(b)
}

func lengthOf(t plan.TotalDiff) string {
	if t.GeneratedTokens == 0 {
		return ui.Tokens(t.PromptTokens)
	}
	return fmt.Sprintf("%s + %d", ui.Tokens(t.PromptTokens), t.GeneratedTokens)
}

// policyText names a policy, with its members where the name alone would not tell two plans' policies apart.
func policyText(name string, q plan.Policy) string {
	if q == nil {
		return "no such head"
	}
	text, err := json.Marshal(q)
	if err != nil || q.Kind() == plan.KindFull {
		return name
	}
	var members map[string]any
	if json.Unmarshal(text, &members) != nil {
		return name
	}
	var sizes []string
	for _, m := range []string{"sink_tokens", "heavy_tokens", "recent_tokens", "budget_tokens", "budget_ratio", "frequent_ratio", "local_ratio", "max_tokens", "max_ratio"} {
		if v, ok := members[m]; ok && v != 0.0 {
			sizes = append(sizes, fmt.Sprintf("%s %v", strings.TrimSuffix(m, "_tokens"), v))
		}
	}
	return name + " (" + strings.Join(sizes, ", ") + ")"
}
