// Package fault damages links on purpose: it drops, duplicates, reorders, delays and corrupts frames, each port and
// direction of a switch by a random sequence of its own that a seed determines.
//
// A [Spec] says what happens where, as plain data; [Parse] reads it from a command line, [ParseYAML] from a file. A
// [Link] decides: it is pure, and told the time. An [Injector] runs links by the clock of the machine.
package fault

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Direction is a way over a link, seen from the switch.
type Direction uint8

// Directions. Only a Spec may have Both.
const (
	Both Direction = iota
	In             // from the host into the switch
	Out            // from the switch to the host
)

var directions = []string{Both: "both", In: "in", Out: "out"}

// String returns both, in or out.
func (d Direction) String() string { return directions[d] }

// MarshalText writes what String returns.
func (d Direction) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads what String returns.
func (d *Direction) UnmarshalText(text []byte) error {
	i := slices.Index(directions, string(text))
	if i < 0 {
		return fmt.Errorf("%q is not in, out or both", text)
	}
	*d = Direction(i)
	return nil
}

// Limits of a Spec.
const (
	MaxPort  = 510              // v1model's last port
	MaxDelay = 10 * time.Second // of a frame
)

// Spec says what happens to the frames of one direction of one port, or of several. Rates are shares of the frames,
// 0..1, and independent of each other.
type Spec struct {
	Drop      float64
	Duplicate float64 // are followed by a copy
	Reorder   float64 // are overtaken by the one to three frames that come next, as far as these come within 5 ms
	Delay     time.Duration
	Delayed   float64 // come later by Delay; 1 unless something else is said
	Corrupt   float64 // have one to three bits of one 16-bit word flipped, anywhere
	Port      uint16  // 1..510; 0 = all
	Direction Direction
	Seed      uint64
	All       bool // all frames, not only the protocol's
}

// keys are the names that a Spec's fields have in text, in the order of String.
var keys = []string{"drop", "duplicate", "reorder", "delay", "delayed", "corrupt", "port", "direction", "seed", "all"}

// set sets the field that key names.
func (s *Spec) set(key, value string) (err error) {
	switch key {
	case "drop":
		s.Drop, err = parseRate(value)
	case "duplicate":
		s.Duplicate, err = parseRate(value)
	case "reorder":
		s.Reorder, err = parseRate(value)
	case "delayed":
		s.Delayed, err = parseRate(value)
	case "corrupt":
		s.Corrupt, err = parseRate(value)
	case "delay":
		if s.Delay, err = time.ParseDuration(value); err != nil || s.Delay <= 0 || s.Delay > MaxDelay {
			err = fmt.Errorf("%q is not a time up to %v, as in 5ms", value, MaxDelay)
		}
	case "port":
		n, bad := strconv.ParseUint(value, 10, 16)
		if s.Port = uint16(n); bad != nil || n < 1 || n > MaxPort {
			err = fmt.Errorf("%q is not a port, 1 to %d (leave it out for all)", value, MaxPort)
		}
	case "direction":
		err = s.Direction.UnmarshalText([]byte(value))
	case "seed":
		if s.Seed, err = strconv.ParseUint(value, 10, 64); err != nil {
			err = fmt.Errorf("%q is not a number of 64 bits", value)
		}
	case "all":
		if s.All, err = strconv.ParseBool(value); err != nil {
			err = fmt.Errorf("%q is not true or false", value)
		}
	default:
		return fmt.Errorf("%q is none of %s", key, strings.Join(keys, ", "))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// parseRate reads 0.2 or 20%.
func parseRate(text string) (float64, error) {
	number, percent := strings.CutSuffix(text, "%")
	rate, err := strconv.ParseFloat(number, 64)
	if percent {
		rate /= 100
	}
	if err != nil || !(rate >= 0 && rate <= 1) { // NaN is neither
		return 0, fmt.Errorf("%q is not a rate, 0 to 1 or 0%% to 100%%", text)
	}
	return rate, nil
}

// finish checks what fields say together, and fills in Delayed; given has the keys that were set.
func (s *Spec) finish(given []string) error {
	if !slices.Contains(given, "delayed") {
		s.Delayed = 0
		if s.Delay > 0 {
			s.Delayed = 1
		}
	} else if s.Delay == 0 {
		return errors.New("delayed: says how many, but no delay says how long")
	}
	if s.Drop == 0 && s.Duplicate == 0 && s.Reorder == 0 && s.Delayed == 0 && s.Corrupt == 0 {
		return errors.New("nothing happens: want drop, duplicate, reorder, delay or corrupt")
	}
	return nil
}

// covers reports whether everything that o is about s is about as well.
func (s *Spec) covers(o *Spec) bool {
	return (s.Port == 0 || s.Port == o.Port) && (s.Direction == Both || s.Direction == o.Direction)
}

// Parse reads the form of a command line: KEY=VALUE, with commas between, as in
// "drop=20%,duplicate=0.05,delay=2ms,port=3,direction=in,seed=7". The keys are the names of Spec's fields.
func Parse(text string) (Spec, error) {
	var s Spec
	var given []string
	err := func() error {
		for _, pair := range strings.Split(text, ",") {
			key, value, ok := strings.Cut(pair, "=")
			if !ok {
				return fmt.Errorf("%q is not KEY=VALUE, as in drop=0.1", pair)
			}
			if slices.Contains(given, key) {
				return fmt.Errorf("%s: is there twice", key)
			}
			if err := s.set(key, value); err != nil {
				return err
			}
			given = append(given, key)
		}
		return s.finish(given)
	}()
	if err != nil {
		return Spec{}, fmt.Errorf("fault %q: %w", text, err)
	}
	return s, nil
}

// String returns the form that Parse reads.
func (s Spec) String() string {
	var b strings.Builder
	put := func(key, value string) {
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(key + "=" + value)
	}
	rate := func(key string, r float64) {
		if r != 0 {
			put(key, strconv.FormatFloat(r, 'g', -1, 64))
		}
	}
	rate("drop", s.Drop)
	rate("duplicate", s.Duplicate)
	rate("reorder", s.Reorder)
	if s.Delay != 0 {
		put("delay", s.Delay.String())
		if s.Delayed != 1 {
			put("delayed", strconv.FormatFloat(s.Delayed, 'g', -1, 64))
		}
	}
	rate("corrupt", s.Corrupt)
	if s.Port != 0 {
		put("port", strconv.Itoa(int(s.Port)))
	}
	if s.Direction != Both {
		put("direction", s.Direction.String())
	}
	if s.Seed != 0 {
		put("seed", strconv.FormatUint(s.Seed, 10))
	}
	if s.All {
		put("all", "true")
	}
	return b.String()
}

// MarshalText writes what String returns.
func (s Spec) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads it as Parse does.
func (s *Spec) UnmarshalText(text []byte) (err error) {
	*s, err = Parse(string(text))
	return err
}

// Check returns an error when one of the specs is in vain, because a later one is about all of its ports and
// directions: the last one that is about a port and direction holds there alone.
func Check(specs []Spec) error {
	for i, s := range specs {
		for _, later := range specs[i+1:] {
			if later.covers(&s) {
				return fmt.Errorf("fault %q: is in vain, the later %q holds wherever it does (put both into one)", s, later)
			}
		}
	}
	return nil
}

// ParseYAML reads the form of a file: a list named faults of mappings with the keys of [Parse]. name is the file's, for
// errors, which begin with name, line and column.
func ParseYAML(name string, src []byte) ([]Spec, error) {
	fail := func(node ast.Node, err error) ([]Spec, error) {
		pos := node.GetToken().Position
		return nil, fmt.Errorf("%s:%d:%d: %w", name, pos.Line, pos.Column, err)
	}
	file, err := parser.ParseBytes(src, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(file.Docs) != 1 || file.Docs[0].Body == nil {
		return nil, fmt.Errorf("%s: want one document with a list named faults", name)
	}
	root, ok := file.Docs[0].Body.(*ast.MappingNode)
	if !ok || len(root.Values) != 1 || root.Values[0].Key.String() != "faults" {
		return fail(file.Docs[0].Body, errors.New("want a list named faults and nothing else"))
	}
	list, ok := root.Values[0].Value.(*ast.SequenceNode)
	if !ok {
		return fail(root.Values[0].Value, errors.New("faults: want a list"))
	}
	var specs []Spec
	for _, item := range list.Values {
		fields, ok := item.(*ast.MappingNode)
		if !ok {
			return fail(item, fmt.Errorf("want a mapping, as in {drop: 0.1, port: 3}, not %s", item))
		}
		var s Spec
		var given []string
		for _, f := range fields.Values {
			value, ok := f.Value.(ast.ScalarNode)
			if !ok {
				return fail(f.Value, fmt.Errorf("%s: want one value", f.Key))
			}
			key := f.Key.GetToken().Value
			if err := s.set(key, value.GetToken().Value); err != nil {
				return fail(f.Key, err)
			}
			given = append(given, key)
		}
		if err := s.finish(given); err != nil {
			return fail(item, err)
		}
		specs = append(specs, s)
	}
	return specs, nil
}
