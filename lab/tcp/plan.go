package tcp

import (
	"fmt"
	"hash/fnv"
	"unsafe"
)

// Plan is what the servers and all workers of a job must agree on.
type Plan struct {
	Ranks   int
	Buckets []int // numbers of values; they are all-reduced in this order, over and over
}

// maxValues bounds a plan: 4 GiB.
const maxValues = 1 << 30

func (p Plan) check() error {
	if p.Ranks < 1 || len(p.Buckets) == 0 {
		return fmt.Errorf("%d ranks and %d buckets: want at least 1 of each", p.Ranks, len(p.Buckets))
	}
	all := 0
	for _, n := range p.Buckets {
		if n < 0 || n > maxValues {
			return fmt.Errorf("a bucket of %d values: want at most %d", n, maxValues)
		}
		if all += n; all > maxValues {
			return fmt.Errorf("buckets of more than %d values", maxValues)
		}
	}
	return nil
}

// least is the number of values from which on a bucket is shared by servers: less would be more headers than values.
const least = 1024

// share returns from which value of each bucket to which a server sums.
func (p Plan) share(server, servers int) [][2]int {
	shares := make([][2]int, len(p.Buckets))
	for b, n := range p.Buckets {
		switch {
		case n >= least*servers:
			shares[b] = [2]int{n * server / servers, n * (server + 1) / servers}
		case b%servers == server:
			shares[b] = [2]int{0, n}
		}
	}
	return shares
}

// hello is what a worker says first.
type hello struct {
	magic, rank, ranks, server, servers, buckets, values, digest uint32
}

// magic is "xagg" if both ends have the same byte order.
const magic = 0x78616767

func (p Plan) hello(rank, server, servers int) hello {
	digest, all := fnv.New32a(), 0
	for _, n := range p.Buckets {
		fmt.Fprintln(digest, n)
		all += n
	}
	return hello{magic, uint32(rank), uint32(p.Ranks), uint32(server), uint32(servers), uint32(len(p.Buckets)), uint32(all), digest.Sum32()}
}

// bytesOf returns the memory of x.
func bytesOf[T float32 | hello](x []T) []byte {
	if len(x) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), len(x)*int(unsafe.Sizeof(x[0])))
}
