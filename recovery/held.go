package recovery

import "math/bits"

// Held says which chunks of a round have a RESULT.
type Held struct {
	Round  uint32
	Chunks uint32   // of the round, at least 1
	Bits   []uint64 // bit c % 64 of word c / 64: chunk c has one
}

// NewHeld returns a round of which no chunk has a RESULT.
func NewHeld(round, chunks uint32) Held {
	return Held{Round: round, Chunks: chunks, Bits: make([]uint64, words(chunks))}
}

func words(chunks uint32) int { return int((uint64(chunks) + 63) / 64) }

// Set notes that a chunk of the round has a RESULT.
func (h Held) Set(chunk uint32) { h.Bits[chunk/64] |= 1 << (chunk % 64) }

// Has reports whether a chunk has a RESULT; one beyond the round has none.
func (h Held) Has(chunk uint32) bool { return chunk < h.Chunks && has(h.Bits, chunk) }

func has(words []uint64, chunk uint32) bool { return words[chunk/64]>>(chunk%64)&1 != 0 }

// Missing returns the number of chunks without a RESULT.
func (h Held) Missing() uint32 {
	n := h.Chunks
	for _, w := range h.Bits {
		n -= uint32(bits.OnesCount64(w))
	}
	return n
}

// Full reports whether every chunk has a RESULT.
func (h Held) Full() bool { return h.Missing() == 0 }
