package telemetry

import (
	"fmt"
	"math"
	"reflect"
	"strings"
)

// Field describes a number that rules can use.
type Field struct {
	Name string // as rules spell it, such as "rank.blocked_p95"
	Type string // "double", "list(double)", "bool" or "string"
	Unit string // "s", "ns", "bytes/s", "packets/s", or "" where there is none
	Doc  string
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
	field := Field{Name: f.Tag.Get("cel"), Unit: f.Tag.Get("unit"), Doc: f.Tag.Get("doc")}
	if group != "" {
		field.Name = group + "." + field.Name
	}
	switch f.Type.Kind() {
	case reflect.Bool:
		field.Type = "bool"
	case reflect.String:
		field.Type = "string"
	case reflect.Slice:
		field.Type = "list(double)"
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

// numbers are the indices of the fields of a struct that hold numbers.
func numbers(t reflect.Type) (list []int) {
	for i := range t.NumField() {
		if k := t.Field(i).Type.Kind(); k == reflect.Float64 || k == reflect.Slice && t.Field(i).Type.Elem().Kind() == reflect.Float64 {
			list = append(list, i)
		}
	}
	return list
}

// Those of a snapshot's parts.
var (
	snapshotNumbers = numbers(reflect.TypeFor[Snapshot]())
	jobNumbers      = numbers(reflect.TypeFor[Job]())
	rankNumbers     = numbers(reflect.TypeFor[Rank]())
	switchNumbers   = numbers(reflect.TypeFor[Switch]())
	serverNumbers   = numbers(reflect.TypeFor[Server]())
)

// check returns the first of a struct's numbers that no rule may be given.
func check(group string, v reflect.Value, numbers []int) error {
	for _, i := range numbers {
		f := v.Field(i)
		if f.Kind() == reflect.Float64 {
			if x := f.Float(); !(x >= 0 && x <= math.MaxFloat64) {
				return impossible(group, v, i, x)
			}
			continue
		}
		for k := range f.Len() {
			if x := f.Index(k).Float(); !(x >= 0 && x <= math.MaxFloat64) {
				return impossible(group, v, i, x)
			}
		}
	}
	return nil
}

func impossible(group string, v reflect.Value, i int, x float64) error {
	name := group + v.Type().Field(i).Tag.Get("cel")
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return fmt.Errorf("check snapshot: %s is %v, want a finite number", name, x)
	}
	return fmt.Errorf("check snapshot: %s is %v, want none below 0", name, x)
}

// Set sets a number, a truth (1 or 0) or a list of one number of a Job, Rank, Switch or Server by the name that it has in rules,
// without its group.
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
		case f.Kind() == reflect.Slice:
			f.Set(reflect.ValueOf([]float64{value}))
			return nil
		default:
			return fmt.Errorf("it is a %s, which cannot be set to a number", f.Kind())
		}
	}
	return fmt.Errorf("there is no such field; there are %s", strings.Join(names, ", "))
}
