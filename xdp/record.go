package xdp

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// record is what a later agent has to know of a server's memory. It is the one entry of a map of its own, so that it
// lives exactly as long as the memory where that is pinned.
type record struct {
	Complete  uint64                    // 1 when everything is pinned: what is not complete was never used
	Instance  uint64                    // of the arena, drawn at random; never 0
	Memory    uint64                    // in bytes, as it was asked for
	Object    [sha256.Size]byte         // hash of the compiled program: its version
	Interface [interfaceNameLen]byte    // padded with zeros
	Seen      [(1<<16 + 63) / 64]uint64 // bit j % 64 of word j / 64: job j has had a plan
}

const (
	interfaceNameLen = 16 // IFNAMSIZ of linux/if.h
	recordMapName    = "xagg_record"
)

var recordSpec = ebpf.MapSpec{
	Name: recordMapName, Type: ebpf.Array, KeySize: 4, ValueSize: uint32(binary.Size(record{})), MaxEntries: 1,
}

// newInstance draws the number of an arena: two have the same with a probability of 2^-64.
func newInstance() uint64 {
	var b [8]byte
	for {
		rand.Read(b[:])
		if n := binary.NativeEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}

// objectHash is the version of the program that this package holds.
func objectHash() [sha256.Size]byte { return sha256.Sum256(_XaggBytes) }

// setInterface notes where the program is attached.
func (r *record) setInterface(name string) {
	clear(r.Interface[:])
	copy(r.Interface[:], name)
}

func (r *record) iface() string { return string(bytes.TrimRight(r.Interface[:], "\x00")) }

func (r *record) seen(job uint16) bool { return r.Seen[job/64]>>(job%64)&1 != 0 }

func (r *record) setSeen(job uint16) { r.Seen[job/64] |= 1 << (job % 64) }

// writeRecord writes the server's record into its map.
func (s *Server) writeRecord() error {
	if err := s.recordMap.Put(uint32(0), &s.record); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return nil
}

// readRecord reads the record that a map holds.
func readRecord(m *ebpf.Map) (r record, err error) {
	if err := m.Lookup(uint32(0), &r); err != nil {
		return r, fmt.Errorf("read record: %w", err)
	}
	return r, nil
}
