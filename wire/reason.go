package wire

import (
	"fmt"
)

// Reason says why a packet was not summed. It is the one enumeration of them: the P4 program's counter indices, the
// XDP program's counter indices, the metric labels and the codes in a NACK are these numbers.
type Reason uint8

// The reasons. ReasonNone counts the packets that were summed.
const (
	ReasonNone       Reason = 0  // summed
	ReasonShort      Reason = 1  // shorter than its headers say, or than a header
	ReasonLength     Reason = 2  // length, block count and valid lanes do not fit each other
	ReasonVersion    Reason = 3  // another protocol version
	ReasonType       Reason = 4  // unknown type, or one that this aggregator does not take from this side
	ReasonChecksum   Reason = 5  // IPv4 or UDP checksum is wrong
	ReasonUnknownJob Reason = 6  // no such job here
	ReasonEpoch      Reason = 7  // the job is known, the plan's epoch is not installed (too old or not yet)
	ReasonRank       Reason = 8  // the rank does not belong to the job, or not to this aggregator
	ReasonPort       Reason = 9  // not the switch port that the sender was admitted at
	ReasonSource     Reason = 10 // not the IPv4 address that the sender was admitted with
	ReasonMask       Reason = 11 // the contributors mask is not what this sender may claim
	ReasonShape      Reason = 12 // elems, blocks, LAST, MODULAR, ASYNC, exponent, round or chunk differ from the slot's
	ReasonStale      Reason = 13 // the slot has gone on to a newer chunk or round
	ReasonOverlap    Reason = 14 // some but not all of the mask is in the slot: a fault of the switch
	ReasonRange      Reason = 15 // chunk or slot beyond the lease
	ReasonTag        Reason = 16 // an integrity lane is outside [0, p * contributors)
	ReasonDuplicate  Reason = 17 // was summed before; answered again
	ReasonSteered    Reason = 18 // the plan sends this rank to a server; passed on
	ReasonForwarded  Reason = 19 // the switch no longer holds the slot; passed on to the server
	ReasonRoute      Reason = 20 // ordinary traffic: no route to the destination
	ReasonTTL        Reason = 21 // ordinary traffic: time to live exceeded
	ReasonReturned   Reason = 22 // a server's answer on its way back; passed on
	ReasonClock      Reason = 23 // async: a contribution of this rank before it is missing
	ReasonLate       Reason = 24 // quorum: the chunk was closed without it; its RESULT was answered
	ReasonHeld       Reason = 25 // async: this rank is too far ahead of the slowest; it may come again
	NumReasons              = 26
)

var reasonNames = [NumReasons]string{
	"summed", "short", "length", "version", "type", "checksum", "unknown_job", "epoch", "rank", "port", "source",
	"mask", "shape", "stale", "overlap", "range", "tag", "duplicate", "steered", "forwarded", "route", "ttl", "returned",
	"clock", "late", "held",
}

// String returns the reason's name, which is also its metric label.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason_%d", uint8(r))
}

// reasonMeanings say in a few words what it is for an operator that packets are counted under a reason.
var reasonMeanings = [NumReasons]string{
	ReasonNone:       "summed",
	ReasonShort:      "cut short, or forged: shorter than the header says",
	ReasonLength:     "damaged or forged: lengths and lanes do not fit each other",
	ReasonVersion:    "of another protocol version: mixed releases, or forged",
	ReasonType:       "of no known type, or one that does not belong on this side",
	ReasonChecksum:   "damaged on the way: a checksum is wrong",
	ReasonUnknownJob: "of a job that is not installed here: a worker of an earlier run, or forged",
	ReasonEpoch:      "of a plan that is not installed here: late, or forged",
	ReasonRank:       "of a rank that the job does not have",
	ReasonPort:       "not from the switch port of the rank that they name: miswired, or forged",
	ReasonSource:     "not from the address of the rank that they name: misconfigured, or forged",
	ReasonMask:       "claim contributions that are not the sender's: a bug, or forged",
	ReasonShape:      "unlike the others' of the same chunk in length, type or exponent: a bug, or forged",
	ReasonStale:      "late: the slot has gone on to a newer chunk",
	ReasonOverlap:    "have contributions in common with what is summed already",
	ReasonRange:      "of a chunk beyond the job's vector: a bug, or forged",
	ReasonTag:        "with an impossible integrity tag: damaged without a checksum, or forged",
	ReasonDuplicate:  "sent again; answered again",
	ReasonSteered:    "passed on to a server by the plan",
	ReasonForwarded:  "passed on to a server, since the switch has closed the chunk",
	ReasonRoute:      "ordinary traffic to an address that the switch does not know",
	ReasonTTL:        "ordinary traffic whose time to live was over",
	ReasonReturned:   "a server's answers, passed back",
	ReasonClock:      "async: an earlier contribution of the rank is missing",
	ReasonLate:       "quorum: after the chunk was closed; the worker keeps them for its next vector",
	ReasonHeld:       "async: of a rank that is too far ahead of the slowest",
}

// Meaning says in a few words what it is for an operator that packets are counted under the reason.
func (r Reason) Meaning() string {
	if int(r) < len(reasonMeanings) {
		return reasonMeanings[r]
	}
	return "of a reason that this release does not know"
}

// Fault reports whether the reason is a refusal: something is wrong with the packet or its sender. The others are
// ordinary ways of not being summed here and now.
func (r Reason) Fault() bool {
	switch r {
	case ReasonNone, ReasonDuplicate, ReasonSteered, ReasonForwarded, ReasonReturned, ReasonLate, ReasonHeld:
		return false
	}
	return true
}
