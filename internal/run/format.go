package run

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// FormatError says that a file is no artefact of the kind that was wanted.
type FormatError struct {
	Path, Reason string
	Err          error // may be nil
}

func (e *FormatError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Path, e.Reason, e.Err)
	}
	return fmt.Sprintf("%s: %s", e.Path, e.Reason)
}

func (e *FormatError) Unwrap() error { return e.Err }

// ReadJSON reads a JSON artefact that begins with "format" and "version" into into. Another format or version and
// unknown members are errors.
func ReadJSON(from io.Reader, format string, version int, into any) error {
	text, err := io.ReadAll(from)
	if err != nil {
		return err
	}
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return err
	}
	if head.Format != format || head.Version != version {
		return fmt.Errorf("format %q version %d, this program reads %q version %d", head.Format, head.Version, format, version)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// LoadJSON decodes the file of an artefact. What decode refuses is a *FormatError with the reason.
func LoadJSON[T any](path, reason string, decode func(io.Reader) (*T, error)) (*T, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	v, err := decode(f)
	if err != nil {
		return nil, &FormatError{Path: path, Reason: reason, Err: err}
	}
	return v, nil
}
