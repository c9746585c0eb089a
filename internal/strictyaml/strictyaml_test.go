package strictyaml_test

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"xagg/internal/strictyaml"
)

type host struct {
	Name string     `yaml:"name"`
	IP   netip.Addr `yaml:"ip"`
}

type file struct {
	Hosts []host `yaml:"hosts"`
	Pool  int    `yaml:"pool"`
}

func TestDecode(t *testing.T) {
	for src, want := range map[string]string{
		"hosts:\n- {name: a, ip: 10.0.0.1}\n": "",
		"pol: 3\n":                            `f.yaml:1:1: unknown field "pol"`,
		"pool: many\n":                        "f.yaml:1:7: cannot unmarshal string into Go struct field file.Pool of type int",
		"hosts:\n- {name: 10.0.0, ip: 10.0.0.300}\n":                                         `f.yaml:2:22: ParseAddr("10.0.0.300"): IPv4 field has value >255`,
		"hosts:\n- {name: moon, ip: 10.0.0.1}\n- {name: b, ip: moon}\n- {name: c, ip: moon}": `f.yaml:3:17: ParseAddr("moon"): unable to parse IP`,
		"hosts:\n- {name: moon, ip: \"moon\"}\n":                                             `f.yaml:2:20: ParseAddr("moon"): unable to parse IP`,
		"hosts:\n- {name: a, ip: 10.0.0.1, mac: 12}\n":                                       `f.yaml:2:27: unknown field "mac"`,
		"hosts: [\n": "f.yaml:1:8: sequence end token ']' not found",
		"hosts:\n- name: a\n- name: b\n  name: c\n": `f.yaml:4:3: mapping key "name" already defined at [3:3]`,
	} {
		got := file{Pool: 7}
		err := strictyaml.Decode("f.yaml", []byte(src), &got, strictyaml.Text[netip.Addr]())
		if err == nil && want != "" || err != nil && err.Error() != want {
			t.Errorf("%q\ngot  %v\nwant %s", src, err, want)
		}
		if want == "" && (got.Pool != 7 || len(got.Hosts) != 1 || got.Hosts[0].IP != netip.MustParseAddr("10.0.0.1")) {
			t.Errorf("%q is %+v", src, got)
		}
	}
}

func TestDurations(t *testing.T) {
	for src, want := range map[string]string{
		"{after: 20ms}":     "",
		"{after: \"20ms\"}": "",
		"{after: \"soon\"}": "f.yaml:1:9: soon is not a time; want a number with a unit, as in 250us, 20ms or 1.5s",
		"{after: 20}":       "f.yaml:1:9: 20 is not a time; want a number with a unit, as in 250us, 20ms or 1.5s",
		"{after: soon}":     "f.yaml:1:9: soon is not a time; want a number with a unit, as in 250us, 20ms or 1.5s",
	} {
		var got struct {
			After time.Duration `yaml:"after"`
		}
		err := strictyaml.Decode("f.yaml", []byte(src), &got, strictyaml.Durations())
		if err == nil && want != "" || err != nil && err.Error() != want {
			t.Errorf("%q\ngot  %v\nwant %s", src, err, want)
		}
		if want == "" && got.After != 20*time.Millisecond {
			t.Errorf("%q is %v", src, got.After)
		}
	}
}

func TestLocate(t *testing.T) {
	src := []byte("hosts:\n- name: a\n- {name: b, ip: 10.0.0.1}\npool: 3\n")
	cause := errors.New("is wrong")
	for field, want := range map[string]string{
		"pool":          "f.yaml:4:7: is wrong",
		"hosts[1].ip":   "f.yaml:3:17: is wrong",
		"hosts[1].name": "f.yaml:3:10: is wrong",
		"hosts[0].ip":   "f.yaml:2:7: is wrong", // is missing: its host
		"hosts[2].ip":   "f.yaml:2:1: is wrong", // and that is missing: the list
		"none":          "f.yaml: is wrong",
		"":              "f.yaml: is wrong",
	} {
		if err := strictyaml.Locate("f.yaml", src, field, cause); err.Error() != want || !errors.Is(err, cause) {
			t.Errorf("%s: %v, want %s", field, err, want)
		}
	}
}
