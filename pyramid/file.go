package pyramid

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/profile"
)

const (
	formatName    = "kvprofile.pyramid"
	formatVersion = 1
)

// Artefact is pyramid.json: what the layers need, and a division of one budget. Other budgets follow from it with
// Divide, without the record.
type Artefact struct {
	Format      string         `json:"format"`
	Version     int            `json:"version"`
	Tool        string         `json:"tool"`
	Record      string         `json:"record_sha256"` // digest of the attention record
	Model       profile.Model  `json:"model"`
	Options     MeasureOptions `json:"measure"`
	Measurement Measurement    `json:"measurement"`
	Request     Request        `json:"request"`
	Result
}

// Build measures a record and divides a budget. Layers, weights and limits of the request are taken from the record. A
// length of 0 is the longest prompt of the record; tool is the version of the program.
func Build(ctx context.Context, rec Record, tool string, o MeasureOptions, q Request) (*Artefact, error) {
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	digest, err := rec.Digest()
	if err != nil {
		return nil, err
	}
	measured, err := Measure(ctx, rec, o)
	if err != nil {
		return nil, err
	}
	meta := rec.Meta()
	if q.Length == 0 {
		for _, s := range rec.Samples() {
			q.Length = max(q.Length, s.Prompt)
		}
	}
	a := &Artefact{Format: formatName, Version: formatVersion, Tool: tool, Record: digest, Model: meta.Model, Options: o, Measurement: *measured}
	if a.Result, err = a.Divide(q); err != nil {
		return nil, err
	}
	if a.Request, err = a.complete(q).resolve(); err != nil {
		return nil, err
	}
	return a, nil
}

// complete fills in what the artefact knows of a request.
func (a *Artefact) complete(q Request) Request {
	q.Layers, q.Limits = a.Model.Layers, a.Model.SlidingWindow
	q.Weights = a.Measurement.Weights(q.Mode)
	return q
}

// Divide divides another budget by the same measurement.
func (a *Artefact) Divide(q Request) (Result, error) { return Allocate(a.complete(q)) }

// FormatError says that a file is no pyramid.json that this program reads.
type FormatError = run.FormatError

// Save writes pyramid.json; path is as it was or whole.
func (a *Artefact) Save(path string) error { return run.WriteJSON(path, a) }

// Load reads a pyramid.json. Unknown members and versions are errors, and budgets that are not those of the request.
func Load(path string) (*Artefact, error) {
	return run.LoadJSON(path, "cannot be read as layer budgets", decode)
}

func decode(from io.Reader) (*Artefact, error) {
	a := new(Artefact)
	if err := run.ReadJSON(from, formatName, formatVersion, a); err != nil {
		return nil, err
	}
	m, x := a.Model, &a.Measurement
	if m.Layers < 1 || len(x.Keys) != m.Layers || len(x.Variation) != m.Layers || len(x.Entropy) != m.Layers {
		return nil, fmt.Errorf("measurements of %d, %d and %d layers for a model of %d", len(x.Keys), len(x.Variation), len(x.Entropy), m.Layers)
	}
	// A resolved request says 0 where it means none.
	q := a.Request
	if q.Window == 0 {
		q.Window = NoWindow
	}
	if q.Floor == 0 {
		q.Floor = NoFloor
	}
	// Floats may round otherwise on other processors, and a budget with them: what must hold is the sum.
	again, err := a.Divide(q)
	if err != nil {
		return nil, err
	}
	if len(a.Budgets) != m.Layers || again.Total() != a.Total() || !slices.Equal(q.Weights, x.Weights(q.Mode)) || !slices.Equal(q.Limits, m.SlidingWindow) {
		return nil, errors.New("the budgets are not those of the request, the measurement and the model")
	}
	for l, b := range a.Budgets {
		if b < 0 || b%max(q.Block, 1) != 0 {
			return nil, fmt.Errorf("layer %d has %d tokens, which are not whole blocks of %d", l, b, q.Block)
		}
	}
	return a, nil
}
