package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvprofile/kvprofile/datasets"
	"github.com/kvprofile/kvprofile/internal/chat"
	"github.com/kvprofile/kvprofile/internal/defaultmodel"
	"github.com/kvprofile/kvprofile/internal/engine"
	"github.com/kvprofile/kvprofile/internal/hub"
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/run"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// openModel finds and opens the model that a user named. Failures are *modelError.
func (a *app) openModel(name string) (*model.Model, error) {
	if name == defaultmodel.Name {
		if _, err := os.Stat(name); err == nil {
			a.ui.Warn("%s is the model that is part of this program; the one here is ./%[1]s", name)
		}
		return defaultmodel.Open()
	}
	path, err := hub.Find(name, a.getenv)
	var miss *hub.NotFoundError
	if errors.As(err, &miss) {
		return nil, ui.Hint(&modelError{err}, "name a Hugging Face folder, a GGUF file, or org/name of a model in the local cache; nothing is downloaded. %s is the model that is part of this program", defaultmodel.Name)
	}
	if err != nil {
		return nil, &modelError{err}
	}
	m, err := model.Open(path)
	if err != nil {
		return nil, ui.Hint(&modelError{err}, "%s inspect shows what is read of a model; folders with config.json and safetensors, and GGUF files are", program)
	}
	return m, nil
}

// openWithTokenizer opens a model that has to have a tokenizer.
func (a *app) openWithTokenizer(name string) (*model.Model, error) {
	m, err := a.openModel(name)
	if err != nil {
		return nil, err
	}
	if m.Tokenizer == nil {
		m.Close()
		return nil, ui.Hint(&modelError{fmt.Errorf("model %s has no tokenizer", m.Path)}, "put tokenizer.json beside the weights")
	}
	return m, nil
}

// chatOf adapts a model's chat template; nil when it has none, or with plain.
func chatOf(m *model.Model, plain bool) datasets.Chat {
	if m.Chat == nil || plain {
		return nil
	}
	return func(messages []datasets.Message, generate bool) (string, error) {
		turns := make([]chat.Message, len(messages))
		for i, x := range messages {
			turns[i] = chat.Message(x)
		}
		return m.Chat.Render(turns, generate)
	}
}

// identity is one string for a model's three hashes.
func identity(p model.Fingerprint) string { return identityOf(p.Config, p.Weights, p.Tokenizer) }

func identityOf(config, weights, tokenizer string) string {
	sum := sha256.Sum256([]byte(config + "\n" + weights + "\n" + tokenizer))
	return hex.EncodeToString(sum[:])
}

// tierOf splits a backend's name, "cpu avx512 f32", into device, tier and precision.
func tierOf(b engine.Backend) (device, tier, precision string) {
	f := strings.Fields(b.Name())
	for len(f) < 3 {
		f = append(f, "")
	}
	return f[0], f[1], f[2]
}

// slug makes a model's name fit to be a folder's.
func slug(name string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(name) {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-', r == '_', r == '.':
			b.WriteRune(r)
		default:
			b.WriteByte('-')
		}
	}
	s := strings.Trim(b.String(), ".-")
	if s == "" {
		return "model"
	}
	return s
}

// target returns where a verb's result goes, and refuses what is there already unless it may be replaced, and
// out/reference in any case.
func (a *app) target(fallback string, replace bool) (string, error) {
	path := a.shared.out
	if path == "" {
		path = fallback
	}
	if err := run.CheckReference(filepath.Dir(path)); err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err == nil && !replace {
		return "", ui.Hint(fmt.Errorf("%s is already there", path), "choose another name with --out, or replace it with --force")
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	return path, nil
}
