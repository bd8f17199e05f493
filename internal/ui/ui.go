// Package ui is what the command says to people and scripts: progress, notes, warnings, errors, tables.
//
// Results go to standard output, everything else to standard error. On a terminal progress is bars; off it, plain
// lines, one when a task begins, a few while it runs, one when it ends. Messages are lowercase and end without a full
// stop; an error may be followed by a line that begins with "hint:".
package ui

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/vbauerster/cupwriter"
	"github.com/vbauerster/mpb/v8"
)

// Options say where a UI writes and how much.
type Options struct {
	Program string // first word of messages
	Out     io.Writer
	Err     io.Writer
	JSON    bool // results and the final error are JSON
	Quiet   bool // neither progress nor notes; warnings and errors stay
	Verbose bool // details
	// Now replaces time.Now in tests.
	Now func() time.Time
}

// UI writes for one run of the command. Its methods may be called from several goroutines.
type UI struct {
	options  Options
	terminal bool

	mu       sync.Mutex
	progress *mpb.Progress // nil until the first bar, and off a terminal
	open     int           // tasks that have not ended
}

// New returns a UI; bars are drawn if o.Err is a terminal.
func New(o Options) *UI {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &UI{options: o, terminal: isTerminal(o.Err)}
}

// isTerminal says whether bars can be drawn: some terminals (of containers, of CI) have no width, and get plain lines.
func isTerminal(w io.Writer) bool {
	if w == nil {
		return false
	}
	t := cupwriter.New(w, false)
	if !t.IsTerminal() {
		return false
	}
	width, _, err := t.GetTermSize()
	return err == nil && width > 0
}

// JSON says whether results are to be JSON.
func (u *UI) JSON() bool { return u.options.JSON }

// Out is where results go.
func (u *UI) Out() io.Writer { return u.options.Out }

// Printf writes a result to standard output.
func (u *UI) Printf(format string, args ...any) error {
	_, err := fmt.Fprintf(u.options.Out, format, args...)
	return err
}

// PrintJSON writes a result as indented JSON with a newline at its end.
func (u *UI) PrintJSON(v any) error {
	e := json.NewEncoder(u.options.Out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Note says something that a person may want to know; nothing with -q.
func (u *UI) Note(format string, args ...any) {
	if !u.options.Quiet {
		u.line("%s", fmt.Sprintf(format, args...))
	}
}

// Detail says something with -v only.
func (u *UI) Detail(format string, args ...any) {
	if u.options.Verbose && !u.options.Quiet {
		u.line("%s", fmt.Sprintf(format, args...))
	}
}

// Warn says what may make a result worse than it looks; also with -q.
func (u *UI) Warn(format string, args ...any) {
	u.line("warning: %s", fmt.Sprintf(format, args...))
}

// Error says why the command failed, and what to do where the error carries a hint. With JSON it writes one line:
// {"error":...,"hint":...,"exit_code":...}.
func (u *UI) Error(err error, code int) {
	hint := HintOf(err)
	if u.options.JSON {
		b, e := json.Marshal(struct {
			Error string `json:"error"`
			Hint  string `json:"hint,omitempty"`
			Code  int    `json:"exit_code"`
		}{err.Error(), hint, code})
		if e == nil {
			fmt.Fprintf(u.options.Err, "%s\n", b)
			return
		}
	}
	u.line("error: %s", err.Error())
	if hint != "" {
		u.line("hint: %s", hint)
	}
}

// line writes one message above the bars.
func (u *UI) line(format string, args ...any) {
	text := u.options.Program + ": " + strings.TrimRight(fmt.Sprintf(format, args...), "\n") + "\n"
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.progress != nil {
		if _, err := u.progress.Write([]byte(text)); err == nil {
			return
		}
	}
	io.WriteString(u.options.Err, text)
}

// hinted is an error with advice.
type hinted struct {
	err  error
	hint string
}

func (h *hinted) Error() string { return h.err.Error() }
func (h *hinted) Unwrap() error { return h.err }

// Hint adds advice to an error; nil stays nil. What stands outermost is shown.
func Hint(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return &hinted{err: err, hint: fmt.Sprintf(format, args...)}
}

// HintOf returns the outermost advice of an error, or "".
func HintOf(err error) string {
	var h *hinted
	if errors.As(err, &h) {
		return h.hint
	}
	return ""
}
