package cpu

import (
	"os"
	"regexp"
	"strings"
	"testing"
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
