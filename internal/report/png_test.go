package report

import (
	"bytes"
	"encoding/xml"
	"image"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/sfnt"
)

// pngOf draws a figure and checks that the file has the figure's size.
func pngOf(t *testing.T, f *Figure) (image.Image, []byte) {
	t.Helper()
	var b bytes.Buffer
	if err := f.WritePNG(&b); err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	size := func(v float64) int {
		shown, err := strconv.ParseFloat(px(v), 64)
		if err != nil {
			t.Fatal(err)
		}
		return int(math.Ceil(pngScale * shown))
	}
	if got, want := img.Bounds().Size(), image.Pt(size(f.Width), size(f.Height)); got != want {
		t.Errorf("the picture of %s has size %v, want %v", f.ID, got, want)
	}
	return img, b.Bytes()
}

// svgOf reads what WriteSVG writes.
func svgOf(t *testing.T, f *Figure) *element {
	t.Helper()
	var b bytes.Buffer
	if err := f.WriteSVG(&b); err != nil {
		t.Fatal(err)
	}
	root := new(element)
	if err := xml.Unmarshal(b.Bytes(), root); err != nil {
		t.Fatal(err)
	}
	return root
}

// all calls a function for each element of a name.
func (e *element) all(name string, f func(e *element)) {
	if e.XMLName.Local == name {
		f(e)
	}
	for i := range e.Elements {
		e.Elements[i].all(name, f)
	}
}

// length is an attribute in pixels of a PNG file.
func (e *element) length(t *testing.T, name string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(e.attribute(name), 64)
	if err != nil {
		t.Fatal(err)
	}
	return pngScale * v
}

func hex(img image.Image, x, y int) string {
	r, g, b, _ := img.At(x, y).RGBA()
	return rgb{float64(r >> 8), float64(g >> 8), float64(b >> 8)}.String()
}

// far is the largest difference of a channel of two colours "#rrggbb".
func far(t *testing.T, a, b string) (d int) {
	t.Helper()
	for i := 1; i < 7; i += 2 {
		x, err1 := strconv.ParseInt(a[i:i+2], 16, 0)
		y, err2 := strconv.ParseInt(b[i:i+2], 16, 0)
		if err1 != nil || err2 != nil {
			t.Fatalf("colours %q and %q", a, b)
		}
		d = max(d, int(x-y), int(y-x))
	}
	return d
}

func light(name string) string {
	for _, c := range colors() {
		if c.name == name {
			return c.light
		}
	}
	return ""
}

// Each cell has its colour, each text has ink of its own colour where it stands, and nothing reaches the edge, where it
// might be cut off.
func TestPNG(t *testing.T) {
	r, err := New(open(t, fixture))
	if err != nil {
		t.Fatal(err)
	}
	face, err := sfnt.Parse(goregular.TTF)
	if err != nil {
		t.Fatal(err)
	}
	cells, texts := 0, 0
	for _, f := range r.Figures() {
		img, first := pngOf(t, f)
		if _, again := pngOf(t, f); !bytes.Equal(first, again) {
			t.Errorf("%s is drawn twice and differs", f.ID)
		}
		root := svgOf(t, f)
		root.all("rect", func(e *element) {
			if e.attribute("class") != "m" {
				return
			}
			cells++
			x, y := int(e.length(t, "x"))+2, int(e.length(t, "y"))+2
			if got, want := hex(img, x, y), e.attribute("fill"); got != want {
				t.Errorf("%s: the cell at %d, %d is %s, want %s", f.ID, x, y, got, want)
			}
		})
		root.all("text", func(e *element) {
			texts++
			classes := strings.Fields(e.attribute("class"))
			want := light("dim")
			switch {
			case slices.Contains(classes, "h"), slices.Contains(classes, "r-t"), slices.Contains(classes, "on-light"):
				want = light("ink")
			case slices.Contains(classes, "on-dark"):
				want = "#ffffff"
			}
			for _, c := range e.Text {
				if glyph, err := face.GlyphIndex(nil, c); err != nil || glyph == 0 {
					t.Errorf("%s: the font lacks %q", f.ID, c)
				}
			}
			x, y, half := e.length(t, "x"), e.length(t, "y"), pngScale*charWidth*float64(len([]rune(e.Text)))/2
			box := image.Rect(int(x), int(y)-8*pngScale, int(x+half), int(y)+pngScale)
			switch {
			case e.attribute("transform") != "": // up
				box = image.Rect(int(x)-8*pngScale, int(y-half/2), int(x)+pngScale, int(y+half/2))
			case slices.Contains(classes, "mid"):
				box = box.Sub(image.Pt(int(half/2), 0))
			case slices.Contains(classes, "end"):
				box = box.Sub(image.Pt(int(half), 0))
			}
			ink := 0
			for y := box.Min.Y; y < box.Max.Y; y++ {
				for x := box.Min.X; x < box.Max.X; x++ {
					if far(t, hex(img, x, y), want) < 40 {
						ink++
					}
				}
			}
			if ink < 3 {
				t.Errorf("%s: of %q there are %d pixels of ink", f.ID, e.Text, ink)
			}
		})
		size := img.Bounds().Size()
		for i := range max(size.X, size.Y) {
			for _, at := range []image.Point{{i, 0}, {i, size.Y - 1}, {0, i}, {size.X - 1, i}} {
				if at.In(img.Bounds()) && hex(img, at.X, at.Y) != "#ffffff" {
					t.Fatalf("%s: there is ink at the edge, at %v", f.ID, at)
				}
			}
		}
	}
	if cells < 100 || texts < 200 {
		t.Errorf("there are %d cells and %d texts", cells, texts)
	}
}

// Two figures look as they did, on every machine. The files themselves may differ with the version of Go that packs them.
func TestGoldenPNG(t *testing.T) {
	r, err := New(open(t, fixture))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range r.Figures() {
		if f.ID != "gates" && f.ID != "evaluation-loss" {
			continue
		}
		img, data := pngOf(t, f)
		path := filepath.Join("testdata", f.ID+".png")
		if *update {
			if err := os.WriteFile(path, data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		want, err := png.Decode(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		if img.Bounds() != want.Bounds() {
			t.Fatalf("%s has bounds %v, want %v", path, img.Bounds(), want.Bounds())
		}
		for y := range want.Bounds().Dy() {
			for x := range want.Bounds().Dx() {
				if got, want := hex(img, x, y), hex(want, x, y); got != want {
					t.Fatalf("%s is %s at %d, %d, want %s (-update writes it anew)", path, got, x, y, want)
				}
			}
		}
	}
}

// sketch draws marks on a ground of 40 x 40 pixels, in the style of figures.
func sketch(marks string) (*image.RGBA, error) {
	return rasterise([]byte(`<svg class="fig" width="40" height="40" viewBox="0 0 40 40"><style>` + fileCSS() + `</style>` + marks + `</svg>`))
}

func TestMarks(t *testing.T) {
	const white = "#ffffff"
	for _, c := range []struct {
		name, marks string
		at          map[image.Point]string // by pixel of the PNG file
	}{
		{"rect", `<rect x="10" y="5" width="10" height="20" fill="#123456"/>`,
			map[image.Point]string{{20, 10}: "#123456", {39, 49}: "#123456", {19, 10}: white, {20, 9}: white, {40, 49}: white, {39, 50}: white}},
		{"half a pixel", `<rect x="10" y="10" width="0.25" height="20" fill="#000"/>`, map[image.Point]string{{20, 30}: "#808080", {21, 30}: white}},
		{"opacity", `<path d="M0 0L40 0L40 40L0 40Z" class="band f0"/>`, map[image.Point]string{{40, 40}: "#d1e6f1"}},
		{"what is over is over", `<rect x="0" y="0" width="40" height="40" fill="#ff0000"/><rect x="0" y="0" width="20" height="40" fill="#00ff00"/>`,
			map[image.Point]string{{39, 0}: "#00ff00", {40, 0}: "#ff0000"}},
		{"invisible", `<circle cx="20" cy="20" r="5" class="m hit"><title>7</title></circle>`, map[image.Point]string{{40, 40}: white}},
		{"circle", `<circle cx="20" cy="20" r="10" class="f1"/>`, map[image.Point]string{{40, 40}: light("c1"), {22, 40}: light("c1"), {53, 53}: light("c1"), {17, 40}: white, {56, 56}: white}},
		{"steps", `<path d="M10 10h10v10h-10Z" class="f2"/><path d="M30 30l4 4l-4 4l-4 -4Z" class="f3"/>`,
			map[image.Point]string{{30, 30}: light("c2"), {42, 30}: white, {60, 68}: light("c3"), {54, 62}: white}},
		{"hole", `<path d="M0 0h40v40h-40ZM10 10v20h20v-20Z" class="f2"/>`, map[image.Point]string{{10, 40}: light("c2"), {40, 40}: white}},
		{"line", `<line x1="10" y1="20" x2="30" y2="20" class="x"/>`, map[image.Point]string{{20, 39}: light("dim"), {59, 40}: light("dim"), {19, 39}: white, {60, 39}: white, {30, 38}: white, {30, 41}: white}},
		{"dashes", `<line x1="10" y1="20" x2="30" y2="20" class="x d1"/>`, map[image.Point]string{{20, 40}: light("dim"), {31, 40}: light("dim"), {32, 40}: white, {37, 40}: white, {38, 40}: light("dim"), {49, 40}: light("dim"), {50, 40}: white}},
		{"dashes around a bend", `<path d="M10 10L14 10L14 30" class="l s0 d1"/>`, map[image.Point]string{{20, 20}: light("c0"), {28, 23}: light("c0"), {28, 25}: white, {28, 29}: white, {28, 31}: light("c0")}},
		{"lines are not filled", `<path d="M10 10L30 10L30 30" class="l s0"/>`, map[image.Point]string{{40, 20}: light("c0"), {50, 30}: white, {60, 40}: light("c0")}},
		{"rules before attributes, a name before none", `<style>.fig rect.new{fill:#00ff00}.fig .new{fill:#ff0000}</style><rect x="10" y="10" width="10" height="10" class="new" fill="#0000ff"/>`,
			map[image.Point]string{{30, 30}: "#00ff00"}},
		{"a group", `<g class="sr" data-name="x"><rect x="10" y="10" width="10" height="10" class="m b f4"><title>7</title></rect></g>`, map[image.Point]string{{30, 30}: light("c4")}},
	} {
		img, err := sketch(c.marks)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for at, want := range c.at {
			if got := hex(img, at.X, at.Y); far(t, got, want) > 1 {
				t.Errorf("%s: at %v there is %s, want %s", c.name, at, got, want)
			}
		}
	}
}

// A stroke has ink where its line is near, none where it is far, and the same at bends of any angle.
func TestBends(t *testing.T) {
	for turn := range 24 {
		angle := float64(turn) / 24 * 2 * math.Pi
		sin, cos := math.Sincos(angle)
		l := line{{8, 20}, {20, 20}, {20 + 12*cos, 20 + 12*sin}}
		img, err := sketch(`<path d="M8 20L20 20L` + px(l[2].x) + ` ` + px(l[2].y) + `" fill="none" stroke="#1b1f24" stroke-width="6"/>`)
		if err != nil {
			t.Fatal(err)
		}
		for y := range 80 {
			for x := range 80 {
				p := position{(float64(x) + 0.5) / pngScale, (float64(y) + 0.5) / pngScale}
				d, end := math.Inf(1), false
				for i := range 2 {
					a, b := l[i], l[i+1]
					s := ((p.x-a.x)*(b.x-a.x) + (p.y-a.y)*(b.y-a.y)) / 144
					end = end || math.Hypot(p.x-l[2*i].x, p.y-l[2*i].y) < 4 // butt ends
					s = min(max(s, 0), 1)
					d = min(d, math.Hypot(p.x-a.x-s*(b.x-a.x), p.y-a.y-s*(b.y-a.y)))
				}
				got := hex(img, x, y)
				if !end && d < 3-0.45 && far(t, got, light("ink")) > 4 || !end && d > 3+0.45 && far(t, got, "#ffffff") > 4 {
					t.Errorf("a bend of %d degrees: at %d, %d, %.2f from the line, there is %s", turn*15, x, y, d, got)
				}
			}
		}
	}
}

// inkBox is the rectangle of what is no ground.
func inkBox(img image.Image) image.Rectangle {
	var box image.Rectangle
	for y := range img.Bounds().Dy() {
		for x := range img.Bounds().Dx() {
			if hex(img, x, y) != "#ffffff" {
				box = box.Union(image.Rect(x, y, x+1, y+1))
			}
		}
	}
	return box
}

func TestTexts(t *testing.T) {
	box := func(class, more, text string) image.Rectangle {
		t.Helper()
		img, err := sketch(`<text x="20" y="20" class="` + class + `"` + more + `>` + text + `</text>`)
		if err != nil {
			t.Fatal(err)
		}
		return inkBox(img)
	}
	near := func(name string, got, want int) {
		t.Helper()
		if got < want-3 || got > want+3 {
			t.Errorf("%s is at %d, want %d", name, got, want)
		}
	}
	start, mid, end := box("start", "", "HH"), box("mid", "", "HH"), box("end", "", "HH")
	near("the left of a text", start.Min.X, 40)
	near("the middle of a text", (mid.Min.X+mid.Max.X)/2, 40)
	near("the right of a text", end.Max.X, 40)
	near("the base line of a text", start.Max.Y, 40)
	near("the top of a capital of 11 pixels", start.Min.Y, 40-2*8)
	near("the width of a text", mid.Dx(), start.Dx())
	near("the width of a text", end.Dx(), start.Dx())
	up := box("a mid", ` transform="rotate(-90 20 20)"`, "HH")
	near("the height of a text that is turned", up.Dy(), start.Dx())
	near("the base line of a text that is turned", up.Max.X, 40)
	near("the middle of a text that is turned", (up.Min.Y+up.Max.Y)/2, 40)
	if heading := box("h", "", "HH"); heading.Dy() <= start.Dy() || heading.Dx() <= start.Dx() {
		t.Errorf("a heading is %v, a text %v", heading.Size(), start.Size())
	}
	// A rule's text has the ground's colour around it, below its own.
	img, err := sketch(`<rect x="0" y="0" width="40" height="40" fill="#ff0000"/><text x="20" y="20" class="r-t mid">H</text>`)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for y := range 80 {
		for x := range 80 {
			count[hex(img, x, y)]++
		}
	}
	if count["#ffffff"] < 50 || count[light("ink")] < 20 {
		t.Errorf("around a rule's text there are %d pixels of ground, %d of ink", count["#ffffff"], count[light("ink")])
	}
}

// What the rasteriser does not know is an error: it must not be missing from one of two files.
func TestUnknownMarks(t *testing.T) {
	for want, marks := range map[string]string{
		"an element ellipse is unknown":      `<ellipse cx="1" cy="1" rx="2" ry="2"/>`,
		"rect has a property rx":             `<rect x="0" y="0" width="1" height="1" rx="1"/>`,
		"line has a property transform":      `<line x1="0" y1="0" x2="1" y2="1" transform="scale(2)"/>`,
		`"var(--new)" is no known colour`:    `<rect x="0" y="0" width="1" height="1" fill="var(--new)"/>`,
		`"red" is no known colour`:           `<rect x="0" y="0" width="1" height="1" fill="red"/>`,
		`"50%" is no number`:                 `<rect x="0" y="0" width="50%" height="1"/>`,
		`"" is no number`:                    `<rect x="0" y="0" width="1"/>`,
		`a path has "C1 1 2 2 3 3"`:          `<path d="M0 0C1 1 2 2 3 3"/>`,
		`a path has "L1 1"`:                  `<path d="L1 1"/>`,
		`a path has "L1"`:                    `<path d="M0 0L1"/>`,
		`dashes "3"`:                         `<line x1="0" y1="0" x2="1" y2="1" stroke="#000" stroke-dasharray="3"/>`,
		`"6,3" is no number`:                 `<line x1="0" y1="0" x2="1" y2="1" stroke="#000" stroke-dasharray="6,3 1"/>`,
		`dashes "3 0"`:                       `<line x1="0" y1="0" x2="1" y2="1" stroke="#000" stroke-dasharray="3 0"/>`,
		`a transform "scale(2)"`:             `<text x="0" y="0" transform="scale(2)">a</text>`,
		`a text anchor "left"`:               `<text x="0" y="0" text-anchor="left">a</text>`,
		"an element in text is unknown":      `<text x="0" y="0">a<tspan>b</tspan></text>`,
		"opacity of a group":                 `<g opacity="0.5"/>`,
		"rect has a property style":          `<rect x="0" y="0" width="1" height="1" style="fill:#000"/>`,
		`a selector ".fig g rect"`:           `<style>.fig g rect{fill:none}</style>`,
		`a selector ".fig .m:hover"`:         `<style>.fig .m:hover{fill:none}</style>`,
		`the style sheet has "@import"`:      `<style>@import</style>`,
		"rect has a property letter-spacing": `<style>.fig rect{letter-spacing:1px}</style><rect x="0" y="0" width="1" height="1"/>`,
	} {
		if _, err := sketch(marks); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, want %s", marks, err, want)
		}
	}
	f := Figure{ID: "new", Width: 40, Height: 40, body: `<ellipse cx="1" cy="1" rx="2" ry="2"/>`}
	if err := f.WritePNG(new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), "figure new") {
		t.Errorf("the error of a figure is %v", err)
	}
}
