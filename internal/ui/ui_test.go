package ui

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

type clock struct{ now time.Time }

func (c *clock) time() time.Time { return c.now }

func TestPlainProgressIsRareAndComplete(t *testing.T) {
	var out, log bytes.Buffer
	c := &clock{now: time.Unix(0, 0)}
	u := New(Options{Program: "p", Out: &out, Err: &log, Now: c.time})
	task := u.Begin("profile", 100)
	for i := 0; i <= 100; i++ {
		task.Set(i, 100, "loss 0.5")
		c.now = c.now.Add(250 * time.Millisecond)
	}
	task.End(nil)
	task.End(nil)
	want := `p: profile: started
p: profile: 40/100, 10s, 15s left, loss 0.5
p: profile: 80/100, 20s, 5.00s left, loss 0.5
p: profile: done in 25s
`
	if log.String() != want || out.Len() != 0 {
		t.Errorf("progress:\n%swant:\n%s", log.String(), want)
	}
}

func TestEtaLeavesOutWorkOfAnEarlierRun(t *testing.T) {
	var log bytes.Buffer
	c := &clock{now: time.Unix(0, 0)}
	u := New(Options{Program: "p", Err: &log, Now: c.time})
	task := u.Begin("x", 100)
	task.Set(80, 100, "")
	c.now = c.now.Add(10 * time.Second)
	task.Set(90, 100, "")
	if !strings.Contains(log.String(), "90/100, 10s, 10s left") {
		t.Errorf("progress:\n%s", log.String())
	}
}

func TestBarsOnATerminal(t *testing.T) {
	var log bytes.Buffer
	u := New(Options{Program: "p", Err: &log})
	u.terminal = true // the writer is none, the bars are the same
	a := u.Begin("first", 2)
	a.Set(1, 2, "a note")
	u.Warn("look")
	a.Set(2, 2, "")
	a.End(nil)
	b := u.Begin("second", 0)
	b.End(errors.New("broken"))
	text := log.String()
	for _, want := range []string{"first", "2/2", "p: warning: look\n", "second"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	if u.progress != nil {
		t.Error("bars are still drawn after the last task")
	}
}

func TestQuietKeepsWarningsAndErrors(t *testing.T) {
	var log bytes.Buffer
	u := New(Options{Program: "p", Err: &log, Quiet: true, Verbose: true})
	task := u.Begin("x", 1)
	task.Set(1, 1, "")
	task.End(nil)
	u.Note("note")
	u.Detail("detail")
	u.Warn("ties in %d heads", 3)
	u.Error(fmt.Errorf("outer: %w", Hint(errors.New("inner"), "do %s", "that")), 1)
	if got, want := log.String(), "p: warning: ties in 3 heads\np: error: outer: inner\np: hint: do that\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestErrorAsJSON(t *testing.T) {
	var log bytes.Buffer
	New(Options{Program: "p", Err: &log, JSON: true}).Error(Hint(errors.New("a \"b\"\nc"), "h"), 11)
	var got struct {
		Error, Hint string
		Code        int `json:"exit_code"`
	}
	if err := json.Unmarshal(log.Bytes(), &got); err != nil || got.Error != "a \"b\"\nc" || got.Hint != "h" || got.Code != 11 {
		t.Errorf("%s: %v", log.String(), err)
	}
	if bytes.Count(log.Bytes(), []byte("\n")) != 1 {
		t.Error("more than one line")
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 1536: "1.50 KiB", 23592960: "22.5 MiB",
		1 << 40: "1.00 TiB", -2048: "-2.00 KiB", 200 << 20: "200 MiB"} {
		if got := Bytes(n); got != want {
			t.Errorf("Bytes(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	table := Table{Header: []string{"policy", "heads", "what"}, Left: []int{2}}
	table.Add("full", 12, "everything")
	table.Add("stream", 7, "ends")
	if err := table.Render(&out); err != nil {
		t.Fatal(err)
	}
	want := `policy  heads  what
full       12  everything
stream      7  ends
`
	if out.String() != want {
		t.Errorf("table:\n%swant:\n%s", out.String(), want)
	}
}
