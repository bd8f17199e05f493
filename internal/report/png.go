package report

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"errors"
	"fmt"
	"image"
	pixel "image/color"
	"image/draw"
	"image/png"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/sfnt"
	units "golang.org/x/image/math/fixed"
	"golang.org/x/image/vector"
)

// pngScale is how many pixels of a PNG file a pixel of a figure's natural size has.
const pngScale = 2

// WritePNG writes the figure as a PNG file of pngScale times its natural size. It draws what [Figure.WriteSVG] writes, so
// that figure.css alone decides on sizes and colours; texts are in Go's own fonts, which are the same on every machine.
//
// The rasteriser is our own because libraries that read SVG have no texts or weigh more than the report, and little is
// missing from golang.org/x/image. It knows what our figures have and refuses the rest, lest a mark be in one of the two
// files only.
func (f *Figure) WritePNG(w io.Writer) error {
	var svg bytes.Buffer
	if err := f.WriteSVG(&svg); err != nil {
		return err
	}
	img, err := rasterise(svg.Bytes())
	if err != nil {
		return fmt.Errorf("drawing figure %s: %w", f.ID, err)
	}
	return png.Encode(w, img)
}

// element is an element of an SVG file.
type element struct {
	XMLName    xml.Name
	Attributes []xml.Attr `xml:",any,attr"`
	Text       string     `xml:",chardata"`
	Elements   []element  `xml:",any"`
}

func (e *element) attribute(name string) string {
	for _, a := range e.Attributes {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

// style is what an element looks like: values of CSS properties by name.
type style map[string]string

// initialStyle has every property that is known, with the value that it has where nothing is said of it.
func initialStyle() style {
	return style{
		"fill": "#000000", "fill-opacity": "1", "opacity": "1",
		"stroke": "none", "stroke-width": "1", "stroke-dasharray": "none", "paint-order": "normal",
		"font-size": "16px", "font-weight": "400", "text-anchor": "start",
		// Of no effect here. Bends are always round: figure.css wants lines so, and around a text it does not show.
		"font-family": "", "pointer-events": "", "stroke-linejoin": "",
	}
}

// geometry has the attributes of each element that are known beside those of all elements.
var geometry = map[string]string{
	"svg": "width height viewBox", "g": "", "rect": "x y width height", "line": "x1 y1 x2 y2", "circle": "cx cy r", "path": "d", "text": "x y transform",
	"title": "", "desc": "", "style": "",
}

// cssRule is a rule of figure.css for elements of a name, or of any, that have all the classes.
type cssRule struct {
	element  string
	classes  []string
	rank     int // of two rules the one with the higher rank wins
	property style
}

var (
	cssBlock    = regexp.MustCompile(`([^{}]*)\{([^{}]*)\}`)
	cssSelector = regexp.MustCompile(`^(?:\.fig )?([a-z]*)((?:\.[a-z0-9-]+)*)$`) // all that is drawn is in a .fig
)

func parseCSS(text string) ([]cssRule, error) {
	if rest := strings.TrimSpace(cssBlock.ReplaceAllString(text, "")); rest != "" {
		return nil, fmt.Errorf("the style sheet has %q, which is unknown here", rest)
	}
	var rules []cssRule
	for _, block := range cssBlock.FindAllStringSubmatch(text, -1) {
		selector := strings.TrimSpace(block[1])
		m := cssSelector.FindStringSubmatch(selector)
		if m == nil {
			return nil, fmt.Errorf("the style sheet has a selector %q, which is unknown here", selector)
		}
		r := cssRule{element: m[1], classes: strings.FieldsFunc(m[2], func(c rune) bool { return c == '.' }), property: style{}}
		// A class counts for more than any number of names: CSS's specificity.
		r.rank = 2 * len(r.classes)
		if r.element != "" {
			r.rank++
		}
		for declaration := range strings.SplitSeq(block[2], ";") {
			if strings.TrimSpace(declaration) == "" {
				continue
			}
			name, value, _ := strings.Cut(declaration, ":")
			r.property[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
		rules = append(rules, r)
	}
	slices.SortStableFunc(rules, func(a, b cssRule) int { return cmp.Compare(a.rank, b.rank) })
	return rules, nil
}

// painter draws elements. The first error stays, so that numbers can be read in passing.
type painter struct {
	img           *image.RGBA
	raster        vector.Rasterizer
	rules         []cssRule
	regular, bold *sfnt.Font
	buffer        sfnt.Buffer
	err           error
}

// rasterise draws an SVG file of a figure.
func rasterise(svg []byte) (*image.RGBA, error) {
	var root element
	if err := xml.Unmarshal(svg, &root); err != nil {
		return nil, err
	}
	p := new(painter)
	css := ""
	for _, e := range root.Elements {
		if e.XMLName.Local == "style" {
			css += e.Text
		}
	}
	var err [3]error
	p.rules, err[0] = parseCSS(css)
	p.regular, err[1] = sfnt.Parse(goregular.TTF)
	p.bold, err[2] = sfnt.Parse(gobold.TTF)
	if err := errors.Join(err[:]...); err != nil {
		return nil, err
	}
	size := func(name string) int { return int(math.Ceil(pngScale * p.number(root.attribute(name)))) }
	p.img = image.NewRGBA(image.Rect(0, 0, size("width"), size("height")))
	draw.Draw(p.img, p.img.Bounds(), image.White, image.Point{}, draw.Src) // where the size is no whole number of pixels
	p.element(&root, initialStyle())
	return p.img, p.err
}

func (p *painter) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf(format, args...)
	}
}

// number reads a length in pixels or a plain number.
func (p *painter) number(s string) float64 {
	v, err := strconv.ParseFloat(strings.TrimSuffix(s, "px"), 64)
	if err != nil {
		p.fail("%q is no number of pixels", s)
	}
	return v
}

// color reads a colour and an opacity; ok is false for none.
func (p *painter) color(s, opacity, own string) (c pixel.NRGBA, ok bool) {
	if s == "none" {
		return c, false
	}
	if len(s) == 4 {
		s = "#" + strings.Repeat(s[1:2], 2) + strings.Repeat(s[2:3], 2) + strings.Repeat(s[3:4], 2)
	}
	v, err := strconv.ParseUint(strings.TrimPrefix(s, "#"), 16, 24)
	if err != nil || len(s) != 7 || s[0] != '#' {
		p.fail("%q is no known colour", s)
	}
	c = pixel.NRGBA{byte(v >> 16), byte(v >> 8), byte(v), byte(math.Round(255 * p.number(opacity) * p.number(own)))}
	return c, c.A > 0
}

// style is that of an element in another: what it inherits, its attributes, and the rules for its name and classes.
func (p *painter) style(e *element, outer style) style {
	s := maps.Clone(outer)
	set := func(name, value string) {
		if _, ok := s[name]; !ok {
			p.fail("%s has a property %s, which is unknown here", e.XMLName.Local, name)
		}
		s[name] = value
	}
	known := append(strings.Fields(geometry[e.XMLName.Local]), "class", "role", "xmlns")
	for _, a := range e.Attributes {
		if name := a.Name.Local; !slices.Contains(known, name) && !strings.HasPrefix(name, "data-") {
			set(name, a.Value)
		}
	}
	classes := strings.Fields(e.attribute("class"))
	for _, r := range p.rules {
		if r.element != "" && r.element != e.XMLName.Local || slices.ContainsFunc(r.classes, func(c string) bool { return !slices.Contains(classes, c) }) {
			continue
		}
		for name, value := range r.property {
			set(name, value)
		}
	}
	return s
}

// element draws an element and what is in it.
func (p *painter) element(e *element, outer style) {
	name := e.XMLName.Local
	if _, ok := geometry[name]; !ok {
		p.fail("an element %s is unknown here", name)
		return
	}
	if name != "svg" && name != "g" && slices.ContainsFunc(e.Elements, func(in element) bool { return in.XMLName.Local != "title" }) {
		p.fail("an element in %s is unknown here", name)
	}
	s := p.style(e, outer)
	at := func(name string) float64 { return p.number(e.attribute(name)) }
	switch name {
	case "svg", "g":
		if s["opacity"] != "1" { // which it would share, not hand down
			p.fail("opacity of a group is unknown here")
		}
		for i := range e.Elements {
			p.element(&e.Elements[i], s)
		}
	case "rect":
		x, y, w, h := at("x"), at("y"), at("width"), at("height")
		p.paint(s, []line{{{x, y}, {x + w, y}, {x + w, y + h}, {x, y + h}, {x, y}}})
	case "line":
		p.paint(s, []line{{{at("x1"), at("y1")}, {at("x2"), at("y2")}}})
	case "circle":
		const corners = 48
		x, y, r := at("cx"), at("cy"), at("r")
		var l line
		for i := range corners + 1 {
			sin, cos := math.Sincos(2 * math.Pi * float64(i) / corners)
			l = append(l, position{x + r*cos, y + r*sin})
		}
		p.paint(s, []line{l})
	case "path":
		p.paint(s, p.path(e.attribute("d")))
	case "text":
		lines := p.text(s, at("x"), at("y"), strings.TrimSpace(e.Text))
		if t := e.attribute("transform"); t != "" {
			p.rotate(t, lines)
		}
		p.paint(s, lines)
	}
}

// A line goes through positions, in pixels of the natural size; one that is filled is closed.
type line []position

type position struct{ x, y float64 }

var pathCommand = regexp.MustCompile(`([A-Za-z])([^A-Za-z]*)`)

// path reads a path of straight lines.
func (p *painter) path(d string) []line {
	var lines []line
	var at, start position
	for _, m := range pathCommand.FindAllStringSubmatch(d, -1) {
		var v []float64
		for _, f := range strings.Fields(m[2]) {
			v = append(v, p.number(f))
		}
		want := map[string]int{"M": 2, "L": 2, "l": 2, "h": 1, "v": 1, "Z": 0}
		if n, ok := want[m[1]]; !ok || n != len(v) || m[1] != "M" && lines == nil {
			p.fail("a path has %q, which is unknown here", m[0])
			return nil
		}
		switch m[1] {
		case "M":
			at = position{v[0], v[1]}
			start = at
			lines = append(lines, nil)
		case "L":
			at = position{v[0], v[1]}
		case "l":
			at = position{at.x + v[0], at.y + v[1]}
		case "h":
			at.x += v[0]
		case "v":
			at.y += v[0]
		case "Z":
			at = start
		}
		last := len(lines) - 1
		lines[last] = append(lines[last], at)
	}
	return lines
}

// rotate turns lines as a transform says.
func (p *painter) rotate(transform string, lines []line) {
	var angle, x, y float64
	if _, err := fmt.Sscanf(transform, "rotate(%g %g %g)", &angle, &x, &y); err != nil {
		p.fail("a transform %q is unknown here", transform)
	}
	sin, cos := math.Sincos(angle * math.Pi / 180)
	for _, l := range lines {
		for i, q := range l {
			l[i] = position{x + cos*(q.x-x) - sin*(q.y-y), y + sin*(q.x-x) + cos*(q.y-y)}
		}
	}
}

// text is the outline of a text.
func (p *painter) text(s style, x, y float64, text string) []line {
	face := p.regular
	if p.number(s["font-weight"]) >= 600 {
		face = p.bold
	}
	size := units.Int26_6(math.Round(64 * pngScale * p.number(s["font-size"])))
	pixels := func(v units.Int26_6) float64 { return float64(v) / 64 / pngScale }
	var lines []line
	var width units.Int26_6
	for _, r := range text {
		glyph, err := face.GlyphIndex(&p.buffer, r) // 0, a box, for what the font does not have
		if err != nil {
			p.fail("%w", err)
		}
		outline, err := face.LoadGlyph(&p.buffer, glyph, size, nil)
		if err != nil {
			p.fail("%w", err)
		}
		for _, part := range outline {
			to := func(i int) position { return position{x + pixels(width+part.Args[i].X), y + pixels(part.Args[i].Y)} }
			last := len(lines) - 1
			switch part.Op {
			case sfnt.SegmentOpMoveTo:
				lines = append(lines, line{to(0)})
			case sfnt.SegmentOpLineTo:
				lines[last] = append(lines[last], to(0))
			case sfnt.SegmentOpQuadTo:
				const pieces = 8
				a, b, c := lines[last][len(lines[last])-1], to(0), to(1)
				for i := range pieces {
					t := float64(i+1) / pieces
					at := func(a, b, c float64) float64 { return (1-t)*(1-t)*a + 2*t*(1-t)*b + t*t*c }
					lines[last] = append(lines[last], position{at(a.x, b.x, c.x), at(a.y, b.y, c.y)})
				}
			default:
				p.fail("the font has curves that are unknown here")
			}
		}
		advance, err := face.GlyphAdvance(&p.buffer, glyph, size, font.HintingNone)
		if err != nil {
			p.fail("%w", err)
		}
		width += advance
	}
	share, ok := map[string]float64{"start": 0, "middle": 0.5, "end": 1}[s["text-anchor"]]
	if !ok {
		p.fail("a text anchor %q is unknown here", s["text-anchor"])
	}
	for _, l := range lines {
		for i := range l {
			l[i].x -= share * pixels(width)
		}
	}
	return lines
}

// paint fills and strokes lines as a style says.
func (p *painter) paint(s style, lines []line) {
	steps := []func(){func() {
		if c, ok := p.color(s["fill"], s["opacity"], s["fill-opacity"]); ok {
			p.fill(lines, c)
		}
	}, func() {
		if c, ok := p.color(s["stroke"], s["opacity"], "1"); ok {
			p.stroke(s, lines, c)
		}
	}}
	if s["paint-order"] == "stroke" {
		slices.Reverse(steps)
	}
	for _, step := range steps {
		step()
	}
}

// fill fills what lines enclose, which may overlap.
func (p *painter) fill(lines []line, c pixel.Color) {
	// Whole 64ths of a pixel: what processors that fuse multiplications with additions round otherwise does not show.
	whole := func(v float64) float64 { return math.Round(v*pngScale*64) / 64 }
	var box image.Rectangle
	for _, l := range lines {
		for _, q := range l {
			x, y := int(math.Floor(whole(q.x))), int(math.Floor(whole(q.y)))
			box = box.Union(image.Rect(x, y, x+1, y+1))
		}
	}
	box = box.Intersect(p.img.Bounds())
	if box.Empty() {
		return
	}
	p.raster.Reset(box.Dx(), box.Dy())
	for _, l := range lines {
		for i, q := range l {
			x, y := float32(whole(q.x)-float64(box.Min.X)), float32(whole(q.y)-float64(box.Min.Y))
			if i == 0 {
				p.raster.MoveTo(x, y)
			} else {
				p.raster.LineTo(x, y)
			}
		}
		p.raster.ClosePath()
	}
	p.raster.Draw(p.img, box, image.NewUniform(c), image.Point{})
}

// stroke draws along lines, with round joins and butt ends.
func (p *painter) stroke(s style, lines []line, c pixel.Color) {
	half := p.number(s["stroke-width"]) / 2
	var dashes []float64
	if s["stroke-dasharray"] != "none" {
		for _, f := range strings.Fields(s["stroke-dasharray"]) {
			dashes = append(dashes, p.number(f))
		}
		if len(dashes) == 0 || len(dashes)%2 != 0 || slices.Min(dashes) <= 0 {
			p.fail("dashes %q are unknown here", s["stroke-dasharray"])
			return
		}
	}
	var outlines []line
	for _, l := range lines {
		for _, piece := range l.dashed(dashes) {
			if o := piece.outline(half); o != nil {
				outlines = append(outlines, o)
			}
		}
	}
	p.fill(outlines, c)
}

// dashed cuts a line into dashes: an even number of lengths, of strokes and gaps in turn.
func (l line) dashed(lengths []float64) []line {
	if len(lengths) == 0 || len(l) == 0 {
		return []line{l}
	}
	var out []line
	piece, turn, left := line{l[0]}, 0, lengths[0]
	for _, to := range l[1:] {
		from := piece[len(piece)-1]
		for {
			d := math.Hypot(to.x-from.x, to.y-from.y)
			if d <= left {
				left -= d
				break
			}
			from = position{from.x + (to.x-from.x)*left/d, from.y + (to.y-from.y)*left/d}
			if turn%2 == 0 {
				out = append(out, append(piece, from))
			}
			turn++
			piece, left = line{from}, lengths[turn%len(lengths)]
		}
		piece = append(piece, to)
	}
	if turn%2 == 0 {
		out = append(out, piece)
	}
	return out
}

// outline goes around a line at a distance: on its left, and back on its right.
func (l line) outline(distance float64) line {
	l = slices.Compact(slices.Clone(l))
	var out line
	side := func() {
		var before position
		for i := range len(l) - 1 {
			a, b := l[i], l[i+1]
			d := math.Hypot(b.x-a.x, b.y-a.y)
			n := position{(b.y - a.y) / d, (a.x - b.x) / d}
			// Around a bend to the other side, an arc; within one, the outline crosses itself where it is filled anyway.
			if turn := math.Atan2(before.x*n.y-before.y*n.x, before.x*n.x+before.y*n.y); i > 0 && turn > 0 {
				const pieces = 8
				for k := 1; k < pieces; k++ {
					sin, cos := math.Sincos(turn * float64(k) / pieces)
					out = append(out, position{a.x + distance*(cos*before.x-sin*before.y), a.y + distance*(sin*before.x+cos*before.y)})
				}
			}
			out = append(out, position{a.x + distance*n.x, a.y + distance*n.y}, position{b.x + distance*n.x, b.y + distance*n.y})
			before = n
		}
	}
	side()
	slices.Reverse(l)
	side()
	return out
}
