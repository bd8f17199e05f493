package run

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// lockName is the lock file of a run folder. It stays when the lock is given back: removing it would let two later
// runs lock two files of the same name.
const lockName = ".lock"

// LockedError says that another process works in the folder.
type LockedError struct {
	Dir  string
	PID  int    // 0 when it could not be read
	Host string // where that process runs
}

func (e *LockedError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("%s is in use by another process", e.Dir)
	}
	return fmt.Sprintf("%s is in use by process %d on %s", e.Dir, e.PID, e.Host)
}

type holder struct {
	PID   int       `json:"pid"`
	Host  string    `json:"host"`
	Since time.Time `json:"since"`
}

// lockDir locks the folder; closing the file gives the lock back.
func lockDir(dir string, now time.Time) (*os.File, error) {
	path := filepath.Join(dir, lockName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	held, err := tryLock(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: cannot lock: %w", path, err)
	}
	if held {
		e := &LockedError{Dir: dir}
		var h holder
		if b, err := io.ReadAll(io.LimitReader(f, 4096)); err == nil && json.Unmarshal(b, &h) == nil {
			e.PID, e.Host = h.PID, h.Host
		}
		f.Close()
		return nil, e
	}
	host, err := os.Hostname()
	if err != nil {
		host = "this machine"
	}
	b, err := json.Marshal(holder{PID: os.Getpid(), Host: host, Since: now.UTC()})
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(b, '\n'), 0)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

// Lock locks a run folder without opening it, for what works on single files in it. Closing gives the lock back. The
// error is a *LockedError when another process has it.
func Lock(dir string) (io.Closer, error) { return lockDir(dir, time.Now()) }
