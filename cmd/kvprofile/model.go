package main

import (
	"github.com/kvprofile/kvprofile/internal/model"
	"github.com/kvprofile/kvprofile/internal/ui"
)

// openModel finds and opens the model that a user named. Failures are *modelError.
func (a *app) openModel(name string) (*model.Model, error) {
	m, err := model.Open(name)
	if err != nil {
		return nil, ui.Hint(&modelError{err}, "a model is a Hugging Face folder with config.json and safetensors, or a GGUF file")
	}
	return m, nil
}
