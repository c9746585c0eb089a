package xdp

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// SlotSize is what one slot takes of a server's memory, in bytes: 256 lanes and 64 bytes of bookkeeping.
const SlotSize = 1088

// Size is an amount of memory in bytes. As text it is a whole number with one of the units B, KiB, MiB and GiB, such as
// "64MiB". It implements [github.com/spf13/pflag.Value].
type Size uint64

var sizeUnits = []struct {
	name  string
	bytes uint64
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

// ParseSize reads a size from its text.
func ParseSize(s string) (Size, error) {
	for _, unit := range sizeUnits {
		digits, ok := strings.CutSuffix(s, unit.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 64)
		if err != nil || n > math.MaxUint64/unit.bytes {
			break
		}
		return Size(n * unit.bytes), nil
	}
	return 0, fmt.Errorf("parse size %q: want a whole number and a unit, such as 512KiB, 64MiB or 2GiB", s)
}

// Set implements pflag.Value.
func (s *Size) Set(text string) (err error) {
	*s, err = ParseSize(text)
	return err
}

// String returns the size in the largest unit that divides it.
func (s Size) String() string {
	for _, unit := range sizeUnits {
		if n := uint64(s); n >= unit.bytes && n%unit.bytes == 0 {
			return fmt.Sprintf("%d%s", n/unit.bytes, unit.name)
		}
	}
	return "0B"
}

// UnmarshalText reads a size as [ParseSize] does.
func (s *Size) UnmarshalText(text []byte) error { return s.Set(string(text)) }

// MarshalText writes a size as String does.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Type implements pflag.Value.
func (s *Size) Type() string { return "size" }

// Slots returns the number of slots that fit, at least 1 and at most 2^32-1, or an error that says what would.
func (s Size) Slots() (uint32, error) {
	switch n := uint64(s) / SlotSize; {
	case n == 0:
		return 0, fmt.Errorf("memory of %v is too small: a slot takes %d bytes, and a job needs at least two for every "+
			"256 lanes of its largest vector", s, SlotSize)
	case n > maxSlots:
		return 0, fmt.Errorf("memory of %v is too big: a server can have %d slots of %d bytes", s, uint32(maxSlots), SlotSize)
	default:
		return uint32(n), nil
	}
}

// maxSlots is the largest number of entries of an array map.
const maxSlots = math.MaxUint32
