package distill

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// duoConfig is the part of DuoAttention's config.json that says what the gates are of.
type duoConfig struct {
	ModelName string `json:"model_name,omitempty"`
	Sink      *int   `json:"sink_size"`
	Recent    *int   `json:"recent_size"`
}

// SaveDuo writes the gates as DuoAttention's own tools read them: full_attention_heads.tsv (rows are layers, columns
// KV heads, "%.18e", tab, no header) and config.json.
func (g *Gates) SaveDuo(dir string) error {
	var b bytes.Buffer
	for _, vs := range g.Values {
		for k, v := range vs {
			if k > 0 {
				b.WriteByte('\t')
			}
			fmt.Fprintf(&b, "%.18e", v)
		}
		b.WriteByte('\n')
	}
	text, err := json.Marshal(duoConfig{ModelName: g.Meta.Source, Sink: &g.Meta.Sink, Recent: &g.Meta.Recent})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := writeWhole(filepath.Join(dir, DuoFile), b.Bytes()); err != nil {
		return err
	}
	return writeWhole(filepath.Join(dir, DuoConfigFile), append(text, '\n'))
}

// Tie is a value that several KV heads share, so that it does not order them.
type Tie struct {
	Value float64 `json:"value"`
	Heads []Head  `json:"heads"` // in order of layer and KV head
}

// Import says what was done to imported gates.
type Import struct {
	// Clamped is the number of gates that stood outside [0,1]: the authors' trainer does not clamp after its last step.
	// Lowest and Highest are the extremes before.
	Clamped         int
	Lowest, Highest float64
	// Ties are the values that more than one head has after clamping, the most frequent first.
	Ties []Tie
}

// overshoot is how far outside [0,1] an imported gate may stand: one step of the optimiser at a generous rate.
const overshoot = 0.05

// LoadDuo reads a folder in DuoAttention's format. Values a little outside [0,1] are clamped, and reported; values
// further out are an error. The error names file, line and column.
func LoadDuo(dir string) (*Gates, *Import, error) {
	path := filepath.Join(dir, DuoFile)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	g := &Gates{}
	if g.Values, err = parseDuo(string(text)); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	path = filepath.Join(dir, DuoConfigFile)
	if text, err = os.ReadFile(path); err != nil {
		return nil, nil, err
	}
	var c duoConfig
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	if c.Sink == nil || c.Recent == nil || *c.Sink < 0 || *c.Recent <= 0 {
		return nil, nil, fmt.Errorf("%s: sink_size and recent_size must be given, not negative, and recent_size positive", path)
	}
	g.Meta = Meta{Sink: *c.Sink, Recent: *c.Recent, Source: c.ModelName}
	im := &Import{Lowest: g.Values[0][0], Highest: g.Values[0][0]}
	for _, vs := range g.Values {
		for k, v := range vs {
			im.Lowest, im.Highest = min(im.Lowest, v), max(im.Highest, v)
			if v < 0 || v > 1 {
				im.Clamped++
				vs[k] = min(max(v, 0), 1)
			}
		}
	}
	im.Ties = Ties(g.Values)
	return g, im, g.Check()
}

func parseDuo(text string) ([][]float64, error) {
	var out [][]float64
	for i, line := range strings.Split(strings.TrimRight(text, "\r\n"), "\n") {
		cells := strings.Split(strings.TrimSuffix(line, "\r"), "\t")
		if len(out) > 0 && len(cells) != len(out[0]) {
			return nil, fmt.Errorf("line %d has %d columns, line 1 has %d", i+1, len(cells), len(out[0]))
		}
		vs := make([]float64, len(cells))
		for k, c := range cells {
			v, err := strconv.ParseFloat(strings.TrimSpace(c), 64)
			if err != nil {
				return nil, fmt.Errorf("line %d, column %d: %q is not a number", i+1, k+1, c)
			}
			if !(v >= -overshoot && v <= 1+overshoot) {
				return nil, fmt.Errorf("line %d, column %d: %g is no gate in [0,1]", i+1, k+1, v)
			}
			vs[k] = v
		}
		out = append(out, vs)
	}
	return out, nil
}
