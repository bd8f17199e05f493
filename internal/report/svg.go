package report

import (
	_ "embed"
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A Figure is a drawing: one panel of the report, and one file of [Report.WriteFigures]. Lengths are in pixels of its
// natural size.
type Figure struct {
	ID     string // a name for files: lower-case letters, digits and dashes
	Title  string
	Label  string // what it shows, for those who cannot see it
	Width  float64
	Height float64
	body   string // marks, escaped
	table  bool   // a table of cells, which is not enlarged
}

// fontSize is that of all texts in figures; charWidth the mean width of a character in it.
const (
	fontSize  = 11.0
	charWidth = 6.0
)

//go:embed assets/figure.css
var figureCSS string

// A color is a variable of the style sheets with its values on light and on dark ground.
type color struct{ name, light, dark string }

// colors are Okabe and Ito's for series and kinds, told apart with any colour vision, without their yellow, which is too
// light for lines; the black one is the text's. On dark ground they are lighter.
func colors() []color {
	return []color{
		{"bg", "#ffffff", "#15181c"},
		{"panel", "#f6f7f9", "#1d2127"},
		{"ink", "#1b1f24", "#e6e9ec"},
		{"dim", "#5b6570", "#9aa5b1"},
		{"grid", "#d9dee4", "#343b44"},
		{"link", "#0b5fa5", "#7cc0f5"},
		{"warn", "#8a4b00", "#f0b35a"},
		{"c0", "#0072b2", "#4aa8e0"},
		{"c1", "#d55e00", "#f08a3c"},
		{"c2", "#009e73", "#2fc79a"},
		{"c3", "#cc79a7", "#e09cc3"},
		{"c4", "#56b4e9", "#9ad4f7"},
		{"c5", "#e69f00", "#f5c04d"},
		{"c6", "#1b1f24", "#e6e9ec"},
	}
}

// seriesColors is the number of colours of series; the last is the text's.
const seriesColors = 7

// methodStyle is the style of the i-th of many series: the text's colour is left for what the page is about.
func methodStyle(i int) int { return i/(seriesColors-1)*seriesColors + i%(seriesColors-1) }

const planStyle = seriesColors - 1

// rootCSS declares the colours, dark ones where the reader prefers them.
func rootCSS() string {
	var light, dark strings.Builder
	for _, c := range colors() {
		fmt.Fprintf(&light, "--%s:%s;", c.name, c.light)
		fmt.Fprintf(&dark, "--%s:%s;", c.name, c.dark)
	}
	return fmt.Sprintf(":root{color-scheme:light dark;%s}\n@media screen and (prefers-color-scheme:dark){:root{%s}}\n", light.String(), dark.String())
}

// fileCSS is the style of a figure by itself: the light colours in place of variables, which few readers of SVG know.
func fileCSS() string {
	var pairs []string
	for _, c := range colors() {
		pairs = append(pairs, "var(--"+c.name+")", c.light)
	}
	return strings.NewReplacer(pairs...).Replace(figureCSS)
}

// WriteSVG writes the figure as a file of its own, on white ground.
func (f *Figure) WriteSVG(w io.Writer) error {
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" class="fig" width="%s" height="%s" viewBox="0 0 %[1]s %[2]s" role="img">
<title>%s</title>
<desc>%s</desc>
<style>%s</style>
<rect x="0" y="0" width="%[1]s" height="%[2]s" fill="#ffffff"/>
%[6]s</svg>
`, px(f.Width), px(f.Height), esc(f.Title), esc(f.Label), fileCSS(), f.body)
	return err
}

// inline is the figure as a part of the page: marks can be reached by keyboard.
func (f *Figure) inline() string {
	class := ""
	switch {
	case f.Width > figureWidth+10:
		class = " wide" // keeps its size, and the page scrolls it
	case f.table:
		class = " narrow"
	}
	return fmt.Sprintf(`<svg class="fig%s" id="fig-%s" viewBox="0 0 %s %s" width="%[3]s" height="%[4]s" role="img" tabindex="0" aria-label="%s">
%s</svg>`, class, f.ID, px(f.Width), px(f.Height), esc(f.Title+". "+f.Label), f.body)
}

// drawing collects the marks of a figure.
type drawing struct{ strings.Builder }

func (d *drawing) f(format string, args ...any) { fmt.Fprintf(d, format, args...) }

// text draws a text; class is a list of classes such as "end" or "mid", which say where it is anchored.
func (d *drawing) text(x, y float64, class, s string) {
	d.f(`<text x="%s" y="%s" class="%s">%s</text>`+"\n", px(x), px(y), class, esc(s))
}

func (d *drawing) line(x1, y1, x2, y2 float64, class string) {
	d.f(`<line x1="%s" y1="%s" x2="%s" y2="%s" class="%s"/>`+"\n", px(x1), px(y1), px(x2), px(y2), class)
}

// rect draws a mark with its numbers; attributes such as fill are written as they are.
func (d *drawing) rect(x, y, w, h float64, attributes, hover string) {
	d.f(`<rect x="%s" y="%s" width="%s" height="%s" %s`, px(x), px(y), px(w), px(h), attributes)
	if hover == "" {
		d.f("/>\n")
		return
	}
	d.f("><title>%s</title></rect>\n", esc(hover))
}

// heading writes the title of a figure, cut to its width.
func (d *drawing) heading(width float64, title string) {
	d.text(4, 14, "h", fit(title, width-8, charWidth*1.25))
}

// fit cuts a text to a width.
func fit(s string, width, char float64) string {
	return clip(s, max(4, int(width/char)))
}

// clip cuts a text to n characters.
func clip(s string, n int) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "\ufffd")), " ")
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// esc makes any text part of XML: characters that XML has no place for are replaced.
func esc(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' || r == 0xfffe || r == 0xffff {
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(s, "\ufffd"))
	return html.EscapeString(s)
}

// px writes a length with a tenth of a pixel. Rounding to a millionth first makes lengths that fall between two tenths go
// the same way whether or not the processor fuses multiplications with additions.
func px(v float64) string {
	s := strings.TrimSuffix(strconv.FormatFloat(math.Round(v*1e6)/1e6, 'f', 1, 64), ".0")
	if s == "-0" {
		return "0"
	}
	return s
}

// A ramp gives the colour of a value in [0,1].
type ramp func(v float64) rgb

type rgb [3]float64

func (c rgb) String() string {
	return fmt.Sprintf("#%02x%02x%02x", byte(math.Round(c[0])), byte(math.Round(c[1])), byte(math.Round(c[2])))
}

// ink is the class of texts that can be read on a colour.
func (c rgb) ink() string {
	if 0.299*c[0]+0.587*c[1]+0.114*c[2] > 140 {
		return "on-light"
	}
	return "on-dark"
}

// between interpolates between colours at equal distances.
func between(v float64, stops []rgb) rgb {
	v = min(max(v, 0), 1) * float64(len(stops)-1)
	i := min(int(v), len(stops)-2)
	var c rgb
	for k := range c {
		c[k] = stops[i][k] + (v-float64(i))*(stops[i+1][k]-stops[i][k])
	}
	return c
}

// viridisStops are nine colours of viridis (Smith and van der Walt 2015): dark is low, light is high, with any colour
// vision and in grey.
func viridisStops() []rgb {
	return []rgb{{68, 1, 84}, {71, 45, 123}, {59, 82, 139}, {44, 114, 142}, {33, 145, 140}, {40, 174, 128}, {94, 201, 98}, {173, 220, 48}, {253, 231, 37}}
}

func viridis(v float64) rgb { return between(v, viridisStops()) }

// diverging runs from orange over white to blue: for values around the middle of the scale.
func diverging(v float64) rgb { return between(v, []rgb{{213, 94, 0}, {247, 247, 247}, {0, 114, 178}}) }

// heatMap is a table of coloured cells.
type heatMap struct {
	id, title, label string
	rows, cols       string // names of the axes
	rowNames         []string
	colNames         []string
	cells            [][]heatCell // [row][column]
	cellHeight       float64      // 0: by the number of rows
	cellWidth        float64      // 0: by the number of columns
	legend           func(d *drawing, x, y, width float64) (height float64)
}

// heatCell is a cell; one without a fill is left out.
type heatCell struct {
	fill  string // "#rrggbb"
	mark  string // a short text in it
	ink   string // class of the mark
	hover string
	extra string // further attributes, such as data-layer
}

// filled is the cell of a value in [0,1] of a ramp.
func filled(r ramp, v float64, mark, hover string) heatCell {
	c := r(v)
	return heatCell{fill: c.String(), ink: c.ink(), mark: mark, hover: hover}
}

// figureWidth is the natural width of a figure: that of a telephone.
const figureWidth = 360.0

func (h *heatMap) figure() Figure {
	left := 16.0
	for _, n := range h.rowNames {
		left = max(left, 16+charWidth*float64(utf8.RuneCountInString(n))+6)
	}
	w := h.cellWidth
	if w == 0 {
		w = min(max((figureWidth-left-8)/float64(len(h.colNames)), 9), 44)
	}
	hgt := h.cellHeight
	if hgt == 0 {
		hgt = min(max(440/float64(len(h.rowNames)), 10), 30)
	}
	width := max(left+w*float64(len(h.colNames))+8, 240)
	d := new(drawing)
	d.heading(width, h.title)
	top := 26.0
	if h.legend != nil {
		top += h.legend(d, left, top, width-left-8)
	}
	top += 16
	if h.cols != "" {
		d.text(left, top-6, "a", h.cols)
		top += 14
	}
	labelled := func(n int, size, need float64) int { // every how many there is room for a name
		step := 1
		for size*float64(step) < need && step < n {
			step++
			for step > 2 && step%2 == 1 && step != 5 {
				step++
			}
		}
		return step
	}
	long := 0
	for _, n := range h.colNames {
		long = max(long, utf8.RuneCountInString(n))
	}
	for c, step := 0, labelled(len(h.colNames), w, charWidth*float64(long)+4); c < len(h.colNames); c += step {
		d.text(left+(float64(c)+0.5)*w, top-4, "mid", h.colNames[c])
	}
	for r, step := 0, labelled(len(h.rowNames), hgt, fontSize+1); r < len(h.rowNames); r += step {
		d.text(left-4, top+(float64(r)+0.5)*hgt+4, "end", h.rowNames[r])
	}
	height := top + hgt*float64(len(h.rowNames)) + 6
	// The name of the rows may be longer than there are rows: then it reaches up beside the legend.
	half := charWidth*float64(utf8.RuneCountInString(h.rows))/2 + 3
	if middle := min(top+hgt*float64(len(h.rowNames))/2, height-half); h.rows != "" {
		d.f(`<text x="11" y="%s" class="a mid" transform="rotate(-90 11 %[1]s)">%s</text>`+"\n", px(middle), esc(h.rows))
	}
	for r, row := range h.cells {
		for c, x := range row {
			if x.fill == "" {
				continue
			}
			d.rect(left+float64(c)*w, top+float64(r)*hgt, w-0.5, hgt-0.5, strings.TrimSpace(fmt.Sprintf(`class="m" fill="%s" %s`, x.fill, x.extra)), x.hover)
			if x.mark != "" && w >= charWidth*float64(utf8.RuneCountInString(x.mark))+1 && hgt >= 10 {
				d.text(left+(float64(c)+0.5)*w, top+(float64(r)+0.5)*hgt+4, "mid pass "+x.ink, x.mark)
			}
		}
	}
	return Figure{ID: h.id, Title: h.title, Label: h.label, Width: width, Height: height, body: d.String(), table: true}
}

// scale draws a ramp with the values at its ends and in the middle.
func scale(r ramp, texts ...string) func(d *drawing, x, y, width float64) float64 {
	return func(d *drawing, x, y, width float64) float64 {
		const steps = 32
		width = min(width, 200)
		for i := range steps {
			d.rect(x+width*float64(i)/steps, y, width/steps+0.4, 8, fmt.Sprintf(`fill="%s"`, r((float64(i)+0.5)/steps)), "")
		}
		for i, t := range texts {
			class := "mid"
			switch i {
			case 0:
				class = "start"
			case len(texts) - 1:
				class = "end"
			}
			d.text(x+width*float64(i)/float64(len(texts)-1), y+20, class, t)
		}
		return 30
	}
}

// An axis maps values to pixels.
type axis struct {
	title     string
	low, high float64
	transform func(v float64) float64 // rising; nil for a linear axis
	ticks     []float64
	format    func(v float64) string
}

func (a *axis) at(v float64) float64 {
	t := a.transform
	if t == nil {
		t = func(v float64) float64 { return v }
	}
	return (t(v) - t(a.low)) / (t(a.high) - t(a.low))
}

// point is a value with an interval where low <= high, and its numbers for people.
type point struct {
	x, y      float64
	low, high float64 // NaN for none
	hover     string
}

func at(x, y float64, hover string) point { return point{x, y, math.NaN(), math.NaN(), hover} }

// series is what is drawn in one colour.
type series struct {
	name   string
	style  int  // colour, shape and dashes
	line   bool // join the points
	marks  bool // draw the points
	bars   bool // a bar for each point
	band   bool // the interval as a ground, in place of whiskers
	star   bool // marks are stars: what the page is about
	points []point
}

// rule is a line across the diagram.
type rule struct {
	at       float64
	vertical bool
	text     string
}

// chart is a diagram of series over two axes.
type chart struct {
	id, title, label string
	x, y             axis
	series           []series
	rules            []rule
	barWidth         float64 // in units of x
}

func (c *chart) figure() Figure {
	const top, right, plotHeight = 30.0, 12.0, 200.0
	left := 26.0
	for _, t := range c.y.ticks {
		left = max(left, 24+charWidth*float64(utf8.RuneCountInString(c.y.format(t))))
	}
	width := figureWidth
	d := new(drawing)
	d.heading(width, c.title)
	X := func(v float64) float64 { return left + (width-left-right)*min(max(c.x.at(v), 0), 1) }
	Y := func(v float64) float64 { return top + plotHeight*(1-min(max(c.y.at(v), 0), 1)) }
	lastY := math.Inf(1)
	for _, t := range c.y.ticks {
		d.line(left, Y(t), width-right, Y(t), "g")
		if math.Abs(lastY-Y(t)) >= fontSize {
			d.text(left-4, Y(t)+4, "end", c.y.format(t))
			lastY = Y(t)
		}
	}
	lastX := math.Inf(-1)
	for _, t := range c.x.ticks {
		d.line(X(t), top, X(t), top+plotHeight, "g")
		name := c.x.format(t)
		if half := charWidth * float64(utf8.RuneCountInString(name)) / 2; X(t)-half > lastX+4 {
			class, x := "mid", X(t)
			if x+half > width-2 {
				class, x = "end", width-2
			}
			d.text(x, top+plotHeight+14, class, name)
			lastX = X(t) + half
		}
	}
	d.text(left+(width-left-right)/2, top+plotHeight+30, "a mid", c.x.title)
	d.f(`<text x="11" y="%s" class="a mid" transform="rotate(-90 11 %[1]s)">%s</text>`+"\n", px(top+plotHeight/2), esc(c.y.title))
	for i := range c.series {
		c.series[i].draw(d, X, Y, c.barWidth, top+plotHeight)
	}
	across := 0
	for _, r := range c.rules {
		if r.vertical {
			d.line(X(r.at), top, X(r.at), top+plotHeight, "r")
			class, x := "r-t", X(r.at)+3
			if X(r.at) > left+(width-left)*0.6 {
				class, x = "r-t end", X(r.at)-3
			}
			d.text(x, top+plotHeight-6, class, r.text)
			continue
		}
		d.line(left, Y(r.at), width-right, Y(r.at), "r")
		// One beside the other: lines may lie close together.
		d.text(left+4+float64(across), Y(r.at)-3, "r-t", r.text)
		across += int(charWidth*float64(utf8.RuneCountInString(r.text))) + 6
	}
	d.line(left, top+plotHeight, width-right, top+plotHeight, "x")
	height := c.legend(d, left, width, top+plotHeight+44)
	return Figure{ID: c.id, Title: c.title, Label: c.label, Width: width, Height: height, body: d.String()}
}

// legend lists the series below the diagram and returns where it ends.
func (c *chart) legend(d *drawing, left, width, y float64) float64 {
	if len(c.series) < 2 {
		return y - 6
	}
	x := left
	for i := range c.series {
		s := &c.series[i]
		name := clip(s.name, 34)
		need := 24 + charWidth*float64(utf8.RuneCountInString(name)) + 10
		if x > left && x+need > width {
			x, y = left, y+16
		}
		d.f(`<g class="lg" data-s="%d">`, i)
		d.rect(x-2, y-11, need-4, 15, `class="hit"`, "")
		if s.bars || s.band && !s.line {
			d.rect(x, y-8, 18, 9, fmt.Sprintf(`class="b f%d"`, s.style%seriesColors), "")
		} else {
			if s.line {
				d.line(x, y-4, x+18, y-4, "l "+strokeClass(s.style))
			}
			if s.marks {
				s.shape(d, x+9, y-4, "")
			}
		}
		d.text(x+22, y, "start", name)
		d.f("</g>\n")
		x += need
	}
	return y + 10
}

func strokeClass(style int) string {
	return fmt.Sprintf("s%d d%d", style%seriesColors, style/seriesColors%3)
}

// draw draws a series as a group; i is the number that the legend gives.
func (s *series) draw(d *drawing, X, Y func(float64) float64, barWidth, floor float64) {
	d.f(`<g class="sr" data-name="%s">`+"\n", esc(s.name))
	defer d.f("</g>\n")
	if s.bars {
		for _, p := range s.points {
			x0, x1 := X(p.x-barWidth/2), X(p.x+barWidth/2)
			d.rect(x0+0.3, Y(p.y), max(x1-x0-0.6, 0.5), floor-Y(p.y), fmt.Sprintf(`class="m b f%d"`, s.style%seriesColors), p.hover)
		}
		return
	}
	if s.band {
		var path strings.Builder
		var any bool
		for _, p := range s.points {
			if math.IsNaN(p.low) {
				continue
			}
			fmt.Fprintf(&path, "%s%s %s", map[bool]string{true: "L", false: "M"}[any], px(X(p.x)), px(Y(p.high)))
			any = true
		}
		for _, p := range slices.Backward(s.points) {
			if !math.IsNaN(p.low) {
				fmt.Fprintf(&path, "L%s %s", px(X(p.x)), px(Y(p.low)))
			}
		}
		if any {
			d.f(`<path d="%sZ" class="band f%d"/>`+"\n", path.String(), s.style%seriesColors)
		}
	} else {
		for _, p := range s.points {
			if !math.IsNaN(p.low) {
				d.line(X(p.x), Y(p.low), X(p.x), Y(p.high), "w "+fmt.Sprintf("s%d", s.style%seriesColors))
				for _, end := range []float64{p.low, p.high} {
					d.line(X(p.x)-2, Y(end), X(p.x)+2, Y(end), "w "+fmt.Sprintf("s%d", s.style%seriesColors))
				}
			}
		}
	}
	if s.line && len(s.points) > 1 {
		var path strings.Builder
		for i, p := range s.points {
			fmt.Fprintf(&path, "%s%s %s", map[bool]string{true: "L", false: "M"}[i > 0], px(X(p.x)), px(Y(p.y)))
		}
		d.f(`<path d="%s" class="l %s"/>`+"\n", path.String(), strokeClass(s.style))
	}
	for _, p := range s.points {
		if s.marks {
			s.shape(d, X(p.x), Y(p.y), p.hover)
		} else {
			d.f(`<circle cx="%s" cy="%s" r="5" class="m hit"><title>%s</title></circle>`+"\n", px(X(p.x)), px(Y(p.y)), esc(p.hover))
		}
	}
}

// shape draws the mark of a style: colours repeat after seven, shapes after five, so that the pair does after 35.
func (s *series) shape(d *drawing, x, y float64, hover string) {
	class := fmt.Sprintf("f%d", s.style%seriesColors)
	if hover != "" {
		class = "m " + class
	}
	var tag string
	path := func(format string, args ...any) string { return `path d="` + fmt.Sprintf(format, args...) + `"` }
	switch {
	case s.star:
		tag = path("%s", star(x, y, 7))
	case s.style%5 == 0:
		tag = fmt.Sprintf(`circle cx="%s" cy="%s" r="3.2"`, px(x), px(y))
	case s.style%5 == 1:
		tag = path("M%s %sh6v6h-6Z", px(x-3), px(y-3))
	case s.style%5 == 2:
		tag = path("M%s %sl4 7h-8Z", px(x), px(y-4.2))
	case s.style%5 == 3:
		tag = path("M%s %sl4 4l-4 4l-4 -4Z", px(x), px(y-4))
	default:
		tag = path("M%s %sl-4 -7h8Z", px(x), px(y+4.2))
	}
	d.f(`<%s class="%s"`, tag, class)
	if hover == "" {
		d.f("/>\n")
		return
	}
	name, _, _ := strings.Cut(tag, " ")
	d.f("><title>%s</title></%s>\n", esc(hover), name)
}

// star is the path of a star with five points.
func star(x, y, radius float64) string {
	var path strings.Builder
	for i := range 10 {
		r := radius
		if i%2 == 1 {
			r *= 0.42
		}
		angle := math.Pi * (float64(i)/5 - 0.5)
		fmt.Fprintf(&path, "%s%s %s", map[bool]string{true: "L", false: "M"}[i > 0], px(x+r*math.Cos(angle)), px(y+r*math.Sin(angle)))
	}
	return path.String() + "Z"
}

// niceTicks are at most n+1 round values from 0 or below low to high or above.
func niceTicks(low, high float64, n int) []float64 {
	span := high - low
	if !(span > 0) {
		return []float64{low}
	}
	step := math.Pow(10, math.Floor(math.Log10(span/float64(n))))
	for _, f := range []float64{1, 2, 2.5, 5, 10} {
		if span/(step*f) <= float64(n) {
			step *= f
			break
		}
	}
	var out []float64
	for k := math.Floor(low / step); ; k++ {
		out = append(out, k*step)
		if k*step >= high-step*1e-9 {
			return out
		}
	}
}
