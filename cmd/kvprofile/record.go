package main

import (
	"errors"
	"fmt"

	"github.com/kvprofile/kvprofile/distill"
	"github.com/kvprofile/kvprofile/internal/ui"
	"github.com/kvprofile/kvprofile/profile"
)

// openRecord opens an attention record.
func openRecord(dir string) (*profile.Record, error) {
	r, err := profile.Open(dir)
	var incomplete *profile.IncompleteError
	switch {
	case errors.As(err, &incomplete):
		return nil, ui.Hint(err, "run %s profile again with the same --out to finish it", program)
	case err != nil:
		return nil, fmt.Errorf("attention record: %w", err)
	}
	return r, nil
}

// recordScores returns the scores of KV heads that a record holds: needle mass and copy score, mean over the samples
// with answers and over the query heads of the group. A record without answers has none.
func recordScores(dir string) ([]distill.Score, error) {
	r, err := openRecord(dir)
	if err != nil {
		return nil, err
	}
	m := r.Meta().Model
	var names = [2]string{distill.ScoreNeedleMass, distill.ScoreCopy}
	var sums [2][][]float64
	for i := range sums {
		sums[i] = make([][]float64, m.Layers)
		for l := range sums[i] {
			sums[i][l] = make([]float64, m.Heads)
		}
	}
	counted := 0
	for i, s := range r.Samples() {
		if len(s.Answers) == 0 {
			continue
		}
		counted++
		heads, err := r.Heads(i)
		if err != nil {
			return nil, err
		}
		for _, h := range heads {
			sums[0][h.Layer][h.Head] += h.AnswerNeedle
			sums[1][h.Layer][h.Head] += h.Copy
		}
	}
	if counted == 0 {
		return nil, nil
	}
	var out []distill.Score
	for i, name := range names {
		for _, layer := range sums[i] {
			for h := range layer {
				layer[h] /= float64(counted)
			}
		}
		s, err := distill.GroupMean(name, sums[i], m.KVHeads)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// showRecord says what a record holds.
func (a *app) showRecord(dir string) error {
	r, err := openRecord(dir)
	if err != nil {
		return err
	}
	digest, err := r.Digest()
	if err != nil {
		return err
	}
	m := r.Meta()
	if a.ui.JSON() {
		return a.ui.PrintJSON(struct {
			Path   string       `json:"path"`
			Digest string       `json:"sha256"`
			Meta   profile.Meta `json:"meta"`
		}{dir, digest, m})
	}
	longest := 0
	for _, s := range r.Samples() {
		longest = max(longest, s.Prompt)
	}
	t := ui.Table{Left: []int{1}}
	t.Add("folder", dir)
	t.Add("model", m.Model.Name)
	t.Add("samples", fmt.Sprintf("%d of %s, prompts of up to %d tokens", m.Dataset.Samples, m.Dataset.Task, longest))
	t.Add("heads", fmt.Sprintf("%d layers of %d query heads and %d KV heads", m.Model.Layers, m.Model.Heads, m.Model.KVHeads))
	t.Add("engine", m.Engine)
	t.Add("sha256", digest)
	return t.Render(a.ui.Out())
}
