package scenario

import (
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"xagg/policy"
)

var update = flag.Bool("update", false, "write the messages that bad scenarios get into their first lines")

func TestGood(t *testing.T) {
	want := map[string]*Scenario{
		"full": {
			Name: "full", About: "Everything that can be said.", Servers: 2, Links: Links{Worker: 37_500_000, Server: 1_000_000_000},
			Warmup: 2, Rounds: 30, Seed: 7, Jobs: []Job{{
				Name: "a", Ranks: 4, Depth: 8, Pool: 16, Tensors: Tensors{Model: "resnet50", Divide: 100, Bucket: 20000},
				Compute: Compute{Mean: 100 * time.Millisecond, Jitter: 0.3, Slow: map[int]float64{1: 2, 3: 1.5}, Backward: 0.66},
				Links:   map[int]Rate{2: 30_000_000}, Loss: map[int]Share{0: 0.001, 3: 0.5}, Steer: []int{3, 1},
				Quorum: &Quorum{Ranks: 3, Wait: 500 * time.Microsecond, Rounds: 256}, Async: &Async{Staleness: 8},
			}, {
				Name: "b", Ranks: 1, Depth: 1, Tensors: Tensors{Sizes: []int{1, 2, 3}},
				Compute: Compute{Mean: time.Millisecond, Moving: &Moving{Every: 20, Factor: 4},
					Episodes: []Episode{{Rank: 0, Factor: 2.5, From: 3, To: 30}}},
			}},
		},
		"least": {
			Name: "least", About: "What has to be said.", Servers: 1, Links: Links{Worker: 40_000_000}, Warmup: DefaultWarmup,
			Rounds: DefaultRounds, Jobs: []Job{{
				Name: "train", Ranks: 64, Depth: 1, Tensors: Tensors{Sizes: []int{1000}}, Compute: Compute{Mean: 20 * time.Millisecond},
			}},
		},
	}
	for name, want := range want {
		got, err := Load("testdata/" + name + ".good.yaml")
		if err != nil {
			t.Error(err)
			continue
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		// What is written is read again.
		text, err := yaml.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse("again.yaml", text)
		if err != nil {
			t.Errorf("%v in\n%s", err, text)
		} else if diff := cmp.Diff(got, again, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s, written and read (-want +got):\n%s", name, diff)
		}
	}
}

// TestDocs: the scenario of the documentation can be run, and says everything that can be said.
func TestDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/bench.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(doc), "```yaml\n")
	text, _, _ = strings.Cut(text, "```")
	s, err := Parse("bench.md", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Job]()) {
		if reflect.ValueOf(s.Jobs[0]).FieldByIndex(field.Index).IsZero() {
			t.Errorf("the example has no %s", field.Tag.Get("yaml"))
		}
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[Compute]()) {
		if reflect.ValueOf(s.Jobs[0].Compute).FieldByIndex(field.Index).IsZero() {
			t.Errorf("the example has no compute.%s", field.Tag.Get("yaml"))
		}
	}
}

// TestBad compares errors with the first line of each file, a comment.
func TestBad(t *testing.T) {
	files, err := filepath.Glob("testdata/*.bad.yaml")
	if err != nil || len(files) < 60 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		first, rest, _ := strings.Cut(string(src), "\n")
		want := filepath.Base(file) + strings.TrimPrefix(first, "# ")
		_, err = Parse(filepath.Base(file), src)
		if err == nil {
			t.Errorf("%s is accepted", file)
			continue
		}
		if *update {
			text := "# " + strings.TrimPrefix(err.Error(), filepath.Base(file)) + "\n" + rest
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if err.Error() != want {
			t.Errorf("\ngot  %v\nwant %s", err, want)
		}
	}
	if _, err := Load("testdata/none.yaml"); !os.IsNotExist(unwrapAll(err)) {
		t.Errorf("a missing file: %v", err)
	}
}

func unwrapAll(err error) error {
	for {
		u, ok := err.(interface{ Unwrap() error })
		if !ok || os.IsNotExist(err) {
			return err
		}
		err = u.Unwrap()
	}
}

// TestValidate: errors name a field that there is, also where nothing was read from a file.
func TestValidate(t *testing.T) {
	if err := (&Scenario{}).Validate(); policy.FieldOf(err) != "name" {
		t.Errorf("an empty scenario: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(src)
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		s, err := Parse("f.yaml", src)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "f.yaml:") {
				t.Errorf("error without the file: %v", err)
			}
			return
		}
		if again, err := Parse("f.yaml", src); err != nil || !reflect.DeepEqual(again, s) {
			t.Errorf("read again: %v", err)
		}
	})
}

func TestRate(t *testing.T) {
	for text, want := range map[string]Rate{
		"40Mbit": 40_000_000, "37.5 Mbit": 37_500_000, "1Gbit": 1_000_000_000, "0.25kbit": 250, "1e3kbit": 1_000_000, "0kbit": 0,
	} {
		var got Rate
		if err := got.UnmarshalText([]byte(text)); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", text, got, err, want)
		}
		var again Rate
		if err := again.UnmarshalText([]byte(got.String())); err != nil || again != got {
			t.Errorf("%v is %d, %v; want %d", got, again, err, got)
		}
	}
	for _, text := range []string{"", "Mbit", "40", "40Mb", "infkbit", "1e300Gbit", "-1kbit", "nankbit", "0x", "9007200Gbit"} {
		var got Rate
		if err := got.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}

func TestShare(t *testing.T) {
	for text, want := range map[string]string{"0.1%": "0.1%", "100 %": "100%", "0%": "0%", "12.5%": "12.5%", "0.001%": "0.001%"} {
		var got Share
		if err := got.UnmarshalText([]byte(text)); err != nil || got.String() != want {
			t.Errorf("%q is %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "%", "1", "101%", "-1%", "nan%"} {
		var got Share
		if err := got.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}
