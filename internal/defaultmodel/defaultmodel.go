// Package defaultmodel holds the model that kvprofile runs when none is named: a small Llama, trained by
// scripts/train_default.py on this project's own synthetic text until it retrieves. docs/defaultmodel.md describes it.
package defaultmodel

import (
	"embed"
	"fmt"
	"io/fs"

	"github.com/kvprofile/kvprofile/internal/model"
)

// Name stands for the model on the command line, where others have a path.
const Name = "default"

// folder is the name of its folder, and the model's own.
const folder = "kvprofile-default"

//go:embed kvprofile-default
var files embed.FS

// Settings is a configuration file, as --config reads them, with windows and lengths that suit the model's short context.
//
//go:embed settings.yaml
var Settings []byte

// Files is the model's Hugging Face folder.
func Files() fs.FS {
	sub, err := fs.Sub(files, folder)
	if err != nil {
		panic(err) // the name is valid
	}
	return sub
}

// Open opens the model.
func Open() (*model.Model, error) {
	m, err := model.OpenFS(Files(), Name)
	if err != nil {
		return nil, fmt.Errorf("embedded model: %w", err)
	}
	m.Name = folder
	return m, nil
}
