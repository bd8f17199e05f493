package report

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/plan"
)

// gpu is a size of memory that many GPUs have.
type gpu struct {
	gigabytes int
	such      string
}

func gpus() []gpu {
	return []gpu{{24, "L4, RTX 4090"}, {48, "L40S, A6000"}, {80, "A100, H100"}, {141, "H200"}}
}

func batches() []int { return []int{1, 8, 32} }

// decimalBytes shows bytes with a decimal unit, as memories of GPUs are sold.
func decimalBytes(v float64) string {
	units := []string{"B", "kB", "MB", "GB", "TB", "PB"}
	i := 0
	for v >= 999.5 && i < len(units)-1 {
		v, i = v/1000, i+1
	}
	return fmt.Sprintf("%.3g %s", v, units[i])
}

// contexts are the lengths of the diagram: powers of two up to the longest that the model or the plan's totals know.
func (in *Inputs) contexts() []int {
	longest := in.Plan.Model.MaxPosition
	for _, t := range in.Plan.Totals {
		longest = max(longest, t.PromptTokens)
	}
	longest = min(longest, 1<<21)
	var out []int
	for n := 512; n < longest; n *= 2 {
		out = append(out, n)
	}
	if len(out) == 0 {
		return []int{max(longest/2, 1), max(longest, 2)}
	}
	return append(out, longest)
}

// bytesFigures are KV bytes against the length of the context, a figure for each batch.
func (in *Inputs) bytesFigures() []Figure {
	p := in.Plan
	lengths := in.contexts()
	bits := func(v float64) float64 { return math.Log2(v) }
	var out []Figure
	for _, batch := range batches() {
		full, kept := series{name: "full cache", style: 6, line: true, marks: true}, series{name: "plan", style: 0, line: true, marks: true}
		low, high := math.Inf(1), 0.0
		for _, n := range lengths {
			u := p.Usage(plan.Request{PromptTokens: n, Batch: batch})
			most := ""
			if u.WorstCase {
				most = "at most "
			}
			hover := fmt.Sprintf("%s tokens, %d sequences\nfull cache %s\nplan %s%s (%s)", ui.Tokens(n), batch, decimalBytes(float64(u.FullBytes)), most, decimalBytes(float64(u.Bytes)), percent(float64(u.Bytes)/float64(max(u.FullBytes, 1))))
			if n > p.Model.MaxPosition {
				hover += "\nbeyond the context that the model was made for"
			}
			full.points = append(full.points, at(float64(n), float64(u.FullBytes), hover))
			kept.points = append(kept.points, at(float64(n), float64(u.Bytes), hover))
			low, high = min(low, float64(u.Bytes)), max(high, float64(u.FullBytes))
		}
		c := chart{id: fmt.Sprintf("bytes-batch-%d", batch), title: fmt.Sprintf("KV cache of %d sequences", batch), series: []series{full, kept},
			label: fmt.Sprintf("At %s tokens the full cache takes %s, the plan %s.", ui.Tokens(lengths[len(lengths)-1]), decimalBytes(full.points[len(lengths)-1].y), decimalBytes(kept.points[len(lengths)-1].y)),
			x:     axis{title: "tokens of context", low: float64(lengths[0]), high: float64(lengths[len(lengths)-1]), transform: bits, format: func(v float64) string { return ui.Tokens(int(v)) }},
			y:     axis{title: "bytes", low: math.Pow(10, math.Floor(math.Log10(max(low, 1)))), high: math.Pow(10, math.Ceil(math.Log10(high*1.01))), transform: math.Log10, format: decimalBytes}}
		if batch == 1 {
			c.title = "KV cache of one sequence"
		}
		for _, n := range lengths {
			c.x.ticks = append(c.x.ticks, float64(n))
		}
		for _, g := range gpus() { // the lines of memories that are near what is drawn
			if v := float64(g.gigabytes) * 1e9; v <= c.y.high*20 {
				c.y.high = max(c.y.high, v*1.5)
			}
		}
		for _, g := range gpus() {
			if v := float64(g.gigabytes) * 1e9; v <= c.y.high && v >= c.y.low {
				c.rules = append(c.rules, rule{at: v, text: fmt.Sprintf("%d GB", g.gigabytes)})
			}
		}
		for v := c.y.low; v <= c.y.high*1.001; v *= 10 {
			c.y.ticks = append(c.y.ticks, v)
		}
		if m := float64(p.Model.MaxPosition); m < c.x.high && m > c.x.low {
			c.rules = append(c.rules, rule{at: m, vertical: true, text: "model's context"})
		}
		out = append(out, c.figure())
	}
	return out
}

// table is a table of the page; the first column names the rows, the others are numbers.
type table struct {
	Caption string
	Header  []string
	Rows    [][]string
	Texts   bool // all columns are texts
}

// sequencesTable says how many sequences fit into the memories of GPUs.
func (in *Inputs) sequencesTable() table {
	p := in.Plan
	lengths := []int{in.context()}
	for _, n := range []int{p.Model.MaxPosition / 4, p.Model.MaxPosition} {
		if n > lengths[len(lengths)-1] && !slices.Contains(lengths, n) {
			lengths = append(lengths, n)
		}
	}
	t := table{Caption: "Sequences whose KV cache fits into all of a GPU's memory: full cache → plan", Header: []string{"memory"}}
	for _, n := range lengths {
		t.Header = append(t.Header, ui.Tokens(n)+" tokens")
	}
	for _, g := range gpus() {
		row := []string{fmt.Sprintf("%d GB (%s)", g.gigabytes, g.such)}
		for _, n := range lengths {
			u := p.Usage(plan.Request{PromptTokens: n})
			memory := int64(g.gigabytes) * 1_000_000_000
			row = append(row, fmt.Sprintf("%d → %d", memory/max(u.FullBytes, 1), memory/max(u.Bytes, 1)))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
