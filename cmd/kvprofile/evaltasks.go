package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/model"
)

// evalTasks are the tasks with questions that eval runs unless told otherwise.
func evalTasks() []string {
	return []string{datasets.TaskNeedleGrid, datasets.TaskMultiKey, datasets.TaskMultiValue, datasets.TaskMultiQuery, datasets.TaskVariables,
		datasets.TaskUUID, datasets.TaskDormant, datasets.TaskPasskeys}
}

// knownTask reports a task that is none of them.
func knownTask(task string) error {
	if !slices.Contains(evalTasks(), task) {
		return usagef("unknown task %q, expected some of %s", task, strings.Join(evalTasks(), ", "))
	}
	return nil
}

// evalDepths are the depths of the needle grid.
func evalDepths() []float64 { return []float64{0.1, 0.3, 0.5, 0.7, 0.9} }

// taskOptions say how much of each task is made.
type taskOptions struct {
	tasks          []string
	lengths        []int
	samples, texts int // of each length
	seed           uint64
	purpose        datasets.Purpose
	haystack       datasets.Haystack
	plain          bool
}

// taskSets makes the datasets of tasks for a model, running text last.
func taskSets(m *model.Model, o taskOptions) ([]*datasets.Dataset, error) {
	var out []*datasets.Dataset
	build := func(task string) (*datasets.Dataset, error) {
		chat := chatOf(m, o.plain)
		switch task {
		case datasets.TaskNeedleGrid:
			n := needleFlags{lengths: o.lengths, depths: evalDepths(), repeats: max(1, o.samples/len(evalDepths()))}
			return datasets.NeedleGrid(m.Tokenizer, chat, n.options(o.seed, o.purpose, o.haystack))
		case datasets.TaskPasskeys:
			return datasets.Passkeys(m.Tokenizer, chat, datasets.PasskeyOptions{Count: o.samples * len(o.lengths), Passkeys: 4, Words: 8, Lengths: o.lengths,
				Seed: o.seed, Purpose: o.purpose, Haystack: o.haystack, ToolVersion: tool().Version})
		}
		count := o.samples
		if task == datasets.TaskText {
			count = o.texts
		}
		return datasets.Build(m.Tokenizer, chat, datasets.TaskOptions{Task: task, Lengths: o.lengths, Count: count * len(o.lengths),
			Seed: o.seed, Purpose: o.purpose, Haystack: o.haystack, ToolVersion: tool().Version})
	}
	tasks := slices.Clone(o.tasks)
	if o.samples == 0 {
		tasks = nil
	}
	if o.texts > 0 {
		tasks = append(tasks, datasets.TaskText)
	}
	for _, task := range tasks {
		if task != datasets.TaskText {
			if err := knownTask(task); err != nil {
				return nil, err
			}
		}
		d, err := build(task)
		if err != nil {
			return nil, datasetAdvice(fmt.Errorf("%s: %w", task, err))
		}
		out = append(out, d)
	}
	if len(out) == 0 {
		return nil, usagef("neither prompts nor texts: nothing to evaluate")
	}
	return out, nil
}
