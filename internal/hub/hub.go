// Package hub finds models by name in the local cache of Hugging Face. It never goes to the network.
package hub

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// NotFoundError says where a model was looked for.
type NotFoundError struct {
	Name     string
	Searched []string
}

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("no model %q; looked in %s", e.Name, strings.Join(e.Searched, ", "))
}

// Find resolves a model's name: the path of a folder or of a GGUF file, or org/name in HF_HUB_CACHE, HF_HOME/hub and
// ~/.cache/huggingface/hub, in this order. getenv reads the environment. A miss is a *NotFoundError.
func Find(name string, getenv func(string) string) (string, error) {
	if _, err := os.Stat(name); err == nil {
		return name, nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("model %s: %w", name, err)
	}
	miss := &NotFoundError{Name: name, Searched: []string{name}}
	org, repo, ok := strings.Cut(name, "/")
	if !ok || org == "" || repo == "" || strings.ContainsAny(name, `\`) || strings.Contains(repo, "/") || strings.HasPrefix(org, ".") || strings.HasPrefix(repo, ".") {
		return "", miss
	}
	for _, cache := range caches(getenv) {
		dir := filepath.Join(cache, "models--"+org+"--"+repo)
		miss.Searched = append(miss.Searched, dir)
		snapshot, err := snapshot(dir)
		if err == nil {
			return snapshot, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("model %s: %w", name, err) // a failed read is not a missing file
		}
	}
	return "", miss
}

func caches(getenv func(string) string) (dirs []string) {
	if d := getenv("HF_HUB_CACHE"); d != "" {
		dirs = append(dirs, d)
	}
	if d := getenv("HF_HOME"); d != "" {
		dirs = append(dirs, filepath.Join(d, "hub"))
	}
	if d := getenv("HOME"); d != "" {
		dirs = append(dirs, filepath.Join(d, ".cache", "huggingface", "hub"))
	}
	return dirs
}

// snapshot is the folder of the revision that main points to.
func snapshot(dir string) (string, error) {
	ref, err := os.ReadFile(filepath.Join(dir, "refs", "main"))
	if err != nil {
		return "", err
	}
	revision := strings.TrimSpace(string(ref))
	if revision == "" || filepath.Base(revision) != revision || revision == ".." {
		return "", fmt.Errorf("%s/refs/main names revision %q", dir, revision)
	}
	path := filepath.Join(dir, "snapshots", revision)
	_, err = os.Stat(path)
	return path, err
}
