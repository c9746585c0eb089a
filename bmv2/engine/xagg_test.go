package engine

import (
	"encoding/binary"
	"fmt"
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

// xaggPlan is what set_plan has of the job; without a server the switch is final.
type xaggPlan struct {
	server bool
	quorum uint64
	waitUs uint64
}

const benchServerPort = 9

// programXAgg installs a job whose ranks are all summed in the switch and a route.
func programXAgg(t testing.TB, p *Program, plan xaggPlan) {
	const in, eg = "XaggIngress.", "XaggEgress."
	job, epoch := exact(benchJob, 2), exact(1, 2)
	insert(t, p, in+"job", []Match{job}, in+"known")
	final, servers := uint64(1), uint64(0)
	if plan.server {
		final, servers = 0, 1
		insert(t, p, in+"server", []Match{job, epoch, exact(0, 2)}, in+"to_server",
			be(benchServerPort, 2), be(0x027861000101, 6), be(0x0a4d0101, 4))
	}
	insert(t, p, in+"plan", []Match{job, epoch}, in+"set_plan", be(1<<benchRanks-1, 8),
		be(final, 1), be(servers, 2), be(1, 2), be(0, 2), be(plan.quorum, 1), be(plan.waitUs, 4))
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
	programXAgg(t, p, xaggPlan{})
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

// flushCase is a contribution and what becomes of it.
type flushCase struct {
	at     uint64 // microseconds
	rank   uint8
	seq    uint32
	flags  byte
	reason int    // that it is counted under
	leaves string // "" for nothing
}

// flushWait is the plan's wait in the cases below.
const flushWait = 1000

var flushCases = []struct {
	name  string
	plan  xaggPlan
	steps []flushCase
}{
	{"before and at the time", xaggPlan{true, 2, flushWait}, []flushCase{
		{at: 50, rank: 1, reason: 0},
		{at: 60, rank: 0, reason: 0},
		{at: 1049, rank: 1, reason: 17, leaves: "WAIT to 2, ranks 3, spread 999"},
		{at: 1050, rank: 1, reason: 17, leaves: "PARTIAL to 9, ranks 3, spread 10, sum 2"},
	}},
	{"a first contribution never flushes", xaggPlan{true, 1, flushWait}, []flushCase{
		{at: 0, rank: 0, reason: 0},
		{at: 5000, rank: 1, reason: 0},
		{at: 5000, rank: 2, reason: 0},
		{at: 5001, rank: 0, reason: 17, leaves: "PARTIAL to 9, ranks 7, spread 5000, sum 3"},
	}},
	{"who comes after the flush is passed on, again and again", xaggPlan{true, 1, flushWait}, []flushCase{
		{at: 0, rank: 0, reason: 0},
		{at: 1000, rank: 0, reason: 17, leaves: "PARTIAL to 9, ranks 1, spread 0, sum 1"},
		{at: 1001, rank: 3, reason: 19, leaves: "GRAD to 9 FORWARDED, ranks 8, spread 0, sum 1"},
		{at: 1002, rank: 3, reason: 19, leaves: "GRAD to 9 FORWARDED, ranks 8, spread 0, sum 1"},
		{at: 1003, rank: 0, reason: 17, leaves: "PARTIAL to 9, ranks 1, spread 0, sum 1"},
		{at: 1004, rank: 1, reason: 19, leaves: "GRAD to 9 FORWARDED, ranks 2, spread 0, sum 1"},
		{at: 1005, rank: 1, flags: 16, reason: 12, leaves: "NACK to 2, ranks 2, spread 0"},
	}},
	{"a claim opens a slot that was closed", xaggPlan{true, 1, flushWait}, []flushCase{
		{at: 0, rank: 0, reason: 0},
		{at: 1000, rank: 0, reason: 17, leaves: "PARTIAL to 9, ranks 1, spread 0, sum 1"},
		{at: 1001, rank: 0, seq: 64, reason: 0},
		{at: 1002, rank: 0, seq: 64, reason: 17, leaves: "WAIT to 1, ranks 1, spread 1"},
		{at: 1003, rank: 1, seq: 64, reason: 0},
		{at: 1004, rank: 1, seq: 0, reason: 19, leaves: "GRAD to 9 FORWARDED, ranks 2, spread 0, sum 1"},
	}},
	{"a complete chunk is not flushed", xaggPlan{true, 1, flushWait}, []flushCase{
		{at: 0, rank: 0, reason: 0},
		{at: 1, rank: 1, reason: 0},
		{at: 2, rank: 2, reason: 0},
		{at: 3, rank: 3, reason: 0, leaves: "PARTIAL to 9, ranks f, spread 3, sum 4"},
		{at: 5000, rank: 3, reason: 17, leaves: "PARTIAL to 9, ranks f, spread 3, sum 4"},
	}},
	{"no wait", xaggPlan{true, 1, 0}, []flushCase{
		{at: 7, rank: 2, reason: 0},
		{at: 7, rank: 2, reason: 17, leaves: "PARTIAL to 9, ranks 4, spread 0, sum 1"},
	}},
	{"the longest wait", xaggPlan{true, 1, 1<<32 - 1}, []flushCase{
		{at: 7, rank: 2, reason: 0},
		{at: 7 + 1<<32 - 2, rank: 2, reason: 17, leaves: "WAIT to 3, ranks 4, spread 4294967294"},
		{at: 7 + 1<<32 - 1, rank: 2, reason: 17, leaves: "PARTIAL to 9, ranks 4, spread 0, sum 1"},
	}},
	{"no quorum", xaggPlan{true, 0, 0}, []flushCase{
		{at: 0, rank: 0, reason: 0},
		{at: 1000, rank: 0, reason: 17, leaves: "WAIT to 1, ranks 1, spread 1000"},
	}},
	{"a switch that is final never flushes", xaggPlan{false, 1, 0}, []flushCase{
		{at: 0, rank: 0, reason: 0},
		{at: 1000, rank: 0, reason: 17, leaves: "WAIT to 1, ranks 1, spread 1000"},
	}},
	{"running sums are the servers'", xaggPlan{true, 1, 0}, []flushCase{
		{at: 0, rank: 0, flags: 128, reason: 12, leaves: "NACK to 1, ranks 1, spread 0"},
		{at: 1, rank: 0, reason: 0},
		{at: 2, rank: 0, flags: 128, reason: 12, leaves: "NACK to 1, ranks 1, spread 0"},
	}},
}

// TestXAggFlush has the clock in hand: what quorum does at which microsecond.
func TestXAggFlush(t *testing.T) {
	types := map[byte]string{1: "GRAD", 2: "PARTIAL", 3: "RESULT", 5: "WAIT", 6: "NACK"}
	for _, c := range flushCases {
		t.Run(c.name, func(t *testing.T) {
			p := loadXAgg(t)
			programXAgg(t, p, c.plan)
			reasons := p.Counter("XaggIngress.reasons")
			for i, s := range c.steps {
				f := gradFrame(s.rank, s.seq, 1)
				f[43] = s.flags
				f[40], f[41] = 0, 0 // no checksum
				before, got := reasons.Read(s.reason).Packets, ""
				p.Process(uint16(s.rank+1), f, s.at, func(port uint16, f []byte) {
					x := f[42:]
					got += fmt.Sprintf("%s to %d", types[x[0]&15], port)
					if x[1]&4 != 0 {
						got += " FORWARDED"
					}
					got += fmt.Sprintf(", ranks %x, spread %d", binary.BigEndian.Uint64(x[24:]), binary.BigEndian.Uint32(x[40:]))
					if len(x) > 56 {
						got += fmt.Sprintf(", sum %d", binary.BigEndian.Uint32(x[56+4*255:]))
					}
				})
				if got != s.leaves {
					t.Errorf("step %d: %q leaves, want %q", i, got, s.leaves)
				}
				if reasons.Read(s.reason).Packets != before+1 {
					t.Errorf("step %d: not counted under reason %d", i, s.reason)
				}
			}
		})
	}
}

// TestXAggShowsClosed asks for a slot before and after a flush.
func TestXAggShowsClosed(t *testing.T) {
	p := loadXAgg(t)
	programXAgg(t, p, xaggPlan{true, 1, flushWait})
	question := udpFrame(0, 0, 1, 19860, append([]byte{0x17}, make([]byte, 55)...))
	for i, want := range []byte{0, 0, 1, 0} {
		switch i {
		case 1, 2: // claim and flush
			p.Process(1, gradFrame(0, 0, 1), uint64(i)*flushWait, func(uint16, []byte) {})
		case 3: // claim
			p.Process(1, gradFrame(0, 64, 1), uint64(i)*flushWait, func(uint16, []byte) {})
		}
		answered := false
		p.Process(510, append([]byte{0, 0}, question...), 0, func(port uint16, f []byte) {
			answered = true
			if got := f[2+42+50]; port != 510 || got != want {
				t.Errorf("answer %d: port %d, reason %d, want %d", i, port, got, want)
			}
		})
		if !answered {
			t.Errorf("question %d: no answer", i)
		}
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
	programXAgg(b, p, xaggPlan{})
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
	programXAgg(b, p, xaggPlan{})
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
	programXAgg(b, p, xaggPlan{})
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
