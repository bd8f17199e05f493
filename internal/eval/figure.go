package eval

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Sizes of a figure in pixels.
const (
	panelWidth   = 300
	panelHeight  = 300
	panelTop     = 40
	panelLeft    = 56
	labelWidth   = 130
	figureBottom = 56
	labelGap     = 13 // least distance between labels
)

// palette is Okabe and Ito's, told apart with any colour vision, without its yellow, which is too light for lines. After
// all colours, lines are dashed.
func palette() []string {
	return []string{"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"}
}

func dashes() []string { return []string{"", "6 3", "2 3"} }

// point is a run in a panel: x is the share of bytes kept.
type point struct{ x, y float64 }

// panel is one diagram: a line for each method.
type panel struct {
	title, base string // base names the line of the full cache
	lines       [][]point
	full        float64
	scale       func(y float64) float64 // rising: better is higher on the page
	ticks       []float64
	label       func(y float64) string
}

// figure draws retention and loss against the kept bytes, a line for each method with its name at its end. Budgets fall
// from left to right. Retention is left out if the full cache gets little right; "" if no method has two budgets.
func (r *Result) figure() string {
	var names []string
	var retention, loss [][]point
	full := r.Overall(&r.Full)
	for _, name := range r.Methods() {
		var a, b []point
		for _, budget := range r.Budgets() {
			x := r.Find(name, budget)
			if x == nil || budget == 0 || full.N == 0 {
				continue
			}
			s := r.Overall(x)
			if s.Kept <= 0 {
				continue
			}
			if s.Retention != nil {
				a = append(a, point{s.Kept, *s.Retention})
			}
			b = append(b, point{s.Kept, s.Loss()})
		}
		if len(b) < 2 {
			continue
		}
		for _, line := range [][]point{a, b} {
			slices.SortStableFunc(line, func(p, q point) int { return cmp.Compare(q.x, p.x) })
		}
		names, retention, loss = append(names, name), append(retention, a), append(loss, b)
	}
	if len(names) == 0 {
		return ""
	}
	percents := func(y float64) string { return fmt.Sprintf("%.0f", 100*y) }
	var panels []panel
	if full.M >= ranksByRight {
		panels = append(panels, panel{title: "retention, %", base: "full cache", lines: retention, full: 1, scale: func(y float64) float64 { return y },
			ticks: []float64{0, 0.2, 0.4, 0.6, 0.8, 1}, label: percents})
	}
	// Losses differ by orders of magnitude: the axis is a square root's.
	root := func(y float64) float64 { return -math.Copysign(math.Sqrt(math.Abs(y)), y) }
	panels = append(panels, panel{title: "loss of log-probability, nats per token", base: "full cache", lines: loss, full: 0, scale: root,
		ticks: []float64{-1, -0.1, 0, 0.1, 0.5, 1, 2, 4, 8, 16, 32}, label: func(y float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", y), ".0") }})

	lowX, highX := math.Inf(1), math.Inf(-1)
	for _, line := range loss {
		for _, p := range line {
			lowX, highX = min(lowX, p.x), max(highX, p.x)
		}
	}
	if lowX == highX {
		lowX, highX = lowX/1.1, highX*1.1
	}
	var out strings.Builder
	width, height := len(panels)*(panelLeft+panelWidth+labelWidth), panelTop+panelHeight+figureBottom
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" font-family="sans-serif" font-size="11" fill="#333">`+"\n", width, height, width, height)
	fmt.Fprintf(&out, "<title>%s: what methods retain against the bytes that they keep</title>\n", escapeXML(r.Model.Name))
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	for i, p := range panels {
		fmt.Fprintf(&out, `<g transform="translate(%d %d)">`+"\n", i*(panelLeft+panelWidth+labelWidth)+panelLeft, panelTop)
		p.draw(&out, names, r.Budgets(), lowX, highX)
		out.WriteString("</g>\n")
	}
	out.WriteString("</svg>\n")
	return out.String()
}

func (p *panel) draw(out *strings.Builder, names []string, budgets []float64, lowX, highX float64) {
	low, high := p.scale(p.full), p.scale(p.full)
	for _, line := range p.lines {
		for _, q := range line {
			low, high = min(low, p.scale(q.y)), max(high, p.scale(q.y))
		}
	}
	if low == high {
		low--
	}
	margin := 0.04 * (high - low)
	low, high = low-margin, high+margin
	// x falls from left to right on a logarithmic axis, with a little room at both ends.
	const room = 10
	toX := func(x float64) float64 {
		return room + (panelWidth-2*room)*(math.Log(highX)-math.Log(x))/(math.Log(highX)-math.Log(lowX))
	}
	toY := func(y float64) float64 { return panelHeight * (high - p.scale(y)) / (high - low) }

	fmt.Fprintf(out, `<text x="0" y="-16" font-weight="bold">%s</text>`+"\n", p.title)
	last := math.Inf(-1)
	ticks := slices.Clone(p.ticks)
	slices.SortFunc(ticks, func(a, b float64) int { return cmp.Compare(toY(a), toY(b)) })
	for _, y := range ticks {
		at := toY(y)
		if at < 0 || at > panelHeight || at-last < labelGap && y != p.full {
			continue
		}
		last = at
		fmt.Fprintf(out, `<path d="M0 %.1fH%d" stroke="#ddd"/><text x="-6" y="%.1f" text-anchor="end">%s</text>`+"\n", at, panelWidth, at+4, p.label(y))
	}
	fmt.Fprintf(out, `<path d="M0 %.1fH%d" stroke="#666" stroke-dasharray="1 2"/><text x="2" y="%.1f" fill="#666">%s</text>`+"\n", toY(p.full), panelWidth, toY(p.full)-3, p.base)
	for _, b := range budgets {
		if b == 0 || b < lowX*0.97 || b > highX*1.03 {
			continue
		}
		fmt.Fprintf(out, `<path d="M%.1f %dv4" stroke="#666"/><text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", toX(b), panelHeight, toX(b), panelHeight+17, percent(b))
	}
	fmt.Fprintf(out, `<path d="M0 0V%dH%d" fill="none" stroke="#666"/><text x="%d" y="%d" text-anchor="middle">bytes kept</text>`+"\n", panelHeight, panelWidth, panelWidth/2, panelHeight+36)

	colours, dash := palette(), dashes()
	ends := make([]float64, len(p.lines))
	for i, line := range p.lines {
		colour, style := colours[i%len(colours)], ""
		if d := dash[i/len(colours)%len(dash)]; d != "" {
			style = fmt.Sprintf(` stroke-dasharray="%s"`, d)
		}
		var path strings.Builder
		step := "M"
		for _, q := range line {
			fmt.Fprintf(&path, "%s%.1f %.1f", step, toX(q.x), toY(q.y))
			step = "L"
		}
		fmt.Fprintf(out, `<path d="%s" fill="none" stroke="%s" stroke-width="1.8"%s/>`, path.String(), colour, style)
		for _, q := range line {
			fmt.Fprintf(out, `<circle cx="%.1f" cy="%.1f" r="2.6" fill="%s"/>`, toX(q.x), toY(q.y), colour)
		}
		out.WriteString("\n")
		ends[i] = toY(line[len(line)-1].y)
	}
	places := spread(ends, labelGap, -panelTop+labelGap, panelHeight+figureBottom-labelGap)
	for i, line := range p.lines {
		end := line[len(line)-1]
		fmt.Fprintf(out, `<path d="M%.1f %.1fL%d %.1f" stroke="%s" stroke-width="0.7"/><text x="%d" y="%.1f">%s</text>`+"\n",
			toX(end.x)+3, ends[i], panelWidth+14, places[i], colours[i%len(colours)], panelWidth+17, places[i]+4, escapeXML(names[i]))
	}
}

// spread moves places apart, so that neighbours keep a distance of at least gap between low and high, in their order and
// near where they want to be; where the room is too small they keep an equal distance over all of it.
func spread(wanted []float64, gap, low, high float64) []float64 {
	n := len(wanted)
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(wanted[a], wanted[b]) })
	if n > 1 {
		gap = min(gap, (high-low)/float64(n-1))
	}
	// Less rank * gap, keeping the distance is keeping the order: isotonic regression, then cut to the room.
	type block struct {
		sum   float64
		count int
	}
	var blocks []block
	for rank, i := range order {
		blocks = append(blocks, block{wanted[i] - gap*float64(rank), 1})
		for len(blocks) > 1 {
			a, b := blocks[len(blocks)-2], blocks[len(blocks)-1]
			if a.sum/float64(a.count) < b.sum/float64(b.count) {
				break
			}
			blocks = append(blocks[:len(blocks)-2], block{a.sum + b.sum, a.count + b.count})
		}
	}
	out := make([]float64, n)
	rank := 0
	for _, b := range blocks {
		at := min(max(b.sum/float64(b.count), low), high-gap*float64(n-1))
		for range b.count {
			out[order[rank]] = at + gap*float64(rank)
			rank++
		}
	}
	return out
}

func escapeXML(s string) string {
	var out strings.Builder
	if err := xml.EscapeText(&out, []byte(s)); err != nil {
		panic(err) // a strings.Builder takes all
	}
	return out.String()
}
