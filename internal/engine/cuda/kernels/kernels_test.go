package kernels

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The PTX is what clang makes of the sources.
func TestCompiledFromSources(t *testing.T) {
	if _, err := exec.LookPath("clang++-19"); err != nil {
		if os.Getenv("KVPROFILE_TEST_CLANG") != "" {
			t.Fatal(err)
		}
		t.Skip("clang++-19 is not installed (Debian: apt-get install clang-19)")
	}
	out := t.TempDir()
	if text, err := exec.Command("bash", "build.sh", out).CombinedOutput(); err != nil || len(text) > 0 {
		t.Fatalf("build.sh: %v\n%s", err, text)
	}
	files, err := filepath.Glob("*.ptx")
	if err != nil || len(files) != len(Modules()) {
		t.Fatalf("%d files of PTX, %d embedded (%v)", len(files), len(Modules()), err)
	}
	for _, f := range files {
		kept, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		made, err := os.ReadFile(filepath.Join(out, f))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(kept, made) {
			t.Errorf("%s is not what its source compiles to: run go generate ./internal/engine/cuda/kernels", f)
		}
	}
}

// What would need a library, a stack, or a newer driver is not in the PTX.
func TestLint(t *testing.T) {
	forbidden := regexp.MustCompile(`\.extern \.func|\bcall\b|\.local|\.f64|^\.func`)
	for _, ptx := range Modules() {
		if !strings.Contains(ptx, "\n.version 7.0\n.target sm_80\n") {
			t.Error("a module is not PTX 7.0 for sm_80")
		}
		for i, line := range strings.Split(ptx, "\n") {
			code, _, _ := strings.Cut(line, "//")
			if found := forbidden.FindString(strings.TrimSpace(code)); found != "" {
				t.Errorf("line %d: %s in %q", i+1, found, line)
			}
		}
	}
}
