package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	// Port is the UDP port of the protocol: aggregators answer at it, workers send to it.
	Port = 19860
	// Version is the protocol version this package speaks.
	Version = 1

	// HeaderLen is the header's length in bytes.
	HeaderLen = 56
	// BlockLanes is the number of 32-bit lanes in a block: 64 lanes are 2,048 bits, the widest field that p4c accepts.
	BlockLanes = 64
	// BlockLen is a block's length in bytes.
	BlockLen = BlockLanes * 4
	// MaxBlocks is the number of blocks a packet may carry.
	MaxBlocks = 4
	// MaxLanes is the number of lanes a packet may carry.
	MaxLanes = MaxBlocks * BlockLanes
	// MaxLen is the length in bytes of the longest payload: a header and four blocks.
	MaxLen = HeaderLen + MaxBlocks*BlockLen
	// MaxRanks is the largest number of workers in a job: the contributors mask has 64 bits.
	MaxRanks = 64
)

// Type says what a packet is.
type Type uint8

// The packet types. The zero value is not one of them.
const (
	TypeGrad    Type = 1 // worker to aggregator: one worker's contribution to a chunk
	TypePartial Type = 2 // switch to server: the sum of the switch's cohort
	TypeResult  Type = 3 // the sum of all contributors
	TypeAck     Type = 4 // your contribution is cached, you may advance
	TypeWait    Type = 5 // your contribution is in, these have come so far
	TypeNack    Type = 6 // refused, Reason says why
	TypeCtrl    Type = 7 // controller to switch and back: read a slot
)

var typeNames = [...]string{"0", "GRAD", "PARTIAL", "RESULT", "ACK", "WAIT", "NACK", "CTRL"}

// String returns the type's name in capitals, or its number.
func (t Type) String() string {
	if int(t) < len(typeNames) {
		return typeNames[t]
	}
	return fmt.Sprintf("%d", uint8(t))
}

// Valid reports whether t is a type that the protocol defines.
func (t Type) Valid() bool { return t >= TypeGrad && t <= TypeCtrl }

// Flags qualify a packet.
type Flags uint8

// The flags.
const (
	FlagLast      Flags = 1 << 0 // last chunk of the round
	FlagResend    Flags = 1 << 1 // the sender has sent this contribution before
	FlagForwarded Flags = 1 << 2 // the switch passes the packet to the server unsummed
	FlagSaturated Flags = 1 << 3 // the sender clipped at least one lane; combined with or
	FlagModular   Flags = 1 << 4 // integer lanes: the values themselves, no exponent
	FlagLate      Flags = 1 << 5 // RESULT: the contribution that it answers came after the chunk was closed
	FlagServer    Flags = 1 << 6 // RESULT: a server closed the chunk
	FlagAsync     Flags = 1 << 7 // the lanes are added to a running sum, or are one
)

// ShapeFlags are the flags that all contributors of a chunk must agree on.
const ShapeFlags = FlagLast | FlagModular | FlagAsync

// StickyFlags are the flags that aggregators combine with or.
const StickyFlags = FlagSaturated

// Header is the packet header. Its zero value encodes to 56 bytes of which only the version is not zero.
type Header struct {
	Type         Type
	Flags        Flags
	Job          uint16    // incarnation of a job, given by the controller
	Epoch        uint16    // version of the job's plan, serial-number order
	Rank         uint8     // sender; in a RESULT the last contributor
	Blocks       uint8     // 64-lane blocks that follow, 0..4
	Seq          uint32    // chunk counted through the whole job, serial-number order
	Round        uint32    // aggregated vector within the job
	Chunk        uint32    // chunk within the round
	Elems        uint16    // valid lanes; lanes beyond are zero
	Exponent     int8      // lane = round(x * 2^Exponent)
	Amax         uint8     // biased float32 exponent of the largest magnitude, 0 = all zero; combined with max
	Contributors uint64    // mask of ranks
	Tag          [2]uint32 // integrity lanes, summed like values
	SpreadUs     uint32    // RESULT, WAIT: microseconds from the first to the last arrival
	BlockedUs    uint32    // RESULT, WAIT: the part of it spent on the last contributor alone
	NextEpoch    uint16    // RESULT of chunk 0: the newest epoch that is armed, 0 = none
	Reason       Reason    // NACK: why
}

// Byte offsets of the header's fields, for whoever patches packets in place.
const (
	OffVersionType  = 0
	OffFlags        = 1
	OffJob          = 2
	OffEpoch        = 4
	OffRank         = 6
	OffBlocks       = 7
	OffSeq          = 8
	OffRound        = 12
	OffChunk        = 16
	OffElems        = 20
	OffExponent     = 22
	OffAmax         = 23
	OffContributors = 24
	OffTag          = 32
	OffSpreadUs     = 40
	OffBlockedUs    = 44
	OffNextEpoch    = 48
	OffReason       = 50
	OffReserved     = 51 // five bytes, zero
)

// Packet is a header and its lanes. Only the first Blocks*64 lanes are on the wire, and only the first Elems of
// them carry values.
type Packet struct {
	Header
	Lanes [MaxLanes]int32
}

// Errors of Decode, in the order of its checks. Every one is a packet that is counted under the reason that [ReasonOf]
// names.
var (
	ErrVersion  = errors.New("packet of another protocol version")
	ErrShort    = errors.New("packet shorter than its header, or than its header says")
	ErrType     = errors.New("packet of unknown type")
	ErrLength   = errors.New("packet length does not fit its block count")
	ErrElems    = errors.New("valid lanes do not fit the block count")
	ErrReserved = errors.New("reserved bits are not zero")
)

// ReasonOf returns the reason code under which a packet is counted that [Packet.Decode] or [ParseFrame] refused with
// err. [ErrNotXAgg] is no fault of a packet but ordinary traffic: ReasonRoute, for those who do not pass it on.
func ReasonOf(err error) Reason {
	switch {
	case err == nil:
		return ReasonNone
	case errors.Is(err, ErrShort):
		return ReasonShort
	case errors.Is(err, ErrVersion):
		return ReasonVersion
	case errors.Is(err, ErrType):
		return ReasonType
	case errors.Is(err, ErrChecksum):
		return ReasonChecksum
	case errors.Is(err, ErrNotXAgg):
		return ReasonRoute
	default:
		return ReasonLength
	}
}

// BlocksFor returns the number of blocks that hold n lanes, 0 <= n <= MaxLanes.
func BlocksFor(n int) uint8 { return uint8((n + BlockLanes - 1) / BlockLanes) }

// PutHeader writes h to the first HeaderLen bytes of b, which must hold them.
func PutHeader(b []byte, h *Header) {
	_ = b[HeaderLen-1]
	b[OffVersionType] = Version<<4 | uint8(h.Type)&0xf
	b[OffFlags] = uint8(h.Flags)
	binary.BigEndian.PutUint16(b[OffJob:], h.Job)
	binary.BigEndian.PutUint16(b[OffEpoch:], h.Epoch)
	b[OffRank] = h.Rank
	b[OffBlocks] = h.Blocks
	binary.BigEndian.PutUint32(b[OffSeq:], h.Seq)
	binary.BigEndian.PutUint32(b[OffRound:], h.Round)
	binary.BigEndian.PutUint32(b[OffChunk:], h.Chunk)
	binary.BigEndian.PutUint16(b[OffElems:], h.Elems)
	b[OffExponent] = uint8(h.Exponent)
	b[OffAmax] = h.Amax
	binary.BigEndian.PutUint64(b[OffContributors:], h.Contributors)
	binary.BigEndian.PutUint32(b[OffTag:], h.Tag[0])
	binary.BigEndian.PutUint32(b[OffTag+4:], h.Tag[1])
	binary.BigEndian.PutUint32(b[OffSpreadUs:], h.SpreadUs)
	binary.BigEndian.PutUint32(b[OffBlockedUs:], h.BlockedUs)
	binary.BigEndian.PutUint16(b[OffNextEpoch:], h.NextEpoch)
	b[OffReason] = uint8(h.Reason)
	clear(b[OffReserved:HeaderLen])
}

// Len returns the packet's length in bytes on the wire, from its block count.
func (h *Header) Len() int { return HeaderLen + int(h.Blocks)*BlockLen }

// Encode writes the packet to b, which must hold p.Len() bytes, and returns that length. It allocates nothing.
func (p *Packet) Encode(b []byte) int {
	n := p.Len()
	_ = b[n-1]
	PutHeader(b, &p.Header)
	putLanes(b[HeaderLen:n], p.Lanes[:int(p.Blocks)*BlockLanes])
	return n
}

// putLanes and getLanes take eight lanes at a time, which lets the compiler drop the bounds checks: twice as fast as
// lane by lane. len(lanes) is a multiple of eight, blocks are.

func putLanes(b []byte, lanes []int32) {
	for len(lanes) >= 8 && len(b) >= 32 {
		l, o := (*[8]int32)(lanes), (*[32]byte)(b)
		binary.BigEndian.PutUint32(o[0:], uint32(l[0]))
		binary.BigEndian.PutUint32(o[4:], uint32(l[1]))
		binary.BigEndian.PutUint32(o[8:], uint32(l[2]))
		binary.BigEndian.PutUint32(o[12:], uint32(l[3]))
		binary.BigEndian.PutUint32(o[16:], uint32(l[4]))
		binary.BigEndian.PutUint32(o[20:], uint32(l[5]))
		binary.BigEndian.PutUint32(o[24:], uint32(l[6]))
		binary.BigEndian.PutUint32(o[28:], uint32(l[7]))
		lanes, b = lanes[8:], b[32:]
	}
}

func getLanes(lanes []int32, b []byte) {
	for len(lanes) >= 8 && len(b) >= 32 {
		l, o := (*[8]int32)(lanes), (*[32]byte)(b)
		l[0] = int32(binary.BigEndian.Uint32(o[0:]))
		l[1] = int32(binary.BigEndian.Uint32(o[4:]))
		l[2] = int32(binary.BigEndian.Uint32(o[8:]))
		l[3] = int32(binary.BigEndian.Uint32(o[12:]))
		l[4] = int32(binary.BigEndian.Uint32(o[16:]))
		l[5] = int32(binary.BigEndian.Uint32(o[20:]))
		l[6] = int32(binary.BigEndian.Uint32(o[24:]))
		l[7] = int32(binary.BigEndian.Uint32(o[28:]))
		lanes, b = lanes[8:], b[32:]
	}
}

// DecodeHeader reads and checks a header. b is the whole UDP payload: its length must be the one that the block
// count demands, exactly. The checks come in the order of docs/protocol.md: short, version, type, length. How many
// blocks there should be only this version says.
func DecodeHeader(b []byte, h *Header) error {
	if len(b) < HeaderLen {
		return fmt.Errorf("%w: %d bytes, want at least %d", ErrShort, len(b), HeaderLen)
	}
	h.Type = Type(b[OffVersionType] & 0xf)
	h.Flags = Flags(b[OffFlags])
	h.Job = binary.BigEndian.Uint16(b[OffJob:])
	h.Epoch = binary.BigEndian.Uint16(b[OffEpoch:])
	h.Rank = b[OffRank]
	h.Blocks = b[OffBlocks]
	h.Seq = binary.BigEndian.Uint32(b[OffSeq:])
	h.Round = binary.BigEndian.Uint32(b[OffRound:])
	h.Chunk = binary.BigEndian.Uint32(b[OffChunk:])
	h.Elems = binary.BigEndian.Uint16(b[OffElems:])
	h.Exponent = int8(b[OffExponent])
	h.Amax = b[OffAmax]
	h.Contributors = binary.BigEndian.Uint64(b[OffContributors:])
	h.Tag[0] = binary.BigEndian.Uint32(b[OffTag:])
	h.Tag[1] = binary.BigEndian.Uint32(b[OffTag+4:])
	h.SpreadUs = binary.BigEndian.Uint32(b[OffSpreadUs:])
	h.BlockedUs = binary.BigEndian.Uint32(b[OffBlockedUs:])
	h.NextEpoch = binary.BigEndian.Uint16(b[OffNextEpoch:])
	h.Reason = Reason(b[OffReason])
	if v := b[OffVersionType] >> 4; v != Version {
		return fmt.Errorf("%w: %d, want %d", ErrVersion, v, Version)
	}
	if h.Blocks <= MaxBlocks && len(b) < h.Len() {
		return fmt.Errorf("%w: %d bytes with %d blocks", ErrShort, len(b), h.Blocks)
	}
	if !h.Type.Valid() {
		return fmt.Errorf("%w: %d", ErrType, uint8(h.Type))
	}
	if h.Blocks > MaxBlocks || len(b) != h.Len() {
		return fmt.Errorf("%w: %d bytes with %d blocks", ErrLength, len(b), h.Blocks)
	}
	// A packet with lanes has as many blocks as its valid lanes need. Short answers keep the chunk's elems.
	if h.HasLanes() && (h.Elems > MaxLanes || h.Blocks != BlocksFor(int(h.Elems))) {
		return fmt.Errorf("%w: %d lanes in %d blocks", ErrElems, h.Elems, h.Blocks)
	}
	// The last five bytes; the three before them are NextEpoch and Reason.
	if binary.BigEndian.Uint64(b[HeaderLen-8:])<<24 != 0 {
		return fmt.Errorf("%w: % x", ErrReserved, b[OffReserved:HeaderLen])
	}
	return nil
}

// HasLanes reports whether packets of this type carry the chunk's lanes: GRAD, PARTIAL and RESULT do.
func (h *Header) HasLanes() bool {
	return h.Type == TypeGrad || h.Type == TypePartial || h.Type == TypeResult
}

// Decode reads a packet from b, a whole UDP payload. It allocates only when it fails. Lanes beyond the packet's
// blocks are left as they were.
func (p *Packet) Decode(b []byte) error {
	if err := DecodeHeader(b, &p.Header); err != nil {
		return err
	}
	getLanes(p.Lanes[:int(p.Blocks)*BlockLanes], b[HeaderLen:])
	return nil
}

// SerialLess reports whether a comes before b in 32-bit serial-number order (RFC 1982).
func SerialLess(a, b uint32) bool { return int32(a-b) < 0 }

// SerialLess16 reports whether a comes before b in 16-bit serial-number order (RFC 1982).
func SerialLess16(a, b uint16) bool { return int16(a-b) < 0 }
