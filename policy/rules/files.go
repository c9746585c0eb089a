package rules

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"xagg/internal/strictyaml"
	"xagg/policy"
)

//go:embed shipped/*.yaml
var shipped embed.FS

// Parse reads a rule from YAML. name is the file's, for errors, which begin with file, line and column.
func Parse(name string, src []byte) (*Rule, error) {
	var spec Spec
	if err := strictyaml.Decode(name, src, &spec); err != nil {
		return nil, err
	}
	r, err := Compile(spec)
	if bad, ok := errors.AsType[*policy.FieldError](err); ok {
		return nil, strictyaml.Locate(name, src, bad.Field, err)
	}
	return r, err
}

// Names returns the names of the rules that come with the program.
func Names() []string {
	entries, err := fs.ReadDir(shipped, "shipped")
	if err != nil {
		panic(err) // it is embedded
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// Source returns the text of a rule that comes with the program, as an example for rules of one's own.
func Source(name string) (string, error) {
	src, err := shipped.ReadFile(path.Join("shipped", name+".yaml"))
	if err != nil {
		return "", fmt.Errorf("find rule %q: want one of %s", name, strings.Join(Names(), ", "))
	}
	return string(src), nil
}

// Shipped returns a rule that comes with the program.
func Shipped(name string) (*Rule, error) {
	src, err := Source(name)
	if err != nil {
		return nil, err
	}
	return Parse(name+".yaml", []byte(src))
}
