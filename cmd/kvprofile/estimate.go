package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/dtype"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/profile"
)

// cost is what a stage will take, estimated before it runs.
type cost struct {
	stage  string
	memory int64 // bytes beyond the weights
	spill  int64 // bytes of memory that a GPU can leave to the host
	disk   int64 // bytes
	// flops are floating-point operations in matrix products and in attention.
	matmul, attention float64
	// parallel is the number of devices that can share the work, 0 for one.
	parallel int
}

// attentionShare is the speed of attention with statistics as a share of that of matrix products. A guess that fits
// the CPU backend within a factor of two.
const attentionShare = 0.25

// forwardFlops are those of one forward pass over n tokens without logits.
func forwardFlops(c engine.Config, n int) (matmul, attention float64) {
	perToken := float64(c.Hidden)*float64(2*c.QueryWidth()+2*c.KVWidth()) + 3*float64(c.Hidden)*float64(c.Intermediate)
	tokens := float64(n)
	return 2 * tokens * float64(c.Layers) * perToken, 2 * tokens * tokens * float64(c.Layers) * float64(c.QueryWidth())
}

// activationBytes is the memory of a forward pass over n tokens in float32: residual stream, one layer's activations.
func activationBytes(c engine.Config, n int) int64 {
	return 4 * int64(n) * int64(3*c.Hidden+2*c.QueryWidth()+4*c.KVWidth()+3*c.Intermediate)
}

func lengthsOf(d *datasets.Dataset) []int {
	out := make([]int, len(d.Samples))
	for i := range d.Samples {
		out[i] = len(d.Samples[i].Tokens)
	}
	return out
}

func datasetCost(lengths []int) cost {
	c := cost{stage: "datasets", memory: 64 << 20}
	for _, n := range lengths {
		c.disk += 2 * int64(n) // zstd halves 4-byte ids
	}
	return c
}

func profileCost(cfg engine.Config, d *datasets.Dataset, grid profile.Grid) (cost, error) {
	sizes := make([]profile.Size, len(d.Samples))
	for i := range d.Samples {
		s := &d.Samples[i]
		sizes[i] = profile.Size{Tokens: len(s.Tokens), Prompt: s.PromptLen(), Answers: len(s.AnswerRows())}
	}
	return profileCostOf(cfg, sizes, grid)
}

func profileCostOf(cfg engine.Config, sizes []profile.Size, grid profile.Grid) (cost, error) {
	c := cost{stage: "profile", parallel: len(sizes)}
	bytes, err := profile.Estimate(cfg, grid, sizes)
	if err != nil {
		return c, err
	}
	c.disk = bytes.Total()
	for _, s := range sizes {
		m, a := forwardFlops(cfg, s.Tokens)
		c.matmul += m
		c.attention += a
		c.memory = max(c.memory, activationBytes(cfg, s.Tokens)+bytes.Total()/int64(len(sizes)))
	}
	return c, nil
}

func distillCost(cfg engine.Config, lengths []int, o distill.Options) cost {
	c := cost{stage: "distill", parallel: o.BatchSize(), disk: int64(o.Steps)*100 + int64(cfg.Layers*cfg.KVHeads)*200}
	if len(lengths) == 0 {
		return c
	}
	var m, a float64
	longest := 0
	for _, n := range lengths {
		dm, da := forwardFlops(cfg, n)
		m, a = m+dm, a+da
		longest = max(longest, n)
	}
	// Teacher forward; student forward and backward in matrix products, whose attention is cheap: it streams.
	steps := float64(o.Steps*o.BatchSize()) / float64(len(lengths))
	c.matmul, c.attention = 3*m*steps, a*steps
	c.spill = min(cfg.StashBytes(longest), o.StashLimit) + 2*cfg.TeacherBytes(longest) + min(o.TeacherLimit, cfg.TeacherBytes(longest)*int64(len(lengths)))
	c.memory = c.spill + 3*activationBytes(cfg, longest)
	// Samples of other lengths leave buffers that are kept for reuse.
	c.memory += c.memory / 3
	return c
}

// weightBytes is the memory of the weights in the form that the backend computes with.
func weightBytes(m *model.Model, b engine.Backend) int64 {
	if g, ok := b.(*cuda.Backend); ok {
		return min(g.WeightBytes(m.Inspect().Parameters), g.WeightLimit())
	}
	return 4*m.Inspect().Parameters + m.Inspect().WeightBytes
}

// speed measures the backend's matrix products, in floating-point operations a second, for a few hundredths of a second.
func speed(b engine.Backend) (float64, error) {
	const rows, inner, cols = 256, 512, 1024
	w, err := b.Load(engine.Matrix{Name: "probe", Rows: cols, Cols: inner, DType: dtype.F32, Data: make([]byte, 4*cols*inner)})
	if err != nil {
		return 0, err
	}
	defer b.Unload(w)
	x, y := b.New(rows, inner), b.New(rows, cols)
	defer b.Free(x, y)
	// Reading a row waits for the product where products are only queued.
	first := make([]float64, cols)
	product := func() {
		b.MatMul(y, x, w, false)
		b.Download(first, b.Slice(y, 0, 1))
	}
	product() // the first call also makes the buffers
	best := math.Inf(1)
	for begin := time.Now(); time.Since(begin) < 50*time.Millisecond; {
		start := time.Now()
		product()
		best = min(best, time.Since(start).Seconds())
	}
	return 2 * rows * inner * cols / best, nil
}

// gpuRoom is what a GPU has for a model, in bytes.
type gpuRoom struct {
	Device   string `json:"device"`
	Free     int64  `json:"free_bytes"`
	Weights  int64  `json:"weight_bytes"`   // that stay there, or have their place there
	Streamed int64  `json:"streamed_bytes"` // of weights that are copied to it whenever they are needed
}

// rooms looks at the GPUs among the devices.
func rooms(m *model.Model, on backends) (out []gpuRoom) {
	for _, b := range on {
		if g, ok := b.(*cuda.Backend); ok {
			all, here := g.WeightBytes(m.Inspect().Parameters), weightBytes(m, b)
			out = append(out, gpuRoom{Device: g.Label(), Free: g.FreeMemory(), Weights: here, Streamed: all - here})
		}
	}
	return out
}

// split says how much of a stage goes to the host's memory, and whether the rest fits.
func (g gpuRoom) split(c cost) (spilled int64, fits bool) {
	over := max(0, c.memory+g.Weights-g.Free)
	return min(over, c.spill), over <= c.spill
}

// dryRun prints what the stages will take on this machine.
func (a *app) dryRun(m *model.Model, costs []cost) error {
	opened, err := a.newBackends(m.Inspect().Parameters, "", "", "")
	if err != nil {
		return err
	}
	defer opened.Close()
	gpus := rooms(m, opened)
	b := opened[0]
	flops, err := speed(b)
	if err != nil {
		return err
	}
	weights := weightBytes(m, b)
	type line struct {
		Stage   string  `json:"stage"`
		Memory  int64   `json:"memory_bytes"`
		Spilled int64   `json:"spilled_bytes,omitempty"` // of it on the host, with the fullest GPU
		Disk    int64   `json:"disk_bytes"`
		Seconds float64 `json:"seconds"`
	}
	var lines []line
	total := line{Stage: "all"}
	for _, c := range costs {
		share := float64(min(len(opened), max(c.parallel, 1)))
		l := line{Stage: c.stage, Memory: c.memory, Disk: c.disk, Seconds: (c.matmul/flops + c.attention/(flops*attentionShare)) / share}
		if c.matmul > 0 {
			l.Memory += weights
			for _, g := range gpus {
				spilled, fits := g.split(c)
				l.Spilled = max(l.Spilled, spilled)
				if !fits {
					a.ui.Warn("%s: %s has %s of memory free: this will not fit; take shorter samples", c.stage, g.Device, ui.Bytes(g.Free))
				}
			}
		}
		lines = append(lines, l)
		total.Memory, total.Disk, total.Seconds = max(total.Memory, l.Memory), total.Disk+l.Disk, total.Seconds+l.Seconds
		total.Spilled = max(total.Spilled, l.Spilled)
	}
	lines = append(lines, total)
	if a.ui.JSON() {
		return a.ui.PrintJSON(struct {
			Backend string    `json:"backend"`
			Flops   float64   `json:"flops"`
			GPUs    []gpuRoom `json:"gpus,omitempty"`
			Stages  []line    `json:"stages"`
		}{b.Name(), flops, gpus, lines})
	}
	for _, g := range gpus {
		text := fmt.Sprintf("%s: %s free, weights take %s", g.Device, ui.Bytes(g.Free), ui.Bytes(g.Weights))
		if g.Streamed > 0 {
			text += fmt.Sprintf("; %s more are copied to it whenever they are needed", ui.Bytes(g.Streamed))
		}
		a.ui.Note("%s", text)
	}
	a.ui.Note("%s, %d threads, %.0f GFLOP/s; nothing is run; times are right within a factor of two or so", b.Name(), a.shared.threads, flops/1e9)
	t := ui.Table{Header: []string{"stage", "memory", "disk", "time"}}
	if total.Spilled > 0 {
		t.Header = []string{"stage", "memory", "of it on the host", "disk", "time"}
	}
	for _, l := range lines {
		cells := []any{l.Stage, ui.Bytes(l.Memory), ui.Bytes(l.Disk), roughly(l.Seconds)}
		if total.Spilled > 0 {
			cells = slices.Insert(cells, 2, any(ui.Bytes(l.Spilled)))
		}
		t.Add(cells...)
	}
	return t.Render(a.ui.Out())
}

// roughly shows a time without feigned precision.
func roughly(seconds float64) string {
	if seconds < 1 {
		return "< 1s"
	}
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d > 10*time.Minute:
		d = d.Round(time.Minute)
	case d > 20*time.Second:
		d = d.Round(10 * time.Second)
	default:
		d = d.Round(time.Second)
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = text[:len(text)-2]
	}
	if strings.HasSuffix(text, "h0m") {
		text = text[:len(text)-2]
	}
	return fmt.Sprintf("~%s", text)
}
