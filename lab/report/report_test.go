package report

import (
	"bytes"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/html"

	"xagg/lab/results"
)

var update = flag.Bool("update", false, "write the golden files")

// forms are all forms of a report.
func forms(d *Document, f *results.File) map[string]func(io.Writer) error {
	return map[string]func(io.Writer) error{
		"report.md":    d.WriteMarkdown,
		"report.txt":   d.WriteText,
		"report.bench": func(w io.Writer) error { return WriteBenchmarks(w, f) },
		"report.html":  d.WriteHTML,
	}
}

func TestGolden(t *testing.T) {
	d, _, f := document(t, 1)
	for name, write := range forms(d, f) {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			t.Fatal(err)
		}
		if dir := os.Getenv("XAGG_REPORTS"); dir != "" { // to look at
			if err := os.WriteFile(filepath.Join(dir, name), b.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if name == "report.html" { // has tests of its own
			continue
		}
		file := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), b.String()); diff != "" {
			t.Errorf("%s: -want +got (write it anew with -update):\n%s", name, diff)
		}
	}
}

// void are HTML's elements without an end.
var void = []string{"meta", "line", "rect", "circle", "polyline", "br", "link", "img", "input"}

// The page is well formed, needs nothing from elsewhere, runs nothing, and its references lead somewhere.
func TestHTMLStandsAlone(t *testing.T) {
	d, _, _ := document(t, 1)
	d.Title = `<script>alert("no")</script>`
	d.Sections[0].Blocks[1].List[0] += `<img src="https://example.com/">`
	var b bytes.Buffer
	if err := d.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	if text := b.String(); strings.Contains(text, "url(") || strings.Contains(text, "@import") {
		t.Error("styles load something")
	}
	var open []string
	ids, refs := map[string]bool{}, map[string]bool{}
	for z := html.NewTokenizer(&b); ; {
		kind := z.Next()
		if kind == html.ErrorToken {
			if z.Err() != io.EOF {
				t.Fatal(z.Err())
			}
			break
		}
		tok := z.Token()
		switch kind {
		case html.StartTagToken, html.SelfClosingTagToken:
			if slices.Contains([]string{"script", "img", "link", "iframe", "object", "embed", "image", "use", "form"}, tok.Data) {
				t.Errorf("element %s", tok.Data)
			}
			if kind == html.StartTagToken && !slices.Contains(void, tok.Data) {
				open = append(open, tok.Data)
			}
			for _, a := range tok.Attr {
				switch {
				case a.Key == "id":
					if ids[a.Val] {
						t.Errorf("two elements have the id %q", a.Val)
					}
					ids[a.Val] = true
				case a.Key == "aria-labelledby":
					refs[a.Val] = true
				case a.Key == "href" && strings.HasPrefix(a.Val, "#"):
					refs[a.Val[1:]] = true
				case a.Key == "href" || a.Key == "src" || a.Key == "style" || strings.HasPrefix(a.Key, "on"):
					t.Errorf("attribute %s=%q", a.Key, a.Val)
				case strings.Contains(a.Val, "NaN") || strings.Contains(a.Val, "Inf") || strings.HasPrefix(a.Val, "ZgotmplZ"):
					t.Errorf("attribute %s=%q of %s", a.Key, a.Val, tok.Data)
				case (a.Key == "width" || a.Key == "height") && strings.HasPrefix(a.Val, "-"):
					t.Errorf("%s of %s is %s", a.Key, tok.Data, a.Val)
				}
			}
		case html.EndTagToken:
			if len(open) == 0 || open[len(open)-1] != tok.Data {
				t.Fatalf("</%s> ends %v", tok.Data, open)
			}
			open = open[:len(open)-1]
		}
	}
	if len(open) > 0 {
		t.Errorf("%v are not ended", open)
	}
	for ref := range refs {
		if !ids[ref] {
			t.Errorf("nothing has the id %q", ref)
		}
	}
	if len(refs) < 10 {
		t.Errorf("only %d references", len(refs))
	}
}

// number is a number in a text.
var number = regexp.MustCompile(`\d[\d` + "\u00a0" + `]*(\.\d+)?(e[+-]\d+)?`)

// Every number that a reader of the page sees is in the document that the other forms are made of.
func TestHTMLNumbers(t *testing.T) {
	d, _, _ := document(t, 1)
	known := map[string]bool{}
	var walk func(reflect.Value)
	walk = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() {
				walk(v.Elem())
			}
		case reflect.Struct:
			for i := range v.NumField() {
				walk(v.Field(i))
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		case reflect.String:
			for _, n := range number.FindAllString(v.String(), -1) {
				known[n] = true
			}
		}
	}
	for _, s := range d.Sections {
		walk(reflect.ValueOf(s.Title))
		for _, b := range s.Blocks {
			walk(reflect.ValueOf(b.Paragraph))
			walk(reflect.ValueOf(b.List))
			walk(reflect.ValueOf(b.Table))
			walk(reflect.ValueOf(b.Listing))
			if b.Figure != nil { // only what is text in it
				walk(reflect.ValueOf(b.Figure.Title + " " + b.Figure.About + " " + b.Figure.Axis))
				for _, tick := range append(b.Figure.Ticks, b.Figure.Lines...) {
					walk(reflect.ValueOf(tick.Text))
				}
				for _, g := range b.Figure.Groups {
					walk(reflect.ValueOf(g.Title))
					for _, key := range b.Figure.Key {
						walk(reflect.ValueOf(key.Text))
					}
					for _, level := range b.Figure.Levels {
						walk(reflect.ValueOf(level.Text))
					}
					for _, m := range g.Marks {
						walk(reflect.ValueOf(m.Label + " " + m.Title))
					}
				}
			}
		}
	}
	var b bytes.Buffer
	if err := d.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	seen, style := 0, false
	for z := html.NewTokenizer(&b); z.Next() != html.ErrorToken; {
		tok := z.Token()
		if tok.Data == "style" {
			style = tok.Type == html.StartTagToken
		}
		if tok.Type != html.TextToken || style {
			continue
		}
		for _, n := range number.FindAllString(tok.Data, -1) {
			seen++
			if !known[n] {
				t.Errorf("number %s in %q is not in the document", n, strings.TrimSpace(tok.Data))
			}
		}
	}
	if seen < 1000 {
		t.Errorf("only %d numbers", seen)
	}
}

// Every number of every table is one of the analysis, as it is or in the column's unit, rounded.
func TestTableNumbers(t *testing.T) {
	d, a, _ := document(t, 2)
	var values []float64
	var walk func(reflect.Value)
	walk = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			walk(v.Elem())
		case reflect.Struct:
			for i := range v.NumField() {
				if v.Type().Field(i).IsExported() {
					walk(v.Field(i))
				}
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		case reflect.Map:
			for i := v.MapRange(); i.Next(); {
				walk(i.Value())
			}
		case reflect.Float64:
			values = append(values, v.Float())
		case reflect.Int:
			values = append(values, float64(v.Int()))
		case reflect.Uint64:
			values = append(values, float64(v.Uint()))
		}
	}
	var units []float64
	for _, sc := range a.Scenarios {
		values = values[:0]
		walk(reflect.ValueOf(sc))
		for _, c := range sc.Costs {
			values = append(values, c.Total())
		}
		for _, v := range values {
			units = append(units, v, 1e3*v, 1e2*v, v/1e6, v/(1<<20))
		}
	}
	is := func(text string) bool {
		v, err := strconv.ParseFloat(strings.ReplaceAll(text, "\u00a0", ""), 64)
		if err != nil {
			t.Fatal(err)
		}
		digits := 0
		if mantissa, exponent, found := strings.Cut(text, "e"); found {
			e, _ := strconv.Atoi(exponent)
			digits = len(mantissa) - strings.Index(mantissa, ".") - 1 - e
		} else if _, fraction, found := strings.Cut(text, "."); found {
			digits = len(fraction)
		}
		return slices.ContainsFunc(units, func(u float64) bool {
			return math.Abs(math.Abs(u)-v) <= 0.5000001*math.Pow10(-digits)
		})
	}
	checked := 0
	for _, s := range d.Sections {
		if s.Level != 3 && s.ID != "answer" {
			continue
		}
		for _, b := range s.Blocks {
			if b.Table == nil || strings.HasPrefix(b.Table.Caption, "The modes") {
				continue
			}
			for _, r := range b.Table.Rows {
				for _, c := range r.Cells {
					for _, n := range number.FindAllString(c.Text+" "+c.Note, -1) {
						checked++
						if !is(n) {
							t.Errorf("%s, %s, %s: %s (%s) has a number that the analysis has not", s.Title, b.Table.Caption, r.Head, c.Text, c.Note)
						}
					}
				}
			}
		}
	}
	if checked < 500 {
		t.Errorf("only %d numbers", checked)
	}
}

// What is not resolved, limited, skipped or failed is called so.
func TestMarks(t *testing.T) {
	d, a, _ := document(t, 1)
	cell := func(section int, table, scenario, mode string) Cell {
		t.Helper()
		for _, b := range d.Sections[section].Blocks {
			if b.Table != nil && strings.HasPrefix(b.Table.Caption, table) {
				for _, r := range b.Table.Rows {
					if r.Head == scenario {
						return r.Cells[slices.Index(b.Table.Head, mode)-1]
					}
				}
			}
		}
		t.Fatalf("no %s, %s, %s", table, scenario, mode)
		return Cell{}
	}
	const matrix = "Communication time in multiples of switch-only's"
	for _, tt := range []struct {
		scenario, mode string
		mark           Mark
	}{
		{"homogeneous", "gloo", Absent}, {"small-buckets", "ring", Limited}, {"half-slow", "server", Unresolved},
		{"slow-4", "hybrid/quorum", Best}, {"slow-4", "switch", ""}, {"homogeneous", "hybrid/quorum", AsGood},
	} {
		if c := cell(0, matrix, tt.scenario, tt.mode); c.Mark != tt.mark {
			t.Errorf("%s, %s: %+v, want mark %q", tt.scenario, tt.mode, c, tt.mark)
		}
	}
	for head, want := range map[string]string{"heterogeneous cases": "6", "at least 49 % less": "4 of 6", "homogeneous cases": "1", "at most 2 % worse": "1 of 1"} {
		if c := cell(1, "Communication time against", "hybrid/quorum", head); c.Text != want {
			t.Errorf("%s: %s, want %s", head, c.Text, want)
		}
	}
	if c := cell(1, "Communication time against", "hybrid", "at least 49 % less"); c.Text != "0 of 6" {
		t.Errorf("hybrid: at least 49 %% less: %s", c.Text)
	}
	if a.Limited != 3 {
		t.Errorf("%d limited runs", a.Limited)
	}
	var b bytes.Buffer
	if err := d.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"apt-get install python3-torch", "connection reset by peer", "shown, marked, without claim", "left out", "Computation is a sleep.",
		"0123456789ab", "Some Processor 9000", "6.12.0-amd64", "xagg bench run -f scenarios/*.yaml", "seeds 1 to 3"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report does not say %q", want)
		}
	}
}

// Reports of little are reports too: one repetition, one mode, no finished run.
func TestLittle(t *testing.T) {
	whole := synthetic(t, 1)
	for name, keep := range map[string]func(results.Run) bool{
		"one repetition": func(r results.Run) bool { return r.Repetition == 0 },
		"one mode":       func(r results.Run) bool { return r.Mode == "tcp" },
		"one run":        func(r results.Run) bool { return r.Mode == "switch" && r.Repetition == 1 && r.Scenario == "slow-2" },
		"only skipped":   func(r results.Run) bool { return !r.Finished() },
		"nothing":        func(results.Run) bool { return false },
	} {
		t.Run(name, func(t *testing.T) {
			f := &results.File{Sessions: []results.Session{{Header: whole.Sessions[0].Header}}}
			for _, r := range whole.Sessions[0].Runs {
				if keep(r) {
					f.Sessions[0].Runs = append(f.Sessions[0].Runs, r)
				}
			}
			a, err := results.Analyze(results.DefaultLimit, f)
			if err != nil {
				t.Fatal(err)
			}
			d := Compare(a)
			for form, write := range forms(d, f) {
				var b bytes.Buffer
				if err := write(&b); err != nil {
					t.Fatal(err)
				}
				if strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") {
					t.Errorf("%s has a number that is none", form)
				}
			}
			for _, b := range d.Sections[0].Blocks { // one pair resolves nothing
				if b.Table != nil && strings.HasPrefix(b.Table.Caption, "Communication") {
					for _, r := range b.Table.Rows {
						for _, c := range r.Cells {
							if c.Mark == Best || name != "one mode" && c.Mark == "" {
								t.Errorf("%s: %+v", r.Head, c)
							}
						}
					}
				}
			}
		})
	}
}

func TestExtraErrors(t *testing.T) {
	for _, tt := range []struct {
		read      func(string, []byte) (*Extra, error)
		src, want string // "" = none
	}{
		{Train, "{", "read a.json: unexpected EOF"},
		{Train, `{"kind":"aggregator"}`, `read a.json: its kind is "aggregator" and not "train"`},
		{Train, `{"schema_version":1}`, `read a.json: its kind is "" and not "train"`},
		{Train, `{"kind":"train","schema_version":9}`, "read a.json: schema version 9"},
		{Train, `{"kind":"train","schema_version":1}{}`, "read a.json: invalid character"},
		{Train, `{"kind":"train","schema_version":1}`, ""}, // interrupted before its first run
		{Aggregator, `{"kind":"train","schema_version":1}`, `read a.json: its kind is "train" and not ""`},
		{Aggregator, `{"schema_version":1}`, "read a.json: no core_sets"},
		{Aggregator, `{"schema_version":0,"core_sets":[{}]}`, "read a.json: schema version 0"},
		{Aggregator, `{"schema_version":1,"core_sets":[{}]}`, ""},
	} {
		_, err := tt.read("a.json", []byte(tt.src))
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)) {
			t.Errorf("%s: error %v, want %q", tt.src, err, tt.want)
		}
	}
}

// What cannot be in a picture, such as the curve of a run that failed, is left out.
func TestTrain(t *testing.T) {
	d, _, _ := document(t, 1)
	i := slices.IndexFunc(d.Sections, func(s Section) bool { return s.ID == "train" })
	var curves []string
	failed := ""
	for _, b := range d.Sections[i].Blocks {
		if b.Figure != nil && b.Figure.ID == "train-seconds" {
			for _, k := range b.Figure.Key {
				curves = append(curves, k.Text)
			}
		}
		failed += strings.Join(b.List, "")
	}
	if want := []string{"single", "switch", "hybrid/quorum", "server/async s=0", "server/async s=8"}; !slices.Equal(curves, want) {
		t.Errorf("curves %v, want %v", curves, want)
	}
	if failed != "server/async s=8, seed 2, failed: rank 3: no answer from the controller" {
		t.Errorf("failed: %s", failed)
	}
}

// A vertical axis is logarithmic where it says so: equal factors are equal distances.
func TestLines(t *testing.T) {
	f := lines("id", "title", "axis", "about", []line{{name: "a", points: []point{{0, 10}, {1, 0.1}}}})
	y := map[string]int{}
	for _, l := range f.Levels {
		y[l.Text] = l.Y
	}
	one, two := y["0.2"]-y["2"], y["0.5"]-y["5"]
	if len(y) != 7 || one < 100 || one-two > 1 || two-one > 1 {
		t.Errorf("levels %v", f.Levels)
	}
	if lines("id", "title", "axis", "about", nil) != nil {
		t.Error("a picture of nothing")
	}
}

func TestFormat(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.00123456: "0.00123", 0.999: "0.999", 1: "1.00", 9.996: "10.0", 12.345: "12.3", 123.4: "123", 1234567: "1\u00a0234\u00a0567",
		-45.67: "-45.7", 1.234e-9: "1.23e-09", math.Inf(1): "–"} {
		if got := three(v); got != want {
			t.Errorf("three(%g) = %q, want %q", v, got, want)
		}
	}
	for v, want := range map[float64]string{0.18: "82 % less", 1: "as much", 1.004: "as much", 1.5: "50 % more"} {
		if got := less(v); got != want {
			t.Errorf("less(%g) = %q, want %q", v, got, want)
		}
	}
	for v, want := range map[float64]int{1: 0, 1.02: 0, 0.5: -2, 0.1: -4, 1.1: 1, 3: 3, 0: 0} {
		if got := heat(v); got != want {
			t.Errorf("heat(%g) = %d, want %d", v, got, want)
		}
	}
	if got := numbers([]uint64{7, 1, 2, 3, 9, 10}); got != "1 to 3, 7, 9, 10" {
		t.Errorf("numbers: %s", got)
	}
	if got := gain(1.001); got != "0 %" {
		t.Errorf("gain: %s", got)
	}
}
