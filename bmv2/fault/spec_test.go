package fault

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		text  string
		want  Spec
		print string // if it differs from text
	}{
		{"drop=0.1", Spec{Drop: 0.1}, ""},
		{"drop=100%", Spec{Drop: 1}, "drop=1"},
		{"delay=1.5ms", Spec{Delay: 1500 * time.Microsecond, Delayed: 1}, ""},
		{"delayed=20%,delay=2ms", Spec{Delay: 2 * time.Millisecond, Delayed: 0.2}, "delay=2ms,delayed=0.2"},
		{"drop=0,corrupt=1e-6,all=1", Spec{Corrupt: 1e-6, All: true}, "corrupt=1e-06,all=true"},
		{"drop=0.1,duplicate=0.05,reorder=0.1,delay=2ms,corrupt=0.01,port=3,direction=in,seed=7",
			Spec{0.1, 0.05, 0.1, 2 * time.Millisecond, 1, 0.01, 3, In, 7, false}, ""},
		{"drop=0.1,direction=both", Spec{Drop: 0.1}, "drop=0.1"},
	} {
		got, err := Parse(c.text)
		if err != nil || got != c.want {
			t.Errorf("%s: %+v, %v, want %+v", c.text, got, err, c.want)
		}
		if c.print == "" {
			c.print = c.text
		}
		if got.String() != c.print {
			t.Errorf("%s: is printed as %s, want %s", c.text, got, c.print)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	src, err := os.ReadFile("testdata/specs.bad")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(src)) {
		text, want, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " => ")
		if !ok {
			continue // a comment
		}
		_, err := Parse(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	src, err := os.ReadFile("testdata/specs.bad")
	if err != nil {
		f.Fatal(err)
	}
	for line := range strings.Lines(string(src)) {
		text, _, _ := strings.Cut(line, " => ")
		f.Add(text)
	}
	f.Add("drop=0.1,duplicate=0.05,reorder=0.1,delay=2ms,delayed=7%,corrupt=0.01,port=3,direction=in,seed=7,all=true")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(s.String())
		if err != nil || again != s {
			t.Errorf("%q is printed as %q, which is %+v, %v", text, s, again, err)
		}
	})
}

func TestParseYAML(t *testing.T) {
	name := filepath.Join("testdata", "all.good.yaml")
	src, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseYAML(name, src)
	want := []Spec{
		{Drop: 0.2, Duplicate: 0.05},
		{Reorder: 0.001, Delay: 2 * time.Millisecond, Delayed: 0.1, Port: 3, Direction: In, Seed: 7},
		{Corrupt: 0.01, Port: 65, Direction: Out, All: true},
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func TestParseYAMLRefuses(t *testing.T) {
	files, err := filepath.Glob("testdata/*.bad.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no files", err)
	}
	for _, name := range files {
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(src), "\n")
		want, ok := strings.CutPrefix(first, "# want: ")
		if !ok {
			t.Fatalf("%s says not what it wants", name)
		}
		if specs, err := ParseYAML(name, src); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v, want %q", name, specs, err, want)
		}
	}
}

func FuzzParseYAML(f *testing.F) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range files {
		src, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(src)
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		specs, err := ParseYAML("x.yaml", src)
		if err != nil {
			return
		}
		for _, s := range specs {
			if again, err := Parse(s.String()); err != nil || again != s {
				t.Errorf("%+v is printed as %q, which is %+v, %v", s, s, again, err)
			}
		}
	})
}

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		specs string
		ok    bool
	}{
		{"drop=0.1", true},
		{"drop=0.1 drop=0.2,port=3", true},
		{"drop=0.1,port=3 drop=0.2", false},
		{"drop=0.1 duplicate=0.1", false},
		{"drop=0.1,direction=in duplicate=0.1,direction=out", true},
		{"drop=0.1,direction=in duplicate=0.1", false},
		{"drop=0.1 duplicate=0.1,direction=in", true},
		{"drop=0.1,port=3 duplicate=0.1,port=4", true},
		{"drop=0.1,port=3 drop=0.1,port=4 duplicate=0.1,port=3", false},
	} {
		var specs []Spec
		for _, text := range strings.Fields(c.specs) {
			s, err := Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			specs = append(specs, s)
		}
		if err := Check(specs); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.specs, err)
		}
	}
}
