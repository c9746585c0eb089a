package telemetry

import (
	"fmt"
	"reflect"
	"strings"
)

// Field describes a number that rules can use.
type Field struct {
	Name string // as rules spell it, such as "rank.blocked_p95"
	Type string // "double", "bool" or "string"
	Unit string // "s", "ns", "bytes/s", "packets/s", or "" where there is none
	Doc  string

	of    string // "", "job", "rank", "switch" or "server"
	index int    // of the struct's field
}

// Fields are all fields, in the order of the structs that hold them.
var Fields = fields()

func fields() []Field {
	list := []Field{fieldOf("", reflect.TypeFor[Snapshot](), 0)}
	for _, g := range []struct {
		name string
		t    reflect.Type
	}{
		{"job", reflect.TypeFor[Job]()}, {"rank", reflect.TypeFor[Rank]()}, {"switch", reflect.TypeFor[Switch]()},
		{"server", reflect.TypeFor[Server]()},
	} {
		for i := range g.t.NumField() {
			list = append(list, fieldOf(g.name, g.t, i))
		}
	}
	return list
}

func fieldOf(group string, t reflect.Type, i int) Field {
	f := t.Field(i)
	field := Field{Name: f.Tag.Get("cel"), Unit: f.Tag.Get("unit"), Doc: f.Tag.Get("doc"), of: group, index: i}
	if group != "" {
		field.Name = group + "." + field.Name
	}
	switch f.Type.Kind() {
	case reflect.Bool:
		field.Type = "bool"
	case reflect.String:
		field.Type = "string"
	default:
		field.Type = "double"
	}
	return field
}

// Find returns the field of a name.
func Find(name string) (Field, bool) {
	for _, f := range Fields {
		if strings.EqualFold(f.Name, name) {
			return f, true
		}
	}
	return Field{}, false
}

// values returns all values of a number in a snapshot; none of what is no number.
func (f *Field) values(s *Snapshot) []float64 {
	var out []float64
	add := func(v reflect.Value) {
		if x := v.Field(f.index); x.Kind() == reflect.Float64 {
			out = append(out, x.Float())
		}
	}
	switch f.of {
	case "":
		add(reflect.ValueOf(s).Elem())
	case "job":
		add(reflect.ValueOf(&s.Job).Elem())
	case "switch":
		add(reflect.ValueOf(&s.Switch).Elem())
	case "rank":
		for i := range s.Ranks {
			add(reflect.ValueOf(&s.Ranks[i]).Elem())
		}
	case "server":
		for i := range s.Servers {
			add(reflect.ValueOf(&s.Servers[i]).Elem())
		}
	}
	return out
}

// Set sets a number or a truth (1 or 0) of a Job, Rank, Switch or Server by the name that it has in rules, without its group.
func Set(target any, name string, value float64) error {
	v := reflect.ValueOf(target).Elem()
	var names []string
	for i := range v.NumField() {
		tag := v.Type().Field(i).Tag.Get("cel")
		switch f := v.Field(i); {
		case tag != name:
			names = append(names, tag)
		case f.Kind() == reflect.Float64:
			f.SetFloat(value)
			return nil
		case f.Kind() == reflect.Bool:
			f.SetBool(value != 0)
			return nil
		default:
			return fmt.Errorf("%s: it is a %s, which cannot be set to a number", name, f.Kind())
		}
	}
	return fmt.Errorf("%s: there is no such field; there are %s", name, strings.Join(names, ", "))
}
