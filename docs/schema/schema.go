// Package schema holds JSON Schemas (draft 2020-12) of the YAML files that people write, for editors and other programs. They are
// made of the types that the files are read into, and their descriptions of those types' comments. What they do not say, such
// as that a threshold is below another, is checked when a file is read.
package schema

import "embed"

//go:generate go run ./gen

//go:embed *.json
var files embed.FS

// Names are the kinds of files that there are schemas of.
var Names = []string{"controller", "policy", "policy-test", "scenario"}

// Of returns the schema of a kind of file; ok is false when there is none of that name.
func Of(name string) (text []byte, ok bool) {
	text, err := files.ReadFile(name + ".json")
	return text, err == nil
}
