package schema

import (
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"
)

// Field is a field of a kind of file.
type Field struct {
	Name    string // with those that it is in: "cost.enter.above"
	Type    string // as people say it: duration, integer, "one of a, b"; of a field that has fields "mapping"
	Range   string // "1 to 64"; empty = the type's
	Default string // as YAML; empty = nothing, 0, false
	Doc     string
}

// definition is what of a schema's definition is used here.
type definition struct {
	Ref         string                 `yaml:"$ref"`
	Title       string                 `yaml:"title"`
	Type        string                 `yaml:"type"`
	Enum        []string               `yaml:"enum"`
	Minimum     *float64               `yaml:"minimum"`
	Maximum     *float64               `yaml:"maximum"`
	Default     any                    `yaml:"default"`
	Description string                 `yaml:"description"`
	Properties  yaml.MapSlice          `yaml:"properties"`
	Defs        map[string]*definition `yaml:"$defs"`
}

// Fields returns the fields of a kind of file in their order, those of a mapping behind it. Lists and mappings by names of
// the file's author have no fields of their own here.
func Fields(kind string) ([]Field, error) {
	text, ok := Of(kind)
	if !ok {
		return nil, fmt.Errorf("there is no schema of %q; there are %s", kind, strings.Join(Names, ", "))
	}
	var root definition
	if err := yaml.Unmarshal(text, &root); err != nil {
		return nil, fmt.Errorf("read schema of %s: %w", kind, err)
	}
	return root.fields(root.Defs, "")
}

// fields returns those of a definition. Below is what stands before their names.
func (d *definition) fields(defs map[string]*definition, below string) ([]Field, error) {
	if d.Ref != "" {
		of := defs[strings.TrimPrefix(d.Ref, "#/$defs/")]
		if of == nil {
			return nil, fmt.Errorf("schema: there is no definition %s", d.Ref)
		}
		return of.fields(defs, below)
	}
	var list []Field
	for _, item := range d.Properties {
		name := below + fmt.Sprint(item.Key)
		src, err := yaml.Marshal(item.Value)
		if err != nil {
			return nil, err
		}
		var p definition
		if err := yaml.Unmarshal(src, &p); err != nil {
			return nil, fmt.Errorf("schema: field %s: %w", name, err)
		}
		inner, err := p.fields(defs, name+".")
		if err != nil {
			return nil, err
		}
		list = append(append(list, p.field(name)), inner...)
	}
	return list, nil
}

// field says what a property is.
func (d *definition) field(name string) Field {
	f := Field{Name: name, Type: d.Type, Doc: d.Description}
	switch {
	case len(d.Enum) > 0:
		f.Type = "one of " + strings.Join(d.Enum, ", ")
	case d.Title != "":
		f.Type = d.Title
	case d.Ref != "" || d.Type == "object":
		f.Type = "mapping"
	case d.Type == "array":
		f.Type = "list"
	}
	if d.Minimum != nil && d.Maximum != nil {
		f.Range = fmt.Sprintf("%v to %v", *d.Minimum, *d.Maximum)
	}
	if d.Default != nil {
		text, err := yaml.MarshalWithOptions(d.Default, yaml.Flow(true))
		if err != nil {
			panic(err) // it was read from text
		}
		f.Default = strings.TrimSpace(string(text))
	}
	return f
}
