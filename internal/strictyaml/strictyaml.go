// Package strictyaml reads what people write in YAML: a field that does not exist is an error, and errors begin with
// the file's name, the line and the column.
package strictyaml

import (
	"context"
	"encoding"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/lexer"
)

// Decode reads src into v, on top of what v holds. name is the file's, for errors.
func Decode(name string, src []byte, v any, opts ...yaml.DecodeOption) error {
	return DecodeContext(context.Background(), name, src, v, opts...)
}

// DecodeContext is Decode with a context that the UnmarshalYAML methods of what is read are called with.
func DecodeContext(ctx context.Context, name string, src []byte, v any, opts ...yaml.DecodeOption) error {
	if err := yaml.UnmarshalContext(ctx, src, v, append(opts, yaml.Strict())...); err != nil {
		return positioned(name, src, err)
	}
	return nil
}

// Text has Decode read values of type T by their UnmarshalText. Without it the decoder does so too, but does not say
// where in the file a value is wrong.
func Text[T any, P interface {
	*T
	encoding.TextUnmarshaler
}]() yaml.DecodeOption {
	return yaml.CustomUnmarshaler(func(v *T, src []byte) error {
		var text string
		if err := yaml.Unmarshal(src, &text); err != nil {
			return err
		}
		if err := P(v).UnmarshalText([]byte(text)); err != nil {
			return &textError{text, err}
		}
		return nil
	})
}

// Durations has Decode say what is wrong with a time.Duration in people's words.
func Durations() yaml.DecodeOption {
	return yaml.CustomUnmarshaler(func(d *time.Duration, src []byte) (err error) {
		text := strings.TrimSpace(string(src))
		if *d, err = time.ParseDuration(strings.Trim(text, `"'`)); err != nil {
			return &textError{text, fmt.Errorf("%s is not a time; want a number with a unit, as in 250us, 20ms or 1.5s", text)}
		}
		return nil
	})
}

// textError is a scalar that is not what it should be.
type textError struct {
	text string
	err  error
}

func (e *textError) Error() string { return e.err.Error() }

// positioned puts the file's name and the place of the mistake before the decoder's message.
func positioned(name string, src []byte, err error) error {
	var bad *textError
	var yerr yaml.Error
	switch {
	case errors.As(err, &bad):
		for _, tok := range lexer.Tokenize(string(src)) {
			if tok.Value == bad.text {
				return fmt.Errorf("%s:%d:%d: %w", name, tok.Position.Line, tok.Position.Column, err)
			}
		}
	case errors.As(err, &yerr) && yerr.GetToken() != nil:
		pos := yerr.GetToken().Position
		return fmt.Errorf("%s:%d:%d: %s", name, pos.Line, pos.Column, yerr.GetMessage())
	}
	return fmt.Errorf("%s: %w", name, err)
}

// Locate puts the file's name and the place of a field before an error about the field, whose path is as in
// "hosts[1].port". A field that is missing is looked for at its parents.
func Locate(name string, src []byte, field string, err error) error {
	for ; field != ""; field = parent(field) {
		path, perr := yaml.PathString("$." + field)
		if perr != nil {
			break
		}
		node, perr := path.ReadNode(strings.NewReader(string(src)))
		if perr != nil {
			continue
		}
		pos := node.GetToken().Position
		return fmt.Errorf("%s:%d:%d: %w", name, pos.Line, pos.Column, err)
	}
	return fmt.Errorf("%s: %w", name, err)
}

// parent cuts the last step off a field path: "hosts[1].port", "hosts[1]", "hosts", "".
func parent(field string) string {
	return field[:max(0, strings.LastIndexAny(field, ".["))]
}
