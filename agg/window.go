package agg

import (
	"time"

	"xagg/wire"
)

// WindowConfig configures a worker's window. All fields are needed.
type WindowConfig struct {
	Job   uint16
	Epoch uint16 // of the first round
	Rank  uint8
	Ranks uint64 // mask of all ranks
	Pool  uint32 // a seq may be sent when seq-Pool was answered; power of two
}

// Window is a worker's side of the protocol for one job with one round under way: which chunk to send now, what an
// answer means, when to look again. Time is a time.Duration since an arbitrary fixed origin of the caller's.
type Window struct{}

// NewWindow returns a window before its first round.
func NewWindow(cfg WindowConfig) *Window { panic("not written") }

// Begin starts the next round with the given number of chunks (at least 1). The round before must be Done.
// It returns the round's number and the epoch that the round runs under.
func (w *Window) Begin(now time.Duration, chunks uint32) (round uint32, epoch uint16) {
	panic("not written")
}

// Send is one transmission that the window asks for.
type Send struct {
	Chunk  uint32
	Seq    uint32
	Resend bool // FlagResend is to be set
}

// Next returns the next transmission that is due at time now, or false when nothing is. Every true return counts as
// sent: the caller must send it. Resends come before new chunks.
func (w *Window) Next(now time.Duration) (Send, bool) { panic("not written") }

// Event says what an answer meant.
type Event uint8

const (
	// EventNone: an answer that changes nothing (old, repeated, for another worker, job or round).
	EventNone Event = iota
	// EventResult: the first RESULT of this chunk of the round under way. The caller takes its lanes; it must have
	// checked the tag before it called Handle.
	EventResult
	// EventDelivered: an ACK or WAIT told for the first time that the contribution is in.
	EventDelivered
	// EventRefused: a NACK for a chunk of the round under way that is still unanswered; its reason is in the header.
	EventRefused
)

// Handle takes the header of an answer that arrived at time now.
func (w *Window) Handle(now time.Duration, h *wire.Header) Event { panic("not written") }

// Deadline returns the time at which Next must be asked again if nothing arrives before, or false when nothing is
// outstanding.
func (w *Window) Deadline() (time.Duration, bool) { panic("not written") }

// Done reports whether every RESULT of the round under way has been taken.
func (w *Window) Done() bool { panic("not written") }

// Missing returns, for the round under way, the ranks that any unfinished chunk is known to wait for (from WAIT and
// ACK masks; 0 when no aggregator has said anything), the first unfinished chunk and the number of unfinished chunks.
func (w *Window) Missing() (ranks uint64, first uint32, chunks int) { panic("not written") }

// Stats are a window's counts since its creation.
type Stats struct {
	Sent    uint64 // packets, resends included
	Resends uint64 // of them sent before
	Results uint64 // RESULTs taken
	Waits   uint64 // WAITs received
	Acks    uint64 // ACKs received
	Nacks   uint64 // NACKs received
}

// Stats returns the counts so far.
func (w *Window) Stats() Stats { panic("not written") }
