package engine

import (
	"encoding/binary"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func loadXAgg(t testing.TB) *Program {
	t.Helper()
	b, err := os.ReadFile("../../p4/xagg.json")
	if err != nil {
		t.Fatal(err)
	}
	p, err := Load(b, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestLoadXAgg(t *testing.T) {
	p := loadXAgg(t)
	for _, name := range []string{"XaggIngress.job", "XaggEgress.replica"} {
		if p.Table(name) == nil {
			t.Errorf("no table %s", name)
		}
	}
}

// be returns v in n bytes, big-endian.
func be(v uint64, n int) []byte {
	b := make([]byte, 8)
	binary.BigEndian.PutUint64(b, v)
	return b[8-n:]
}

func insert(t testing.TB, p *Program, table string, match []Match, action string, args ...[]byte) {
	t.Helper()
	tb := p.Table(table)
	if tb == nil {
		t.Fatalf("no table %s", table)
	}
	a := tb.Action(action)
	if a == nil {
		t.Fatalf("table %s has no action %s", table, action)
	}
	if err := tb.Insert(&Entry{Match: match, Action: a, Args: args}); err != nil {
		t.Fatalf("insert into %s: %v", table, err)
	}
}

func exact(v uint64, n int) Match { return Match{Value: be(v, n)} }

const (
	benchJob   = 7
	benchRanks = 4
)

// programXAgg installs a job whose ranks are all summed in the switch and a route.
func programXAgg(t testing.TB, p *Program) {
	const in, eg = "XaggIngress.", "XaggEgress."
	job, epoch := exact(benchJob, 2), exact(1, 2)
	insert(t, p, in+"job", []Match{job}, in+"known")
	insert(t, p, in+"plan", []Match{job, epoch}, in+"set_plan", be(1<<benchRanks-1, 8), be(1, 1), be(0, 2), be(1, 2), be(0, 2))
	var group []Replica
	for r := range uint64(benchRanks) {
		ip := 10<<24 | 77<<16 | (r + 1)
		insert(t, p, in+"member", []Match{job, epoch, exact(r, 1)}, in+"summed",
			be(r+1, 2), be(ip, 4), be(1<<r, 8), be(0, 4), be(63, 4))
		insert(t, p, eg+"replica", []Match{exact(100+r, 2)}, eg+"to_rank", be(0x027861000001+r, 6), be(ip, 4), be(19860, 2))
		group = append(group, Replica{Port: uint16(r + 1), Instance: uint16(100 + r)})
	}
	if err := p.AddGroup(1, group); err != nil {
		t.Fatal(err)
	}
	insert(t, p, in+"ipv4", []Match{{Value: be(10<<24|88<<16, 4), Prefix: 16}}, in+"forward", be(5, 2), be(0x027861000005, 6))
}

// udpFrame is an Ethernet frame with an IPv4 and UDP packet, checksums included.
func udpFrame(src, dst uint32, sport, dport uint16, payload []byte) []byte {
	f := make([]byte, 42+len(payload))
	binary.BigEndian.PutUint16(f[12:], 0x0800)
	ip, udp := f[14:34], f[34:]
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	binary.BigEndian.PutUint16(ip[2:], uint16(20+len(udp)))
	binary.BigEndian.PutUint32(ip[12:], src)
	binary.BigEndian.PutUint32(ip[16:], dst)
	binary.BigEndian.PutUint16(ip[10:], uint16(checksum16(ip)))
	binary.BigEndian.PutUint16(udp, sport)
	binary.BigEndian.PutUint16(udp[2:], dport)
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	copy(udp[8:], payload)
	pseudo := append(append([]byte{}, ip[12:20]...), 0, 17, udp[4], udp[5])
	binary.BigEndian.PutUint16(udp[6:], uint16(checksum16(append(pseudo, udp...))))
	return f
}

// gradFrame is a contribution of 256 lanes, each with the value lane.
func gradFrame(rank uint8, seq uint32, lane uint32) []byte {
	p := make([]byte, 56+1024)
	p[0] = 0x11
	binary.BigEndian.PutUint16(p[2:], benchJob)
	binary.BigEndian.PutUint16(p[4:], 1)
	p[6], p[7] = rank, 4
	binary.BigEndian.PutUint32(p[8:], seq)
	binary.BigEndian.PutUint32(p[16:], seq)
	binary.BigEndian.PutUint16(p[20:], 256)
	binary.BigEndian.PutUint64(p[24:], 1<<rank)
	binary.BigEndian.PutUint32(p[32:], 1000+uint32(rank))
	for i := range 256 {
		binary.BigEndian.PutUint32(p[56+4*i:], lane)
	}
	return udpFrame(10<<24|77<<16|uint32(rank+1), 0x0a4dfffe, 19860, 19860, p)
}

func TestXAggSumsAndMulticasts(t *testing.T) {
	p := loadXAgg(t)
	programXAgg(t, p)
	for seq := range uint32(3) {
		for r := range uint8(benchRanks) {
			out := 0
			p.Process(uint16(r+1), gradFrame(r, seq, 0xffffff00+uint32(r)), 1000, func(port uint16, f []byte) {
				if port != uint16(out+1) {
					t.Errorf("copy %d left port %d", out, port)
				}
				out++
				x := f[42:]
				if x[0] != 0x13 || len(x) != 56+1024 {
					t.Fatalf("seq %d: type %#x, %d bytes: want a RESULT of %d", seq, x[0], len(x), 56+1024)
				}
				var lane uint32 = 0xfffffc06 // 4 x -256 + 0 + 1 + 2 + 3
				if got := binary.BigEndian.Uint32(x[56+4*255:]); got != lane {
					t.Errorf("seq %d: last lane %#x, want %#x", seq, got, lane)
				}
			})
			if want := 0; r == benchRanks-1 {
				want = benchRanks
				if out != want {
					t.Errorf("seq %d, rank %d: %d frames, want %d", seq, r, out, want)
				}
			} else if out != want {
				t.Errorf("seq %d, rank %d: %d frames, want none", seq, r, out)
			}
		}
	}
	if v := p.Counter("XaggIngress.reasons").Read(0); v.Packets != 3*benchRanks {
		t.Errorf("reason 0 counted %d packets, want %d", v.Packets, 3*benchRanks)
	}
}

// cpuTime reports the processor time per operation beside the elapsed: on a busy machine it is the one to compare.
func cpuTime(b *testing.B) {
	used := func() (r unix.Rusage) {
		if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
			b.Fatal(err)
		}
		return r
	}
	before := used()
	b.Cleanup(func() {
		after := used()
		spent := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
		b.ReportMetric(float64(spent)/float64(b.N), "cpu-ns/op")
	})
}

// BenchmarkLoad is the time to load the aggregation program.
func BenchmarkLoad(b *testing.B) {
	for b.Loop() {
		loadXAgg(b)
	}
}

// BenchmarkGrad is the time for one contribution of 256 lanes, every fourth of which closes its chunk and leaves as
// four RESULTs.
func BenchmarkGrad(b *testing.B) {
	p := loadXAgg(b)
	programXAgg(b, p)
	frames := make([][]byte, benchRanks)
	for r := range frames {
		frames[r] = gradFrame(uint8(r), 0, 1)
		frames[r][34+6], frames[r][34+7] = 0, 0 // the UDP checksum differs for every seq; verifying is measured below
	}
	b.ReportAllocs()
	cpuTime(b)
	b.SetBytes(int64(len(frames[0])))
	emitted := 0
	emit := func(uint16, []byte) { emitted++ }
	n := uint32(0)
	for b.Loop() {
		r := n % benchRanks
		binary.BigEndian.PutUint32(frames[r][42+8:], n/benchRanks)
		p.Process(uint16(r+1), frames[r], 1000, emit)
		n++
	}
	if want := int(n) / benchRanks * benchRanks; emitted != want {
		b.Fatalf("%d frames left, want %d", emitted, want)
	}
}

// BenchmarkGradDuplicate is one contribution that was summed before, with its UDP checksum verified.
func BenchmarkGradDuplicate(b *testing.B) {
	p := loadXAgg(b)
	programXAgg(b, p)
	f := gradFrame(0, 0, 1)
	b.ReportAllocs()
	cpuTime(b)
	emit := func(uint16, []byte) {}
	for b.Loop() {
		p.Process(1, f, 1000, emit)
	}
}

// BenchmarkForward is one ordinary packet of 1,000 bytes that is routed.
func BenchmarkForward(b *testing.B) {
	p := loadXAgg(b)
	programXAgg(b, p)
	f := udpFrame(10<<24|77<<16|1, 10<<24|88<<16|1, 5000, 5001, make([]byte, 958))
	b.ReportAllocs()
	cpuTime(b)
	b.SetBytes(int64(len(f)))
	emitted := 0
	emit := func(port uint16, f []byte) { emitted++ }
	n := 0
	for b.Loop() {
		p.Process(1, f, 1000, emit)
		n++
	}
	if emitted != n {
		b.Fatalf("%d of %d frames left", emitted, n)
	}
}
