package report

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvprofile/kvprofile/fastgen"
)

// quantile is the q-quantile of values by the nearest rank.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// spread draws the median of the KV heads with a band of the middle eighty percent, and their worst.
func spread(name string, style int) (median, worst series) {
	return series{name: name + ": median, band 10 to 90 %", style: style, line: true, marks: true, band: true}, series{name: name + ": worst KV head", style: style + seriesColors, line: true}
}

// recoveryFigures show which share of the attention falls on what policies keep: for FastGen's lattice, and for the
// streaming policies that the record can judge.
func (in *Inputs) recoveryFigures() ([]Figure, error) {
	var out []Figure
	percents := func(v float64) string { return plain(100 * v) }
	quarters := []float64{0, 0.25, 0.5, 0.75, 1}
	build := func(id, title, label string, all []series, threshold float64) Figure {
		c := chart{id: id, title: title, label: label, series: all,
			x: axis{title: "kept, % of the tokens of the prompt", low: 0, high: 1, ticks: quarters, format: percents},
			y: axis{title: "recovery, % of the attention", low: 0, high: 1, ticks: quarters, format: percents}}
		if threshold > 0 {
			c.rules = []rule{{at: threshold, text: "threshold " + percents(threshold) + " %"}}
		}
		return c.figure()
	}
	if f := in.FastGen; f != nil {
		median, worst := spread("FastGen", 2)
		count := make([]int, len(f.Lattice))
		heads := 0
		for _, row := range f.Layers {
			for _, h := range row {
				count[h.Policy]++
				heads++
			}
		}
		for i, p := range f.Lattice {
			var recovery, kept []float64
			for _, row := range f.Layers {
				for _, h := range row {
					recovery, kept = append(recovery, h.Recovery[i]), append(kept, h.Kept[i])
				}
			}
			median, worst = addSpread(median, worst, mean(kept), recovery, fmt.Sprintf("%s\nthe cheapest that recovers %s for %d of %d KV heads", clip(p.Name, 60), percent(f.Options.Threshold), count[i], heads))
		}
		out = append(out, build("recovery-fastgen", "Recovery of FastGen's policies", fmt.Sprintf("%d policies from the cheapest to the full cache.", len(f.Lattice)), []series{median, worst}, f.Options.Threshold))
		out = append(out, in.latticeFigure(count, heads))
	}
	if in.Record != nil {
		f, ok, err := in.streamingFigure(build)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, f)
		}
	}
	return out, nil
}

// addSpread adds what all KV heads recover with one policy.
func addSpread(median, worst series, kept float64, recovery []float64, text string) (a, b series) {
	low, mid, high, least := quantile(recovery, 0.1), quantile(recovery, 0.5), quantile(recovery, 0.9), slices.Min(recovery)
	hover := fmt.Sprintf("%s\nkeeps %s\nrecovers %s in the median, %s to %s in the middle 80 %%, %s for the worst KV head", text, percent(kept), percent(mid), percent(low), percent(high), percent(least))
	median.points = append(median.points, point{kept, mid, low, high, hover})
	worst.points = append(worst.points, at(kept, least, hover))
	return median, worst
}

// latticeFigure shows for how many KV heads each policy of the lattice is the cheapest that is enough.
func (in *Inputs) latticeFigure(count []int, heads int) Figure {
	high := niceTicks(0, float64(slices.Max(count)), 5)
	bars := series{name: "KV heads", style: 2, bars: true}
	for i, n := range count {
		bars.points = append(bars.points, at(float64(i), float64(n), fmt.Sprintf("%s\n%d of %d KV heads", clip(in.FastGen.Lattice[i].Name, 60), n, heads)))
	}
	short := func(v float64) string {
		i := int(v)
		p := in.FastGen.Lattice[i]
		switch {
		case p.Full:
			return "full"
		case i == 0:
			return "special"
		case p.LocalRatio > 0:
			return "+ local"
		case p.FrequentRatio > 0:
			return "+ frequent"
		}
		return "+ punct."
	}
	x := axis{title: "policy", low: -0.6, high: float64(len(count)) - 0.4, format: short}
	for i := range count {
		x.ticks = append(x.ticks, float64(i))
	}
	c := chart{id: "fastgen-choice", title: fmt.Sprintf("Cheapest policy that recovers %s", percent(in.FastGen.Options.Threshold)), series: []series{bars}, barWidth: 0.7, x: x,
		label: fmt.Sprintf("%d of %d KV heads need the full cache.", count[len(count)-1], heads),
		y:     axis{title: "KV heads", low: 0, high: high[len(high)-1], ticks: high, format: plain}}
	return c.figure()
}

// streamingFigure judges all streaming policies of the record's widths with the most sinks that it has.
func (in *Inputs) streamingFigure(build func(id, title, label string, all []series, threshold float64) Figure) (Figure, bool, error) {
	grid := in.Record.Meta().Grid
	if len(grid.Recent) == 0 || len(grid.Sinks) == 0 {
		return Figure{}, false, nil
	}
	o := fastgen.Options{LocalRatio: grid.LocalRatios[0]}
	if in.FastGen != nil {
		o = in.FastGen.Options
	}
	sink := slices.Max(grid.Sinks)
	median, worst := spread("streaming", 5)
	for _, recent := range grid.Recent {
		heads, err := fastgen.Streaming(in.Record, sink, recent, o)
		if err != nil {
			return Figure{}, false, fmt.Errorf("recovery of streaming policies: %w", err)
		}
		var recovery, kept []float64
		for _, row := range heads {
			for _, h := range row {
				recovery, kept = append(recovery, h.Recovery), append(kept, h.Kept)
			}
		}
		if math.IsNaN(mean(recovery)) {
			return Figure{}, false, nil
		}
		median, worst = addSpread(median, worst, mean(kept), recovery, fmt.Sprintf("streaming, first %d and last %d tokens", sink, recent))
	}
	threshold := o.Threshold
	return build("recovery-streaming", "Recovery of streaming policies", fmt.Sprintf("The first %d tokens and the last %d to %d.", sink, slices.Min(grid.Recent), slices.Max(grid.Recent)), []series{median, worst}, threshold), true, nil
}
