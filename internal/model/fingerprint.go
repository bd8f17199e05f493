package model

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"sort"

	"github.com/kvprofile/kvprofile/internal/engine"
)

// Fingerprint identifies a model: SHA-256 hashes in hex. A GGUF and the folder that it was made from agree in Config
// and Tokenizer, not in Weights.
type Fingerprint struct {
	Config    string `json:"config"`    // of what the mathematics depends on
	Weights   string `json:"weights"`   // of the sorted (name, type, shape, bytes) of the stored tensors
	Tokenizer string `json:"tokenizer"` // of the tokenizer's meaning, "" when the model has none
}

// Fingerprint hashes the model. The weights are read in full by the first call: about a second for each gigabyte.
func (m *Model) Fingerprint() Fingerprint {
	m.hashed.Do(func() { m.print = m.hash() })
	return m.print
}

func (m *Model) hash() Fingerprint {
	p := Fingerprint{Config: ConfigHash(m.Config)}
	if m.Tokenizer != nil {
		p.Tokenizer = m.Tokenizer.Fingerprint()
	}
	names := make([]string, 0, len(m.tensors))
	for name := range m.tensors {
		names = append(names, name)
	}
	sort.Strings(names)
	h := sha256.New()
	for _, name := range names {
		t := m.tensors[name]
		fmt.Fprintf(h, "%q %v %v\n", name, t.dtype, t.shape)
		h.Write(t.data)
	}
	p.Weights = hex.EncodeToString(h.Sum(nil))
	return p
}

// ConfigHash hashes what a configuration means. Numbers that GGUF stores in float32 are rounded to it, and frequencies
// stand for the parameters that they come from, so that both formats of a model give the same hash.
func ConfigHash(c engine.Config) string {
	freq, factor, err := c.Frequencies()
	if err != nil {
		return ""
	}
	h := sha256.New()
	windows := c.SlidingWindow
	if !slices.ContainsFunc(windows, func(w int) bool { return w != 0 }) {
		windows = nil
	}
	meaning := struct {
		Layers, Heads, KVHeads, HeadDim, Hidden, Intermediate, Vocab, MaxPosition int
		NormEps                                                                   float32
		Windows                                                                   []int
		Tied, Bias, Norm                                                          bool
		Factor                                                                    float32
	}{c.Layers, c.Heads, c.KVHeads, c.HeadDim, c.Hidden, c.Intermediate, c.Vocab, c.MaxPosition, float32(c.NormEps), windows,
		c.TiedEmbeddings, c.QKVBias, c.QKNorm, float32(factor)}
	// Encoding fields of these types cannot fail.
	_ = json.NewEncoder(h).Encode(meaning)
	for _, f := range freq {
		// Five digits: GGUF keeps the divisors of a scaled model in float32.
		fmt.Fprintf(h, "%.5g\n", f)
	}
	return hex.EncodeToString(h.Sum(nil))
}
