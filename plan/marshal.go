package plan

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// brokenMembers are the members of a plan that are written with one element per line whatever their length, so that
// two plans can be compared line by line.
var brokenMembers = []string{"policies", "layers", "totals", "warnings"}

// tree is the plan as a JSON value, its members in the order of their declaration, policies by name.
func (p *Plan) tree() (*node, error) {
	type members Plan // without MarshalJSON
	data, err := json.Marshal((*members)(p))
	if err != nil {
		return nil, fmt.Errorf("write cache plan: %w", err)
	}
	n, err := parseJSON(data)
	if err != nil {
		return nil, fmt.Errorf("write cache plan: %w", err)
	}
	return n, nil
}

// Marshal writes the plan for people to read: a line per layer, policy and total. The same plan gives the same bytes.
// The plan is not checked, see [Plan.Validate]; the error is for numbers that JSON does not have.
func (p *Plan) Marshal() ([]byte, error) {
	n, err := p.tree()
	if err != nil {
		return nil, err
	}
	return append(n.appendPretty(nil, 0, 0, lineWidth, true), '\n'), nil
}

// MarshalJSON writes the plan as [Plan.Marshal] does.
func (p *Plan) MarshalJSON() ([]byte, error) { return p.Marshal() }

// UnmarshalJSON reads the plan as [Parse] does.
func (p *Plan) UnmarshalJSON(data []byte) error {
	q, err := Parse(data)
	if err != nil {
		return err
	}
	*p = *q
	return nil
}

// Digest is the SHA-256, as 64 hexadecimal digits, of the plan without evidence and warnings, in the canonical form of
// RFC 8785: members sorted by key, no white space, members that are left out when at their default left out. It is ""
// for a plan that cannot be written.
func (p *Plan) Digest() string {
	q := *p
	q.Evidence, q.Warnings = nil, nil
	n, err := q.tree()
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(n.appendCanonical(nil))
	return hex.EncodeToString(sum[:])
}

// Write writes a valid plan to a file, whole or not at all: to a temporary name in the same folder first, then renamed.
// An invalid plan is an [InvalidError] and leaves the file alone.
func (p *Plan) Write(path string) (err error) {
	if vs := p.Validate(); len(vs) > 0 {
		return fmt.Errorf("write %s: %w", path, &InvalidError{Violations: vs})
	}
	data, err := p.Marshal()
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if _, err = f.Write(data); err != nil {
		return err
	}
	// Plans are not secret, and other users' servers read them.
	if err = f.Chmod(0o644); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
