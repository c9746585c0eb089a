package capture_test

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"testing"
	"time"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"
	"github.com/google/gopacket/pcapgo"

	"xagg/wire"
	"xagg/wire/capture"
	"xagg/wire/internal/capturetest"
)

var (
	start  = time.Date(2024, 2, 29, 23, 59, 59, 999_999_000, time.UTC)
	orders = []capturetest.Order{binary.LittleEndian, binary.BigEndian}
)

// frames returns n different IPv4 packets in Ethernet frames, a millisecond apart.
func frames(n int) []capturetest.Packet {
	ps := make([]capturetest.Packet, n)
	for i := range ps {
		payload := bytes.Repeat([]byte{byte(i)}, 1+i*97%1400)
		ps[i].Frame = wire.AppendUDP(nil, wire.Addr{Port: 1}, wire.Addr{Port: uint16(i)}, payload, true)
		ps[i].Time = start.Add(time.Duration(i) * time.Millisecond)
	}
	return ps
}

func zip(b []byte) []byte {
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	w.Write(b)
	w.Close()
	return buf.Bytes()
}

// read returns all packets of a file, which must be whole, and checks their numbers.
func read(t *testing.T, file []byte) []capture.Packet {
	t.Helper()
	r, err := capture.NewReader(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	var all []capture.Packet
	for {
		var p capture.Packet
		err := r.Next(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		p.Data = bytes.Clone(p.Data)
		if all = append(all, p); r.Number() != len(all) {
			t.Fatalf("packet %d has the number %d", len(all), r.Number())
		}
	}
}

func TestFormats(t *testing.T) {
	want := frames(40)
	for _, link := range capturetest.Links {
		for _, order := range orders {
			files := map[string][]byte{
				"pcap, microseconds": capturetest.Pcap(order, false, link, want),
				"pcap, nanoseconds":  capturetest.Pcap(order, true, link, want),
				"pcapng":             capturetest.Pcapng(order, link, want),
				"pcapng twice": append(capturetest.Pcapng(order, link, want[:17]),
					capturetest.Pcapng(orders[1], link, want[17:])...),
			}
			for _, name := range []string{"pcap, nanoseconds", "pcapng"} {
				files[name+", gzip"] = zip(files[name])
			}
			for name, file := range files {
				t.Run(fmt.Sprintf("%v/%v/%s", link, order, name), func(t *testing.T) {
					got := read(t, file)
					if len(got) != len(want) {
						t.Fatalf("%d packets, want %d", len(got), len(want))
					}
					for i, p := range got {
						ip, ok := p.IPv4()
						if !ok || !bytes.Equal(ip, want[i].Frame[14:]) || !p.Time.Equal(want[i].Time) || p.Link != link || p.Cut() {
							t.Fatalf("packet %d: %v of %v, IPv4 %v, cut %v\n% x", i+1, p.Time, p.Link, ok, p.Cut(), p.Data)
						}
					}
				})
			}
		}
	}
}

// What gopacket writes is read.
func TestGopacketFiles(t *testing.T) {
	want := frames(10)
	var classic, ng bytes.Buffer
	cw := pcapgo.NewWriterNanos(&classic)
	if err := cw.WriteFileHeader(65536, layers.LinkTypeLinuxSLL); err != nil {
		t.Fatal(err)
	}
	nw, err := pcapgo.NewNgWriter(&ng, layers.LinkTypeEthernet)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range want {
		sll := capturetest.Dress(capture.LinkLinuxSLL, p.Frame)
		ci := gopacket.CaptureInfo{Timestamp: p.Time, CaptureLength: len(sll), Length: len(sll)}
		if err := cw.WritePacket(ci, sll); err != nil {
			t.Fatal(err)
		}
		ci.CaptureLength, ci.Length = len(p.Frame), len(p.Frame)
		if err := nw.WritePacket(ci, p.Frame); err != nil {
			t.Fatal(err)
		}
	}
	if err := nw.Flush(); err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string][]byte{"pcap": classic.Bytes(), "pcapng": ng.Bytes()} {
		got := read(t, file)
		if len(got) != len(want) {
			t.Fatalf("%s: %d packets, want %d", name, len(got), len(want))
		}
		for i, p := range got {
			if ip, ok := p.IPv4(); !ok || !bytes.Equal(ip, want[i].Frame[14:]) || !p.Time.Equal(want[i].Time) {
				t.Errorf("%s: packet %d: %v of %v", name, i+1, p.Time, p.Link)
			}
		}
	}
}

func TestPcapngBlocks(t *testing.T) {
	le := binary.LittleEndian
	frame := frames(5)[4].Frame
	words := func(v ...uint32) (b []byte) {
		for _, v := range v {
			b = le.AppendUint32(b, v)
		}
		return b
	}
	n := uint32(len(frame))
	for name, c := range map[string]struct {
		resolution []byte
		block      []byte
		time       time.Time
		cut        bool
	}{
		"microseconds":     {nil, capturetest.Block(le, 6, append(words(0, 1, 5, n, n), frame...)), time.UnixMicro(1<<32 + 5), false},
		"seconds":          {[]byte{0}, capturetest.Block(le, 6, append(words(0, 0, 5, n, n), frame...)), time.Unix(5, 0), false},
		"10^-19":           {[]byte{19}, capturetest.Block(le, 6, append(words(0, 1<<31, 0, n, n), frame...)), time.Unix(0, 922337203), false},
		"2^-63":            {[]byte{0x80 | 63}, capturetest.Block(le, 6, append(words(0, 3<<30, 0, n, n), frame...)), time.Unix(1, 5e8), false},
		"2^-10":            {[]byte{0x80 | 10}, capturetest.Block(le, 6, append(words(0, 0, 1536, n, n), frame...)), time.Unix(1, 5e8), false},
		"obsolete block":   {nil, capturetest.Block(le, 2, append(words(7<<16, 0, 5, n, n), frame...)), time.UnixMicro(5), false},
		"simple block":     {nil, capturetest.Block(le, 3, append(words(n), frame...)), time.Time{}, false},
		"cut":              {nil, capturetest.Block(le, 6, append(words(0, 0, 5, n, n+1), frame...)), time.UnixMicro(5), true},
		"unknown before":   {nil, append(capturetest.Block(le, 0x0bad, make([]byte, 1<<20)), capturetest.Block(le, 6, append(words(0, 0, 5, n, n), frame...))...), time.UnixMicro(5), false},
		"interface behind": {nil, append(capturetest.Interface(le, 276, nil), capturetest.Block(le, 6, append(words(0, 0, 5, n, n), frame...))...), time.UnixMicro(5), false},
	} {
		t.Run(name, func(t *testing.T) {
			file := append(capturetest.Section(le), capturetest.Interface(le, capture.LinkEthernet, c.resolution)...)
			got := read(t, append(file, c.block...))
			if len(got) != 1 || !got[0].Time.Equal(c.time) || got[0].Cut() != c.cut || !bytes.Equal(got[0].Data, frame) {
				t.Errorf("read %+v, want time %v", got, c.time)
			}
		})
	}
}

// Times of an interface may count from another second than 1970's first (if_tsoffset).
func TestPcapngTimeOffset(t *testing.T) {
	le := binary.LittleEndian
	iface := append(make([]byte, 8), 14, 0, 8, 0)
	le.PutUint16(iface, uint16(capture.LinkEthernet))
	iface = le.AppendUint64(iface, uint64(1_000_000_000))
	packet := make([]byte, 20)
	le.PutUint32(packet[8:], 7)
	file := append(capturetest.Section(le), capturetest.Block(le, 1, iface)...)
	got := read(t, append(file, capturetest.Block(le, 6, packet)...))
	if want := time.Unix(1_000_000_000, 7000); len(got) != 1 || !got[0].Time.Equal(want) {
		t.Errorf("read %+v, want %v", got, want)
	}
}

// Files that end too early, wherever that is.
func TestTruncated(t *testing.T) {
	want := frames(3)
	for name, file := range map[string][]byte{
		"pcap":   capturetest.Pcap(orders[0], true, capture.LinkEthernet, want),
		"pcapng": capturetest.Pcapng(orders[0], capture.LinkEthernet, want),
	} {
		ends := map[int]error{}
		for n := range len(file) {
			r, err := capture.NewReader(bytes.NewReader(file[:n]))
			if err != nil {
				if !errors.Is(err, capture.ErrFormat) {
					t.Fatalf("%s of %d bytes: %v", name, n, err)
				}
				continue
			}
			var p capture.Packet
			for err == nil {
				err = r.Next(&p)
			}
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("%s of %d bytes: %v after %d packets", name, n, err, r.Number())
			}
			ends[r.Number()] = err
		}
		for n := range 3 {
			if ends[n] == nil {
				t.Errorf("%s: no truncated file had %d packets", name, n)
			}
		}
		// The last byte but one of a pcap belongs to a packet: the end is not taken for a clean one.
		r, _ := capture.NewReader(bytes.NewReader(file[:len(file)-1]))
		var p capture.Packet
		var err error
		for err == nil {
			err = r.Next(&p)
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) || r.Number() != 2 {
			t.Errorf("%s without its last byte: %v after %d packets", name, err, r.Number())
		}
	}
}

func TestDamaged(t *testing.T) {
	le := binary.LittleEndian
	pcap := capturetest.Pcap(le, true, capture.LinkEthernet, frames(2))
	ng := func(blocks ...[]byte) []byte {
		file := append(capturetest.Section(le), capturetest.Interface(le, capture.LinkEthernet, nil)...)
		return append(file, bytes.Join(blocks, nil)...)
	}
	edit := func(file []byte, off int, v uint32) []byte {
		file = bytes.Clone(file)
		le.PutUint32(file[off:], v)
		return file
	}
	packet := func(id, captured, length uint32) []byte {
		body := le.AppendUint32(nil, id)
		body = append(body, make([]byte, 8)...)
		body = le.AppendUint32(body, captured)
		return capturetest.Block(le, 6, append(le.AppendUint32(body, length), make([]byte, 64)...))
	}
	for name, file := range map[string][]byte{
		"empty":                           {},
		"three bytes":                     {0xd4, 0xc3, 0xb2},
		"text":                            []byte("this is not a capture"),
		"ELF":                             append([]byte("\x7fELF"), make([]byte, 60)...),
		"gzip of text":                    zip([]byte("this is not a capture")),
		"gzip of gzip":                    zip(zip(pcap)),
		"gzip, damaged":                   {0x1f, 0x8b, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9},
		"pcap of version 1":               edit(pcap, 4, 1),
		"huge packet":                     edit(edit(pcap, 24+8, 1<<20), 24+12, 1<<20),
		"more captured":                   edit(pcap, 24+12, 1),
		"pcapng of version 2":             edit(ng(), 12, 2),
		"no byte order":                   edit(ng(), 8, 0x12345678),
		"odd block length":                edit(ng(packet(0, 1, 1)), 48+4, 97),
		"short block length":              edit(ng(packet(0, 1, 1)), 48+4, 8),
		"huge block":                      edit(ng(packet(0, 1, 1)), 48+4, 1<<24),
		"other length at end":             edit(ng(packet(0, 1, 1)), 48+4+4+20+64+4-4, 100),
		"interface missing":               ng(packet(1, 1, 1)),
		"interface of the section before": append(ng(), append(capturetest.Section(le), packet(0, 1, 1)...)...),
		"captured beyond block":           ng(packet(0, 65, 65)),
		"more captured, pcapng":           ng(packet(0, 10, 9)),
		"captured 4 GB":                   ng(packet(0, math.MaxUint32, math.MaxUint32)),
		"resolution 10^-20":               ng(capturetest.Interface(le, 1, []byte{20})),
		"resolution 10^-64":               ng(capturetest.Interface(le, 1, []byte{64})),
		"resolution 2^-64":                ng(capturetest.Interface(le, 1, []byte{0x80 | 64})),
		"option beyond block":             ng(capturetest.Block(le, 1, []byte{1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 9, 0})),
		"short interface":                 ng(capturetest.Block(le, 1, make([]byte, 4))),
		"short packet":                    ng(capturetest.Block(le, 6, make([]byte, 16))),
		"short simple packet":             ng(capturetest.Block(le, 3, nil)),
		"simple beyond block":             ng(capturetest.Block(le, 3, []byte{9, 0, 0, 0})),
		"simple first":                    append(capturetest.Section(le), capturetest.Block(le, 3, []byte{0, 0, 0, 0})...),
		"short section":                   capturetest.Block(le, 0x0a0d0d0a, []byte{0x4d, 0x3c, 0x2b, 0x1a}),
	} {
		t.Run(name, func(t *testing.T) {
			r, err := capture.NewReader(bytes.NewReader(file))
			var p capture.Packet
			for err == nil {
				err = r.Next(&p)
			}
			if !errors.Is(err, capture.ErrFormat) {
				t.Errorf("error %v, want one of the format", err)
			}
		})
	}
}

func TestIPv4(t *testing.T) {
	for name, p := range map[string]capture.Packet{
		"empty":       {Link: capture.LinkEthernet},
		"ARP":         {Link: capture.LinkEthernet, Data: append(make([]byte, 12), 8, 6, 0)},
		"short SLL":   {Link: capture.LinkLinuxSLL, Data: make([]byte, 15)},
		"short SLL2":  {Link: capture.LinkLinuxSLL2, Data: append([]byte{8, 0}, make([]byte, 17)...)},
		"ARP in SLL2": {Link: capture.LinkLinuxSLL2, Data: append([]byte{8, 6}, make([]byte, 40)...)},
		"another":     {Link: 127, Data: append(make([]byte, 12), 8, 0, 0)},
	} {
		if _, ok := p.IPv4(); ok {
			t.Errorf("%s: taken for IPv4", name)
		}
	}
	for link, want := range map[capture.LinkType]string{1: "Ethernet", 113: "LINUX_SLL", 276: "LINUX_SLL2", 127: "link type 127"} {
		if got := link.String(); got != want {
			t.Errorf("name %q, want %q", got, want)
		}
	}
}

func TestMerge(t *testing.T) {
	all := frames(30)
	var parts [4][]capturetest.Packet // the last stays empty
	for i, p := range all {
		parts[i*i%3] = append(parts[i*i%3], p)
	}
	parts[1] = append(parts[1], parts[1][0]) // a step back in time within a file
	var rs []*capture.Reader
	for i, part := range parts {
		file := capturetest.Pcapng(orders[0], capture.LinkEthernet, part)
		if i == 1 {
			file = capturetest.Pcap(orders[1], true, capture.LinkLinuxSLL, part)
			file = file[:len(file)-1]
		}
		r, err := capture.NewReader(bytes.NewReader(file))
		if err != nil {
			t.Fatal(err)
		}
		rs = append(rs, r)
	}
	m := capture.Merge(rs...)
	count := make([]int, len(parts))
	for n, want := range all {
		var p capture.Packet
		i, err := m.Next(&p)
		if err != nil {
			t.Fatal(err)
		}
		count[i]++
		if ip, _ := p.IPv4(); !bytes.Equal(ip, want.Frame[14:]) || rs[i].Number() != count[i] {
			t.Fatalf("packet %d is number %d of file %d: %v", n, rs[i].Number(), i, p.Time)
		}
	}
	var p capture.Packet
	if i, err := m.Next(&p); !errors.Is(err, io.EOF) || i != -1 {
		t.Errorf("after the last packet: %d, %v", i, err)
	}
	for i := range parts {
		if got, want := m.Truncated(i), i == 1; got != want {
			t.Errorf("file %d truncated: %v", i, got)
		}
	}

	// Damage in one file is an error with its index.
	good, _ := capture.NewReader(bytes.NewReader(capturetest.Pcap(orders[0], true, 1, all)))
	file := capturetest.Pcap(orders[0], true, 1, all[:1])
	bad, _ := capture.NewReader(bytes.NewReader(append(file, bytes.Repeat([]byte{0xff}, 16)...)))
	m = capture.Merge(good, bad)
	var err error
	i := 0
	for err == nil {
		i, err = m.Next(&p)
	}
	if i != 1 || !errors.Is(err, capture.ErrFormat) {
		t.Errorf("damaged file: %d, %v", i, err)
	}
}

func TestNoAllocations(t *testing.T) {
	ps := frames(2000)
	for name, file := range map[string][]byte{
		"pcap":   capturetest.Pcap(orders[0], true, capture.LinkLinuxSLL2, ps),
		"pcapng": capturetest.Pcapng(orders[0], capture.LinkLinuxSLL2, ps),
	} {
		r, err := capture.NewReader(bytes.NewReader(file))
		if err != nil {
			t.Fatal(err)
		}
		var p capture.Packet
		if n := testing.AllocsPerRun(1500, func() {
			if err := r.Next(&p); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations a packet", name, n)
		}
	}
}

func FuzzReader(f *testing.F) {
	for _, order := range orders {
		ps := frames(2)
		f.Add(capturetest.Pcap(order, true, capture.LinkLinuxSLL2, ps))
		f.Add(capturetest.Pcapng(order, capture.LinkEthernet, ps))
		f.Add(append(capturetest.Section(order), capturetest.Block(order, 3, []byte{0, 0, 0, 0})...))
		f.Add(append(capturetest.Section(order), capturetest.Interface(order, 1, []byte{0x80 | 63})...))
	}
	f.Add(zip(capturetest.Pcap(orders[0], false, capture.LinkEthernet, frames(1))))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := capture.NewReader(io.LimitReader(bytes.NewReader(b), 1<<20))
		if err != nil {
			return
		}
		var p capture.Packet
		for range 1000 {
			if err := r.Next(&p); err != nil {
				return
			}
			if len(p.Data) > p.Len {
				t.Fatalf("%d of %d bytes captured", len(p.Data), p.Len)
			}
			if ip, ok := p.IPv4(); ok {
				var x wire.Packet
				_, _, _ = wire.ParseIPv4(ip, &x)
			}
		}
	})
}
