package hub

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestFind(t *testing.T) {
	dir := t.TempDir()
	put := func(path, text string) {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("home/hub/models--org--name/refs/main", "abc\n")
	put("home/hub/models--org--name/snapshots/abc/config.json", "{}")
	put("home/hub/models--org--gone/refs/main", "def")
	put("home/hub/models--org--evil/refs/main", "../../..")
	put("user/.cache/huggingface/hub/models--org--gone/refs/main", "123")
	put("user/.cache/huggingface/hub/models--org--gone/snapshots/123/config.json", "{}")
	env := map[string]string{"HF_HOME": filepath.Join(dir, "home"), "HOME": filepath.Join(dir, "user")}
	getenv := func(k string) string { return env[k] }

	for name, want := range map[string]string{
		dir:        dir,
		"org/name": filepath.Join(dir, "home/hub/models--org--name/snapshots/abc"),
		"org/gone": filepath.Join(dir, "user/.cache/huggingface/hub/models--org--gone/snapshots/123"),
	} {
		if got, err := Find(name, getenv); err != nil || got != want {
			t.Errorf("%s: got %s and %v, want %s", name, got, err, want)
		}
	}
	var miss *NotFoundError
	if _, err := Find("org/other", getenv); !errors.As(err, &miss) || len(miss.Searched) != 3 {
		t.Errorf("got %v, want the three places searched", err)
	}
	for _, name := range []string{"other", "../x", "a/b/c", ""} {
		if _, err := Find(name, getenv); !errors.As(err, &miss) {
			t.Errorf("%q: got %v", name, err)
		}
	}
	if _, err := Find("org/evil", getenv); err == nil || errors.As(err, &miss) {
		t.Errorf("a revision outside the folder gives %v", err)
	}
}
