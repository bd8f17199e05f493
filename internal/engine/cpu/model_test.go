package cpu

import (
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// A whole model on every tier agrees with float64.
func TestModel(t *testing.T) {
	cfg, rows := enginetest.Tiny(), []int{60, 75, 89}
	want := enginetest.RunModel(t, cfg, ref.New[float64](), rows...)
	for _, b := range backends(t, 2) {
		enginetest.RunModel(t, cfg, b, rows...).Within(t, b.Name(), want, 5e-6, 1e-4)
	}
}
