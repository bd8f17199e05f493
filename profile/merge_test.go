package profile

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
)

// recordOf records samples under new ids in order.
func recordOf(t *testing.T, o Options, seed uint64, samples ...datasets.Sample) *Record {
	t.Helper()
	d := &datasets.Dataset{Meta: datasets.Meta{Task: "test", Purpose: datasets.Calibration, Seed: seed, Tokenizer: "tok"}}
	for i, s := range samples {
		s.ID, s.Seed = i, seed
		d.Samples = append(d.Samples, s)
	}
	d.Meta.ContentHash = datasets.HashSamples(d.Samples)
	mustRun(t, testModel(t), d, o)
	return mustOpen(t, o.Dir)
}

func mustOpen(t *testing.T, dir string) *Record {
	t.Helper()
	r, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// threeRecords have other grids of maps, other engines and samples with and without answers.
func threeRecords(t *testing.T) []*Record {
	t.Helper()
	root := t.TempDir()
	a := testOptions(filepath.Join(root, "a"))
	a.Grid.MapSamples, a.Grid.ExactSamples = 1, []int{1}
	b := testOptions(filepath.Join(root, "b"))
	b.Grid.MapSamples, b.Grid.ExactHeads, b.Grid.ExactSamples, b.Tool, b.ModelName = NoMaps, nil, nil, "v2", "a-name"
	c := testOptions(filepath.Join(root, "c"))
	c.Grid.MapSamples, c.Grid.ExactSamples = 4, []int{0}
	return []*Record{recordOf(t, a, 1, testSample(0, 9, 1), testSample(1, 20, 1)), recordOf(t, b, 2, plainSample(0, 17), testSample(1, 5, 2), plainSample(2, 1)),
		recordOf(t, c, 1, testSample(7, 12, 9))}
}

func mustMerge(t *testing.T, o MergeOptions, records ...*Record) (*Record, []Dropped) {
	t.Helper()
	dropped, err := Merge(t.Context(), records, o, nil)
	if err != nil {
		t.Fatal(err)
	}
	return mustOpen(t, o.Dir), dropped
}

// tree reads all files below a folder.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		out[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// sameStatistics compares all that two records hold of a sample.
func sameStatistics(t *testing.T, what string, a *Record, i int, b *Record, j int) {
	t.Helper()
	compare := func(table string, read func(r *Record, id int) (any, error)) {
		t.Helper()
		x, err := read(a, i)
		if err != nil {
			t.Fatal(err)
		}
		y, err := read(b, j)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(x, y) {
			t.Errorf("%s: %s differ", what, table)
		}
	}
	compare("samples", func(r *Record, id int) (any, error) {
		s := r.Samples()[id]
		s.ID = 0
		return s, nil
	})
	compare("heads", func(r *Record, id int) (any, error) { return r.Heads(id) })
	for l := range a.Meta().Model.Layers {
		compare("columns", func(r *Record, id int) (any, error) { return r.Columns(id, l) })
	}
	compare("maps", func(r *Record, id int) (any, error) { return r.Maps(id) })
	compare("exact maps", func(r *Record, id int) (any, error) { return r.ExactMaps(id) })
}

func TestMergeKeepsEveryNumber(t *testing.T) {
	in := threeRecords(t)
	root := t.TempDir()
	m, dropped := mustMerge(t, MergeOptions{Dir: filepath.Join(root, "m")}, in...)
	meta := m.Meta()
	if len(dropped) != 0 || meta.Dataset.Samples != 6 || meta.Tool != "v1 + v2" || meta.Model.Name != "a-name" || meta.Dataset.Seed != 0 ||
		meta.Dataset.Task != "test" || meta.Dataset.Purpose != "calibration" {
		t.Errorf("%+v, dropped %v", meta, dropped)
	}
	// Of a the first sample, of c the only one have pooled maps; of a the second, of c the first exact ones.
	if meta.Grid.MapSamples != 2 || len(meta.Grid.ExactSamples) != 2 || len(meta.Grid.ExactHeads) != 2 {
		t.Errorf("grid %+v", meta.Grid)
	}
	found := 0
	for id, s := range m.Samples() {
		if s.ID != id {
			t.Errorf("sample %d says that it is %d", id, s.ID)
		}
		for _, r := range in {
			for j, x := range r.Samples() {
				if slices.Equal(x.Tokens, s.Tokens) {
					found++
					sameStatistics(t, Origin{r.Dir, j}.String(), m, id, r, j)
				}
			}
		}
	}
	if found != 6 {
		t.Errorf("%d of 6 samples are there", found)
	}

	// Neither the order of the records nor merging in two steps changes a byte.
	want := tree(t, m.Dir)
	for i, order := range [][]*Record{{in[2], in[0], in[1]}, {in[1], in[2], in[0]}, {in[2], in[1], in[0]}} {
		other, _ := mustMerge(t, MergeOptions{Dir: filepath.Join(root, string(rune('n'+i)))}, order...)
		if !reflect.DeepEqual(tree(t, other.Dir), want) {
			t.Errorf("order %d gives another record", i)
		}
	}
	ab, _ := mustMerge(t, MergeOptions{Dir: filepath.Join(root, "ab")}, in[1], in[0])
	abc, _ := mustMerge(t, MergeOptions{Dir: filepath.Join(root, "abc")}, in[2], ab)
	if !reflect.DeepEqual(tree(t, abc.Dir), want) {
		t.Error("merging in two steps gives another record")
	}
	if left, err := filepath.Glob(filepath.Join(root, ".*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}

func TestMergeDuplicates(t *testing.T) {
	root := t.TempDir()
	bare, mapped := testOptions(filepath.Join(root, "bare")), testOptions(filepath.Join(root, "mapped"))
	bare.Grid.MapSamples, bare.Grid.ExactHeads, bare.Grid.ExactSamples = NoMaps, nil, nil
	mapped.Grid.ExactSamples = []int{0}
	a := recordOf(t, bare, 1, testSample(0, 9, 1), testSample(1, 20, 1))
	b := recordOf(t, mapped, 5, testSample(1, 20, 1), plainSample(2, 17))
	var twice *DuplicateError
	if _, err := Merge(t.Context(), []*Record{a, b}, MergeOptions{Dir: filepath.Join(root, "no")}, nil); !errors.As(err, &twice) {
		t.Errorf("the same sample twice: %v", err)
	}
	x, dropped := mustMerge(t, MergeOptions{Dir: filepath.Join(root, "x"), DropDuplicates: true}, a, b)
	y, again := mustMerge(t, MergeOptions{Dir: filepath.Join(root, "y"), DropDuplicates: true}, b, a)
	want := []Dropped{{Origin{a.Dir, 1}, Origin{b.Dir, 0}}} // the one with maps stays
	if !reflect.DeepEqual(dropped, want) || !reflect.DeepEqual(again, want) {
		t.Errorf("dropped %v and %v, want %v", dropped, again, want)
	}
	if len(x.Samples()) != 3 || !reflect.DeepEqual(tree(t, x.Dir), tree(t, y.Dir)) {
		t.Errorf("%d samples; the order of the records counts", len(x.Samples()))
	}
	// Without maps the digest decides, whatever the order.
	c := testOptions(filepath.Join(root, "c"))
	c.Grid, c.Tool = bare.Grid, "v9"
	d := recordOf(t, c, 1, testSample(0, 9, 1))
	low := a
	da, _ := a.Digest()
	dd, _ := d.Digest()
	if dd < da {
		low = d
	}
	for i, order := range [][]*Record{{a, d}, {d, a}} {
		_, dropped := mustMerge(t, MergeOptions{Dir: filepath.Join(root, string(rune('p'+i))), DropDuplicates: true}, order...)
		if len(dropped) != 1 || dropped[0].Stays.Dir != low.Dir {
			t.Errorf("dropped %v, the record with the lowest digest is %s", dropped, low.Dir)
		}
	}
}

func TestMergeRefuses(t *testing.T) {
	root := t.TempDir()
	o := testOptions(filepath.Join(root, "a"))
	a := recordOf(t, o, 1, testSample(0, 9, 1), plainSample(1, 4), plainSample(2, 5))
	for i, c := range []struct {
		what   string
		change func(m *Meta)
	}{
		{"model.sha256.weights", func(m *Meta) { m.Model.SHA256 = map[string]string{"weights": "other", "config": "c"} }},
		{"model.layers", func(m *Meta) { m.Model.Layers++ }},
		{"dataset.purpose", func(m *Meta) { m.Dataset.Purpose = "search" }},
		{"dataset.tokenizer", func(m *Meta) { m.Dataset.Tokenizer = "other" }},
		{"grid.windows", func(m *Meta) { m.Grid.Windows = []int{4, 8} }},
		{"grid.map_size", func(m *Meta) { m.Grid.MapSize = 4 }},
		{"grid.exact_heads", func(m *Meta) { m.Grid.ExactHeads = []Head{{0, 1}} }},
	} {
		b := *a
		c.change(&b.meta)
		for _, records := range [][]*Record{{a, &b}, {&b, a}} {
			to := filepath.Join(root, "to")
			_, err := Merge(t.Context(), records, MergeOptions{Dir: to}, nil)
			var mixed *MergeError
			if !errors.As(err, &mixed) || mixed.What != c.what {
				t.Errorf("case %d: %v, want a difference in %s", i, err, c.what)
			}
			if _, err := os.Stat(to); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("case %d: something was written", i)
			}
		}
	}
	if _, err := Merge(t.Context(), nil, MergeOptions{Dir: filepath.Join(root, "to")}, nil); err == nil {
		t.Error("no records: no error")
	}

	// What is there stays, unless it is to be replaced.
	p := testOptions(filepath.Join(root, "p"))
	b := recordOf(t, p, 1, testSample(0, 12, 3), testSample(1, 3, 3), plainSample(2, 3))
	to := filepath.Join(root, "there")
	if err := os.CopyFS(to, os.DirFS(a.Dir)); err != nil {
		t.Fatal(err)
	}
	before := tree(t, to)
	if _, err := Merge(t.Context(), []*Record{a, b}, MergeOptions{Dir: to}, nil); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a folder that is there: %v", err)
	}
	// A run that is stopped, or that finds damage, leaves nothing behind.
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Merge(ctx, []*Record{a, b}, MergeOptions{Dir: to, Replace: true}, func(Progress) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("stopped: %v", err)
	}
	damaged := filepath.Join(root, "damaged")
	if err := os.CopyFS(damaged, os.DirFS(b.Dir)); err != nil {
		t.Fatal(err)
	}
	open := mustOpen(t, damaged)
	if err := os.Truncate(partName(damaged, tableColumns, 1), 500); err != nil {
		t.Fatal(err)
	}
	var part *PartError
	if _, err := Merge(t.Context(), []*Record{a, open}, MergeOptions{Dir: to, Replace: true}, nil); !errors.As(err, &part) {
		t.Errorf("damage: %v", err)
	}
	if !reflect.DeepEqual(tree(t, to), before) {
		t.Error("the record changed")
	}
	if left, err := filepath.Glob(filepath.Join(root, ".*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
	m, _ := mustMerge(t, MergeOptions{Dir: to, Replace: true}, a, b)
	if len(m.Samples()) != 6 {
		t.Errorf("%d samples", len(m.Samples()))
	}
	if left, err := filepath.Glob(filepath.Join(root, ".*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
