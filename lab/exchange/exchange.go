// Package exchange is what ways of summing float32 values over TCP have in common. The numbers are in the machine's own byte
// order; both ends of a connection check that they have the same.
package exchange

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"unsafe"
)

// Plan is what all processes of a job must agree on.
type Plan struct {
	Ranks   int
	Buckets []int // numbers of values; they are all-reduced in this order, over and over
}

// MaxValues bounds a plan: 4 GiB.
const MaxValues = 1 << 30

// Check reports what is wrong with a plan.
func (p Plan) Check() error {
	if p.Ranks < 1 || len(p.Buckets) == 0 {
		return fmt.Errorf("%d ranks and %d buckets: want at least 1 of each", p.Ranks, len(p.Buckets))
	}
	all := 0
	for _, n := range p.Buckets {
		if n < 0 || n > MaxValues {
			return fmt.Errorf("a bucket of %d values: want 0 to %d", n, MaxValues)
		}
		if all += n; all > MaxValues {
			return fmt.Errorf("buckets of more than %d values", MaxValues)
		}
	}
	return nil
}

// Hello is what one process says to another first.
type Hello struct {
	magic, Rank, ranks, buckets, values, digest uint32
	// Place is anything else that both must agree on.
	Place [2]uint32
}

// magic is "xagg" if both ends have the same byte order.
const magic = 0x78616767

// NewHello returns the first words of a rank.
func NewHello(p Plan, rank int, place ...uint32) Hello {
	digest, all := fnv.New32a(), 0
	for _, n := range p.Buckets {
		fmt.Fprintln(digest, n)
		all += n
	}
	h := Hello{magic, uint32(rank), uint32(p.Ranks), uint32(len(p.Buckets)), uint32(all), digest.Sum32(), [2]uint32{}}
	copy(h.Place[:], place)
	return h
}

// ErrPlace is a process that takes this one for another.
var ErrPlace = errors.New("it takes this for another process of the job")

// ReadHello reads the first words of a process that ought to have the same plan and place, and returns its rank.
func ReadHello(r io.Reader, p Plan, place ...uint32) (rank int, err error) {
	var h [1]Hello
	if _, err := io.ReadFull(r, Bytes(h[:])); err != nil {
		return 0, err
	}
	got, want := h[0], NewHello(p, int(h[0].Rank), place...)
	switch {
	case got.magic != magic:
		return 0, fmt.Errorf("it begins with %#x instead of %#x: none of ours, or of another byte order", got.magic, magic)
	case got.ranks != want.ranks || got.Rank >= want.ranks:
		return 0, fmt.Errorf("it is rank %d of %d, but this job has %d ranks", got.Rank, got.ranks, want.ranks)
	case got.Place != want.Place:
		return 0, fmt.Errorf("%w: %d instead of %d", ErrPlace, got.Place, want.Place)
	case got != want:
		return 0, fmt.Errorf("it has %d buckets of %d values in all, but this job has %d of %d, or other ones", got.buckets, got.values,
			want.buckets, want.values)
	}
	return int(got.Rank), nil
}

// Bytes returns the memory of x.
func Bytes[T float32 | Hello](x []T) []byte {
	if len(x) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), len(x)*int(unsafe.Sizeof(x[0])))
}

// Floats returns the values whose memory b is. It must begin where a float32 may, and has no part of one at its end.
func Floats(b []byte) []float32 {
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), len(b)/4)
}
