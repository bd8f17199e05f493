package profile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/format"
)

// The tables, in the order in which the parts of a sample are put into place: a sample whose samples part is there is
// done.
const (
	tableMaps    = "maps"
	tableColumns = "columns"
	tableHeads   = "heads"
	tableSamples = "samples"
)

// Keys of the metadata of a part.
const (
	keyRecord  = "kvprofile.record"  // Meta as JSON
	keyTable   = "kvprofile.table"   // name of the table
	keySample  = "kvprofile.sample"  // id
	keyColumns = "kvprofile.columns" // unit and meaning of every column as JSON
)

// tempMark stands in the names of parts that are not whole yet.
const tempMark = ".tmp-"

// column is one column of a table.
type column struct {
	name, unit, meaning string
	typ                 reflect.Type
	optional            bool
}

// MarshalJSON is what the metadata say of a column.
func (c column) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]string{"name": c.name, "unit": c.unit, "meaning": c.meaning})
}

type table struct {
	name    string
	columns []column
}

var (
	typeInt     = reflect.TypeFor[int32]()
	typeID      = reflect.TypeFor[uint64]()
	typeFloat   = reflect.TypeFor[float64]()
	typeString  = reflect.TypeFor[string]()
	typeInts    = reflect.TypeFor[[]int32]()
	typeFloats  = reflect.TypeFor[[]float32]()
	typeStrings = reflect.TypeFor[[]string]()
)

func samplesTable() table {
	return table{tableSamples, []column{
		{name: "sample", unit: "id", meaning: "index in the dataset", typ: typeInt},
		{name: "task", unit: "name", meaning: "task of the dataset", typ: typeString},
		{name: "seed", unit: "", meaning: "seed of the dataset", typ: typeID},
		{name: "prompt", unit: "tokens", meaning: "prompt rows: tokens before the first answer", typ: typeInt},
		{name: "tokens", unit: "token ids", meaning: "prompt and answers", typ: typeInts},
		{name: "classes", unit: "0 other, 1 special, 2 punctuation", meaning: "class of every token", typ: typeInts},
		{name: "span_kind", unit: "name", meaning: "spans in order of position; the four span lists have equal lengths", typ: typeStrings},
		{name: "span_index", unit: "", meaning: "number of the needle, question or answer", typ: typeInts},
		{name: "span_start", unit: "token", meaning: "first token of the span", typ: typeInts},
		{name: "span_end", unit: "token", meaning: "token after the span's last", typ: typeInts},
		{name: "answers", unit: "rows", meaning: "query rows that write answer tokens", typ: typeInts},
	}}
}

func headsTable(g Grid) table {
	c := []column{
		{name: "sample", unit: "id", typ: typeInt},
		{name: "layer", typ: typeInt},
		{name: "head", meaning: "query head", typ: typeInt},
		{name: "kv_head", typ: typeInt},
	}
	mass := func(name, meaning string) {
		c = append(c, column{name: name, unit: "share of a row's attention", meaning: meaning, typ: typeFloat})
	}
	for _, s := range g.Sinks {
		mass("sink_"+strconv.Itoa(s), fmt.Sprintf("on the first %d tokens, mean over prompt rows", s))
	}
	for _, w := range g.Recent {
		mass("recent_"+strconv.Itoa(w), fmt.Sprintf("on keys at a distance below %d, mean over prompt rows", w))
	}
	mass("special", "on special tokens, mean over prompt rows")
	mass("punctuation", "on punctuation tokens, mean over prompt rows")
	mass("needle", "on needle tokens, mean over prompt rows")
	mass("answer_needle", "on needle tokens, mean over answer rows; null without answers")
	c[len(c)-1].optional = true
	mass("copy", "share of answer rows whose strongest key is a token of their own needle and the token being written; null without answers")
	c[len(c)-1].unit, c[len(c)-1].optional = "share of rows", true
	c = append(c, column{name: "entropy", unit: "nats", meaning: "of a row's attention, mean over prompt rows", typ: typeFloat})
	for _, m := range g.Masses {
		c = append(c, column{name: "keys_" + ratioName(m), unit: "tokens", typ: typeFloat,
			meaning: fmt.Sprintf("smallest number of keys that hold %g of a row's attention, mean over sampled prompt rows", m)})
	}
	c = append(c,
		column{name: "variance", unit: "squared attention", typ: typeFloat,
			meaning: fmt.Sprintf("sum over keys of the variance over the last %d prompt rows", g.VarianceWindow)},
		column{name: "value_norm", unit: "Euclidean norm", meaning: "of the KV head's value vectors, mean over prompt tokens", typ: typeFloat},
		column{name: "value_norm_max", unit: "Euclidean norm", meaning: "of the KV head's value vectors, maximum over prompt tokens", typ: typeFloat})
	for _, w := range g.Recent {
		c = append(c, column{name: "sink_far_" + strconv.Itoa(w), unit: "attention, summed over rows", typ: typeFloats,
			meaning: fmt.Sprintf("received by each of the first %d tokens from prompt rows at a distance of at least %d", g.maxSink(), w)})
	}
	return table{tableHeads, c}
}

func columnsTable(g Grid) table {
	c := []column{
		{name: "sample", unit: "id", typ: typeInt},
		{name: "layer", typ: typeInt},
		{name: "head", meaning: "query head", typ: typeInt},
	}
	list := func(name, meaning string) {
		c = append(c, column{name: name, unit: "attention, summed over rows", meaning: "received by each token " + meaning, typ: typeFloats})
	}
	list("total", "of the prompt from all prompt rows")
	for _, r := range g.LocalRatios {
		list("far_"+ratioName(r), fmt.Sprintf("of the prompt from prompt rows at a distance of at least ceil(%g * prompt)", r))
	}
	for _, w := range g.Windows {
		list("window_"+strconv.Itoa(w), fmt.Sprintf("of the prompt from the last %d prompt rows", w))
	}
	list("half", "of the prompt from the prompt rows of the second half, from floor(prompt / 2) on")
	for _, r := range g.LocalRatios {
		list("first_far_"+ratioName(r), fmt.Sprintf("of the prompt's first half from rows of the first half at a distance of at least ceil(%g * floor(prompt / 2))", r))
	}
	list("answer", "from the answer rows; empty without answers")
	return table{tableColumns, c}
}

// rowType makes the struct that a table's rows are written from.
func (t table) rowType() reflect.Type {
	fields := make([]reflect.StructField, len(t.columns))
	for i, c := range t.columns {
		tag := `parquet:"` + c.name
		switch {
		case c.typ == typeFloats:
			tag += `,list" parquet-element:",split,zstd"`
		case c.typ.Kind() == reflect.Slice:
			tag += `,list" parquet-element:",zstd"`
		case c.optional:
			tag += `,optional"`
		default:
			tag += `"`
		}
		typ := c.typ
		if c.optional {
			typ = reflect.PointerTo(typ)
		}
		fields[i] = reflect.StructField{Name: "F" + strconv.Itoa(i), Type: typ, Tag: reflect.StructTag(tag)}
	}
	return reflect.StructOf(fields)
}

// partWriter writes one part under a temporary name.
type partWriter struct {
	path string
	file *os.File
	typ  reflect.Type
	rows *parquet.GenericWriter[any]
}

// partName is the file of a sample's part.
func partName(dir, table string, sample int) string {
	return filepath.Join(dir, table, fmt.Sprintf("part-%05d.parquet", sample))
}

// partOptions are what all tables' writers have in common.
func partOptions(name string, columns []column, meta Meta, sample int) ([]parquet.WriterOption, error) {
	record, err := json.Marshal(meta)
	if err != nil {
		return nil, err
	}
	described, err := json.Marshal(columns)
	if err != nil {
		return nil, err
	}
	return []parquet.WriterOption{
		parquet.CreatedBy("kvprofile", meta.Tool, ""),
		parquet.KeyValueMetadata(keyRecord, string(record)),
		parquet.KeyValueMetadata(keyTable, name),
		parquet.KeyValueMetadata(keySample, strconv.Itoa(sample)),
		parquet.KeyValueMetadata(keyColumns, string(described)),
	}, nil
}

func createTemp(path string) (*os.File, error) {
	return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+tempMark+"*")
}

func newPart(dir string, t table, meta Meta, sample int) (*partWriter, error) {
	options, err := partOptions(t.name, t.columns, meta, sample)
	if err != nil {
		return nil, err
	}
	p := &partWriter{path: partName(dir, t.name, sample), typ: t.rowType()}
	if p.file, err = createTemp(p.path); err != nil {
		return nil, err
	}
	options = append(options, parquet.SchemaOf(reflect.New(p.typ).Interface()))
	p.rows = parquet.NewGenericWriter[any](p.file, options...)
	return p, nil
}

// add writes a row; values are in the order of the table's columns, nil for null.
func (p *partWriter) add(values ...any) error {
	row := reflect.New(p.typ)
	for i, v := range values {
		field := row.Elem().Field(i)
		switch {
		case v == nil:
		case field.Kind() == reflect.Pointer:
			x := reflect.New(field.Type().Elem())
			x.Elem().Set(reflect.ValueOf(v))
			field.Set(x)
		default:
			field.Set(reflect.ValueOf(v))
		}
	}
	_, err := p.rows.Write([]any{row.Interface()})
	return err
}

// flush ends a row group.
func (p *partWriter) flush() error { return p.rows.Flush() }

// finish makes the file whole and leaves it under its temporary name.
func (p *partWriter) finish() error {
	if err := p.rows.Close(); err != nil {
		return err
	}
	return finishFile(p.file)
}

func finishFile(f *os.File) error {
	// Temporary files are private; artefacts are for others too.
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return f.Close()
}

func (p *partWriter) commit() error { return os.Rename(p.file.Name(), p.path) }

// discard removes what is left of the temporary file.
func (p *partWriter) discard() {
	p.file.Close()
	os.Remove(p.file.Name())
}

// halfFloat is the Parquet type of 16-bit floats, which parquet-go has no tag for.
type halfFloat struct{ parquet.Type }

func (halfFloat) LogicalType() *format.LogicalType {
	return &format.LogicalType{Value: &format.Float16Type{}}
}

// mapsSchema is that of the maps table. Its rows are written value by value.
func mapsSchema() *parquet.Schema {
	int32s := parquet.Int(32)
	return parquet.NewSchema(tableMaps, parquet.Group{
		"sample": int32s, "layer": int32s, "head": int32s, "query": int32s, "size": int32s, "tile": int32s,
		"pooled": parquet.List(parquet.Compressed(parquet.Leaf(halfFloat{parquet.FixedLenByteArrayType(2)}), &parquet.Zstd)),
		"exact":  parquet.List(parquet.Compressed(parquet.Encoded(parquet.Leaf(parquet.FloatType), &parquet.ByteStreamSplit), &parquet.Zstd)),
	})
}

func mapsColumns() []column {
	return []column{
		{name: "sample", unit: "id"}, {name: "layer"}, {name: "head", meaning: "query head"},
		{name: "query", unit: "row", meaning: "query row of an exact map's row; -1 for a pooled map"},
		{name: "size", unit: "cells", meaning: "rows and columns of a pooled map; 0 otherwise"},
		{name: "tile", unit: "tokens", meaning: "width of a cell; 0 otherwise"},
		{name: "pooled", unit: "share of a row's attention", meaning: "size x size cells, row-major: mean over the tile's rows of the mass on the tile's keys"},
		{name: "exact", unit: "share of a row's attention", meaning: "on the keys 0 to query"},
	}
}

// mapsPart writes the maps table.
type mapsPart struct {
	path string
	file *os.File
	rows *parquet.GenericWriter[any]
	row  parquet.Row
}

func newMapsPart(dir string, meta Meta, sample int) (*mapsPart, error) {
	options, err := partOptions(tableMaps, mapsColumns(), meta, sample)
	if err != nil {
		return nil, err
	}
	p := &mapsPart{path: partName(dir, tableMaps, sample)}
	if p.file, err = createTemp(p.path); err != nil {
		return nil, err
	}
	p.rows = parquet.NewGenericWriter[any](p.file, append(options, mapsSchema())...)
	return p, nil
}

// add writes one row: the columns of a parquet.Group are sorted by name.
func (p *mapsPart) add(sample, layer, head, query, size, tile int, pooled, exact []float32) error {
	p.row = p.row[:0]
	// exact 0, head 1, layer 2, pooled 3, query 4, sample 5, size 6, tile 7
	scalar := func(c, v int) {
		p.row = append(p.row, parquet.Int32Value(int32(v)).Level(0, 0, c))
	}
	list := func(c int, values []float32, value func(float32) parquet.Value) {
		if len(values) == 0 {
			p.row = append(p.row, parquet.NullValue().Level(0, 0, c))
		}
		for i, x := range values {
			p.row = append(p.row, value(x).Level(min(i, 1), 1, c))
		}
	}
	list(0, exact, parquet.FloatValue)
	scalar(1, head)
	scalar(2, layer)
	list(3, pooled, func(x float32) parquet.Value {
		h := toHalf(x)
		return parquet.FixedLenByteArrayValue([]byte{byte(h), byte(h >> 8)})
	})
	scalar(4, query)
	scalar(5, sample)
	scalar(6, size)
	scalar(7, tile)
	_, err := p.rows.WriteRows([]parquet.Row{p.row})
	return err
}

func (p *mapsPart) flush() error { return p.rows.Flush() }

func (p *mapsPart) finish() error {
	if err := p.rows.Close(); err != nil {
		return err
	}
	return finishFile(p.file)
}

func (p *mapsPart) commit() error { return os.Rename(p.file.Name(), p.path) }

func (p *mapsPart) discard() {
	p.file.Close()
	os.Remove(p.file.Name())
}

// toHalf rounds to the nearest 16-bit float, ties to even. x is finite.
func toHalf(x float32) uint16 {
	bits := math.Float32bits(x)
	sign, exp, frac := uint16(bits>>16&0x8000), int(bits>>23&0xff)-127+15, bits&0x7fffff
	shift := 13
	switch {
	case exp >= 31:
		return sign | 0x7c00
	case exp < -10:
		return sign
	case exp <= 0: // subnormal: the leading 1 is written out
		frac |= 0x800000
		shift += 1 - exp
		exp = 0
	}
	h := uint32(exp)<<10 | frac>>shift
	if rest, tie := frac&(1<<shift-1), uint32(1)<<(shift-1); rest > tie || rest == tie && h&1 == 1 {
		h++ // may carry into the exponent, which is then right
	}
	return sign | uint16(h)
}

// part is a part that was opened for reading.
type part struct {
	path string
	file *os.File
	data *parquet.File
	meta Meta
	// table and sample say what the part holds.
	table  string
	sample int
}

// openPart reads a part's metadata. Errors are *PartError, or fs.ErrNotExist.
func openPart(path string) (*part, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	p := &part{path: path, file: f}
	if err := p.readMeta(); err != nil {
		f.Close()
		return nil, err
	}
	return p, nil
}

func (p *part) close() { p.file.Close() }

func (p *part) fail(format string, args ...any) error {
	return &PartError{Path: p.path, Reason: fmt.Sprintf(format, args...)}
}

func (p *part) readMeta() (err error) {
	defer func() {
		// The Parquet reader is made for sound files: a damaged footer can make it panic.
		if r := recover(); r != nil {
			err = p.fail("is no sound Parquet file: %v", r)
		}
	}()
	info, err := p.file.Stat()
	if err != nil {
		return &PartError{p.path, "cannot be read", err}
	}
	p.data, err = parquet.OpenFile(p.file, info.Size(), parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
	if err != nil {
		return &PartError{p.path, "is no whole Parquet file", err}
	}
	record, ok := p.data.Lookup(keyRecord)
	if !ok {
		return p.fail("has no metadata of an attention record")
	}
	d := json.NewDecoder(strings.NewReader(record))
	d.DisallowUnknownFields()
	if err := d.Decode(&p.meta); err != nil {
		var head struct {
			Format  string
			Version int
		}
		if json.Unmarshal([]byte(record), &head) == nil && head.Version != formatVersion {
			return p.fail("is of version %d of %q, this program reads version %d", head.Version, head.Format, formatVersion)
		}
		return &PartError{p.path, "has metadata that cannot be read", err}
	}
	if p.meta.Format != formatName || p.meta.Version != formatVersion {
		return p.fail("is of version %d of %q, this program reads version %d of %q", p.meta.Version, p.meta.Format, formatVersion, formatName)
	}
	p.table, _ = p.data.Lookup(keyTable)
	id, _ := p.data.Lookup(keySample)
	if p.sample, err = strconv.Atoi(id); err != nil || p.sample < 0 {
		return p.fail("does not say of which sample it is")
	}
	return nil
}

// leaf finds a column, and whether it is a list.
func (p *part) leaf(name string) (index int, list bool, err error) {
	c := p.data.Root().Column(name)
	if c == nil {
		return 0, false, p.fail("has no column %s", name)
	}
	for !c.Leaf() {
		if len(c.Columns()) != 1 {
			return 0, false, p.fail("column %s is neither a value nor a list", name)
		}
		c, list = c.Columns()[0], true
	}
	return c.Index(), list, nil
}

// number is what a column's values can be read as.
type number interface {
	~int32 | ~uint64 | ~float32 | ~float64 | ~[]byte
}

// readColumn reads the values of one column of a row group by pages: much faster than by rows. lengths receives the
// length of every list; of a plain column it is 1, or 0 for null.
func readColumn[T number](p *part, group int, name string) (values []T, lengths []int, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = p.fail("column %s cannot be read: %v", name, r)
		}
	}()
	index, _, err := p.leaf(name)
	if err != nil {
		return nil, nil, err
	}
	groups := p.data.RowGroups()
	if group >= len(groups) {
		return nil, nil, p.fail("has %d row groups, not %d", len(groups), group+1)
	}
	pages := groups[group].ColumnChunks()[index].Pages()
	defer pages.Close()
	for {
		page, err := pages.ReadPage()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, nil, &PartError{p.path, "column " + name + " cannot be read", err}
		}
		before, data := len(values), page.Data()
		switch v := any(&values).(type) {
		case *[]int32:
			*v = append(*v, data.Int32()...)
		case *[]uint64:
			*v = append(*v, data.Uint64()...)
		case *[]float32:
			*v = append(*v, data.Float()...)
		case *[]float64:
			*v = append(*v, data.Double()...)
		case *[][]byte:
			switch kind := page.Type().Kind(); kind {
			case parquet.FixedLenByteArray:
				b, size := data.FixedLenByteArray()
				for i := 0; i+size <= len(b); i += size {
					*v = append(*v, append([]byte(nil), b[i:i+size]...))
				}
			case parquet.ByteArray:
				b, offsets := data.ByteArray()
				for i := range max(len(offsets)-1, 0) {
					*v = append(*v, append([]byte(nil), b[offsets[i]:offsets[i+1]]...))
				}
			default:
				return nil, nil, p.fail("column %s is of kind %v", name, kind)
			}
		}
		lengths, err = p.addLengths(lengths, page, name, len(values)-before)
		parquet.Release(page)
		if err != nil {
			return nil, nil, err
		}
	}
	return values, lengths, nil
}

// addLengths appends the lengths of a page's lists. A list may go on over pages.
func (p *part) addLengths(lengths []int, page parquet.Page, name string, got int) ([]int, error) {
	rep, def := page.RepetitionLevels(), page.DefinitionLevels()
	n := int(page.NumValues())
	present := 0
	for i := range n {
		if len(rep) == 0 || rep[i] == 0 {
			lengths = append(lengths, 0)
		}
		if len(lengths) == 0 {
			return nil, p.fail("column %s begins within a list", name)
		}
		if len(def) == 0 || def[i] > 0 {
			lengths[len(lengths)-1]++
			present++
		}
	}
	if present != got {
		return nil, p.fail("column %s has %d values where its levels say %d", name, got, present)
	}
	return lengths, nil
}
