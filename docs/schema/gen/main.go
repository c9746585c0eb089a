// Command gen writes the schemas of package schema, in whose folder it is run.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/invopop/jsonschema"

	"xagg/controller"
	"xagg/lab"
	"xagg/lab/scenario"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/policy/cases"
	"xagg/policy/cost"
	"xagg/policy/rules"
	"xagg/policy/telemetry"
	"xagg/xdp"
)

// kinds are the files, and what they are read into.
var kinds = map[string]reflect.Type{
	"controller": reflect.TypeFor[controller.Config](), "policy": reflect.TypeFor[adapt.Config](), "policy-test": reflect.TypeFor[cases.File](),
	"scenario": reflect.TypeFor[scenario.Scenario](),
}

// defaults are what holds of these types where a file does not say; what is zero is not told.
var defaults = []any{
	controller.DefaultConfig(), controller.DefaultConfig().Switch, controller.DefaultConfig().Policy, adapt.DefaultConfig(), cost.DefaultParams(),
	scenario.Scenario{Servers: 1, Warmup: scenario.DefaultWarmup, Rounds: scenario.DefaultRounds}, scenario.Job{Depth: 1},
}

// scalars are how types are spelled that are no strings and numbers in Go, or of which only some values are meant.
var scalars = map[reflect.Type]jsonschema.Schema{
	reflect.TypeFor[time.Duration]():   {Title: "duration", Type: "string", Pattern: `^(0|([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+$`, Examples: []any{"250us", "20ms", "1.5s"}},
	reflect.TypeFor[netip.Addr]():      {Title: "IPv4 address", Type: "string", Format: "ipv4"},
	reflect.TypeFor[controller.MAC]():  {Title: "Ethernet address", Type: "string", Pattern: `^[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}$`, Examples: []any{"02:78:61:00:00:01"}},
	reflect.TypeFor[xdp.Size]():        {Title: "size", Type: "string", Pattern: `^[0-9]+(GiB|MiB|KiB|B)$`, Examples: []any{"4GiB"}},
	reflect.TypeFor[scenario.Rate]():   {Title: "rate", Type: "string", Pattern: `^[0-9.]+(e[0-9]+)? *(kbit|Mbit|Gbit)$`, Examples: []any{"40Mbit"}},
	reflect.TypeFor[scenario.Share]():  {Title: "share", Type: "string", Pattern: `^[0-9.]+(e-?[0-9]+)? *%$`, Examples: []any{"0.1%"}},
	reflect.TypeFor[policy.Mode]():     {Type: "string", Enum: []any{"", policy.ModeSwitch, policy.ModeServer, policy.ModeHybrid}},
	reflect.TypeFor[controller.Mode](): {Type: "string", Enum: []any{"", controller.ModeSync, controller.ModeQuorum, controller.ModeAsync}},
	reflect.TypeFor[adapt.Place]():     {Type: "string", Enum: []any{adapt.Switch, adapt.Server}},
}

// ranges are the least and the largest values of fields, by type and name in YAML.
var ranges = map[string][2]float64{
	"controller.Switch.cpu_port": {1, controller.MaxPort}, "controller.Host.port": {1, controller.MaxPort}, "controller.Server.port": {1, controller.MaxPort},
	"controller.Config.reserve": {0, 1}, "controller.JobSpec.weight": {0, controller.MaxWeight},
	"controller.JobSpec.ranks": {1, policy.MaxRanks}, "controller.JobSpec.max_elems": {1, 1<<32 - 1}, "controller.JobSpec.depth": {0, controller.MaxDepth},
	"controller.Consistency.quorum": {0, policy.MaxRanks}, "controller.Consistency.staleness": {0, controller.MaxStaleness},
	"controller.Consistency.rounds": {0, controller.MaxRounds}, "policy.Static.quorum": {0, policy.MaxRanks}, "policy.Static.pool": {0, 1 << 31},
	"adapt.Config.window": {1, telemetry.MaxWindow}, "adapt.Config.moves": {1, 600}, "adapt.Config.min_cohort": {2, policy.MaxRanks},
	"adapt.Config.steered": {0, policy.MaxRanks}, "adapt.Config.min_steered": {0, policy.MaxRanks},
	"cost.Params.price": {0, 10}, "cost.Params.hop": {0, 10}, "cost.Params.trust": {0, 1000}, "cost.Params.slack": {0, 1},
	"rules.Enter.for": {1, rules.MaxOf}, "rules.Enter.of": {1, rules.MaxOf}, "rules.Leave.for": {1, rules.MaxOf}, "rules.Leave.of": {1, rules.MaxOf},
	"cases.Test.ranks": {1, policy.MaxRanks}, "cases.Step.rounds": {1, 1<<31 - 1},
	"scenario.Scenario.servers": {1, lab.MaxServers}, "scenario.Scenario.warmup": {1, scenario.MaxRounds}, "scenario.Scenario.rounds": {1, scenario.MaxRounds},
	"scenario.Job.ranks": {1, lab.MaxWorkers}, "scenario.Job.depth": {0, controller.MaxDepth}, "scenario.Job.pool": {0, 1 << 31},
	"scenario.Quorum.ranks": {1, lab.MaxWorkers}, "scenario.Quorum.rounds": {0, controller.MaxRounds},
	"scenario.Async.staleness": {0, controller.MaxStaleness}, "scenario.Tensors.divide": {0, 1 << 31}, "scenario.Tensors.bucket": {0, scenario.MaxValues},
	"scenario.Compute.jitter": {0, 3}, "scenario.Compute.backward": {0, 1}, "scenario.Moving.every": {1, scenario.MaxRounds},
	"scenario.Moving.factor": {1, scenario.MaxSlow}, "scenario.Episode.factor": {1, scenario.MaxSlow}, "scenario.Episode.from": {0, scenario.MaxRounds},
	"scenario.Episode.to": {1, scenario.MaxRounds},
}

// names are the values of fields that name something.
var names = map[string][]any{"policy.Static.rule": {"", policy.RuleStatic}, "adapt.Config.rule": anys(adapt.Names())}

func anys[T any](list []T) (out []any) {
	for _, v := range list {
		out = append(out, v)
	}
	return out
}

// required are the fields that a type cannot be without.
var required = map[string][]string{
	"controller.Config": {"service"}, "controller.Service": {"ip", "mac"}, "controller.Host": {"name", "ip", "mac", "port"},
	"controller.Server": {"name", "agent", "ip", "mac", "port"}, "controller.JobSpec": {"name", "ranks", "max_elems"},
	"rules.Spec": {"name", "score", "enter", "leave"}, "cases.File": {"policy", "tests"}, "cases.Test": {"ranks", "steps"}, "cases.Step": {"rounds"},
	"scenario.Scenario": {"name", "about", "links", "jobs"}, "scenario.Links": {"worker"}, "scenario.Job": {"name", "ranks", "tensors", "compute"},
	"scenario.Compute": {"mean"}, "scenario.Quorum": {"ranks"}, "scenario.Moving": {"every", "factor"}, "scenario.Episode": {"rank", "factor", "to"},
}

func main() {
	log.SetFlags(0)
	here, err := os.Getwd()
	if err != nil {
		log.Fatal(err)
	}
	if err := os.Chdir("../.."); err != nil { // comments are found below the module's root
		log.Fatal(err)
	}
	for name, kind := range kinds {
		text, err := schemaOf(name, kind)
		if err == nil {
			err = os.WriteFile(filepath.Join(here, name+".json"), text, 0o644)
		}
		if err != nil {
			log.Fatalf("schema of %s: %v", name, err)
		}
	}
}

func schemaOf(name string, kind reflect.Type) ([]byte, error) {
	r := &jsonschema.Reflector{
		FieldNameTag: "yaml", RequiredFromJSONSchemaTags: true, Anonymous: true,
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			if s, ok := scalars[t]; ok {
				return &s
			}
			return nil
		},
		// Types of the same name in two packages are two definitions.
		Namer: nameOf,
	}
	for _, dir := range []string{"./controller", "./policy", "./lab/scenario"} {
		if err := r.AddGoComments("xagg", dir); err != nil {
			return nil, err
		}
	}
	s := r.ReflectFromType(kind)
	s.Title = "xagg " + name + " file"
	for name, def := range s.Definitions {
		constrain(name, def)
	}
	for _, of := range defaults {
		if def, ok := s.Definitions[nameOf(reflect.TypeOf(of))]; ok {
			fill(def, reflect.ValueOf(of))
		}
	}
	out, err := json.MarshalIndent(s, "", "  ")
	return append(out, '\n'), err
}

// constrain says which fields a type needs, and the ranges of fields, and puts descriptions in a line.
func constrain(name string, s *jsonschema.Schema) {
	s.Required = required[name]
	if s.Properties == nil {
		return
	}
	for p := s.Properties.Oldest(); p != nil; p = p.Next() {
		p.Value.Description = strings.ReplaceAll(p.Value.Description, "\n", " ")
		p.Value.Enum = append(p.Value.Enum, names[name+"."+p.Key]...)
		if lim, ok := ranges[name+"."+p.Key]; ok {
			p.Value.Minimum, p.Value.Maximum = json.Number(fmt.Sprint(lim[0])), json.Number(fmt.Sprint(lim[1]))
		}
	}
}

// nameOf names the definition of a type; types without a name are written where they are used.
func nameOf(t reflect.Type) string {
	if t.Name() == "" {
		return ""
	}
	return t.PkgPath()[strings.LastIndexByte(t.PkgPath(), '/')+1:] + "." + t.Name()
}

// fill puts the values of a struct's fields to its schema as their defaults.
func fill(s *jsonschema.Schema, v reflect.Value) {
	for i := range v.NumField() {
		field, value := v.Type().Field(i), v.Field(i)
		name, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		p, ok := s.Properties.Get(name)
		switch {
		case field.Anonymous:
			fill(s, value)
		case !ok || value.IsZero():
		case field.Type == reflect.TypeFor[time.Duration]():
			p.Default = value.Interface().(time.Duration).String()
		case slices.ContainsFunc(defaults, func(of any) bool { return reflect.TypeOf(of) == field.Type }): // its fields have theirs
		case p.Ref != "" && value.Kind() == reflect.Struct:
			text, err := yaml.Marshal(value.Interface())
			if err == nil {
				err = yaml.Unmarshal(text, &p.Default)
			}
			if err != nil {
				log.Fatalf("default of %s: %v", name, err)
			}
		case value.Comparable() && value.Kind() != reflect.Struct && value.Kind() != reflect.Pointer:
			p.Default = value.Interface()
		}
	}
}
