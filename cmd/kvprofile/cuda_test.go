//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine/cuda"
	"github.com/kvprofile/kvprofile/internal/engine/cuda/fakecuda"
	"github.com/kvprofile/kvprofile/internal/run"
)

// onGPU runs the command on a machine with a simulated GPU.
func onGPU(t *testing.T, fake *fakecuda.Driver, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	code, stdout, stderr = onGPUs(t, fake, dir, "cuda", args...)
	if err := fake.Err(); err != nil {
		t.Error(err)
	}
	return code, stdout, stderr
}

// onGPUs runs the command on some of a machine's simulated GPUs, which may fail.
func onGPUs(t *testing.T, fake *fakecuda.Driver, dir, device string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, log bytes.Buffer
	a := &app{libraries: func(string) (cuda.Symbols, error) {
		return func(_ cuda.Library, name string) (uintptr, error) { return fake.Symbol(name) }, nil
	}}
	env := []string{"KVPROFILE_CONFIG=" + filepath.Join(dir, "tiny.yaml")}
	code = a.main(context.Background(), append(args, "--device", device), strings.NewReader(""), &out, &log, env)
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

// Two and three GPUs come to the bytes of one: record, gates, plan and evaluation.
func TestSeveralGPUsComeToTheBytesOfOne(t *testing.T) {
	if testing.Short() {
		t.Skip("simulating GPUs takes a while")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tiny.yaml"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	machines := []struct {
		device string
		gpus   int
		made   map[string]string
	}{{device: "cuda:0", gpus: 1}, {device: "cuda:all", gpus: 2}, {device: "cuda:2,0,1", gpus: 3}}
	t.Run("machines", func(t *testing.T) {
		for i := range machines {
			c := &machines[i]
			t.Run(c.device, func(t *testing.T) {
				t.Parallel()
				fake, out := fakecuda.New(fakecuda.Options{Count: c.gpus}), filepath.Join(dir, strings.NewReplacer(":", "-", ",", "-").Replace(c.device))
				for _, args := range [][]string{
					{"run", testdata + "llama", "-o", out, "--lengths", "380", "--depths", "0.2,0.8", "--train-lengths", "380", "--count", "3", "--passkeys", "1", "--words", "1",
						"--train-sink", "4", "--train-recent", "16", "--learning-rate", "0.9", "--steps", "1", "--train-batch", "3", "--allow-low-rate"},
					{"eval", testdata + "llama", "--plan", filepath.Join(out, "plan.json"), "--tasks", "needle-grid", "--lengths", "380", "--samples", "1", "--texts", "1", "--extra", "0",
						"-o", filepath.Join(out, "eval.json")},
				} {
					if code, _, log := onGPUs(t, fake, dir, c.device, args...); code != exitDone {
						t.Fatalf("exit code %d: %s", code, log)
					}
					if err := fake.Err(); err != nil {
						t.Error(err)
					}
				}
				if n := fake.Calls("cuDevicePrimaryCtxRetain"); n != 2*c.gpus {
					t.Errorf("%d GPUs were opened in two commands, want %d", n, 2*c.gpus)
				}
				c.made = filesBelow(t, out)
			})
		}
	})
	for _, c := range machines {
		for name, text := range machines[0].made {
			// The report says when and on what it was made.
			if c.made[name] != text && filepath.Base(name) != reportFile {
				t.Errorf("%s: %s differs from that of one GPU", c.device, name)
			}
		}
		if len(c.made) != len(machines[0].made) || len(c.made) < 20 {
			t.Errorf("%s: %d files, one GPU made %d", c.device, len(c.made), len(machines[0].made))
		}
	}
}

// filesBelow reads all files of a run folder but run.json, which has times, and the lock.
func filesBelow(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == run.ManifestName || d.Name() == ".lock" {
			return err
		}
		text, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// A GPU that fails ends the command with an error that says which one it was; nothing hangs and nothing of the others stays behind.
func TestOneOfSeveralGPUsFails(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tiny.yaml"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	fake := fakecuda.New(fakecuda.Options{})
	dataset := filepath.Join(dir, "train.parquet")
	if code, _, log := call(context.Background(), dir, "datasets", "build", testdata+"llama", "--task", "passkeys", "--lengths", "380", "--count", "3", "--passkeys", "1", "--words", "1", "-o", dataset); code != exitDone {
		t.Fatal(log)
	}
	for name, args := range map[string][]string{
		"profile": {"profile", testdata + "llama", "--dataset", dataset},
		"distill": {"distill", testdata + "llama", "--dataset", dataset, "--train-sink", "4", "--train-recent", "16", "--steps", "3", "--batch", "3", "--allow-low-rate"},
	} {
		fake.Reset(fakecuda.Options{Count: 3})
		fake.Break(1, 40)
		code, _, log := onGPUs(t, fake, dir, "cuda:all", append(args, "-o", filepath.Join(dir, name))...)
		if code != exitFailed || !strings.Contains(log, "cuda:1: ") || !strings.Contains(log, "CUDA_ERROR_ILLEGAL_ADDRESS") {
			t.Errorf("%s: exit code %d: %s", name, code, log)
		}
	}
	for device, want := range map[string]string{"cuda:0,3": "cuda:3", "cuda:0,0": "unknown device", "cuda:": "unknown device", "cuda:all,1": "unknown device", "cuda:1,-1": "unknown device"} {
		fake.Reset(fakecuda.Options{Count: 3})
		if code, _, log := onGPUs(t, fake, dir, device, "profile", testdata+"llama", "--dataset", dataset, "-o", filepath.Join(dir, "x")); code != exitFailed || !strings.Contains(log, want) {
			t.Errorf("%s: exit code %d: %s", device, code, log)
		}
	}
}

// A dry run says for every GPU what of the weights stays and what is streamed, how much of a stage goes to the host, and what does not fit.
func TestDryRunOnSmallGPUs(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tiny.yaml"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	fake := fakecuda.New(fakecuda.Options{})
	type estimate struct {
		GPUs []struct {
			Device   string `json:"device"`
			Free     int64  `json:"free_bytes"`
			Weights  int64  `json:"weight_bytes"`
			Streamed int64  `json:"streamed_bytes"`
		} `json:"gpus"`
		Stages []struct {
			Stage   string `json:"stage"`
			Memory  int64  `json:"memory_bytes"`
			Spilled int64  `json:"spilled_bytes"`
		} `json:"stages"`
	}
	look := func(memory int64, tokens string) (e estimate, log string) {
		fake.Reset(fakecuda.Options{Count: 2, Memory: memory})
		code, out, log := onGPUs(t, fake, dir, "cuda:all", "run", testdata+"llama", "--train-lengths", tokens, "--dry-run", "--json")
		if code != exitDone {
			t.Fatalf("%d bytes: exit code %d: %s", memory, code, log)
		}
		if err := json.Unmarshal([]byte(out), &e); err != nil {
			t.Fatal(err)
		}
		return e, log
	}
	distill := func(e estimate) (memory, spilled int64) {
		for _, s := range e.Stages {
			if s.Stage == "distill" {
				memory, spilled = s.Memory, s.Spilled
			}
		}
		return memory, spilled
	}
	all, log := look(1<<30, "1500")
	memory, spilled := distill(all)
	if len(all.GPUs) != 2 || all.GPUs[1].Device != "cuda:1" || all.GPUs[0].Streamed != 0 || all.GPUs[0].Free != 1<<30 || spilled != 0 || strings.Contains(log, "will not fit") {
		t.Errorf("of large GPUs: %+v, %s", all, log)
	}
	// A byte less than the training needs is a byte on the host.
	if less, log := look(memory-1, "1500"); less.GPUs[0].Streamed != 0 || strings.Contains(log, "will not fit") {
		t.Errorf("of smaller GPUs: %+v, %s", less, log)
	} else if _, spilled := distill(less); spilled != 1 {
		t.Errorf("%d bytes on the host, want 1", spilled)
	}
	if _, log := look(64<<20, "100000"); !strings.Contains(log, "distill: cuda:1 has 64.0 MiB of memory free: this will not fit") || strings.Contains(log, "profile: cuda") {
		t.Errorf("of small GPUs: %s", log)
	}
	g := gpuRoom{Free: 100, Weights: 75, Streamed: 25}
	for _, c := range []struct {
		memory, spill, spilled int64
		fits                   bool
	}{{25, 25, 0, true}, {26, 25, 1, true}, {50, 25, 25, true}, {51, 25, 25, false}, {26, 0, 0, false}} {
		if spilled, fits := g.split(cost{memory: c.memory, spill: c.spill}); spilled != c.spilled || fits != c.fits {
			t.Errorf("%+v: %d bytes on the host, fits: %t", c, spilled, fits)
		}
	}
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
