package check

import (
	"fmt"

	"xagg/wire"
)

// Reason says what is wrong with a packet. The names that [wire.Reason] has as well mean the same here.
type Reason string

// The reasons of this package's own.
const (
	// ReasonField is a field or flag that must be zero in packets of this type, or must not be.
	ReasonField Reason = "field"
	// ReasonSum is a PARTIAL or RESULT that is not the sum of the contributions in its mask.
	ReasonSum Reason = "sum"
	// ReasonTwice is a rank that is counted twice.
	ReasonTwice Reason = "twice"
	// ReasonConflict is a second packet for the same place that says something else.
	ReasonConflict Reason = "conflict"
)

// fault is what is wrong with a packet.
type fault struct {
	reason Reason
	detail string
	other  Ref // the packet that it contradicts, if it is one that can be named
}

func faultf(reason Reason, format string, args ...any) *fault {
	return &fault{reason: reason, detail: fmt.Sprintf(format, args...)}
}

func wireReason(r wire.Reason) Reason { return Reason(r.String()) }

const (
	gradFlags   = wire.ShapeFlags | wire.StickyFlags | wire.FlagResend | wire.FlagForwarded
	answerFlags = wire.ShapeFlags
	sumFlags    = wire.ShapeFlags | wire.StickyFlags
	resultFlags = sumFlags | wire.FlagLate | wire.FlagServer
)

// offUDPChecksum is the offset of the UDP checksum in an IPv4 packet without options.
const offUDPChecksum = 20 + 6

// checkSummed checks that a packet carries a UDP checksum where its type must and none where it must not: the types
// differ in little else, so that this is what shows an altered one. A GRAD's sender may choose.
func checkSummed(typ wire.Type, checksum uint16) *fault {
	switch typ {
	case wire.TypePartial:
		if checksum == 0 {
			return faultf(ReasonField, "a PARTIAL without a UDP checksum")
		}
	case wire.TypeResult, wire.TypeAck, wire.TypeWait, wire.TypeNack:
		if checksum != 0 {
			return faultf(ReasonField, "UDP checksum %#04x, want none in this type", checksum)
		}
	}
	return nil
}

// checkSumFlags checks what the flags of a PARTIAL or RESULT say of how it came about.
func checkSumFlags(p *wire.Packet) *fault {
	async, late, server := p.Flags&wire.FlagAsync != 0, p.Flags&wire.FlagLate != 0, p.Flags&wire.FlagServer != 0
	switch {
	case late && !server:
		return faultf(ReasonField, "LATE without SERVER: only a server answers who comes late")
	case !async:
		return nil
	case p.Type == wire.TypePartial:
		return faultf(ReasonField, "a PARTIAL with ASYNC: switches add to no running sum")
	case late || !server:
		return faultf(ReasonField, "flags %#x with ASYNC: want SERVER, and nobody is late", uint8(p.Flags))
	case p.SpreadUs != 0 || p.BlockedUs != 0:
		return faultf(ReasonField, "spread %d us and blocked time %d us with ASYNC, want 0", p.SpreadUs, p.BlockedUs)
	case p.Tag[0] >= wire.P || p.Tag[1] >= wire.P:
		return faultf(wireReason(wire.ReasonTag), "the tag %#x of a running sum is not below %d", p.Tag, wire.P)
	}
	return nil
}

// checkForm checks what a packet that wire has decoded says of itself, but for the tag. It returns nil when that is
// in order.
func checkForm(p *wire.Packet) *fault {
	flags := gradFlags
	switch p.Type {
	case wire.TypeGrad:
		switch {
		case p.Rank >= wire.MaxRanks:
			return faultf(wireReason(wire.ReasonRank), "rank %d, want at most %d", p.Rank, wire.MaxRanks-1)
		case p.Contributors != 1<<p.Rank:
			return faultf(wireReason(wire.ReasonMask), "the mask %#x is not rank %d alone", p.Contributors, p.Rank)
		case p.Tag[0] >= wire.P || p.Tag[1] >= wire.P:
			return faultf(wireReason(wire.ReasonTag), "the tag %#x is not below %d", p.Tag, wire.P)
		}
	case wire.TypePartial, wire.TypeResult:
		if flags = sumFlags; p.Type == wire.TypeResult {
			flags = resultFlags
		}
		if f := checkSumFlags(p); f != nil {
			return f
		}
		// The last to add to a running sum need not have come to the round that was asked for.
		if p.Rank >= wire.MaxRanks || p.Contributors>>p.Rank&1 == 0 && p.Flags&wire.FlagAsync == 0 || p.Contributors == 0 {
			return faultf(wireReason(wire.ReasonMask), "the mask %#x lacks the last contributor, rank %d", p.Contributors, p.Rank)
		}
		if p.NextEpoch != 0 && (p.Type == wire.TypePartial || p.Chunk != 0) {
			return faultf(ReasonField, "next epoch %d, but only a RESULT of chunk 0 announces one", p.NextEpoch)
		}
	case wire.TypeWait, wire.TypeAck:
		flags = answerFlags
		switch {
		case p.Contributors == 0:
			return faultf(wireReason(wire.ReasonMask), "the mask is empty")
		case p.Tag != [2]uint32{}:
			return faultf(ReasonField, "tag %#x, want 0", p.Tag)
		case p.BlockedUs != 0 || p.NextEpoch != 0:
			return faultf(ReasonField, "blocked time %d us and next epoch %d, want 0", p.BlockedUs, p.NextEpoch)
		}
	case wire.TypeNack:
		flags = answerFlags
		switch {
		case p.Reason == wire.ReasonNone || p.Reason >= wire.NumReasons:
			return faultf(ReasonField, "reason %d, which is none to refuse for", p.Reason)
		case p.SpreadUs != 0 || p.BlockedUs != 0 || p.NextEpoch != 0:
			return faultf(ReasonField, "spread %d us, blocked time %d us and next epoch %d, want 0",
				p.SpreadUs, p.BlockedUs, p.NextEpoch)
		}
	case wire.TypeCtrl:
		return nil // a question's fields are the controller's, an answer's are a slot as it is
	}
	if p.Flags&^flags != 0 {
		return faultf(ReasonField, "flags %#x, want none but %#x", uint8(p.Flags), uint8(flags))
	}
	if p.Type != wire.TypeNack && p.Reason != wire.ReasonNone {
		return faultf(ReasonField, "reason %d, want 0", p.Reason)
	}
	if !p.HasLanes() {
		if p.Blocks != 0 {
			return faultf(wireReason(wire.ReasonLength), "%d blocks, want none", p.Blocks)
		}
		return nil
	}
	for i, v := range p.Lanes[p.Elems : int(p.Blocks)*wire.BlockLanes] {
		if v != 0 {
			return faultf(wireReason(wire.ReasonLength), "lane %d is %d, beyond the %d valid ones it must be 0",
				int(p.Elems)+i, v, p.Elems)
		}
	}
	return nil
}
