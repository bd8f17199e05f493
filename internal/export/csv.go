package export

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvprofile/kvprofile/plan"
)

// csvTable writes one row per layer and KV head with all members of its policy, and what the head keeps at the plan's
// lengths. Members that a kind does not have are empty.
func csvTable(d *draft, _ Options) ([]File, error) {
	p := d.p
	header := []string{"plan_sha256", "model", "layer", "kv_head", "query_heads", "sliding_window", "policy", "kind", "evict", "decode", "positions",
		"sink_tokens", "recent_tokens", "heavy_tokens", "budget_tokens", "budget_ratio", "observation_window", "pool", "kernel", "aggregate",
		"classes", "frequent_ratio", "local_ratio", "max_tokens", "max_ratio", "overflow", "dtype", "block_size"}
	for _, t := range p.Totals {
		at := fmt.Sprintf("_%d_%d", t.PromptTokens, t.GeneratedTokens)
		header = append(header, "kept_tokens"+at, "kept_blocks"+at, "kept_bytes"+at, "full_bytes"+at)
	}
	header = append(header, "worst_case")
	var out bytes.Buffer
	w := csv.NewWriter(&out)
	if err := w.Write(header); err != nil {
		return nil, err
	}
	digest := p.Digest()
	group := p.Model.NHeads / p.Model.NKVHeads
	for l, row := range p.Layers {
		for k, name := range row {
			q := p.Policies[name]
			cell := map[string]string{"plan_sha256": digest, "model": p.Model.Name, "layer": strconv.Itoa(l), "kv_head": strconv.Itoa(k),
				"query_heads": fmt.Sprintf("%d-%d", k*group, (k+1)*group-1), "sliding_window": strconv.Itoa(p.Model.Window(l)), "policy": name,
				"dtype": string(p.Cache.Dtype), "block_size": strconv.Itoa(p.Cache.BlockSize), "worst_case": "false"}
			policyCells(cell, q)
			for _, t := range p.Totals {
				u, err := p.HeadUsage(l, k, plan.Request{PromptTokens: t.PromptTokens, GeneratedTokens: t.GeneratedTokens})
				if err != nil {
					return nil, err
				}
				at := fmt.Sprintf("_%d_%d", t.PromptTokens, t.GeneratedTokens)
				for column, n := range map[string]int64{"kept_tokens": u.Tokens, "kept_blocks": u.Blocks, "kept_bytes": u.Bytes, "full_bytes": u.FullBytes} {
					cell[column+at] = strconv.FormatInt(n, 10)
				}
				if u.WorstCase {
					cell["worst_case"] = "true"
				}
			}
			record := make([]string, len(header))
			for i, column := range header {
				record[i] = cell[column]
			}
			if err := w.Write(record); err != nil {
				return nil, err
			}
		}
	}
	w.Flush()
	if err := w.Error(); err != nil {
		return nil, err
	}
	if len(p.Pins) > 0 {
		d.lose(Loss{Of: "pins", Effect: None, Reason: "has no rows for pins; the kept tokens count them"})
	}
	if p.TokenClasses != nil {
		d.lose(Loss{Of: "token_classes", Effect: None, Reason: "names classes without the ids of their tokens"})
	}
	d.common("totals", "cache")
	return []File{{"plan.csv", out.Bytes()}}, nil
}

// policyCells fills in the members of a policy.
func policyCells(cell map[string]string, q plan.Policy) {
	tokens := func(column string, n int) { cell[column] = strconv.Itoa(n) }
	ratio := func(column string, x float64) { cell[column] = strconv.FormatFloat(x, 'g', -1, 64) }
	times := func(e plan.Evict, d plan.Decode, p plan.Positions) {
		cell["evict"], cell["decode"], cell["positions"] = string(e), string(d), string(p)
	}
	cell["kind"] = string(q.Kind())
	switch q := q.(type) {
	case plan.Streaming:
		tokens("sink_tokens", q.SinkTokens)
		tokens("recent_tokens", q.RecentTokens)
		times(q.Evict, q.Decode, q.Positions)
	case plan.H2O:
		tokens("sink_tokens", q.SinkTokens)
		tokens("heavy_tokens", q.HeavyTokens)
		tokens("recent_tokens", q.RecentTokens)
		times(q.Evict, q.Decode, q.Positions)
	case plan.TopK:
		if q.BudgetRatio > 0 {
			ratio("budget_ratio", q.BudgetRatio)
		} else {
			tokens("budget_tokens", q.BudgetTokens)
		}
		tokens("sink_tokens", q.SinkTokens)
		tokens("observation_window", q.ObservationWindow)
		cell["pool"], cell["aggregate"] = string(q.Pool.Kind), string(q.Aggregate)
		tokens("kernel", q.Pool.Kernel)
		times(q.Evict, q.Decode, q.Positions)
	case plan.FastGen:
		var classes []string
		for _, c := range q.Classes {
			classes = append(classes, string(c))
		}
		cell["classes"], cell["overflow"] = strings.Join(classes, " "), string(q.Overflow)
		ratio("frequent_ratio", q.FrequentRatio)
		ratio("local_ratio", q.LocalRatio)
		if q.MaxTokens > 0 {
			tokens("max_tokens", q.MaxTokens)
		}
		if q.MaxRatio > 0 {
			ratio("max_ratio", q.MaxRatio)
		}
		times(q.Evict, q.Decode, q.Positions)
	}
}
