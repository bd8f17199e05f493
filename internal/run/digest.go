package run

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// tempMark stands in the name of every file that is not whole yet. Such files are no part of an artefact.
const tempMark = ".tmp-"

// WriteAtomic writes a file under a temporary name in the same folder, syncs it and renames it, so that path is
// either absent, as it was, or whole. The folder is made if need be. On an error nothing is left behind.
func WriteAtomic(path string, write func(io.Writer) error) (err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+tempMark+"*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("%s: %w", path, err)
		}
	}()
	if err := write(f); err != nil {
		return err
	}
	// CreateTemp makes private files; artefacts are for others too.
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// WriteJSON writes v as indented JSON with WriteAtomic.
func WriteJSON(path string, v any) error {
	return WriteAtomic(path, func(w io.Writer) error {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(v)
	})
}

// DigestPath returns the SHA-256 in hex and the size in bytes of an artefact: of a file, its bytes; of a folder, the
// names, sizes and digests of the files in it in order of their names. Temporary files do not count.
func DigestPath(path string) (digest string, size int64, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", 0, err
	}
	if !info.IsDir() {
		return digestFile(path)
	}
	sum := sha256.New()
	err = filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.Contains(d.Name(), tempMark) {
			return err
		}
		rel, err := filepath.Rel(path, name)
		if err != nil {
			return err
		}
		inner, n, err := digestFile(name)
		if err != nil {
			return err
		}
		size += n
		// %q keeps a name with a newline in it apart from two names.
		fmt.Fprintf(sum, "%q %d %s\n", filepath.ToSlash(rel), n, inner)
		return nil
	})
	if err != nil {
		return "", 0, err
	}
	return hex.EncodeToString(sum.Sum(nil)), size, nil
}

func digestFile(path string) (string, int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, f)
	if err != nil {
		return "", 0, err
	}
	return hex.EncodeToString(sum.Sum(nil)), n, nil
}
