package ui

import (
	"fmt"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
)

// plainEvery is the shortest time between two lines of one task off a terminal.
const plainEvery = 10 * time.Second

// nameWidth aligns the bars of tasks that follow one another.
const nameWidth = 10

// Task is the progress of one piece of work. A nil Task ignores all calls.
type Task struct {
	ui    *UI
	name  string
	start time.Time

	mu       sync.Mutex
	ended    bool
	bar      *mpb.Bar
	total    int
	done     int
	first    int // done when the first report came: work of an earlier run, which took no time in this one
	reported bool
	note     string
	last     time.Time // of the last plain line
}

// Begin starts a task. Its total may be 0 until the first Set.
func (u *UI) Begin(name string, total int) *Task {
	t := &Task{ui: u, name: name, start: u.options.Now(), total: total}
	t.last = t.start
	if u.options.Quiet {
		return t
	}
	if !u.terminal {
		u.line("%s: started", name)
		return t
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.progress == nil {
		u.progress = mpb.New(mpb.WithOutput(u.options.Err), mpb.WithWidth(40), mpb.WithAutoRefresh())
	}
	u.open++
	t.bar = u.progress.New(int64(max(total, 1)), mpb.BarStyle().Lbound("[").Filler("=").Tip(">").Padding(" ").Rbound("]"),
		mpb.PrependDecorators(decor.Name(name, decor.WC{W: nameWidth, C: decor.DindentRight})),
		mpb.AppendDecorators(
			decor.Any(func(decor.Statistics) string { return " " + t.counts() }, decor.WCSyncSpaceR),
			decor.Any(func(decor.Statistics) string { return t.times() }, decor.WCSyncSpaceR),
			decor.Any(func(decor.Statistics) string { return t.noted() }),
		))
	return t
}

// Set says that done of total are finished; note, such as a loss, stands beside them.
func (t *Task) Set(done, total int, note string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if t.ended {
		t.mu.Unlock()
		return
	}
	if !t.reported {
		t.reported, t.first = true, done
	}
	t.done, t.total, t.note = done, total, note
	bar := t.bar
	plain := !t.ui.terminal && !t.ui.options.Quiet && t.ui.options.Now().Sub(t.last) >= plainEvery
	if plain {
		t.last = t.ui.options.Now()
	}
	t.mu.Unlock()
	// The bar's own goroutine calls back for the counts, so it is called without the lock.
	if bar != nil {
		// One below the total: the bar completes in End alone, whatever the last report says.
		bar.SetTotal(int64(max(total, 1)), false)
		bar.SetCurrent(int64(min(done, max(total, 1)-1)))
	}
	if plain {
		text := t.name + ": " + t.counts() + ", " + t.times()
		if note != "" {
			text += ", " + note
		}
		t.ui.line("%s", text)
	}
}

// End finishes the task: err nil means that it is done.
func (t *Task) End(err error) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if t.ended {
		t.mu.Unlock()
		return
	}
	t.ended = true
	if err == nil && t.total > 0 {
		t.done = t.total
	}
	bar := t.bar
	took := t.ui.options.Now().Sub(t.start)
	t.mu.Unlock()
	if bar != nil {
		if err == nil {
			bar.SetTotal(int64(max(t.total, 1)), true)
		} else {
			bar.Abort(false)
		}
		t.ui.endBar()
		return
	}
	if err == nil && !t.ui.options.Quiet {
		t.ui.line("%s: done in %s", t.name, Duration(took))
	}
}

// endBar waits for the screen when the last bar has ended, so that what is printed next stands below the bars.
func (u *UI) endBar() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.open--
	if u.open == 0 {
		u.progress.Wait()
		u.progress = nil
	}
}

func (t *Task) counts() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.total <= 0 {
		return ""
	}
	return fmt.Sprintf("%d/%d", t.done, t.total)
}

func (t *Task) times() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	elapsed := t.ui.options.Now().Sub(t.start)
	if t.ended {
		return Duration(elapsed)
	}
	text := Duration(elapsed)
	if worked := t.done - t.first; worked > 0 && t.total > t.done {
		left := time.Duration(float64(elapsed) / float64(worked) * float64(t.total-t.done))
		text += ", " + Duration(left) + " left"
	}
	return text
}

func (t *Task) noted() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.note == "" {
		return ""
	}
	return " " + t.note
}
