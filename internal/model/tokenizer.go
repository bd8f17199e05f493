package model

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvprofile/kvprofile/internal/chat"
	"github.com/kvprofile/kvprofile/internal/gguf"
	"github.com/kvprofile/kvprofile/internal/tokenizer"
)

// readTokenizer reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a folder.
func (m *Model) readTokenizer(dir fs.FS) error {
	main, err := fs.ReadFile(dir, "tokenizer.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // Tokenizer stays nil: weights alone can still be inspected
	}
	if err != nil {
		return err
	}
	config, err := fs.ReadFile(dir, "tokenizer_config.json")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if m.Tokenizer, err = tokenizer.FromJSON(main, config); err != nil {
		return tokenizerError(err)
	}
	if id, ok := m.Tokenizer.EOS(); ok {
		m.addEOS(id)
	}
	template := m.Tokenizer.ChatTemplate()
	switch file, err := fs.ReadFile(dir, "chat_template.jinja"); {
	case err == nil:
		template = string(file)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	return m.parseChat(template)
}

// tokenizerError sorts an error of package tokenizer into those of this package.
func tokenizerError(err error) error {
	if errors.Is(err, tokenizer.ErrUnsupported) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return fmt.Errorf("%w: %w", ErrCorrupt, err)
}

// parseChat prepares the chat template; "" means that the model has none.
func (m *Model) parseChat(template string) error {
	if template == "" {
		return nil
	}
	text := func(id int32, ok bool) string {
		if !ok {
			return ""
		}
		return m.Tokenizer.Token(id)
	}
	var err error
	if m.Chat, err = chat.Parse(template, text(m.Tokenizer.BOS()), text(m.Tokenizer.EOS())); err != nil {
		return fmt.Errorf("%w: chat template: %w", ErrUnsupported, err)
	}
	return nil
}

// vocabularyOf reads the tokenizer that the metadata of a GGUF describes.
func (m *Model) vocabularyOf(f *gguf.File) error {
	meta := func(key string) any { return f.Metadata["tokenizer.ggml."+key] }
	v := tokenizer.Vocabulary{}
	v.Model, _ = meta("model").(string)
	if v.Model == "" {
		return nil
	}
	v.Pre, _ = meta("pre").(string)
	v.Tokens, _ = meta("tokens").([]string)
	v.Types, _ = meta("token_type").([]int64)
	v.Merges, _ = meta("merges").([]string)
	v.ChatTemplate, _ = f.Metadata["tokenizer.chat_template"].(string)
	if scores, ok := meta("scores").([]float64); ok {
		v.Scores = make([]float32, len(scores))
		for i, s := range scores {
			v.Scores[i] = float32(s)
		}
	}
	id := func(key string) int32 {
		if n, ok := meta(key).(uint64); ok && n < 1<<31 {
			return int32(n)
		}
		return -1
	}
	v.BOS, v.EOS, v.UNK = id("bos_token_id"), id("eos_token_id"), id("unknown_token_id")
	flag := func(key string) *bool {
		if b, ok := meta(key).(bool); ok {
			return &b
		}
		return nil
	}
	v.AddBOS, v.AddEOS, v.AddSpacePrefix = flag("add_bos_token"), flag("add_eos_token"), flag("add_space_prefix")
	var err error
	if m.Tokenizer, err = tokenizer.FromVocabulary(v); err != nil {
		return tokenizerError(err)
	}
	m.addEOS(v.EOS, id("eot_token_id"))
	return m.parseChat(v.ChatTemplate)
}
