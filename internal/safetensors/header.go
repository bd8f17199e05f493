package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Limits of a header: the format's own, and far above any file's tensors and any weight's dimensions.
const (
	maxHeader  = 100_000_000
	maxTensors = 1 << 17
	maxDims    = 8
)

// header walks the JSON of a file's header token by token: nothing of it is kept but names, and the first fault ends
// it.
type header struct{ *json.Decoder }

// checkHeader refuses what st.Deserialize takes: two tensors of one name (it keeps the last). It also refuses early what
// would cost much memory first (a header of 60 MB of empty objects takes 460 MB there), and says which tensor has a number
// format that is not read.
func checkHeader(data []byte) error {
	if len(data) < 8 {
		return corrupt("it has %d bytes", len(data))
	}
	size := binary.LittleEndian.Uint64(data)
	switch {
	case size > maxHeader:
		return corrupt("a header of %d bytes (at most %d)", size, maxHeader)
	case size > uint64(len(data)-8):
		return corrupt("a header of %d bytes in a file of %d: the file is truncated", size, len(data))
	}
	h := header{json.NewDecoder(bytes.NewReader(data[8 : 8+size]))}
	h.UseNumber()
	seen := map[string]bool{}
	end := int64(0)
	err := h.object(func(name string) error {
		if seen[name] {
			return corrupt("tensor %q twice", name)
		}
		seen[name] = true
		if len(seen) > maxTensors {
			return corrupt("more than %d tensors", maxTensors)
		}
		if name == "__metadata__" { // free text of whoever made the file
			return h.object(func(string) error { _, err := h.text(); return err })
		}
		to, err := h.tensor()
		if err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
		end = max(end, to)
		return nil
	})
	if err == nil {
		if _, e := h.Token(); e != io.EOF {
			err = corrupt("something follows the header's object")
		}
	}
	if err != nil {
		if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrUnsupported) {
			err = fmt.Errorf("%w: header: %w", ErrCorrupt, err)
		}
		return err
	}
	if body := int64(len(data)-8) - int64(size); end > body {
		return corrupt("%d bytes of tensors, of which %d are in the file: the file is truncated", end, body)
	}
	return nil
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...)
}

// object calls f for every key of an object; f must consume the value.
func (h header) object(f func(key string) error) error {
	if err := h.delim('{'); err != nil {
		return err
	}
	for h.More() {
		key, err := h.text()
		if err != nil {
			return err
		}
		if err := f(key); err != nil {
			return err
		}
	}
	return h.delim('}')
}

func (h header) delim(want json.Delim) error {
	t, err := h.Token()
	if err != nil {
		return err
	}
	if t != want {
		return corrupt("header: %v at byte %d, want %v", t, h.InputOffset(), want)
	}
	return nil
}

func (h header) text() (string, error) {
	t, err := h.Token()
	if err != nil {
		return "", err
	}
	s, ok := t.(string)
	if !ok {
		return "", corrupt("header: %v at byte %d, want a string", t, h.InputOffset())
	}
	return s, nil
}

// counts reads an array of up to most non-negative integers, and returns their number and the last.
func (h header) counts(most int) (n int, last int64, err error) {
	if err := h.delim('['); err != nil {
		return 0, 0, err
	}
	for ; h.More(); n++ {
		t, err := h.Token()
		if err != nil {
			return 0, 0, err
		}
		number, _ := t.(json.Number)
		if last, err = number.Int64(); err != nil || last < 0 {
			return 0, 0, corrupt("header: %v at byte %d, want a count", t, h.InputOffset())
		}
		if n == most {
			return 0, 0, corrupt("header: more than %d numbers at byte %d", most, h.InputOffset())
		}
	}
	return n, last, h.delim(']')
}

// tensor reads the description of a tensor, and returns where its data ends.
func (h header) tensor() (end int64, err error) {
	members := []string{"dtype", "shape", "data_offsets"}
	var seen [3]bool
	err = h.object(func(key string) error {
		i := slices.Index(members, key)
		if i < 0 || seen[i] {
			return corrupt("unknown or repeated member %q", key)
		}
		seen[i] = true
		switch i {
		case 0:
			kind, err := h.text()
			if err == nil && kind != "F32" && kind != "F16" && kind != "BF16" {
				err = fmt.Errorf("%w: it is %s (F32, F16 and BF16 are read)", ErrUnsupported, kind)
			}
			return err
		case 1:
			_, _, err := h.counts(maxDims)
			return err
		}
		n, last, err := h.counts(2)
		if err == nil && n != 2 {
			err = corrupt("%d data_offsets, want 2", n)
		}
		end = last
		return err
	})
	if err == nil && seen != [3]bool{true, true, true} {
		err = corrupt("dtype, shape or data_offsets is missing")
	}
	return end, err
}
