package schema

import (
	"slices"
	"testing"
)

func TestFields(t *testing.T) {
	for _, kind := range Names {
		fields, err := Fields(kind)
		if err != nil || len(fields) < 2 {
			t.Errorf("%s: %d fields, %v", kind, len(fields), err)
		}
	}
	fields, err := Fields("policy")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []Field{
		{"moves", "integer", "1 to 600", "12", "Moves is how many ranks of a job may be moved in any minute."},
		{"dwell", "duration", "", "1s", "Dwell is how long a rank stays where it came to, at least."},
		{"cost", "mapping", "", "", "Cost are the parameters of rule cost-model; nil = the defaults."},
		{"cost.enter", "mapping", "", "{above: 0.02, for: 2, of: 3}", ""},
		{"define.enter.of", "integer", "1 to 64", "", ""},
	} {
		i := slices.IndexFunc(fields, func(f Field) bool { return f.Name == want.Name })
		if i < 0 {
			t.Errorf("there is no field %s", want.Name)
			continue
		}
		got := fields[i]
		if want.Doc == "" {
			got.Doc = ""
		}
		if got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if fields, err := Fields("moon"); err == nil {
		t.Errorf("a file that there is not has %v", fields)
	}
}
