package main

import (
	"encoding/json"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvprofile/kvprofile/plan"
)

const reference = "../../out/reference/smollm2-135m-instruct/plan.json"

// modelOf is what a server of the plan's model knows.
func modelOf(t *testing.T, path string) plan.Model {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return p.Model
}

func TestStart(t *testing.T) {
	model := modelOf(t, reference)
	card, err := json.Marshal(map[string]any{"format": "kvprofile.model", "version": 1, "model": model})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "model.json")
	if err := os.WriteFile(path, card, 0o644); err != nil {
		t.Fatal(err)
	}
	read, err := readModel(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := start(reference, plan.Want{Model: read}, "", 1<<30); err != nil {
		t.Error(err)
	}
	other := read
	other.NLayers++
	if _, err := start(reference, plan.Want{Model: other}, "", 1<<30); !errors.Is(err, plan.ErrModel) {
		t.Errorf("another model: %v", err)
	}
	if _, err := start(reference, plan.Want{Model: read}, "int3", 1<<30); err == nil {
		t.Error("an unknown type: no error")
	}
	if _, err := start(reference, plan.Want{Model: read}, "", 100); err == nil {
		t.Error("no memory: no error")
	}
	every := "../../plan/testdata/valid/every-kind.json"
	if _, err := start(every, plan.Want{Model: modelOf(t, every)}, "", 1<<30); err == nil || !strings.Contains(err.Error(), "this server has no") {
		t.Errorf("a kind that it cannot do: %v", err)
	}
	if _, err := readModel(reference + ".missing"); err == nil {
		t.Error("no model: no error")
	}
}

// The pool holds as many sequences as the plan's totals promise, and no more are let in, whoever asks at the same time.
func TestAdmit(t *testing.T) {
	model := modelOf(t, reference)
	s, err := start(reference, plan.Want{Model: model}, "", 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	total := s.plan.Totals[2]
	bytes := max(total.KeptBytes, total.PeakPrefillBytes)
	want := (int64(1<<30) / 4096) / (bytes / 4096) // a block: 16 tokens of 2 * 64 elements of 2 bytes
	if s.blockBytes() != 4096 || s.blocks != 1<<30/4096 || bytes%4096 != 0 {
		t.Fatalf("%d blocks of %d bytes", s.blocks, s.blockBytes())
	}
	var admitted atomic.Int64
	var wg sync.WaitGroup
	releases := make(chan func(), 1000)
	for range 200 {
		wg.Go(func() {
			release, err := s.admit(total.PromptTokens, total.GeneratedTokens)
			switch {
			case err == nil:
				admitted.Add(1)
				releases <- release
			case !errors.Is(err, errBusy):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	close(releases)
	if admitted.Load() != want || want < 1 || want >= 200 {
		t.Errorf("%d sequences were let in, want %d", admitted.Load(), want)
	}
	for release := range releases {
		release()
		release() // once is enough
	}
	if s.reserved != 0 {
		t.Errorf("%d blocks stay reserved", s.reserved)
	}
}

func TestCapacity(t *testing.T) {
	s, err := start(reference, plan.Want{Model: modelOf(t, reference)}, plan.FP8E4M3, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	get := func(query string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest("GET", query, nil))
		return w
	}
	w := get("/capacity?prompt=4096&generate=0")
	var got map[string]int64
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	total := s.plan.Totals[2] // 4096 tokens, in two bytes an element
	if got["bytes"] != total.KeptBytes/2 || got["full_bytes"] != total.FullBytes/2 || got["sequences"] <= got["sequences_full"] {
		t.Errorf("%v, the plan says %+v", got, total)
	}
	for _, bad := range []string{"/", "/capacity", "/capacity?prompt=0&generate=1", "/capacity?prompt=9&generate=-1", "/capacity?prompt=999999999999&generate=1"} {
		if w := get(bad); w.Code != 400 {
			t.Errorf("%s: status %d", bad, w.Code)
		}
	}
}
