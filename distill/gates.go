// Package distill trains the gates of DuoAttention (Xiao et al. 2024): one number in [0,1] per layer and KV head that
// says how much the head needs the whole cache rather than the first and the last tokens. It also computes the cheap
// scores that trained gates are compared with, reads and writes both, and tests on held-out samples whether gates mean
// what they say.
package distill

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/parquet-go/parquet-go"
)

// Names of the files that Save writes.
const (
	GatesFile     = "gates.parquet"
	CurveFile     = "curve.tsv"
	AgreementFile = "agreement.json"
	DuoFile       = "full_attention_heads.tsv"
	DuoConfigFile = "config.json"
)

const gatesFormat = "kvprofile.gates.1"

// Gates are the result of a training, or of an import, with the scores that they are compared with.
type Gates struct {
	Values [][]float64 // [layer][KV head], in [0,1]
	Meta   Meta
	// Scores are other measures of the same heads; see the Score constants for their names.
	Scores []Score
	// Agreement holds the rank correlations of all pairs of measures; see Correlate.
	Agreement []Correlation
	// Curve has one point per step of the training; none after an import.
	Curve []CurvePoint
}

// Meta says where gates come from.
type Meta struct {
	Model   string   `json:"model,omitempty"`   // fingerprint
	Dataset string   `json:"dataset,omitempty"` // content hash
	Backend string   `json:"backend,omitempty"`
	Tool    string   `json:"tool,omitempty"`
	Sink    int      `json:"sink"`              // tokens, of the streaming mask while training
	Recent  int      `json:"recent"`            // tokens
	Options *Options `json:"options,omitempty"` // nil after an import
	Source  string   `json:"source,omitempty"`  // of an import: the model name its config gives
}

// Score is a measure of every KV head; larger means that it needs the whole cache more.
type Score struct {
	Name   string
	Values [][]float64 // [layer][KV head]
}

// Names of scores, which are the columns of the file.
const (
	ScoreGate       = "gate"
	ScoreDataLight  = "data_light"
	ScoreNeedleMass = "needle_mass"
	ScoreCopy       = "copy"
)

// CurvePoint is one step of a training.
type CurvePoint struct {
	Step           int     `json:"step"`             // from 0
	Sample         int     `json:"sample"`           // ID of the first sample
	Others         []int   `json:"others,omitempty"` // IDs of the step's other samples, in order
	Tokens         int     `json:"tokens"`           // of all samples
	Loss           float64 `json:"loss"`             // distillation loss before the step, mean over the samples
	Regularisation float64 `json:"regularisation"`   // its term of the loss before the step
	Rate           float64 `json:"rate"`             // learning rate
	Mean           float64 `json:"mean"`             // mean gate after the step
	Open           int     `json:"open"`             // gates >= 0.5 after the step
}

// row is a row of gates.parquet.
type row struct {
	Layer      int32    `parquet:"layer"`
	KVHead     int32    `parquet:"kv_head"`
	Gate       float64  `parquet:"gate"`
	DataLight  *float64 `parquet:"data_light,optional"`
	NeedleMass *float64 `parquet:"needle_mass,optional"`
	Copy       *float64 `parquet:"copy,optional"`
}

// score returns the cell of a named score, or nil when there is no such column.
func (r *row) score(name string) **float64 {
	switch name {
	case ScoreDataLight:
		return &r.DataLight
	case ScoreNeedleMass:
		return &r.NeedleMass
	case ScoreCopy:
		return &r.Copy
	}
	return nil
}

// Check reports gates that are ragged, out of range or not finite, and scores of another shape.
func (g *Gates) Check() error {
	if len(g.Values) == 0 || len(g.Values[0]) == 0 {
		return fmt.Errorf("there are no gates")
	}
	heads := len(g.Values[0])
	for l, vs := range g.Values {
		if len(vs) != heads {
			return fmt.Errorf("layer %d has %d gates, layer 0 has %d", l, len(vs), heads)
		}
		for k, v := range vs {
			if !(v >= 0 && v <= 1) {
				return fmt.Errorf("gate of layer %d, KV head %d is %g, outside [0,1]", l, k, v)
			}
		}
	}
	seen := map[string]bool{}
	for _, s := range g.Scores {
		if (&row{}).score(s.Name) == nil || seen[s.Name] {
			return fmt.Errorf("score %q is unknown or given twice", s.Name)
		}
		seen[s.Name] = true
		if err := sameShape(s.Values, g.Values); err != nil {
			return fmt.Errorf("score %s: %w", s.Name, err)
		}
	}
	return nil
}

// sameShape also reports values that are not finite.
func sameShape(a, want [][]float64) error {
	if len(a) != len(want) {
		return fmt.Errorf("%d layers, want %d", len(a), len(want))
	}
	for l := range a {
		if len(a[l]) != len(want[l]) {
			return fmt.Errorf("layer %d has %d KV heads, want %d", l, len(a[l]), len(want[l]))
		}
		if k := finite(a[l]); k >= 0 {
			return fmt.Errorf("layer %d, KV head %d is not finite", l, k)
		}
	}
	return nil
}

// Score returns a named score, or nil. The gates are ScoreGate.
func (g *Gates) Score(name string) [][]float64 {
	if name == ScoreGate {
		return g.Values
	}
	for _, s := range g.Scores {
		if s.Name == name {
			return s.Values
		}
	}
	return nil
}

// Save writes gates.parquet, the DuoAttention files, the training curve and the agreement to a folder, each file whole
// or not at all. The same gates give the same bytes.
func (g *Gates) Save(dir string) error {
	if err := g.Check(); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	table, err := g.parquet()
	if err != nil {
		return err
	}
	if err := writeWhole(filepath.Join(dir, GatesFile), table); err != nil {
		return err
	}
	if err := g.SaveDuo(dir); err != nil {
		return err
	}
	if len(g.Curve) > 0 {
		if err := writeWhole(filepath.Join(dir, CurveFile), formatCurve(g.Curve)); err != nil {
			return err
		}
	}
	if len(g.Agreement) > 0 {
		text, err := json.MarshalIndent(g.Agreement, "", "  ")
		if err != nil {
			return err
		}
		return writeWhole(filepath.Join(dir, AgreementFile), append(text, '\n'))
	}
	return nil
}

func (g *Gates) parquet() ([]byte, error) {
	meta, err := json.Marshal(g.Meta)
	if err != nil {
		return nil, err
	}
	var rows []row
	for l := range g.Values {
		for k, v := range g.Values[l] {
			r := row{Layer: int32(l), KVHead: int32(k), Gate: v}
			for _, s := range g.Scores {
				*r.score(s.Name) = &s.Values[l][k]
			}
			rows = append(rows, r)
		}
	}
	var out bytes.Buffer
	w := parquet.NewGenericWriter[row](&out, parquet.KeyValueMetadata("kvprofile.format", gatesFormat),
		parquet.KeyValueMetadata("kvprofile.meta", string(meta)), parquet.CreatedBy("kvprofile", "1", ""))
	if _, err := w.Write(rows); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Load reads what Save wrote. The curve and the agreement may be missing; gates.parquet may not. The error names the
// file.
func Load(dir string) (*Gates, error) {
	path := filepath.Join(dir, GatesFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	g, err := decode(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	path = filepath.Join(dir, CurveFile)
	if data, err = os.ReadFile(path); err == nil {
		g.Curve, err = parseCurve(string(data))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	path = filepath.Join(dir, AgreementFile)
	if data, err = os.ReadFile(path); err == nil {
		err = json.Unmarshal(data, &g.Agreement)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return g, nil
}

// maxHeads bounds what a file may make us allocate; no model has as many.
const maxHeads = 1 << 20

// decode reads gates.parquet. parquet-go panics on some damaged files.
func decode(data []byte) (g *Gates, err error) {
	defer func() {
		if p := recover(); p != nil {
			g, err = nil, fmt.Errorf("damaged Parquet file: %v", p)
		}
	}()
	f, err := parquet.OpenFile(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		return nil, err
	}
	if v, _ := f.Lookup("kvprofile.format"); v != gatesFormat {
		return nil, fmt.Errorf("format is %q, want %q", v, gatesFormat)
	}
	g = &Gates{}
	meta, _ := f.Lookup("kvprofile.meta")
	if err := json.Unmarshal([]byte(meta), &g.Meta); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	if n := f.NumRows(); n <= 0 || n > maxHeads {
		return nil, fmt.Errorf("%d rows of gates", n)
	}
	r := parquet.NewGenericReader[row](f)
	defer r.Close()
	rows := make([]row, f.NumRows())
	if n, err := r.Read(rows); n != len(rows) {
		return nil, fmt.Errorf("read %d of %d rows: %w", n, len(rows), err)
	}
	heads := 0
	for heads < len(rows) && rows[heads].Layer == 0 {
		heads++
	}
	if heads == 0 || len(rows)%heads != 0 {
		return nil, fmt.Errorf("%d rows with %d KV heads in layer 0", len(rows), heads)
	}
	flat := make([]float64, len(rows))
	for i := range rows {
		if int(rows[i].Layer) != i/heads || int(rows[i].KVHead) != i%heads {
			return nil, fmt.Errorf("row %d is layer %d, KV head %d; want layer %d, KV head %d", i, rows[i].Layer, rows[i].KVHead, i/heads, i%heads)
		}
		flat[i] = rows[i].Gate
	}
	g.Values = square(flat, heads)
	for _, name := range []string{ScoreDataLight, ScoreNeedleMass, ScoreCopy} {
		have := 0
		for i := range rows {
			if v := *rows[i].score(name); v != nil {
				have++
				flat[i] = *v
			}
		}
		switch have {
		case 0:
		case len(rows):
			g.Scores = append(g.Scores, Score{Name: name, Values: square(flat, heads)})
		default:
			return nil, fmt.Errorf("score %s is missing for %d of %d KV heads", name, len(rows)-have, len(rows))
		}
	}
	return g, g.Check()
}

const curveHeader = "step\tsample\ttokens\tloss\tregularisation\trate\tmean_gate\topen_gates\n"

func formatCurve(curve []CurvePoint) []byte {
	var b bytes.Buffer
	b.WriteString(curveHeader)
	for _, p := range curve {
		samples := strconv.Itoa(p.Sample)
		for _, id := range p.Others {
			samples += "," + strconv.Itoa(id)
		}
		fmt.Fprintf(&b, "%d\t%s\t%d\t%v\t%v\t%v\t%v\t%d\n", p.Step, samples, p.Tokens, p.Loss, p.Regularisation, p.Rate, p.Mean, p.Open)
	}
	return b.Bytes()
}

func parseCurve(text string) ([]CurvePoint, error) {
	body, ok := strings.CutPrefix(text, curveHeader)
	if !ok {
		return nil, fmt.Errorf("line 1 is not the header of a training curve")
	}
	var curve []CurvePoint
	for i, line := range strings.Split(strings.TrimSuffix(body, "\n"), "\n") {
		cells := strings.Split(line, "\t")
		if len(cells) != 8 {
			return nil, fmt.Errorf("line %d has %d cells, want 8", i+2, len(cells))
		}
		var p CurvePoint
		var errs []error
		first, others, many := strings.Cut(cells[1], ",")
		if many {
			for _, text := range strings.Split(others, ",") {
				id, err := strconv.Atoi(text)
				p.Others, errs = append(p.Others, id), append(errs, err)
			}
		}
		for _, c := range []struct {
			text string
			to   any
		}{{cells[0], &p.Step}, {first, &p.Sample}, {cells[2], &p.Tokens}, {cells[3], &p.Loss}, {cells[4], &p.Regularisation},
			{cells[5], &p.Rate}, {cells[6], &p.Mean}, {cells[7], &p.Open}} {
			var err error
			switch to := c.to.(type) {
			case *int:
				*to, err = strconv.Atoi(c.text)
			case *float64:
				*to, err = strconv.ParseFloat(c.text, 64)
				if err == nil && math.IsNaN(*to) {
					err = fmt.Errorf("%s is not a number", c.text)
				}
			}
			errs = append(errs, err)
		}
		if err := errors.Join(errs...); err != nil {
			return nil, fmt.Errorf("line %d: %w", i+2, err)
		}
		curve = append(curve, p)
	}
	return curve, nil
}
