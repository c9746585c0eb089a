package agg

import (
	"fmt"
	"slices"

	"xagg/wire"
)

// What the model tests have in common: a job whose contributions anyone can compute, and the network's naming of ends.

const modelJob = 7

// value is the one lane that a rank contributes to a chunk: different for every rank and place, of both signs.
func value(rank uint8, round, chunk uint32) int32 {
	v := int32(1+rank)<<20 + int32(round)<<8 + int32(chunk)
	if (uint32(rank)+chunk)%2 == 1 {
		v = -v
	}
	return v
}

// grad is a rank's contribution as the worker sends it.
func grad(epoch uint16, rank uint8, round, seq, chunk, chunks uint32) *wire.Packet {
	p := &wire.Packet{Header: wire.Header{
		Type: wire.TypeGrad, Job: modelJob, Epoch: epoch, Rank: rank, Blocks: 1, Elems: 1,
		Seq: seq, Round: round, Chunk: chunk, Contributors: bit(rank), Amax: rank + 1,
	}}
	if chunk == chunks-1 {
		p.Flags = wire.FlagLast
	}
	p.Lanes[0] = value(rank, round, chunk)
	p.Seal()
	return p
}

// checkResult checks that a RESULT is what a plain loop over all ranks gives.
func checkResult(p *wire.Packet, ranks int) error {
	var sum int32
	for r := range ranks {
		sum += value(uint8(r), p.Round, p.Chunk)
	}
	switch {
	case p.Contributors != 1<<ranks-1:
		return fmt.Errorf("RESULT of round %d chunk %d has mask %#x", p.Round, p.Chunk, p.Contributors)
	case p.Lanes[0] != sum:
		return fmt.Errorf("RESULT of round %d chunk %d is %d, want %d", p.Round, p.Chunk, p.Lanes[0], sum)
	case !p.TagOK():
		return fmt.Errorf("RESULT of round %d chunk %d has a tag that does not fit", p.Round, p.Chunk)
	case p.Amax != uint8(ranks):
		return fmt.Errorf("RESULT of round %d chunk %d has amax %d, want %d", p.Round, p.Chunk, p.Amax, ranks)
	}
	return nil
}

// modelMember is where rank is admitted.
func modelMember(rank uint8) Member {
	return Member{Port: uint16(rank) + 1, Src: 0x0a4d0001 + uint32(rank)}
}

func modelMembers(ranks int) map[uint8]Member {
	m := make(map[uint8]Member)
	for r := range ranks {
		m[uint8(r)] = modelMember(uint8(r))
	}
	return m
}

func modelServerPorts(n int) []uint16 { return []uint16{65, 66, 67, 68}[:n] }

func cloneSlots(slots []slot) []slot {
	slots = slices.Clone(slots)
	for i := range slots {
		slots[i].lanes = slices.Clone(slots[i].lanes)
	}
	return slots
}
