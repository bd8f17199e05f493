package cpu

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// A register that only AVX-512 has would make an AVX2 kernel crash on the machines that it is for, and nowhere else.
func TestAVX2KernelsUseAVX2(t *testing.T) {
	text, err := os.ReadFile("kernels_amd64.s")
	if err != nil {
		t.Fatal(err)
	}
	wide := regexp.MustCompile(`\b(Z\d+|[XY](1[6-9]|2\d|3[01])|K[0-7])\b|Requires:.*AVX512`)
	checked := 0
	for _, f := range strings.Split(string(text), "// func ")[1:] {
		name := f[:strings.IndexByte(f, '(')]
		if !strings.HasSuffix(name, "AVX2") {
			continue
		}
		checked++
		if m := wide.FindString(f); m != "" {
			t.Errorf("%s uses %s", name, m)
		}
	}
	if checked < 20 {
		t.Errorf("only %d AVX2 kernels found", checked)
	}
}

func TestSplitRowsKernel(t *testing.T) {
	if !slices.ContainsFunc(tiers(), func(k *kernels) bool { return k.lanes == 16 }) {
		t.Skip("this processor has no AVX-512")
	}
	r := enginetest.Seeded(34)
	for _, count := range []int{1, 2, 18} {
		for _, rows := range []int{1, 7, 16} {
			src := floats(r, rows*(count*step+5))
			got, want := make([]uint16, count*3*tilePair), make([]uint16, count*3*tilePair)
			splitRowsAVX512(count, rows, src, count*step+5, got)
			splitRowsGo(count, rows, src, count*step+5, want)
			if !slices.Equal(got, want) {
				t.Fatalf("%d rows of %d steps are split otherwise than by the twin", rows, count)
			}
		}
	}
}
