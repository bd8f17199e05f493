package plan

import "strconv"

// Advice returns what is allowed but seldom meant, in order of the pointers. The plan must be valid.
func (p *Plan) Advice() []Violation {
	c := &checker{plan: p}
	advise := c.fail
	least := 0
	for _, w := range p.Model.SlidingWindow {
		if w > 0 && (least == 0 || w < least) {
			least = w
		}
	}
	for name, q := range p.Policies {
		at := PointerTo("/policies", name)
		whole := func(member string, tokens int) {
			if n := p.Cache.roundUp(tokens); n != tokens {
				advise(at+"/"+member, "is %d, no multiple of block_size %d: its blocks have room for %d", tokens, p.Cache.BlockSize, n)
			}
		}
		bound := 0
		switch q := q.(type) {
		case Streaming:
			whole("sink_tokens", q.SinkTokens)
			whole("recent_tokens", q.RecentTokens)
			bound = q.SinkTokens + q.RecentTokens
		case TopK:
			if q.BudgetTokens > 0 {
				whole("budget_tokens", q.BudgetTokens)
				bound = q.BudgetTokens
			}
		case H2O:
			bound = q.SinkTokens + q.HeavyTokens + q.RecentTokens
			if n := p.Cache.roundUp(bound); n != bound {
				advise(at, "keeps %d tokens, no multiple of block_size %d: its blocks have room for %d", bound, p.Cache.BlockSize, n)
			}
		case FastGen:
			if q.MaxTokens == 0 && q.MaxRatio == 0 {
				advise(at, "has neither max_tokens nor max_ratio: in the worst case it keeps everything")
			}
		}
		if least > 0 && bound >= least {
			advise(at, "keeps %d tokens, and a layer's sliding window has %d: there the window is kept", bound, least)
		}
	}
	for i, t := range p.Totals {
		if n := t.PromptTokens + t.GeneratedTokens; n > p.Model.MaxPosition {
			advise("/totals/"+strconv.Itoa(i), "is for %d tokens, the model was made for %d", n, p.Model.MaxPosition)
		}
		if t.KeptBytes >= t.FullBytes {
			advise("/totals/"+strconv.Itoa(i), "saves nothing: kept_bytes %d, full_bytes %d", t.KeptBytes, t.FullBytes)
		}
	}
	if p.Evidence == nil || len(p.Evidence.Evaluations) == 0 {
		advise("", "has no evaluation: nothing says what the model still retrieves")
	}
	return SortViolations(c.found)
}

// HeadsByPolicy counts the KV heads of every policy, by its name.
func (p *Plan) HeadsByPolicy() map[string]int {
	n := map[string]int{}
	for _, row := range p.Layers {
		for _, name := range row {
			n[name]++
		}
	}
	return n
}
