package xdp

import (
	"math/bits"

	"xagg/wire"
)

// LagBuckets is the number of buckets of a histogram of lags: bucket i counts [2^i, 2^(i+1)) microseconds, bucket 0
// also 0. The last one is above an hour.
const LagBuckets = 32

// RankStats is what a server saw of one rank: how far its summed contributions arrived behind the first arrival of
// their chunk, on the server's clock. Only GRADs have lags; a PARTIAL does not say when its contributors came.
type RankStats struct {
	Packets  uint64 // GRADs summed
	Partials uint64 // PARTIALs summed of which it was the last contributor
	LagSumUs uint64
	LagMaxUs uint64
	LagLog2  [LagBuckets]uint64
}

// Add counts one contribution that arrived lag microseconds behind the first.
func (s *RankStats) Add(lag uint32) {
	s.Packets++
	s.LagSumUs += uint64(lag)
	s.LagMaxUs = max(s.LagMaxUs, uint64(lag))
	s.LagLog2[bits.Len32(lag|1)-1]++
}

// merge adds the statistics of another processor.
func (s *RankStats) merge(o *RankStats) {
	s.Packets += o.Packets
	s.Partials += o.Partials
	s.LagSumUs += o.LagSumUs
	s.LagMaxUs = max(s.LagMaxUs, o.LagMaxUs)
	for i, n := range o.LagLog2 {
		s.LagLog2[i] += n
	}
}

// reasonMap returns the counters that are not zero, by name.
func reasonMap(counts [wire.NumReasons]uint64) map[string]uint64 {
	m := make(map[string]uint64)
	for r, n := range counts {
		if n != 0 {
			m[wire.Reason(r).String()] = n
		}
	}
	return m
}
