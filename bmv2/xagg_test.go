package bmv2_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	p4cfg "github.com/p4lang/p4runtime/go/p4/config/v1"

	"xagg/bmv2/dataplane"
)

// The aggregation program with four jobs: 7 is summed by the switch alone, 8, 10 and 11 have a rank that is steered to a
// server; in 10 a duplicate closes an open slot at once, in 11 only after an hour.
const (
	xaggJSON = "../p4/xagg.json"
	xaggInfo = "../p4/xagg.p4info.txtpb"
	ranks    = 3
	pool     = 4
	serverIP = 0x0a4d0101
	service  = 0x0a4dfffe
)

func rankIP(r uint64) uint64 { return 0x0a4d0001 + r }

func programXAgg(t *testing.T, r *rig, info *p4cfg.P4Info) {
	n := names{t, info}
	const in, eg = "XaggIngress.", "XaggEgress."
	insert := func(table string, match []any, action string, args ...uint64) {
		r.write(t, insertEntry(n.entry(table, 0, match, action, args...)))
	}
	for i, job := range []int{7, 8, 10, 11} {
		insert(in+"job", []any{job}, in+"known")
		all, cohort := uint32(1+2*i), uint32(2+2*i)
		for _, epoch := range []int{1, 2} {
			base := uint64(16*i + 8*(epoch-1))
			switch job {
			case 7:
				insert(in+"plan", []any{job, epoch}, in+"set_plan", 1<<ranks-1, 1, 0, uint64(all), 0, 0, 0)
			case 8:
				insert(in+"plan", []any{job, epoch}, in+"set_plan", 1<<(ranks-1)-1, 0, 1, uint64(all), 2, 0, 0)
			case 10:
				insert(in+"plan", []any{job, epoch}, in+"set_plan", 1<<(ranks-1)-1, 0, 1, uint64(all), 2, 1, 0)
			case 11:
				insert(in+"plan", []any{job, epoch}, in+"set_plan", 1<<(ranks-1)-1, 0, 1, uint64(all), 2, 2, math.MaxUint32)
			}
			for rank := range uint64(ranks) {
				match := []any{job, epoch, int(rank)}
				if job != 7 && rank == ranks-1 {
					insert(in+"member", match, in+"steered", rank+1, rankIP(rank), 1<<rank)
				} else {
					insert(in+"member", match, in+"summed", rank+1, rankIP(rank), 1<<rank, base, 2*pool-1)
				}
			}
			insert(in+"server", []any{job, epoch, 0}, in+"to_server", 65, 0x027861000101, serverIP)
			insert(in+"returning", []any{65, job, epoch}, in+"from_server", 0x02786100fffe, service, uint64(all), uint64(cohort))
		}
		var everyone, summed [][2]uint32
		for rank := range uint32(ranks) {
			rid := uint32(100*(i+1)) + rank
			insert(eg+"replica", []any{int(rid)}, eg+"to_rank", 0x027861000001+uint64(rank), rankIP(uint64(rank)), 19860+uint64(i))
			everyone = append(everyone, [2]uint32{rank + 1, rid})
			if job == 7 || rank < ranks-1 {
				summed = append(summed, [2]uint32{rank + 1, rid})
			}
		}
		r.write(t, group(1, all, everyone...), group(1, cohort, summed...))
	}
	for rank := range uint64(ranks) {
		insert(in+"ipv4", []any{lpm{rankIP(rank), 32}}, in+"forward", rank+1, 0x027861000001+rank)
	}
	insert(in+"ipv4", []any{lpm{serverIP, 32}}, in+"forward", 65, 0x027861000101)
	insert(in+"arp", []any{int(service)}, in+"arp_reply", 0x02786100fffe)
	r.write(t, group(1, 9, [2]uint32{1, 0}, [2]uint32{2, 0}, [2]uint32{65, 0}))
	flood := n.entry(in+"arp", 0, nil, in+"flood", 9)
	flood.IsDefaultAction = true
	r.write(t, update(2, flood))
}

// xaggFrame is a frame of the protocol that is right in most respects.
func xaggFrame(r *rand.Rand) dataplane.Frame {
	rarely := func(n int) bool { return r.IntN(n) == 0 }
	rank := r.Uint64N(ranks)
	typ := pick(r, 1, 1, 1, 1, 1, 1, 1, 3, 4, 5, 6, 2, 7, 9)
	blocks := pick(r, 0, 1, 1, 1, 2, 4)
	job, seq := pick(r, 7, 8, 10, 10, 11), uint32(r.IntN(12))
	if rarely(8) {
		seq = uint32(r.IntN(5000))
	}
	if rarely(30) {
		job = 9
	}
	x := make([]byte, 56+256*blocks)
	x[0] = byte(0x10 | typ)
	if rarely(40) {
		x[0] = byte(r.Uint32())
	}
	x[1] = byte(pick(r, 0, 0, 0, 0, 0, 0, 1, 2, 8, 16, 32, 64, 128))
	binary.BigEndian.PutUint16(x[2:], uint16(job))
	binary.BigEndian.PutUint16(x[4:], uint16(pick(r, 1, 1, 1, 1, 1, 2, 3)))
	x[6], x[7] = byte(rank), byte(blocks)
	binary.BigEndian.PutUint32(x[8:], seq)
	binary.BigEndian.PutUint32(x[12:], seq/8)
	binary.BigEndian.PutUint32(x[16:], seq%8)
	binary.BigEndian.PutUint16(x[20:], uint16(64*blocks))
	x[22], x[23] = byte(pick(r, 10, 10, 10, 10, 10, 10, 11)), byte(r.Uint32())
	binary.BigEndian.PutUint64(x[24:], 1<<rank)
	binary.BigEndian.PutUint32(x[32:], r.Uint32N(67108859))
	binary.BigEndian.PutUint32(x[36:], r.Uint32N(67108859))
	for i := 56; i < len(x); i++ {
		x[i] = byte(r.Uint32())
	}
	if rarely(15) { // anything at all in the header
		x[r.IntN(56)] = byte(r.Uint32())
	}
	port, src, dst, sport, dport := uint16(rank+1), rankIP(rank), uint64(service), uint16(19860), uint16(19860)
	switch typ {
	case 3, 4, 5, 6: // from a server
		port, src = 65, serverIP
		dport = uint16(pick(r, 19860, 5000))
		dst = pick(r, service, service, rankIP(rank))
		binary.BigEndian.PutUint64(x[24:], pick(r, 7, 3, 1<<rank))
	case 7:
		port = uint16(pick(r, 1, cpuPort))
	}
	if rarely(20) {
		port = uint16(pick(r, 1, 2, 3, 65, 70))
	}
	if rarely(30) {
		src++
	}
	if rarely(25) {
		dst = pick(r, rankIP(1), serverIP, 0x08080808)
	}
	f := udpFrame(src, dst, sport, dport, x)
	switch r.IntN(30) {
	case 0:
		f[14+r.IntN(len(f)-14)] ^= 1 << r.IntN(8) // damaged
	case 1:
		f = f[:14+r.IntN(len(f)-14)] // cut short
	case 2:
		f = append(f, make([]byte, 1+r.IntN(20))...) // too long
	case 3:
		f[40], f[41] = 0, 0 // no UDP checksum
	case 4:
		f = arpFrame(uint32(pick(r, service, rankIP(1))))
	case 5:
		f = udpFrame(src, pick(r, rankIP(0), rankIP(2), serverIP, 0x08080808), 1000, 2000, x[:30])
		f[22] = byte(pick(r, 0, 1, 2, 64))
		f[24], f[25] = 0, 0
		binary.BigEndian.PutUint16(f[24:], sum16(f[14:34]))
	}
	if port == cpuPort {
		f = append([]byte{0, byte(pick(r, 1, 2, 65))}, f...)
	}
	return dataplane.Frame{Port: port, Bytes: f}
}

func arpFrame(target uint32) []byte {
	f := []byte{255, 255, 255, 255, 255, 255, 2, 0x78, 0x61, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0x78, 0x61, 0, 0, 1, 10, 77, 0, 1,
		0, 0, 0, 0, 0, 0}
	return binary.BigEndian.AppendUint32(f, target)
}

func udpFrame(src, dst uint64, sport, dport uint16, payload []byte) []byte {
	f := []byte{2, 0x78, 0x61, 0, 0xff, 0xfe, 2, 0x78, 0x61, 0, 0, 1, 8, 0}
	ip := []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0}
	binary.BigEndian.PutUint16(ip[2:], uint16(28+len(payload)))
	ip = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(ip, uint32(src)), uint32(dst))
	binary.BigEndian.PutUint16(ip[10:], sum16(ip))
	udp := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, sport), dport)
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(payload)))
	udp = append(append(udp, 0, 0), payload...)
	binary.BigEndian.PutUint16(udp[6:], sum16(ip[12:20], []byte{0, 17}, udp[4:6], udp))
	return append(append(f, ip...), udp...)
}

// maskTimes clears spread_us and blocked_us, and the checksum of a PARTIAL, which covers them.
func maskTimes(f []byte) {
	const header = 42
	if len(f) < header+56 || binary.BigEndian.Uint16(f[12:]) != 0x0800 || f[23] != 17 {
		return
	}
	if binary.BigEndian.Uint16(f[34:]) != 19860 && binary.BigEndian.Uint16(f[36:]) != 19860 {
		return
	}
	if typ := f[header] & 15; typ == 2 || typ == 3 || typ == 5 {
		clear(f[header+40 : header+48])
		clear(f[40:42])
	}
}

func xaggFrames(n int) []dataplane.Frame {
	r := rand.New(rand.NewPCG(7, 8))
	var in []dataplane.Frame
	for range n {
		in = append(in, xaggFrame(r))
	}
	return in
}

func TestXAggAgrees(t *testing.T) {
	compare(t, xaggJSON, xaggInfo, programXAgg, xaggFrames(3000), maskTimes)
}
