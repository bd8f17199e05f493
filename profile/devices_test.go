package profile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/engine/devices"
	"github.com/kvprofile/kvprofile/internal/engine/enginetest"
	"github.com/kvprofile/kvprofile/internal/engine/ref"
)

// Any number of devices makes the record of one; where a sample fails, the parts of others stay and nothing is left half done.
func TestRecordIsTheSameOnAnyNumberOfDevices(t *testing.T) {
	d := testDataset()
	whole := testOptions(t.TempDir())
	m := testModel(t)
	mustRun(t, m, d, whole)
	on := func(n int) *devices.Set {
		var backends []engine.Backend
		for range n {
			backends = append(backends, ref.New[float64]())
		}
		s, err := devices.New(m.Config, enginetest.Weights{Config: m.Config, Seed: 7}, backends...)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, n := range []int{2, 3, 8} {
		o := testOptions(t.TempDir())
		last := 0
		err := RunOn(t.Context(), on(n), d, testClasses{}, o, func(p Progress) {
			if p.Done < last || p.Layer < 0 || p.Layer > p.Layers {
				t.Errorf("%d devices: progress %+v after %d samples", n, p, last)
			}
			last = p.Done
		})
		if err != nil || last != len(d.Samples) {
			t.Fatalf("%d devices: %d samples done, error %v", n, last, err)
		}
		sameFolder(t, "several devices", o.Dir, whole.Dir)
	}
	stop := errors.New("a full disk")
	o := testOptions(t.TempDir())
	tokens := d.Samples[1].Tokens
	classes := failing{at: tokens[len(tokens)-1], with: &engine.Failure{Err: stop}}
	if err := RunOn(t.Context(), on(3), d, classes, o, nil); !errors.Is(err, stop) {
		t.Errorf("a failure: %v", err)
	}
	err := filepath.WalkDir(o.Dir, func(path string, _ os.DirEntry, err error) error {
		if strings.Contains(path, tempMark) {
			t.Errorf("%s was left behind", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := RunOn(t.Context(), on(2), d, testClasses{}, o, nil); err != nil {
		t.Fatal(err)
	}
	sameFolder(t, "taken up on other devices", o.Dir, whole.Dir)
}

// failing fails as a device does, at a token.
type failing struct {
	at   int32
	with *engine.Failure
}

func (f failing) IsSpecial(id int32) bool { return testClasses{}.IsSpecial(id) }

func (f failing) IsPunctuation(id int32) bool {
	if id == f.at {
		panic(f.with)
	}
	return testClasses{}.IsPunctuation(id)
}
