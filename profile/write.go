package profile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
)

// Options of Run.
type Options struct {
	Dir string // of the record; made if need be
	// Tool is the version of the program, ModelName and SHA256 identify the model (see Model).
	Tool      string
	ModelName string
	SHA256    map[string]string
	Grid      Grid
	// Batch is the number of samples that pass through the model together, 1 by default. A model that does not fit in
	// memory is read once per batch; the results are the same.
	Batch int
}

// Progress says how far a run is.
type Progress struct {
	Done, Samples int // samples
	// Sample is the one at work, Layer the number of its layers that are done.
	Sample, Layer, Layers int
}

// Run records the attention of a model over a dataset to a folder. Parts that are there and whole are kept, so that a
// run that was stopped is taken up sample by sample; it ends with the same bytes as an unbroken one. Parts that were
// made otherwise are refused with a *MismatchError; damaged ones are written anew. progress may be nil.
//
// Errors beside those: *OptionError, *NonFiniteError, those of the dataset and of the file system.
func Run(ctx context.Context, m *engine.Model, ds *datasets.Dataset, classes Classes, o Options, progress func(Progress)) error {
	return RunOn(ctx, devices.Of(m), ds, classes, o, progress)
}

// RunOn is Run with the batches spread over devices. The record is the same on any number: every sample has parts of its own. Parts
// come about in the order in which devices are done; progress is called from one goroutine at a time.
func RunOn(ctx context.Context, set *devices.Set, ds *datasets.Dataset, classes Classes, o Options, progress func(Progress)) error {
	meta, err := newMeta(set.First(), ds, o)
	if err != nil {
		return err
	}
	r := &recorder{dir: o.Dir, meta: meta, classes: classes}
	r.progress = func(sample, layer, done int) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.done += done
		if progress != nil {
			progress(Progress{Done: r.done, Samples: len(ds.Samples), Sample: sample, Layer: layer, Layers: meta.Model.Layers})
		}
	}
	todo, err := r.prepare(ds.Samples)
	if err != nil {
		return err
	}
	r.progress(0, 0, len(ds.Samples)-len(todo))
	batches := slices.Collect(slices.Chunk(todo, max(o.Batch, 1)))
	return devices.Map(ctx, set, len(batches), func(ctx context.Context, m *engine.Model, i int) (struct{}, error) {
		return struct{}{}, r.record(ctx, m, batches[i])
	}, func(int, struct{}) error { return nil })
}

func newMeta(m *engine.Model, ds *datasets.Dataset, o Options) (Meta, error) {
	if o.Dir == "" {
		return Meta{}, &OptionError{"folder", "is not named"}
	}
	if len(ds.Samples) == 0 {
		return Meta{}, &OptionError{"dataset", "has no samples"}
	}
	if err := ds.Validate(m.Config.Vocab); err != nil {
		return Meta{}, err
	}
	grid, err := o.Grid.resolve(m.Config, len(ds.Samples))
	if err != nil {
		return Meta{}, err
	}
	c := m.Config
	return Meta{
		Format: formatName, Version: formatVersion, Tool: o.Tool, Engine: m.Backend.Name(),
		Model: Model{Name: o.ModelName, Architecture: c.Architecture, Layers: c.Layers, Heads: c.Heads, KVHeads: c.KVHeads,
			HeadDim: c.HeadDim, MaxPosition: c.MaxPosition, SlidingWindow: c.SlidingWindow, SHA256: o.SHA256},
		Dataset: Dataset{Hash: ds.Meta.ContentHash, Task: ds.Meta.Task, Purpose: string(ds.Meta.Purpose), Seed: ds.Meta.Seed,
			Tokenizer: ds.Meta.Tokenizer, Samples: len(ds.Samples)},
		Grid: grid,
	}, nil
}

// difference names the first member that differs between the JSON of two Metas.
func difference(have, want Meta) (what, inHave, inWant string) {
	var a, b any
	for _, x := range []struct {
		meta Meta
		to   *any
	}{{have, &a}, {want, &b}} {
		text, err := json.Marshal(x.meta)
		if err == nil {
			d := json.NewDecoder(bytes.NewReader(text))
			d.UseNumber() // seeds are larger than floats hold
			err = d.Decode(x.to)
		}
		if err != nil {
			return "metadata", err.Error(), "JSON"
		}
	}
	return differ("", a, b)
}

func differ(path string, a, b any) (what, inA, inB string) {
	x, xok := a.(map[string]any)
	y, yok := b.(map[string]any)
	if !xok || !yok {
		if reflect.DeepEqual(a, b) {
			return "", "", ""
		}
		show := func(v any) string {
			text, err := json.Marshal(v)
			if err != nil || v == nil {
				return "absent"
			}
			return string(text)
		}
		return strings.TrimPrefix(path, "."), show(a), show(b)
	}
	keys := map[string]bool{}
	for k := range x {
		keys[k] = true
	}
	for k := range y {
		keys[k] = true
	}
	names := make([]string, 0, len(keys))
	for k := range keys {
		names = append(names, k)
	}
	slices.Sort(names)
	for _, k := range names {
		if what, inA, inB := differ(path+"."+k, x[k], y[k]); what != "" {
			return what, inA, inB
		}
	}
	return "", "", ""
}

// recorder is a run at work.
type recorder struct {
	dir      string
	meta     Meta
	classes  Classes
	progress func(sample, layer, done int) // done: samples more than before

	mu   sync.Mutex
	done int // samples
}

// prepare makes the folders and returns the samples that are still to be recorded.
func (r *recorder) prepare(samples []datasets.Sample) ([]*datasets.Sample, error) {
	for _, t := range []string{tableMaps, tableColumns, tableHeads, tableSamples} {
		dir := filepath.Join(r.dir, t)
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return nil, err
		}
		// What a killed run left.
		left, err := filepath.Glob(filepath.Join(dir, ".part-*"+tempMark+"*"))
		if err != nil {
			return nil, err
		}
		for _, path := range left {
			if err := os.Remove(path); err != nil {
				return nil, err
			}
		}
		// A part of this or any other sample that belongs to another record means that the folder is taken.
		parts, err := filepath.Glob(filepath.Join(dir, "*.parquet"))
		if err != nil {
			return nil, err
		}
		for _, path := range parts {
			if _, err := r.whole(path, t); err != nil {
				return nil, err
			}
		}
	}
	var todo []*datasets.Sample
	for i := range samples {
		s := &samples[i]
		for _, t := range r.tables(s.ID) {
			ok, err := r.whole(partName(r.dir, t, s.ID), t)
			if err != nil {
				return nil, err
			}
			if !ok {
				todo = append(todo, s)
				break
			}
		}
	}
	return todo, nil
}

// tables lists the tables that a sample has a part in.
func (r *recorder) tables(sample int) []string {
	if r.meta.hasMaps(sample) {
		return []string{tableMaps, tableColumns, tableHeads, tableSamples}
	}
	return []string{tableColumns, tableHeads, tableSamples}
}

// hasMaps reports whether the maps table has a part of a sample.
func (m Meta) hasMaps(sample int) bool {
	return sample < m.Grid.MapSamples || len(m.Grid.ExactHeads) > 0 && slices.Contains(m.Grid.ExactSamples, sample)
}

// whole reports whether a part is there and can be kept.
func (r *recorder) whole(path, table string) (bool, error) {
	p, err := openPart(path)
	var damaged *PartError
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.As(err, &damaged):
		return false, nil
	case err != nil:
		return false, err
	}
	defer p.close()
	if what, have, want := difference(p.meta, r.meta); what != "" {
		return false, &MismatchError{path, what, have, want}
	}
	return p.table == table && path == partName(r.dir, table, p.sample) && p.checkRows() == nil, nil
}

// checkRows compares the numbers of rows and row groups with what the metadata promise.
func (p *part) checkRows() error {
	layers, heads := p.meta.Model.Layers, p.meta.Model.Heads
	rows := p.data.NumRows()
	switch p.table {
	case tableSamples:
		if rows != 1 {
			return p.fail("has %d rows, want 1", rows)
		}
	case tableHeads:
		if rows != int64(layers)*int64(heads) || len(p.data.RowGroups()) != 1 {
			return p.fail("has %d rows in %d row groups, want %d in 1", rows, len(p.data.RowGroups()), layers*heads)
		}
	case tableColumns:
		if len(p.data.RowGroups()) != layers {
			return p.fail("has %d row groups for %d layers", len(p.data.RowGroups()), layers)
		}
		for l, g := range p.data.RowGroups() {
			if g.NumRows() != int64(heads) {
				return p.fail("layer %d has %d rows for %d query heads", l, g.NumRows(), heads)
			}
		}
	case tableMaps:
	default:
		return p.fail("is of an unknown table %q", p.table)
	}
	return nil
}

// record runs a batch of samples through the model and puts their parts into place.
func (r *recorder) record(ctx context.Context, m *engine.Model, batch []*datasets.Sample) error {
	jobs := make([]*job, len(batch))
	defer func() {
		for _, j := range jobs {
			if j != nil {
				j.discard()
			}
		}
	}()
	sequences := make([]*engine.Sequence, len(batch))
	for i, s := range batch {
		j, err := r.newJob(s)
		if err != nil {
			return err
		}
		jobs[i] = j
		sequences[i] = &engine.Sequence{Tokens: s.Tokens, Tap: j.tap, Tapped: j.tapped}
	}
	if err := m.Forward(ctx, sequences...); err != nil {
		var bad *engine.NonFiniteError
		if errors.As(err, &bad) && bad.Sequence < len(batch) {
			return &NonFiniteError{Sample: batch[bad.Sequence].ID, Layer: bad.Layer, Token: bad.Row}
		}
		return err
	}
	for i, j := range jobs {
		if err := j.commit(); err != nil {
			return fmt.Errorf("sample %d: %w", j.sample.ID, err)
		}
		jobs[i] = nil
		r.progress(j.sample.ID, r.meta.Model.Layers, 1)
	}
	return nil
}

// file is a part that is being written.
type file interface {
	finish() error
	commit() error
	discard()
}

// job is the recording of one sample.
type job struct {
	r                     *recorder
	sample                *datasets.Sample
	prompt                int
	answers               []int
	classes               []Class
	needle                []int // per token: number of its needle, or -1
	answerOf              []int // per answer row: number of its answer
	samples, heads, lists *partWriter
	maps                  *mapsPart
}

func (r *recorder) newJob(s *datasets.Sample) (_ *job, err error) {
	j := &job{r: r, sample: s, prompt: s.PromptLen(), answers: s.AnswerRows(), classes: classify(s.Tokens, r.classes),
		needle: needles(s.Spans, len(s.Tokens))}
	for _, sp := range s.Find(datasets.SpanAnswer) {
		for range sp.Len() {
			j.answerOf = append(j.answerOf, sp.Index)
		}
	}
	defer func() {
		if err != nil {
			j.discard()
		}
	}()
	for _, t := range []struct {
		table table
		to    **partWriter
	}{{samplesTable(), &j.samples}, {headsTable(r.meta.Grid), &j.heads}, {columnsTable(r.meta.Grid), &j.lists}} {
		if *t.to, err = newPart(r.dir, t.table, r.meta, s.ID); err != nil {
			return nil, err
		}
	}
	if r.meta.hasMaps(s.ID) {
		if j.maps, err = newMapsPart(r.dir, r.meta, s.ID); err != nil {
			return nil, err
		}
	}
	return j, j.writeSample()
}

// needles says for every token which needle it is of, -1 for none.
func needles(spans []datasets.Span, tokens int) []int {
	out := slices.Repeat([]int{-1}, tokens)
	for _, sp := range spans {
		if sp.Kind == datasets.SpanNeedle {
			for t := sp.Start; t < sp.End; t++ {
				out[t] = sp.Index
			}
		}
	}
	return out
}

// files lists the parts in the order in which they are put into place.
func (j *job) files() []file {
	var out []file
	if j.maps != nil {
		out = append(out, j.maps)
	}
	for _, p := range []*partWriter{j.lists, j.heads, j.samples} {
		if p != nil {
			out = append(out, p)
		}
	}
	return out
}

func (j *job) discard() {
	for _, f := range j.files() {
		f.discard()
	}
}

// commit makes all parts whole, and only then puts them into place.
func (j *job) commit() error {
	for _, f := range j.files() {
		if err := f.finish(); err != nil {
			return err
		}
	}
	for _, f := range j.files() {
		if err := f.commit(); err != nil {
			return err
		}
	}
	return nil
}

func toInt32[T ~int | ~uint8](v []T) []int32 {
	out := make([]int32, len(v))
	for i, x := range v {
		out[i] = int32(x)
	}
	return out
}

func (j *job) writeSample() error {
	s := j.sample
	var kind []string
	var index, start, end []int
	for _, sp := range s.Spans {
		kind = append(kind, string(sp.Kind))
		index, start, end = append(index, sp.Index), append(start, sp.Start), append(end, sp.End)
	}
	return j.samples.add(int32(s.ID), s.Task, s.Seed, int32(j.prompt), s.Tokens, toInt32(j.classes),
		kind, toInt32(index), toInt32(start), toInt32(end), toInt32(j.answers))
}

// distances are what the tap's far lists are asked for: those of the local ratios, for the prompt and for its first
// half, and the recent widths.
func (g Grid) distances(prompt int) []int {
	var out []int
	for _, n := range []int{prompt, HalfRow(prompt)} {
		for _, r := range g.LocalRatios {
			out = append(out, Tokens(r, n))
		}
	}
	return append(out, g.Recent...)
}

// tap says which statistics of a layer are wanted.
func (j *job) tap(layer int) *engine.Tap {
	g := j.r.meta.Grid
	t := &engine.Tap{
		Prompt: j.prompt,
		Far:    g.distances(j.prompt),
		// The second half is one more observation window.
		Windows:        append(slices.Clone(g.Windows), j.prompt-HalfRow(j.prompt)),
		VarianceWindow: g.VarianceWindow,
		Answer:         j.answers,
		KeysEvery:      min(g.KeysEvery, j.prompt),
		Masses:         g.Masses,
	}
	if j.sample.ID < g.MapSamples {
		t.Map = g.MapSize
	}
	if slices.Contains(g.ExactSamples, j.sample.ID) {
		for _, h := range g.ExactHeads {
			if h.Layer == layer && !slices.Contains(t.Exact, h.Head) {
				t.Exact = append(t.Exact, h.Head)
			}
		}
		slices.Sort(t.Exact)
	}
	return t
}

// tapped writes a layer's statistics.
func (j *job) tapped(layer int, tap *engine.Tap) error {
	meta := j.r.meta
	for h := range tap.Heads {
		kv := h / meta.Model.Group()
		if err := j.writeHead(layer, h, kv, &tap.Heads[h], tap.KV[kv]); err != nil {
			return err
		}
		if err := j.writeColumns(layer, h, &tap.Heads[h]); err != nil {
			return err
		}
		if err := j.writeMaps(layer, h, &tap.Heads[h]); err != nil {
			return err
		}
	}
	if err := j.lists.flush(); err != nil {
		return err
	}
	if j.maps != nil {
		if err := j.maps.flush(); err != nil {
			return err
		}
	}
	j.r.progress(j.sample.ID, layer+1, 0)
	return nil
}

func (j *job) writeHead(layer, head, kv int, st *engine.HeadStats, norms engine.KVStats) error {
	g, n := j.r.meta.Grid, j.prompt
	rows := float64(n)
	row := []any{int32(j.sample.ID), int32(layer), int32(head), int32(kv)}
	for _, s := range g.Sinks {
		row = append(row, sum(st.Total[:min(s, n)])/rows)
	}
	far := st.Far[2*len(g.LocalRatios):]
	for x := range g.Recent {
		row = append(row, max(0, rows-sum(far[x]))/rows)
	}
	var special, punctuation, needle, answerNeedle float64
	for t, x := range st.Total[:n] {
		switch j.classes[t] {
		case Special:
			special += float64(x)
		case Punctuation:
			punctuation += float64(x)
		}
		if j.needle[t] >= 0 {
			needle += float64(x)
		}
	}
	row = append(row, special/rows, punctuation/rows, needle/rows)
	if a := len(j.answers); a > 0 {
		for t, x := range st.Answer {
			if j.needle[t] >= 0 {
				answerNeedle += float64(x)
			}
		}
		row = append(row, answerNeedle/float64(a), float64(j.copies(st.Top))/float64(a))
	} else {
		row = append(row, nil, nil)
	}
	row = append(row, st.Entropy)
	for _, k := range st.Keys {
		row = append(row, k)
	}
	row = append(row, st.Variance, norms.ValueNorm, norms.ValueNormMax)
	for x := range g.Recent {
		row = append(row, far[x][:min(g.maxSink(), n)])
	}
	return j.heads.add(row...)
}

// copies counts the answer rows whose strongest key is a token of their own needle and the token being written.
func (j *job) copies(top []int32) (n int) {
	for a, key := range top {
		if j.needle[key] == j.answerOf[a] && j.sample.Tokens[key] == j.sample.Tokens[j.answers[a]+1] {
			n++
		}
	}
	return n
}

func sum(v []float32) (s float64) {
	for _, x := range v {
		s += float64(x)
	}
	return s
}

func (j *job) writeColumns(layer, head int, st *engine.HeadStats) error {
	g, n := j.r.meta.Grid, j.prompt
	row := []any{int32(j.sample.ID), int32(layer), int32(head), st.Total[:n]}
	for x := range g.LocalRatios {
		row = append(row, st.Far[x][:n])
	}
	for x := range st.Window { // the last one is the second half
		row = append(row, st.Window[x][:n])
	}
	half := HalfRow(n)
	for x, r := range g.LocalRatios {
		first, _ := SplitFar(st.Far[len(g.LocalRatios)+x][:n], st.Window[len(g.Windows)][:n], Tokens(r, half))
		row = append(row, first[:half])
	}
	return j.lists.add(append(row, st.Answer)...)
}

func (j *job) writeMaps(layer, head int, st *engine.HeadStats) error {
	if j.maps == nil {
		return nil
	}
	if st.MapSize > 0 {
		if err := j.maps.add(j.sample.ID, layer, head, -1, st.MapSize, st.MapTile, st.Map, nil); err != nil {
			return err
		}
	}
	if st.Exact == nil {
		return nil
	}
	for i := range j.prompt {
		if err := j.maps.add(j.sample.ID, layer, head, i, 0, 0, nil, st.Exact[i*j.prompt:i*j.prompt+i+1]); err != nil {
			return err
		}
	}
	return nil
}

// Size is a sample's size for Estimate.
type Size struct{ Tokens, Prompt, Answers int }

// Bytes are sizes before compression; compressed parts are smaller by a fifth or more.
type Bytes struct{ Samples, Heads, Columns, Maps int64 }

// Total is the sum over the tables.
func (b Bytes) Total() int64 { return b.Samples + b.Heads + b.Columns + b.Maps }

// Estimate says how large a record will be before it is made.
func Estimate(cfg engine.Config, grid Grid, sizes []Size) (Bytes, error) {
	g, err := grid.resolve(cfg, len(sizes))
	if err != nil {
		return Bytes{}, err
	}
	var b Bytes
	meta := Meta{Grid: g}
	heads := int64(cfg.Layers) * int64(cfg.Heads)
	for id, s := range sizes {
		if s.Prompt < 1 || s.Prompt > s.Tokens || s.Answers < 0 {
			return Bytes{}, &OptionError{"sizes", "sample " + strconv.Itoa(id) + " has no prompt within its tokens"}
		}
		n := int64(s.Prompt)
		b.Samples += int64(s.Tokens)*8 + int64(s.Answers)*4
		b.Heads += heads * int64(4*4+8*(len(g.Sinks)+len(g.Recent)+len(g.Masses)+9)+4*len(g.Recent)*min(g.maxSink(), s.Prompt))
		lists := int64(len(g.LocalRatios) + len(g.Windows) + 2)
		b.Columns += heads * (12 + 4*(lists*n+int64(len(g.LocalRatios)*HalfRow(s.Prompt))))
		if s.Answers > 0 {
			b.Columns += heads * 4 * int64(s.Tokens)
		}
		if id < g.MapSamples {
			tiles, _ := engine.MapGrid(s.Prompt, g.MapSize)
			b.Maps += heads * int64(24+2*tiles*tiles)
		}
		if meta.hasMaps(id) && slices.Contains(g.ExactSamples, id) {
			b.Maps += int64(len(g.ExactHeads)) * (n*24 + 4*n*(n+1)/2)
		}
	}
	return b, nil
}
