package pitfalls

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"maps"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"xagg/api"
	"xagg/internal/metrics"
	"xagg/lab"
	"xagg/wire"
	"xagg/worker"
)

// forger sends packets that nobody should have sent.
type forger struct {
	*bench
	topology lab.Topology
	ready    *api.Ready
	link     worker.Link // of rank 0, where answers to forged packets come in
	bufs     [][]byte
}

func newForger(t *testing.T, policy *api.Policy) *forger {
	topology, err := lab.Star(4, 2)
	if err != nil {
		t.Fatal(err)
	}
	f := &forger{bench: newBench(t, 4, 1000, policy), topology: topology, bufs: [][]byte{make([]byte, wire.MaxLen)}}
	streams := make([]api.Controller_JoinClient, 4)
	for rank := range streams {
		streams[rank], err = f.client.Join(t.Context(), &api.JoinRequest{
			Job: f.job, Rank: uint32(rank), Ip: topology.Workers[rank].IP.String(), UdpPort: wire.Port,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, stream := range streams {
		event, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		f.ready = event.GetReady()
	}
	f.link = f.Link(0, wire.Port)
	t.Cleanup(func() { f.link.Close() })
	if err := f.link.Connect(f.service()); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *forger) service() wire.Addr {
	return wire.Addr{MAC: f.topology.ServiceMAC, IP: f.topology.ServiceIP.As4(), Port: wire.Port}
}

// grad is a rank's honest contribution to a chunk of one block.
func (f *forger) grad(rank uint8, seq uint32) wire.Packet {
	p := wire.Packet{Header: wire.Header{
		Type: wire.TypeGrad, Job: uint16(f.ready.Job), Epoch: uint16(f.ready.Epoch), Rank: rank, Blocks: 1, Seq: seq, Round: seq / 4,
		Chunk: seq % 4, Elems: 64, Contributors: 1 << rank,
	}}
	p.Seal()
	return p
}

// frame is p as a rank sends it.
func (f *forger) frame(rank int, p wire.Packet) []byte {
	return wire.AppendFrame(nil, f.topology.Workers[rank].Addr(wire.Port), f.service(), &p, true)
}

// unsummed takes the UDP checksum off a frame, which then says nothing of what follows.
func unsummed(frame []byte) []byte {
	copy(frame[40:], []byte{0, 0})
	return frame
}

// ordinary turns a frame into one of another UDP port, to an address and with a time to live.
func ordinary(frame []byte, ip [4]byte, ttl byte) []byte {
	frame = unsummed(frame)
	copy(frame[34:], []byte{0, 7, 0, 7}) // answers of the protocol are known by their source port
	copy(frame[30:], ip[:])
	frame[22] = ttl
	copy(frame[24:], []byte{0, 0})
	var sum uint32
	for i := 14; i < 34; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(frame[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(frame[24:], ^uint16(sum+sum>>16))
	return frame
}

// reasons returns what a device, the switch or server s0, has counted, as the status has it.
func (f *forger) reasons(device string) map[string]uint64 {
	f.Helper()
	status, err := f.client.Status(f.Context(), &api.StatusRequest{})
	if err != nil {
		f.Fatal(err)
	}
	reasons := maps.Clone(status.GetSwitch().GetReasons())
	if device == "s0" {
		reasons = maps.Clone(status.GetServers()[0].GetReasons())
	}
	maps.DeleteFunc(reasons, zero)
	return reasons
}

// zero takes what was not counted out of counts, for a server does not tell of it.
func zero(_ string, n uint64) bool { return n == 0 }

// scraped returns the same as Prometheus has it.
func (f *forger) scraped(device string) map[string]uint64 {
	f.Helper()
	handler, err := metrics.Handler(slog.New(slog.DiscardHandler), f.Collectors()[0])
	if err != nil {
		f.Fatal(err)
	}
	response := httptest.NewRecorder()
	handler.ServeHTTP(response, httptest.NewRequest("GET", metrics.Path, nil))
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(response.Body)
	if err != nil {
		f.Fatal(err)
	}
	reasons := make(map[string]uint64)
	for _, m := range families["xagg_packets_total"].GetMetric() {
		labels := make(map[string]string)
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		if labels["device"] == device {
			reasons[labels["reason"]] = uint64(m.GetCounter().GetValue())
		}
	}
	maps.DeleteFunc(reasons, zero)
	return reasons
}

// refused waits until a device has counted one packet more under a reason, and nothing else but what was to be summed.
func (f *forger) refused(device string, before map[string]uint64, reason wire.Reason, summed uint64) {
	f.Helper()
	want := map[string]uint64{"summed": 0}
	maps.Copy(want, before)
	want[reason.String()]++
	want["summed"] += summed
	maps.DeleteFunc(want, zero)
	f.reached(fmt.Sprintf("%s counts one %s: want %v", device, reason, want), func() bool {
		return maps.Equal(f.reasons(device), want)
	})
	if scraped := f.scraped(device); !maps.Equal(scraped, want) {
		f.Errorf("metrics have %v, want %v", scraped, want)
	}
}

// nacked waits for the NACK to rank 0.
func (f *forger) nacked(reason wire.Reason) {
	f.Helper()
	sizes := []int{0}
	for {
		n, err := f.link.Recv(f.bufs, sizes, time.Now().Add(10*time.Second))
		if err != nil || n == 0 {
			f.Fatalf("no NACK %s: %v", reason, err)
		}
		var h wire.Header
		if err := wire.DecodeHeader(f.bufs[0][:sizes[0]], &h); err != nil {
			f.Fatal(err)
		}
		if h.Type != wire.TypeNack {
			continue // an answer to an honest packet
		}
		if h.Reason != reason {
			f.Errorf("NACK %s, want %s", h.Reason, reason)
		}
		return
	}
}

// forgery is a packet that an attacker or a bug sends, and the reason for which it is refused.
type forgery struct {
	name   string
	reason wire.Reason
	nack   bool // its sender, rank 0, is told
	frame  func(*forger) []byte
	first  func(*forger) [][]byte // honest packets before it, which are summed
}

// edit forges a contribution of rank 0.
func edit(change func(p *wire.Packet)) func(*forger) []byte {
	return func(f *forger) []byte {
		p := f.grad(0, 8)
		change(&p)
		return f.frame(0, p)
	}
}

// patch forges the bytes of one, whose UDP checksum is taken off.
func patch(change func(frame []byte) []byte) func(*forger) []byte {
	return func(f *forger) []byte { return change(unsummed(f.frame(0, f.grad(0, 8)))) }
}

func header(offset int, b byte) func(*forger) []byte {
	return patch(func(frame []byte) []byte {
		frame[wire.FrameOverhead+offset] = b
		return frame
	})
}

// both are refused by switch and server alike.
var both = []forgery{
	{name: "cut in its header", reason: wire.ReasonShort, frame: patch(func(frame []byte) []byte { return frame[:60] })},
	{name: "longer than it says", reason: wire.ReasonLength, frame: patch(func(frame []byte) []byte { return append(frame, 1, 2, 3, 4) })},
	{name: "another version", reason: wire.ReasonVersion, frame: header(wire.OffVersionType, 2<<4|1)},
	{name: "no type", reason: wire.ReasonType, frame: header(wire.OffVersionType, wire.Version<<4|9)},
	{name: "a flipped lane", reason: wire.ReasonChecksum, frame: func(f *forger) []byte {
		frame := f.frame(0, f.grad(0, 8))
		frame[wire.FrameOverhead+wire.HeaderLen+5] ^= 1
		return frame
	}},
	{name: "an unknown job", reason: wire.ReasonUnknownJob, nack: true, frame: edit(func(p *wire.Packet) { p.Job++ })},
	{name: "a stale epoch", reason: wire.ReasonEpoch, nack: true, frame: edit(func(p *wire.Packet) { p.Epoch-- })},
	{name: "a rank that the job does not have", reason: wire.ReasonRank, nack: true, frame: edit(func(p *wire.Packet) { p.Rank, p.Contributors = 9, 1<<9 })},
	{name: "a mask with others", reason: wire.ReasonMask, nack: true, frame: edit(func(p *wire.Packet) { p.Contributors |= 2 })},
	{name: "a tag that is none", reason: wire.ReasonTag, nack: true, frame: edit(func(p *wire.Packet) { p.Tag[1] = wire.P })},
	{name: "another length than the others'", reason: wire.ReasonShape, nack: true,
		first: func(f *forger) [][]byte { return [][]byte{f.frame(1, f.grad(1, 12))} },
		frame: func(f *forger) []byte {
			p := f.grad(0, 12)
			p.Elems = 63
			return f.frame(0, p)
		}},
	{name: "another type than the others'", reason: wire.ReasonShape, nack: true,
		first: func(f *forger) [][]byte { return [][]byte{f.frame(1, f.grad(1, 13))} },
		frame: func(f *forger) []byte {
			p := f.grad(0, 13)
			p.Flags |= wire.FlagModular
			return f.frame(0, p)
		}},
}

// atSwitch are refused by a switch that closes chunks itself.
var atSwitch = []forgery{
	{name: "a server's type", reason: wire.ReasonType, frame: edit(func(p *wire.Packet) { p.Type = wire.TypePartial })},
	{name: "a controller's type", reason: wire.ReasonType, frame: edit(func(p *wire.Packet) { p.Type = wire.TypeCtrl })},
	{name: "another rank", reason: wire.ReasonPort, frame: edit(func(p *wire.Packet) { p.Rank, p.Contributors = 1, 2 })},
	{name: "another rank and its address", reason: wire.ReasonPort, frame: func(f *forger) []byte { return f.frame(1, f.grad(1, 8)) }},
	{name: "a result of no server", reason: wire.ReasonPort, frame: edit(func(p *wire.Packet) { p.Type = wire.TypeResult })},
	{name: "another address", reason: wire.ReasonSource, frame: func(f *forger) []byte { return f.frame(1, f.grad(0, 8)) }},
	{name: "an older chunk", reason: wire.ReasonStale, nack: true,
		first: func(f *forger) [][]byte { return [][]byte{f.frame(0, f.grad(0, 14+2*f.ready.Pool))} },
		frame: func(f *forger) []byte { return f.frame(0, f.grad(0, 14)) }},
	{name: "ordinary traffic to nowhere", reason: wire.ReasonRoute, frame: patch(func(frame []byte) []byte { return ordinary(frame, [4]byte{192, 0, 2, 1}, 64) })},
	{name: "ordinary traffic that goes round", reason: wire.ReasonTTL, frame: patch(func(frame []byte) []byte { return ordinary(frame, [4]byte{10, 77, 0, 2}, 1) })},
}

// atServer are refused by a server.
var atServer = []forgery{
	{name: "a worker's type", reason: wire.ReasonType, frame: edit(func(p *wire.Packet) { p.Type = wire.TypeResult })},
	{name: "a sum of nobody", reason: wire.ReasonMask, nack: true, frame: edit(func(p *wire.Packet) { p.Type, p.Contributors = wire.TypePartial, 0 })},
	{name: "a sum of ranks that the job does not have", reason: wire.ReasonMask, nack: true,
		frame: edit(func(p *wire.Packet) { p.Type, p.Contributors = wire.TypePartial, 0b10011 })},
	{name: "a mask that overlaps", reason: wire.ReasonOverlap, nack: true,
		first: func(f *forger) [][]byte { return [][]byte{f.frame(1, f.grad(1, 14))} },
		frame: func(f *forger) []byte {
			p := f.grad(0, 14)
			p.Type, p.Contributors = wire.TypePartial, 0b0011
			return f.frame(0, p)
		}},
	{name: "a chunk beyond the vector", reason: wire.ReasonRange, nack: true, frame: edit(func(p *wire.Packet) { p.Chunk = 4 })},
	{name: "an older round", reason: wire.ReasonStale, nack: true,
		first: func(f *forger) [][]byte { return [][]byte{f.frame(0, f.grad(0, 48))} },
		frame: func(f *forger) []byte { return f.frame(0, f.grad(0, 40)) }},
}

// TestPitfall38: packets that claim to be another's, or that are wrong in any other way, change no sum. Each is counted under its
// own reason, in the status and in the metrics, and the sender is told where it may be a worker with a fault.
func TestPitfall38(t *testing.T) {
	t.Run("switch", func(t *testing.T) {
		f := newForger(t, policies["switch"])
		for _, tt := range slices.Concat(both, atSwitch) {
			t.Run(tt.name, func(t *testing.T) {
				f := &forger{bench: &bench{T: t, Lab: f.Lab, client: f.client}, topology: f.topology, ready: f.ready, link: f.link, bufs: f.bufs}
				before := f.reasons("sw")
				var honest [][]byte
				if tt.first != nil {
					honest = tt.first(f)
				}
				for _, frame := range honest {
					rank := slices.IndexFunc(f.topology.Workers, func(h lab.Host) bool { ip := h.IP.As4(); return string(frame[26:30]) == string(ip[:]) })
					if err := f.Inject(f.topology.Workers[rank].Port, frame); err != nil {
						t.Fatal(err)
					}
				}
				f.reached("honest packets are summed", func() bool { return f.reasons("sw")["summed"] == before["summed"]+uint64(len(honest)) })
				if err := f.Inject(f.topology.Workers[0].Port, tt.frame(f)); err != nil {
					t.Fatal(err)
				}
				f.refused("sw", before, tt.reason, uint64(len(honest)))
				if tt.nack {
					f.nacked(tt.reason)
				}
			})
		}
	})
	t.Run("server", func(t *testing.T) {
		f := newForger(t, policies["server"])
		for _, tt := range slices.Concat(both, atServer) {
			t.Run(tt.name, func(t *testing.T) {
				f := &forger{bench: &bench{T: t, Lab: f.Lab, client: f.client}, topology: f.topology, ready: f.ready}
				before := f.reasons("s0")
				var honest [][]byte
				if tt.first != nil {
					honest = tt.first(f)
				}
				for _, frame := range honest {
					f.InjectServer(0, frame)
				}
				answer := f.InjectServer(0, tt.frame(f))
				f.refused("s0", before, tt.reason, uint64(len(honest)))
				var p wire.Packet
				if !tt.nack {
					if len(answer) != 0 {
						t.Errorf("it is answered: % x", answer[:wire.FrameOverhead])
					}
				} else if _, _, err := wire.ParseFrame(answer, &p); err != nil || p.Type != wire.TypeNack || p.Reason != tt.reason {
					t.Errorf("answer is %s %s, %v", p.Type, p.Reason, err)
				}
			})
		}
	})
	t.Run("all reasons", func(t *testing.T) {
		seen := make(map[wire.Reason]bool)
		for _, tt := range slices.Concat(both, atSwitch, atServer) {
			seen[tt.reason] = true
		}
		seen[wire.ReasonClock] = true // of async jobs alone, which agg tests
		for r := range wire.Reason(wire.NumReasons) {
			if r.Fault() != seen[r] {
				t.Errorf("refusals for reason %s: %v are forged, %v there are", r, seen[r], r.Fault())
			}
		}
	})
}
