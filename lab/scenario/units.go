package scenario

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Rate is a link's rate in bits per second; in YAML a number with "kbit", "Mbit" or "Gbit" behind it.
type Rate uint64

// Share is a part of something, 0..1; in YAML a percentage such as "0.1%".
type Share float64

// rateUnits are in the order in which String tries them.
var rateUnits = []struct {
	name string
	bits float64
}{{"Gbit", 1e9}, {"Mbit", 1e6}, {"kbit", 1e3}}

// UnmarshalText reads a rate such as "37.5Mbit". A fraction of a bit is rounded.
func (r *Rate) UnmarshalText(text []byte) error {
	for _, unit := range rateUnits {
		number, ok := strings.CutSuffix(string(text), unit.name)
		if !ok {
			continue
		}
		// Beyond 2^53 numbers are no rates, and not exact.
		x, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if bits := math.Round(x * unit.bits); err == nil && bits >= 0 && bits < 1<<53 {
			*r = Rate(bits)
			return nil
		}
	}
	return fmt.Errorf("%q is not a rate; want a number with kbit, Mbit or Gbit behind it, as in 40Mbit", text)
}

// MarshalText writes the rate as String does.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// String writes the rate in the largest unit that it has at least one of.
func (r Rate) String() string {
	for _, unit := range rateUnits {
		if x := float64(r) / unit.bits; x >= 1 || unit.name == "kbit" {
			return strconv.FormatFloat(x, 'f', -1, 64) + unit.name
		}
	}
	panic("unreachable")
}

// UnmarshalText reads a percentage such as "0.1%".
func (s *Share) UnmarshalText(text []byte) error {
	number, ok := strings.CutSuffix(string(text), "%")
	x, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if !ok || err != nil || !(x >= 0 && x <= 100) {
		return fmt.Errorf("%q is not a share; want 0%% to 100%%, as in 0.1%%", text)
	}
	*s = Share(x / 100)
	return nil
}

// MarshalText writes the share as String does.
func (s Share) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// String writes the share as a percentage.
func (s Share) String() string { return strconv.FormatFloat(100*float64(s), 'g', 12, 64) + "%" }
