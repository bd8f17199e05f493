package eval

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

var update = flag.Bool("update", false, "write the expected tables and pages in testdata anew")

// golden compares with a file in testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs; go test -update writes it anew. It is now:\n%s", name, got)
	}
}

func fits(t *testing.T, text []byte) {
	t.Helper()
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if utf8.RuneCountInString(line) > lineWidth || strings.TrimRight(line, " ") != line {
			t.Errorf("too wide, or with blanks at its end: %q", line)
		}
	}
}

func TestPlanTable(t *testing.T) {
	r := synthetic()
	var out bytes.Buffer
	if err := r.PlanTable(&out, r.Find("snapkv", 0.25)); err != nil {
		t.Fatal(err)
	}
	fits(t, out.Bytes())
	golden(t, "plan.txt", out.Bytes())
}

func TestComparisonTable(t *testing.T) {
	r := synthetic()
	for i := range r.Runs { // one keeps too much, one is missing
		if x := &r.Runs[i]; x.Name == "window" && x.Budget == 0.5 {
			for j := range x.Outcomes {
				x.Outcomes[j].Bytes = x.Outcomes[j].FullBytes * 6 / 10
			}
		}
	}
	r.Runs = slices.DeleteFunc(r.Runs, func(x Run) bool { return x.Name == "streaming-llm" && x.Budget == 0.125 })
	var out bytes.Buffer
	if err := r.ComparisonTable(&out); err != nil {
		t.Fatal(err)
	}
	fits(t, out.Bytes())
	golden(t, "comparison.txt", out.Bytes())
}

// TestTablesOfLittle: results without right answers, prompts, texts or runs are shown too.
func TestTablesOfLittle(t *testing.T) {
	r := synthetic()
	for i := range r.Full.Outcomes {
		r.Full.Outcomes[i].Right, r.Full.Outcomes[i].Share = false, 0
	}
	text := func(r *Result) string {
		t.Helper()
		var out bytes.Buffer
		if err := r.ComparisonTable(&out); err != nil {
			t.Fatal(err)
		}
		if len(r.Runs) > 0 {
			if err := r.PlanTable(&out, &r.Runs[0]); err != nil {
				t.Fatal(err)
			}
		}
		fits(t, out.Bytes())
		return out.String()
	}
	got := text(r)
	for _, want := range []string{"none of 80 prompts right", "best is steady (highest log-probability of the right answers)"} {
		if !strings.Contains(strings.Join(strings.Fields(got), " "), want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	r = synthetic()
	r.Full.Texts = nil
	for i := range r.Runs {
		r.Runs[i].Texts = nil
	}
	if got := text(r); strings.Contains(got, "perplexity") {
		t.Errorf("perplexity of nothing:\n%s", got)
	}
	r = synthetic()
	r.Full.Outcomes = nil
	for i := range r.Runs {
		r.Runs[i].Outcomes = nil
	}
	if got := text(r); strings.Contains(got, "retention") || !strings.Contains(got, "perplexity") {
		t.Errorf("of texts alone:\n%s", got)
	}
	r.Runs = nil
	text(r)
}

func TestTableErrors(t *testing.T) {
	r := synthetic()
	full := errors.New("disk full")
	for _, after := range []int{0, 1, 3, 5, 8} {
		w := &failing{after, full}
		if err := r.ComparisonTable(w); !errors.Is(err, full) {
			t.Errorf("%v", err)
		}
	}
	if err := r.PlanTable(&failing{0, full}, &r.Runs[0]); !errors.Is(err, full) {
		t.Errorf("%v", err)
	}
}

type failing struct {
	writes int
	err    error
}

func (f *failing) Write(b []byte) (int, error) {
	if f.writes--; f.writes < 0 {
		return 0, f.err
	}
	return len(b), nil
}

func TestRank(t *testing.T) {
	r := synthetic()
	k, err := r.Rank(0.25)
	if err != nil {
		t.Fatal(err)
	}
	if !k.ByRight || k.Best.Name != "steady" || names(k.Behind) != "streaming-llm, window" && names(k.Behind) != "snapkv, streaming-llm, window" || len(k.Close)+len(k.Behind) != 3 {
		t.Errorf("%+v", k)
	}
	// A copy of the best is close to it, and the one with fewer bytes is the best.
	twin := *k.Best
	twin.Name = "twin"
	twin.Outcomes = slices.Clone(twin.Outcomes)
	twin.Outcomes[0].Bytes--
	r.Runs = append(r.Runs, twin)
	if k, err = r.Rank(0.25); err != nil || k.Best.Name != "twin" || names(k.Close[:1]) != "steady" {
		t.Errorf("%+v, %v", k, err)
	}
	// What keeps too much is not ranked.
	last := &r.Runs[len(r.Runs)-1]
	for i := range last.Outcomes {
		last.Outcomes[i].Bytes = last.Outcomes[i].FullBytes
	}
	if k, err = r.Rank(0.25); err != nil || k.Best.Name != "steady" || names(k.Over) != "twin" {
		t.Errorf("%+v, %v", k, err)
	}
	if k, err = r.Rank(0.99); err != nil || k.Best != nil {
		t.Errorf("a rank of nothing: %+v, %v", k, err)
	}
}

func TestNumbers(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{share(1), "100.0"}, {share(0.9999), "99.9"}, {share(0.3), "30.0"}, {share(0), "0.0"}, {share(0.29), "29.0"}, {share(2.0 / 3), "66.6"},
		{decimal(-0.0001), "0.000"}, {decimal(0.0005), "0.001"}, {decimal(-12.345), "-12.35"}, {decimal(123.45), "123.5"}, {decimal(-1.2), "-1.200"},
		{perplexity(12.345), "12.35"}, {perplexity(123.45), "123.5"}, {perplexity(12345), "12345"}, {perplexity(1.5e9), "1.5e+09"},
		{pValue(0.00049), "< 0.001"}, {pValue(0.0312), "= 0.031"}, {pValue(0.5), "= 0.50"}, {pValue(1), "= 1.00"},
		{percent(0.125), "12.5 %"}, {percent(0.5), "50 %"}, {percent(0.07), "7 %"}, {budgetName(0), "given plans"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
