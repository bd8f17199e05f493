package profile

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
)

// FuzzPart reads any bytes as a part of each table: an error or sound values, never a panic.
func FuzzPart(f *testing.F) {
	dir := f.TempDir()
	cfg := enginetest.Tiny()
	d := &datasets.Dataset{Samples: []datasets.Sample{plainSample(0, 5)}}
	d.Meta.ContentHash = datasets.HashSamples(d.Samples)
	o := testOptions(dir)
	o.Grid.ExactHeads, o.Grid.ExactSamples = []Head{{0, 1}}, []int{0}
	if err := Run(f.Context(), testModel(f), d, testClasses{}, o, nil); err != nil {
		f.Fatal(err)
	}
	tables := []string{tableSamples, tableHeads, tableColumns, tableMaps}
	for i, t := range tables {
		b, err := os.ReadFile(partName(dir, t, 0))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, i)
	}
	f.Add([]byte("PAR1\x00\x00\x00\x00PAR1"), 0)
	f.Fuzz(func(t *testing.T, b []byte, table int) {
		if table < 0 || table >= len(tables) {
			t.Skip()
		}
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(o.Dir)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, tables[table], "part-00000.parquet"), b, 0o644); err != nil {
			t.Fatal(err)
		}
		rec, err := Open(dir)
		if err != nil {
			return
		}
		heads, err := rec.Heads(0)
		if err == nil && len(heads) != cfg.Layers*cfg.Heads {
			t.Errorf("%d heads", len(heads))
		}
		for l := range cfg.Layers {
			columns, err := rec.Columns(0, l)
			if err == nil && (len(columns) != cfg.Heads || len(columns[0].Total) != rec.Samples()[0].Prompt) {
				t.Errorf("%d columns of %d tokens", len(columns), len(columns[0].Total))
			}
		}
		if _, err := rec.Maps(0); err == nil {
			if _, err := rec.ExactMaps(0); err != nil {
				t.Logf("exact maps: %v", err)
			}
		}
	})
}
