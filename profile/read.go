package profile

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/kvprofile/kvprofile/datasets"
)

// Record is a record that was opened. Its methods may be called concurrently.
type Record struct {
	Dir     string
	meta    Meta
	samples []Sample
	// paths[table][id] is the file of a part.
	paths map[string][]string
}

// Open reads a record's metadata and samples, and checks that all parts are there and belong together. The names of
// the parts do not matter.
//
// Errors: *PartError for a damaged part, *MismatchError for one of another record, *IncompleteError, fs.ErrNotExist.
func Open(dir string) (*Record, error) {
	r := &Record{Dir: dir, paths: map[string][]string{}}
	if _, err := os.Stat(filepath.Join(dir, tableSamples)); err != nil {
		return nil, fmt.Errorf("%s is no attention record: %w", dir, err)
	}
	known := false
	for _, t := range []string{tableSamples, tableHeads, tableColumns, tableMaps} {
		parts, err := filepath.Glob(filepath.Join(dir, t, "*.parquet"))
		if err != nil {
			return nil, err
		}
		for _, path := range parts {
			p, err := openPart(path)
			if err != nil {
				return nil, err
			}
			err = r.take(p, t, &known)
			p.close()
			if err != nil {
				return nil, err
			}
		}
	}
	missing := &IncompleteError{Dir: dir}
	if !known {
		missing.Missing = []string{"all samples"}
		return nil, missing
	}
	for id := range r.meta.Dataset.Samples {
		for _, t := range []string{tableSamples, tableHeads, tableColumns} {
			if r.paths[t][id] == "" {
				missing.Missing = append(missing.Missing, fmt.Sprintf("%s of sample %d", t, id))
			}
		}
		if r.meta.hasMaps(id) && r.paths[tableMaps][id] == "" {
			missing.Missing = append(missing.Missing, fmt.Sprintf("maps of sample %d", id))
		}
	}
	if missing.Missing != nil {
		return nil, missing
	}
	return r, nil
}

// take adds a part to the record.
func (r *Record) take(p *part, table string, known *bool) error {
	if !*known {
		if err := p.meta.check(); err != nil {
			return &PartError{p.path, "has metadata that make no sense", err}
		}
		r.meta, *known = p.meta, true
		for _, t := range []string{tableSamples, tableHeads, tableColumns, tableMaps} {
			r.paths[t] = make([]string, r.meta.Dataset.Samples)
		}
		r.samples = make([]Sample, r.meta.Dataset.Samples)
	}
	if what, have, want := difference(p.meta, r.meta); what != "" {
		return &MismatchError{p.path, what, have, want}
	}
	if p.table != table {
		return p.fail("is a part of the table %s in the folder of %s", p.table, table)
	}
	if p.sample >= len(r.samples) {
		return p.fail("is of sample %d of %d", p.sample, len(r.samples))
	}
	if other := r.paths[table][p.sample]; other != "" {
		return p.fail("is of sample %d, and so is %s", p.sample, other)
	}
	if err := p.checkRows(); err != nil {
		return err
	}
	r.paths[table][p.sample] = p.path
	if table == tableSamples {
		s, err := readSample(p)
		if err != nil {
			return err
		}
		r.samples[p.sample] = s
	}
	return nil
}

// maxSamples bounds what a damaged part can make a reader allocate.
const maxSamples = 1 << 20

// check reports metadata that no run would write.
func (m Meta) check() error {
	c := m.Model
	if c.Layers < 1 || c.Heads < 1 || c.KVHeads < 1 || c.Heads%c.KVHeads != 0 || c.Layers > 1<<16 || c.Heads > 1<<16 {
		return fmt.Errorf("%d layers of %d query heads and %d KV heads", c.Layers, c.Heads, c.KVHeads)
	}
	if c.SlidingWindow != nil && len(c.SlidingWindow) != c.Layers {
		return fmt.Errorf("%d sliding windows for %d layers", len(c.SlidingWindow), c.Layers)
	}
	if m.Dataset.Samples < 1 || m.Dataset.Samples > maxSamples {
		return fmt.Errorf("%d samples", m.Dataset.Samples)
	}
	return m.Grid.check(c.Layers, c.Heads, m.Dataset.Samples)
}

// Meta says what the record was made of and how.
func (r *Record) Meta() Meta { return r.meta }

// Samples returns the samples, in order of their ids from 0. They are shared: not to be changed.
func (r *Record) Samples() []Sample { return r.samples }

func readSample(p *part) (Sample, error) {
	s := Sample{ID: p.sample}
	c := columnReader{p: p}
	id, prompt := c.int32s("sample", 1), c.int32s("prompt", 1)
	seed := read[uint64](&c, "seed", 1)
	task := read[[]byte](&c, "task", 1)
	s.Tokens = c.int32s("tokens", -1)
	classes := c.int32s("classes", len(s.Tokens))
	kind := read[[]byte](&c, "span_kind", -1)
	index, start, end := c.int32s("span_index", len(kind)), c.int32s("span_start", len(kind)), c.int32s("span_end", len(kind))
	answers := c.int32s("answers", -1)
	if c.err != nil {
		return s, c.err
	}
	if int(id[0]) != s.ID {
		return s, p.fail("holds sample %d, not %d", id[0], s.ID)
	}
	s.Task, s.Seed, s.Prompt = string(task[0]), seed[0], int(prompt[0])
	for _, x := range classes {
		if x < 0 || x > int32(Punctuation) {
			return s, p.fail("has a token of class %d", x)
		}
		s.Classes = append(s.Classes, Class(x))
	}
	for i := range kind {
		s.Spans = append(s.Spans, datasets.Span{Kind: datasets.SpanKind(kind[i]), Index: int(index[i]), Start: int(start[i]), End: int(end[i])})
	}
	for i, a := range answers {
		if a < 0 || int(a) >= len(s.Tokens)-1 || i > 0 && a <= answers[i-1] {
			return s, p.fail("has answer rows that do not ascend within its %d tokens", len(s.Tokens))
		}
		s.Answers = append(s.Answers, int(a))
	}
	at := 0
	for _, sp := range s.Spans {
		if sp.Start != at || sp.End <= sp.Start {
			return s, p.fail("has spans that do not cover its tokens")
		}
		at = sp.End
	}
	of := datasets.Sample{Tokens: s.Tokens, Spans: s.Spans}
	if at != len(s.Tokens) || len(s.Tokens) == 0 || s.Prompt < 1 || s.Prompt != of.PromptLen() || !slices.Equal(s.Answers, of.AnswerRows()) {
		return s, p.fail("has spans that do not agree with its %d tokens, %d prompt rows and %d answer rows", len(s.Tokens), s.Prompt, len(s.Answers))
	}
	return s, nil
}

// columnReader reads columns of a row group until one fails.
type columnReader struct {
	p     *part
	group int
	err   error
}

// read returns a column whose every list has the given length; -1 means one list of any length.
func read[T number](c *columnReader, name string, length int) []T {
	if c.err != nil {
		return make([]T, max(length, 0))
	}
	values, lengths, err := readColumn[T](c.p, c.group, name)
	if err == nil && length < 0 && len(lengths) != 1 {
		err = c.p.fail("column %s has %d rows, want 1", name, len(lengths))
	}
	if err == nil && length >= 0 {
		for row, n := range lengths {
			if n != length {
				err = c.p.fail("column %s has %d values in row %d, want %d", name, n, row, length)
				break
			}
		}
	}
	if c.err = err; err != nil {
		return make([]T, max(length, 0))
	}
	return values
}

func (c *columnReader) int32s(name string, length int) []int32 { return read[int32](c, name, length) }

// doubles reads a column of finite numbers, one per row.
func (c *columnReader) doubles(name string, rows int) []float64 {
	v := read[float64](c, name, 1)
	if c.err == nil && len(v) != rows {
		c.err = c.p.fail("column %s has %d values, want %d", name, len(v), rows)
	}
	for i, x := range v {
		if c.err == nil && (math.IsNaN(x) || math.IsInf(x, 0)) {
			c.err = c.p.fail("column %s has %g in row %d", name, x, i)
		}
	}
	if c.err != nil {
		return make([]float64, rows)
	}
	return v
}

// masses reads a column of lists of sums of attention, length values in each of rows lists.
func (c *columnReader) masses(name string, rows, length int) [][]float32 {
	v := read[float32](c, name, length)
	out := make([][]float32, rows)
	if c.err == nil && len(v) != rows*length {
		c.err = c.p.fail("column %s has %d values, want %d lists of %d", name, len(v), rows, length)
	}
	if c.err != nil {
		return out
	}
	for i, x := range v {
		if !(x >= 0) || math.IsInf(float64(x), 0) {
			c.err = c.p.fail("column %s has %g in row %d", name, x, i/length)
			return out
		}
	}
	for i := range out {
		out[i] = v[i*length : (i+1)*length : (i+1)*length]
	}
	return out
}

// at checks that a column of numbers says what the order of rows says.
func (c *columnReader) at(name string, rows int, want func(row int) int) {
	v := read[int32](c, name, 1)
	if c.err == nil && len(v) != rows {
		c.err = c.p.fail("has %d rows, want %d", len(v), rows)
	}
	for i, x := range v {
		if c.err == nil && int(x) != want(i) {
			c.err = c.p.fail("row %d is of %s %d, want %d", i, name, x, want(i))
		}
	}
}

func (r *Record) open(table string, sample int) (*part, error) {
	if sample < 0 || sample >= len(r.samples) {
		return nil, fmt.Errorf("%s has no sample %d: it has %d", r.Dir, sample, len(r.samples))
	}
	return openPart(r.paths[table][sample])
}

// Heads returns the statistics of the query heads of a sample: layer after layer, Model.Heads each.
func (r *Record) Heads(sample int) ([]HeadStats, error) {
	p, err := r.open(tableHeads, sample)
	if err != nil {
		return nil, err
	}
	defer p.close()
	m, g, s := r.meta.Model, r.meta.Grid, &r.samples[sample]
	rows := m.Layers * m.Heads
	c := columnReader{p: p}
	c.at("sample", rows, func(int) int { return sample })
	c.at("layer", rows, func(i int) int { return i / m.Heads })
	c.at("head", rows, func(i int) int { return i % m.Heads })
	c.at("kv_head", rows, func(i int) int { return i % m.Heads / m.Group() })
	out := make([]HeadStats, rows)
	for i := range out {
		out[i] = HeadStats{Layer: i / m.Heads, Head: i % m.Heads, KVHead: i % m.Heads / m.Group()}
	}
	each := func(name string, put func(h *HeadStats, x float64)) {
		for i, x := range c.doubles(name, rows) {
			put(&out[i], x)
		}
	}
	for _, x := range g.Sinks {
		each(fmt.Sprintf("sink_%d", x), func(h *HeadStats, x float64) { h.Sink = append(h.Sink, x) })
	}
	for _, x := range g.Recent {
		each(fmt.Sprintf("recent_%d", x), func(h *HeadStats, x float64) { h.Recent = append(h.Recent, x) })
	}
	each("special", func(h *HeadStats, x float64) { h.Special = x })
	each("punctuation", func(h *HeadStats, x float64) { h.Punctuation = x })
	each("needle", func(h *HeadStats, x float64) { h.Needle = x })
	if len(s.Answers) > 0 {
		each("answer_needle", func(h *HeadStats, x float64) { h.AnswerNeedle = x })
		each("copy", func(h *HeadStats, x float64) { h.Copy = x })
	}
	each("entropy", func(h *HeadStats, x float64) { h.Entropy = x })
	for _, x := range g.Masses {
		each("keys_"+ratioName(x), func(h *HeadStats, x float64) { h.Keys = append(h.Keys, x) })
	}
	each("variance", func(h *HeadStats, x float64) { h.Variance = x })
	each("value_norm", func(h *HeadStats, x float64) { h.ValueNorm = x })
	each("value_norm_max", func(h *HeadStats, x float64) { h.ValueNormMax = x })
	for _, w := range g.Recent {
		for i, x := range c.masses(fmt.Sprintf("sink_far_%d", w), rows, min(g.maxSink(), s.Prompt)) {
			out[i].SinkFar = append(out[i].SinkFar, x)
		}
	}
	return out, c.err
}

// Columns returns the statistics by token of the query heads of one layer on one sample.
func (r *Record) Columns(sample, layer int) ([]Columns, error) {
	p, err := r.open(tableColumns, sample)
	if err != nil {
		return nil, err
	}
	defer p.close()
	m, g, s := r.meta.Model, r.meta.Grid, &r.samples[sample]
	if layer < 0 || layer >= m.Layers {
		return nil, fmt.Errorf("%s has no layer %d: the model has %d", p.path, layer, m.Layers)
	}
	c := columnReader{p: p, group: layer}
	c.at("sample", m.Heads, func(int) int { return sample })
	c.at("layer", m.Heads, func(int) int { return layer })
	c.at("head", m.Heads, func(i int) int { return i })
	out := make([]Columns, m.Heads)
	each := func(name string, length int, put func(h *Columns, v []float32)) {
		for i, v := range c.masses(name, m.Heads, length) {
			put(&out[i], v)
		}
	}
	n := s.Prompt
	each("total", n, func(h *Columns, v []float32) { h.Total = v })
	for _, x := range g.LocalRatios {
		each("far_"+ratioName(x), n, func(h *Columns, v []float32) { h.Far = append(h.Far, v) })
	}
	for _, w := range g.Windows {
		each(fmt.Sprintf("window_%d", w), n, func(h *Columns, v []float32) { h.Window = append(h.Window, v) })
	}
	each("half", n, func(h *Columns, v []float32) { h.Half = v })
	for _, x := range g.LocalRatios {
		each("first_far_"+ratioName(x), HalfRow(n), func(h *Columns, v []float32) { h.FirstFar = append(h.FirstFar, v) })
	}
	if len(s.Answers) > 0 {
		each("answer", len(s.Tokens), func(h *Columns, v []float32) { h.Answer = v })
	}
	return out, c.err
}

// Maps returns the pooled maps of a sample, layer after layer; none where the record has none.
func (r *Record) Maps(sample int) ([]Map, error) {
	var out []Map
	err := r.maps(sample, func(m Map, query int) error {
		if query < 0 {
			out = append(out, m)
		}
		return nil
	})
	return out, err
}

// ExactMaps returns the exact maps of a sample: Size is the number of prompt rows, Tile 1.
func (r *Record) ExactMaps(sample int) ([]Map, error) {
	var out []Map
	err := r.maps(sample, func(m Map, query int) error {
		if query < 0 {
			return nil
		}
		n := r.samples[sample].Prompt
		if query == 0 {
			out = append(out, Map{Layer: m.Layer, Head: m.Head, Size: n, Tile: 1})
		}
		if len(out) == 0 || len(out[len(out)-1].Cells) != query*n || query >= n {
			return fmt.Errorf("exact map of query head %d:%d is not in order at row %d", m.Layer, m.Head, query)
		}
		last := &out[len(out)-1]
		last.Cells = append(last.Cells, m.Cells...)
		last.Cells = append(last.Cells, make([]float32, n-len(m.Cells))...)
		return nil
	})
	return out, err
}

// maps calls yield with every row of a sample's maps.
func (r *Record) maps(sample int, yield func(m Map, query int) error) error {
	if sample >= 0 && sample < len(r.samples) && r.paths[tableMaps][sample] == "" {
		return nil
	}
	p, err := r.open(tableMaps, sample)
	if err != nil {
		return err
	}
	defer p.close()
	m := r.meta.Model
	for g := range p.data.RowGroups() {
		c := columnReader{p: p, group: g}
		layer, head := c.int32s("layer", 1), c.int32s("head", 1)
		query, size, tile := c.int32s("query", 1), c.int32s("size", 1), c.int32s("tile", 1)
		if c.err != nil {
			return c.err
		}
		exact, exactLen, err := readColumn[float32](p, g, "exact")
		if err != nil {
			return err
		}
		pooled, pooledLen, err := readColumn[[]byte](p, g, "pooled")
		if err != nil {
			return err
		}
		rows := len(layer)
		for _, n := range []int{len(head), len(query), len(size), len(tile), len(exactLen), len(pooledLen)} {
			if n != rows {
				return p.fail("has columns of %d and %d rows", rows, n)
			}
		}
		for i := range rows {
			x := Map{Layer: int(layer[i]), Head: int(head[i]), Size: int(size[i]), Tile: int(tile[i])}
			if x.Layer < 0 || x.Layer >= m.Layers || x.Head < 0 || x.Head >= m.Heads {
				return p.fail("has a map of query head %d:%d", x.Layer, x.Head)
			}
			switch q := int(query[i]); {
			case q < 0 && (exactLen[i] != 0 || x.Size < 1 || x.Size > 4096 || pooledLen[i] != x.Size*x.Size):
				return p.fail("has a pooled map of %d values for %d x %d cells", pooledLen[i], x.Size, x.Size)
			case q >= 0 && (pooledLen[i] != 0 || exactLen[i] != q+1 || q >= r.samples[sample].Prompt):
				return p.fail("has row %d of an exact map with %d values", q, exactLen[i])
			case q >= 0:
				x.Cells = exact[:q+1]
			default:
				for _, b := range pooled[:pooledLen[i]] {
					if len(b) != 2 {
						return p.fail("has pooled maps of %d bytes a value, want 2", len(b))
					}
					x.Cells = append(x.Cells, fromHalf(uint16(b[0])|uint16(b[1])<<8))
				}
			}
			if err := yield(x, int(query[i])); err != nil {
				return &PartError{p.path, "has unsound maps", err}
			}
			exact, pooled = exact[exactLen[i]:], pooled[pooledLen[i]:]
		}
	}
	return nil
}

// fromHalf widens a finite 16-bit float.
func fromHalf(h uint16) float32 {
	exp, frac := int(h>>10&31), float64(h&0x3ff)
	x := math.Ldexp(1+frac/1024, exp-15)
	if exp == 0 {
		x = math.Ldexp(frac/1024, -14)
	}
	if h&0x8000 != 0 {
		x = -x
	}
	return float32(x)
}

// Digest is the SHA-256, in hex, of the evidence: the metadata, then the samples, heads and columns parts in order of
// their samples. Names and order of the files do not count, nor do maps, which nothing is computed from.
func (r *Record) Digest() (string, error) {
	all := sha256.New()
	record, err := json.Marshal(r.meta)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(all, "%s\n", record)
	for id := range r.samples {
		for _, t := range []string{tableSamples, tableHeads, tableColumns} {
			one := sha256.New()
			f, err := os.Open(r.paths[t][id])
			if err != nil {
				return "", err
			}
			_, err = io.Copy(one, f)
			if err := errors.Join(err, f.Close()); err != nil {
				return "", err
			}
			fmt.Fprintf(all, "%d %s %x\n", id, t, one.Sum(nil))
		}
	}
	return hex.EncodeToString(all.Sum(nil)), nil
}
