//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
)

// onGPU runs the command on a machine with a simulated GPU.
func onGPU(t *testing.T, fake *fakecuda.Driver, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, log bytes.Buffer
	a := &app{libraries: func(string) (cuda.Symbols, error) {
		return func(_ cuda.Library, name string) (uintptr, error) { return fake.Symbol(name) }, nil
	}}
	env := []string{"KVPROFILE_CONFIG=" + filepath.Join(dir, "tiny.yaml")}
	code = a.main(context.Background(), append(args, "--device", "cuda"), strings.NewReader(""), &out, &log, env)
	if err := fake.Err(); err != nil {
		t.Error(err)
	}
	if err := fake.Leaks(); err != nil {
		t.Error(err)
	}
	return code, out.String(), log.String()
}

// The whole pipeline on a simulated GPU comes to the CPU's plan: gates within a hundredth, and the same policies but for heads that
// lie as close to a threshold.
func TestRunOnSimulatedGPU(t *testing.T) {
	if testing.Short() {
		t.Skip("simulating a GPU takes a while")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tiny.yaml"), []byte(tiny), 0o644); err != nil {
		t.Fatal(err)
	}
	arguments := func(out string) []string {
		return []string{"run", testdata + "llama", "-o", filepath.Join(dir, out), "--lengths", "400", "--train-lengths", "450", "--count", "2", "--learning-rate", "0.5", "--steps", "4"}
	}
	if code, _, log := call(context.Background(), dir, arguments("cpu")...); code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	fake := fakecuda.New(fakecuda.Options{})
	if code, _, log := onGPU(t, fake, dir, arguments("cuda")...); code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	instructions, flop := fake.Work()
	t.Logf("%d warp instructions, %d FLOP in products", instructions, flop)
	gates := map[string][]float64{}
	for _, device := range []string{"cpu", "cuda"} {
		text, err := os.ReadFile(filepath.Join(dir, device, "gates", "full_attention_heads.tsv"))
		if err != nil {
			t.Fatal(err)
		}
		for _, field := range strings.Fields(string(text)) {
			g, err := strconv.ParseFloat(field, 64)
			if err != nil {
				t.Fatal(err)
			}
			gates[device] = append(gates[device], g)
		}
	}
	if len(gates["cpu"]) != 4 || len(gates["cuda"]) != 4 {
		t.Fatalf("gates of cpu %v, of cuda %v", gates["cpu"], gates["cuda"])
	}
	worst := 0.
	for i, g := range gates["cpu"] {
		worst = max(worst, math.Abs(g-gates["cuda"][i]))
	}
	t.Logf("gates %v differ by at most %.2g", gates["cuda"], worst)
	if worst > 1e-2 {
		t.Errorf("gates of cpu %v, of cuda %v", gates["cpu"], gates["cuda"])
	}
	code, out, _ := call(context.Background(), dir, "diff", filepath.Join(dir, "cpu", "plan.json"), filepath.Join(dir, "cuda", "plan.json"))
	if code != exitDone { // no head of this model lies at a threshold
		t.Errorf("the plans differ, exit code %d: %s", code, out)
	}
	// And evaluating it on the GPU says what evaluating it on the CPU says.
	var logProbs [2][]float64
	evaluate := func(name string) []string {
		return []string{"eval", testdata + "llama", "--plan", filepath.Join(dir, "cpu", "plan.json"), "--tasks", "needle-grid", "--lengths", "400", "--samples", "1",
			"--texts", "1", "--extra", "0", "-o", filepath.Join(dir, name)}
	}
	if code, _, log := call(context.Background(), dir, evaluate("cpu.json")...); code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	if code, _, log := onGPU(t, fake, dir, evaluate("cuda.json")...); code != exitDone {
		t.Fatalf("exit code %d: %s", code, log)
	}
	for i, name := range []string{"cpu.json", "cuda.json"} {
		var result struct {
			Runs []struct {
				Outcomes []struct {
					LogProb float64 `json:"logprob"`
				} `json:"outcomes"`
			} `json:"runs"`
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			err = json.Unmarshal(text, &result)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range result.Runs[0].Outcomes {
			logProbs[i] = append(logProbs[i], o.LogProb)
		}
	}
	if len(logProbs[0]) == 0 || len(logProbs[0]) != len(logProbs[1]) {
		t.Fatalf("log-probabilities on the CPU %v, on the GPU %v", logProbs[0], logProbs[1])
	}
	for i, p := range logProbs[0] {
		if math.Abs(p-logProbs[1][i]) > 5e-2*math.Abs(p) {
			t.Errorf("prompt %d: log-probability on the CPU %g, on the GPU %g", i, p, logProbs[1][i])
		}
	}
	t.Logf("log-probabilities on the CPU %.4g, on the GPU %.4g", logProbs[0], logProbs[1])
}

func TestDoctorOnSimulatedGPU(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tiny.yaml"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	fake := fakecuda.New(fakecuda.Options{Count: 2})
	for _, precision := range []string{"f32", "bf16"} {
		code, out, log := onGPU(t, fake, dir, "doctor", "--precision", precision)
		if code != exitDone || !strings.Contains(out, "cuda:1 simulated GPU, compute capability 9.0") || strings.Contains(out, "WRONG") || !strings.Contains(out, "decoding over pages") {
			t.Errorf("exit code %d: %s%s", code, out, log)
		}
	}
	if code, _, log := onGPU(t, fake, dir, "doctor", "--precision", "fp4"); code != exitFailed || !strings.Contains(log, "fp4") {
		t.Errorf("precision fp4: exit code %d: %s", code, log)
	}
	// A kernel that computes something else is found out.
	fake.Reset(fakecuda.Options{Rewrite: func(ptx string) string {
		return strings.Replace(ptx, "lg2.approx.ftz.f32", "ex2.approx.ftz.f32", 1)
	}})
	if code, out, _ := onGPU(t, fake, dir, "doctor"); code != exitFindings || !strings.Contains(out, "WRONG") {
		t.Errorf("a wrong kernel: exit code %d: %s", code, out)
	}
}
