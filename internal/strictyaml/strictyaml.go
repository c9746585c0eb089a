// Package strictyaml reads what people write in YAML: a field that does not exist is an error, and errors begin with
// the file's name, the line and the column.
package strictyaml

import (
	"context"
	"encoding"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Decode reads src into v, on top of what v holds. name is the file's, for errors.
func Decode(name string, src []byte, v any, opts ...yaml.DecodeOption) error {
	return DecodeContext(context.Background(), name, src, v, opts...)
}

// DecodeContext is Decode with a context that the UnmarshalYAML methods of what is read are called with.
func DecodeContext(ctx context.Context, name string, src []byte, v any, opts ...yaml.DecodeOption) error {
	opts = append(opts, yaml.Strict())
	err := yaml.UnmarshalContext(ctx, src, v, opts...)
	var bad *textError
	var yerr yaml.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &bad):
		if pos := find(ctx, src, bad.text, reflect.TypeOf(v), opts); pos != nil {
			return fmt.Errorf("%s:%d:%d: %w", name, pos.Line, pos.Column, err)
		}
	case errors.As(err, &yerr) && yerr.GetToken() != nil:
		pos := yerr.GetToken().Position
		return fmt.Errorf("%s:%d:%d: %s", name, pos.Line, pos.Column, yerr.GetMessage())
	}
	return fmt.Errorf("%s: %w", name, err)
}

// find returns where the scalar is that cannot be read, of which only the text is known: other scalars may have the same text and
// another type. It is the one that is at fault whatever it is made to be.
func find(ctx context.Context, src []byte, text string, as reflect.Type, opts []yaml.DecodeOption) *token.Position {
	const other = "∅" // which no type reads
	for i, tok := range lexer.Tokenize(string(src)) {
		if tok.Value != text {
			continue
		}
		tokens := lexer.Tokenize(string(src))
		tokens[i].Type, tokens[i].Value, tokens[i].Origin = token.StringType, other, other
		file, err := parser.Parse(tokens, 0)
		if err != nil || len(file.Docs) == 0 {
			return nil
		}
		err = yaml.NewDecoder(strings.NewReader(""), opts...).DecodeFromNodeContext(ctx, file.Docs[0].Body, reflect.New(as.Elem()).Interface())
		if bad, ok := errors.AsType[*textError](err); ok && bad.text == other {
			return tok.Position
		}
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
		text := strings.Trim(strings.TrimSpace(string(src)), `"'`)
		if *d, err = time.ParseDuration(text); err != nil {
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
