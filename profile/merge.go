package profile

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// MergeOptions of Merge.
type MergeOptions struct {
	Dir string // of the new record
	// Replace puts the new record in the place of what is there; without it that is an error, fs.ErrExist.
	Replace bool
	// DropDuplicates keeps one of the samples that have the same tokens and spans, instead of refusing them: one with
	// maps if there is one, then that of the record with the lowest digest, then the one with the lowest id.
	DropDuplicates bool
}

// Origin is a sample of a record.
type Origin struct {
	Dir    string `json:"record"`
	Sample int    `json:"sample"`
}

// String names the sample for messages.
func (o Origin) String() string { return fmt.Sprintf("sample %d of %s", o.Sample, o.Dir) }

// Dropped says which sample was left out, and which equal one stayed.
type Dropped struct {
	Sample Origin `json:"sample"`
	Stays  Origin `json:"stays"`
}

// MergeError says why two records cannot be one.
type MergeError struct {
	Dir, Other string
	// What names the first field of Meta that differs, as in its JSON; Have is in Dir, Want in Other.
	What, Have, Want string
}

func (e *MergeError) Error() string {
	return fmt.Sprintf("%s and %s cannot be merged: %s is %s in the first and %s in the second", e.Dir, e.Other, e.What, e.Have, e.Want)
}

// DuplicateError says that two records have the same sample.
type DuplicateError struct{ A, B Origin }

func (e *DuplicateError) Error() string {
	return fmt.Sprintf("%s and %s are the same", e.A, e.B)
}

// Merge writes one record of the samples of several. They must be of one model (its name aside), one tokenizer, one
// purpose and one grid (the choice of samples with maps aside); engine and program may differ, and the new record names
// all of them. The order of the records does not matter: samples with pooled maps come first, as a record has them, then
// the order is that of task, seed, number of tokens, and a hash of tokens and spans. The record appears whole or not at
// all. progress may be nil.
//
// Errors: *MergeError, *DuplicateError, fs.ErrExist, and those of reading and writing.
func Merge(ctx context.Context, records []*Record, o MergeOptions, progress func(Progress)) ([]Dropped, error) {
	if len(records) == 0 {
		return nil, &OptionError{"records", "there is none to merge"}
	}
	if _, err := os.Lstat(o.Dir); err == nil && !o.Replace {
		return nil, fmt.Errorf("%s: %w", o.Dir, fs.ErrExist)
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, r := range records[1:] {
		if err := mergeable(r, records[0]); err != nil {
			return nil, err
		}
	}
	samples, dropped, err := distinct(records, o.DropDuplicates)
	if err != nil {
		return nil, err
	}
	meta := mergedMeta(records, samples)
	if err := meta.check(); err != nil {
		return nil, fmt.Errorf("merge: %w", err)
	}
	if progress == nil {
		progress = func(Progress) {}
	}
	dir, err := os.MkdirTemp(filepath.Dir(o.Dir), "."+filepath.Base(o.Dir)+tempMark+"*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	for _, t := range []string{tableMaps, tableColumns, tableHeads, tableSamples} {
		if err := os.Mkdir(filepath.Join(dir, t), 0o777); err != nil {
			return nil, err
		}
	}
	for id, s := range samples {
		m := merger{ctx: ctx, dir: dir, meta: meta, id: id, from: s, progress: progress}
		if err := m.write(); err != nil {
			return nil, fmt.Errorf("%s: %w", s.origin(), err)
		}
	}
	if _, err := Open(dir); err != nil {
		return nil, fmt.Errorf("merge: %w", err)
	}
	return dropped, put(dir, o.Dir, o.Replace)
}

// mergeable compares what must be the same in two records.
func mergeable(r, with *Record) error {
	have, want := r.meta, with.meta
	have.Tool, have.Engine, have.Model.Name = want.Tool, want.Engine, want.Model.Name
	d := want.Dataset
	d.Purpose, d.Tokenizer = have.Dataset.Purpose, have.Dataset.Tokenizer
	have.Dataset = d
	have.Grid.MapSamples, have.Grid.ExactSamples = want.Grid.MapSamples, want.Grid.ExactSamples
	// Exact maps of some records only are no contradiction.
	switch {
	case len(have.Grid.ExactHeads) == 0:
		have.Grid.ExactHeads = want.Grid.ExactHeads
	case len(want.Grid.ExactHeads) == 0:
		want.Grid.ExactHeads = have.Grid.ExactHeads
	}
	if what, h, w := difference(have, want); what != "" {
		return &MergeError{r.Dir, with.Dir, what, h, w}
	}
	return nil
}

// merging is a sample to be merged.
type merging struct {
	record        *Record
	sample        *Sample
	mapped, exact bool // has pooled maps, exact maps
	key           [sha256.Size]byte
}

func (m *merging) origin() Origin { return Origin{m.record.Dir, m.sample.ID} }

// distinct lists the samples of all records in their new order.
func distinct(records []*Record, drop bool) (samples []*merging, dropped []Dropped, err error) {
	digests := map[*Record]string{}
	for _, r := range records {
		g := r.meta.Grid
		if drop {
			if digests[r], err = r.Digest(); err != nil {
				return nil, nil, err
			}
		}
		for i := range r.samples {
			s := &r.samples[i]
			samples = append(samples, &merging{record: r, sample: s, mapped: s.ID < g.MapSamples,
				exact: len(g.ExactHeads) > 0 && slices.Contains(g.ExactSamples, s.ID), key: sampleKey(s)})
		}
	}
	first := func(yes, also bool) int {
		switch {
		case yes == also:
			return 0
		case yes:
			return -1
		}
		return 1
	}
	slices.SortStableFunc(samples, func(a, b *merging) int {
		return cmp.Or(bytes.Compare(a.key[:], b.key[:]), first(a.mapped, b.mapped), first(a.exact, b.exact),
			cmp.Compare(digests[a.record], digests[b.record]), cmp.Compare(a.sample.ID, b.sample.ID))
	})
	kept := samples[:0]
	for _, s := range samples {
		if n := len(kept); n > 0 && kept[n-1].key == s.key {
			if !drop {
				return nil, nil, &DuplicateError{kept[n-1].origin(), s.origin()}
			}
			dropped = append(dropped, Dropped{s.origin(), kept[n-1].origin()})
			continue
		}
		kept = append(kept, s)
	}
	slices.SortFunc(dropped, func(a, b Dropped) int {
		return cmp.Or(strings.Compare(a.Sample.Dir, b.Sample.Dir), cmp.Compare(a.Sample.Sample, b.Sample.Sample))
	})
	slices.SortFunc(kept, func(a, b *merging) int {
		return cmp.Or(first(a.mapped, b.mapped), cmp.Compare(a.sample.Task, b.sample.Task), cmp.Compare(a.sample.Seed, b.sample.Seed),
			cmp.Compare(len(a.sample.Tokens), len(b.sample.Tokens)), bytes.Compare(a.key[:], b.key[:]))
	})
	return kept, dropped, nil
}

// sampleKey hashes what a sample is: its tokens and spans.
func sampleKey(s *Sample) (key [sha256.Size]byte) {
	h := sha256.New()
	var b []byte
	for _, t := range s.Tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(s.Tokens))))
	h.Write(b)
	for _, sp := range s.Spans {
		fmt.Fprintf(h, "%s %d %d %d\n", sp.Kind, sp.Index, sp.Start, sp.End)
	}
	h.Sum(key[:0])
	return key
}

// mergedMeta describes the new record.
func mergedMeta(records []*Record, samples []*merging) Meta {
	meta := records[0].meta
	var tools, engines, names, tasks []string
	for _, r := range records {
		tools = append(tools, strings.Split(r.meta.Tool, nameSeparator)...)
		engines = append(engines, strings.Split(r.meta.Engine, nameSeparator)...)
		names = append(names, r.meta.Model.Name)
		if len(r.meta.Grid.ExactHeads) > 0 {
			meta.Grid.ExactHeads = r.meta.Grid.ExactHeads
		}
	}
	all := sha256.New()
	meta.Grid.MapSamples, meta.Grid.ExactSamples = 0, nil
	meta.Dataset.Seed, meta.Dataset.Samples = samples[0].sample.Seed, len(samples)
	for id, s := range samples {
		tasks = append(tasks, s.sample.Task)
		if s.sample.Seed != samples[0].sample.Seed {
			meta.Dataset.Seed = 0 // several: each sample has its own
		}
		if s.mapped {
			meta.Grid.MapSamples = id + 1
		}
		if s.exact {
			meta.Grid.ExactSamples = append(meta.Grid.ExactSamples, id)
		}
		all.Write(s.key[:])
	}
	if meta.Grid.ExactSamples == nil {
		meta.Grid.ExactHeads = nil
	}
	meta.Tool, meta.Engine, meta.Dataset.Task = joined(tools), joined(engines), joined(tasks)
	meta.Model.Name = slices.Min(names)
	meta.Dataset.Hash = hex.EncodeToString(all.Sum(nil))
	return meta
}

// nameSeparator stands between the names of several programs, engines or tasks.
const nameSeparator = " + "

func joined(names []string) string {
	slices.Sort(names)
	return strings.Join(slices.Compact(names), nameSeparator)
}

// merger writes one sample of a merged record.
type merger struct {
	ctx      context.Context
	dir      string
	meta     Meta
	id       int
	from     *merging
	progress func(Progress)
}

func (m *merger) write() (err error) {
	for _, write := range []func() error{m.maps, m.columns, m.heads, m.sample} {
		if err := m.ctx.Err(); err != nil {
			return err
		}
		if err := write(); err != nil {
			return err
		}
	}
	m.progress(Progress{Done: m.id + 1, Samples: m.meta.Dataset.Samples, Sample: m.id, Layer: m.meta.Model.Layers, Layers: m.meta.Model.Layers})
	return nil
}

// part writes a part with what fill adds to it.
func (m *merger) part(t table, fill func(p *partWriter) error) error {
	p, err := newPart(m.dir, t, m.meta, m.id)
	if err != nil {
		return err
	}
	return complete(p, fill(p))
}

// complete puts a part into place, or removes it after an error.
func complete(f file, err error) error {
	if err == nil {
		err = f.finish()
	}
	if err == nil {
		err = f.commit()
	}
	if err != nil {
		f.discard()
	}
	return err
}

func (m *merger) sample() error {
	s := m.from.sample
	var kind []string
	var index, start, end []int
	for _, sp := range s.Spans {
		kind = append(kind, string(sp.Kind))
		index, start, end = append(index, sp.Index), append(start, sp.Start), append(end, sp.End)
	}
	return m.part(samplesTable(), func(p *partWriter) error {
		return p.add(int32(m.id), s.Task, s.Seed, int32(s.Prompt), s.Tokens, toInt32(s.Classes), kind, toInt32(index), toInt32(start), toInt32(end), toInt32(s.Answers))
	})
}

func (m *merger) heads() error {
	heads, err := m.from.record.Heads(m.from.sample.ID)
	if err != nil {
		return err
	}
	return m.part(headsTable(m.meta.Grid), func(p *partWriter) error {
		for _, h := range heads {
			row := []any{int32(m.id), int32(h.Layer), int32(h.Head), int32(h.KVHead)}
			for _, list := range [][]float64{h.Sink, h.Recent, {h.Special, h.Punctuation, h.Needle}} {
				row = appendAny(row, list)
			}
			if len(m.from.sample.Answers) > 0 {
				row = append(row, h.AnswerNeedle, h.Copy)
			} else {
				row = append(row, nil, nil)
			}
			row = appendAny(append(row, h.Entropy), h.Keys)
			row = appendAny(append(row, h.Variance, h.ValueNorm, h.ValueNormMax), h.SinkFar)
			if err := p.add(row...); err != nil {
				return err
			}
		}
		return nil
	})
}

func appendAny[T any](row []any, values []T) []any {
	for _, v := range values {
		row = append(row, v)
	}
	return row
}

func (m *merger) columns() error {
	return m.part(columnsTable(m.meta.Grid), func(p *partWriter) error {
		for l := range m.meta.Model.Layers {
			if err := m.ctx.Err(); err != nil {
				return err
			}
			columns, err := m.from.record.Columns(m.from.sample.ID, l)
			if err != nil {
				return err
			}
			for h, c := range columns {
				row := appendAny([]any{int32(m.id), int32(l), int32(h), c.Total}, c.Far)
				row = appendAny(append(appendAny(row, c.Window), c.Half), c.FirstFar)
				if err := p.add(append(row, c.Answer)...); err != nil {
					return err
				}
			}
			if err := p.flush(); err != nil {
				return err
			}
		}
		return nil
	})
}

func (m *merger) maps() error {
	if !m.from.mapped && !m.from.exact {
		return nil
	}
	pooled, err := m.from.record.Maps(m.from.sample.ID)
	if err != nil {
		return err
	}
	exact, err := m.from.record.ExactMaps(m.from.sample.ID)
	if err != nil {
		return err
	}
	p, err := newMapsPart(m.dir, m.meta, m.id)
	if err != nil {
		return err
	}
	return complete(p, func() error {
		for l := range m.meta.Model.Layers {
			for h := range m.meta.Model.Heads {
				of := func(x Map) bool { return x.Layer == l && x.Head == h }
				if i := slices.IndexFunc(pooled, of); i >= 0 {
					if err := p.add(m.id, l, h, -1, pooled[i].Size, pooled[i].Tile, pooled[i].Cells, nil); err != nil {
						return err
					}
				}
				i := slices.IndexFunc(exact, of)
				if i < 0 {
					continue
				}
				for q := range exact[i].Size {
					at := q * exact[i].Size
					if err := p.add(m.id, l, h, q, 0, 0, nil, exact[i].Cells[at:at+q+1]); err != nil {
						return err
					}
				}
			}
			if err := p.flush(); err != nil {
				return err
			}
		}
		return nil
	}())
}

// put renames a finished folder. What is there is put aside until the new one is in place.
func put(dir, to string, replace bool) error {
	// Temporary folders are private; artefacts are for others too.
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	old := dir + ".old"
	if replace {
		switch err := os.Rename(to, old); {
		case errors.Is(err, fs.ErrNotExist):
			replace = false
		case err != nil:
			return err
		}
	}
	err := os.Rename(dir, to)
	if !replace {
		return err
	}
	if err != nil {
		return errors.Join(err, os.Rename(old, to))
	}
	return os.RemoveAll(old)
}
