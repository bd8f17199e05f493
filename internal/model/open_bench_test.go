package model_test

import (
	"testing"

	"github.com/kvprofile/kvprofile/internal/model"
)

func BenchmarkOpenSmolLM2(b *testing.B) {
	path := openSmolLM2(b).Path
	for b.Loop() {
		m, err := model.Open(path)
		if err != nil {
			b.Fatal(err)
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkFingerprintSmolLM2(b *testing.B) {
	m := openSmolLM2(b)
	b.SetBytes(m.Inspect().WeightBytes)
	for b.Loop() {
		// A model keeps its fingerprint: each has to be opened anew, which takes little beside.
		fresh, err := model.Open(m.Path)
		if err != nil {
			b.Fatal(err)
		}
		fresh.Fingerprint()
		if err := fresh.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
