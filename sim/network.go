package sim

import (
	"encoding/binary"
	"math/bits"
	"time"

	"xagg/agg"
	"xagg/wire"
	"xagg/wire/capture"
	"xagg/wire/check"
)

// The addresses of the hosts, as in the lab.

var service = wire.Addr{MAC: [6]byte{2, 'x', 'a', 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}

// workerAddr returns the address of a rank's first process; those after it have other ports, as kernels give them out.
func workerAddr(rank int) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 'x', 'a', 0, 0, byte(rank + 1)}, IP: [4]byte{10, 77, 0, byte(rank + 1)}, Port: wire.Port}
}

func serverAddr(s int) wire.Addr {
	return wire.Addr{MAC: [6]byte{2, 'x', 'a', 0, 1, byte(s + 1)}, IP: [4]byte{10, 77, 1, byte(s + 1)}, Port: wire.Port}
}

func ipNumber(ip [4]byte) uint32 { return binary.BigEndian.Uint32(ip[:]) }

// Switch ports: the workers', then from firstServerPort on the servers'.
const firstServerPort = 65

func workerPort(rank int) uint16 { return uint16(rank + 1) }

func serverPort(s int) uint16 { return uint16(firstServerPort + s) }

// line is one direction of a link.
type line struct {
	*Link
	busy time.Duration // when the last packet that waits has gone
}

// host is what is attached to a port of the switch.
type host struct {
	up, down line
}

// port returns the switch port of a host.
func (w *world) port(node int) uint16 {
	if node < w.s.Workers {
		return workerPort(node)
	}
	return serverPort(node - w.s.Workers)
}

// buffer returns an empty frame buffer.
func (w *world) buffer() []byte {
	if n := len(w.free); n > 0 {
		b := w.free[n-1]
		w.free = w.free[:n-1]
		return b[:0]
	}
	return make([]byte, 0, wire.MaxFrameLen)
}

// transmit puts a frame, which it takes over, on a host's line.
func (w *world) transmit(node int, arrival kind, frame []byte) {
	if w.opts.sabotage != nil {
		frame = w.spoil(node, arrival, frame)
	}
	l := &w.hosts[node].up
	if arrival == atHost {
		w.capture(node, frame)
		l = &w.hosts[node].down
	}
	w.report.Frames++
	l.busy = max(l.busy, w.now)
	waiting := 0
	if l.Gap > 0 {
		waiting = int((l.busy - w.now) / l.Gap)
	}
	if waiting >= l.Queue {
		w.report.Overflows++
		w.lost("lost in a full queue", node, arrival, frame)
		return
	}
	l.busy += l.Gap
	if w.chance(l.Drop) {
		w.report.Losses++
		w.lost("lost", node, arrival, frame)
		return
	}
	if w.chance(l.Duplicate) {
		w.fly(l, node, arrival, append(w.buffer(), frame...))
	}
	w.fly(l, node, arrival, frame)
}

// lost is a frame's end.
func (w *world) lost(how string, node int, arrival kind, frame []byte) {
	w.tell(how, node, arrival, frame)
	w.misses(node, arrival)
	w.free = append(w.free, frame)
}

// misses notes that the trace checker may not be shown in time what a running sum has become.
func (w *world) misses(node int, arrival kind) {
	if w.running != nil && arrival == atSwitch && node >= w.s.Workers {
		w.unseen++
	}
}

// spoil lets a test change a frame.
func (w *world) spoil(node int, arrival kind, frame []byte) []byte {
	var p wire.Packet
	src, dst, err := wire.ParseFrame(frame, &p)
	if err != nil || !w.opts.sabotage(w, node, arrival, &p) {
		return frame
	}
	return wire.AppendFrame(w.buffer(), src, dst, &p, binary.BigEndian.Uint16(frame[udpChecksum:]) != 0)
}

// fly lets a frame arrive at the end of its line.
func (w *world) fly(l *line, node int, arrival kind, frame []byte) {
	at := l.busy + l.Delay
	if l.Jitter > 0 && w.chance(l.Reorder) {
		at += time.Duration(w.rng.ExpFloat64() * float64(l.Jitter))
		w.misses(node, arrival)
	}
	if w.chance(l.Corrupt) {
		w.damage(node, arrival, frame)
	}
	w.events.add(event{at: at, kind: arrival, node: node, frame: frame})
}

const udpChecksum = wire.FrameOverhead - 2

// damage flips bits of the payload.
func (w *world) damage(node int, arrival kind, frame []byte) {
	flips := 1
	if w.s.Damage == Unprotected {
		flips += w.rng.IntN(3)
	} else if binary.BigEndian.Uint16(frame[udpChecksum:]) == 0 {
		return
	}
	w.tell("damaged", node, arrival, frame)
	w.report.Damaged++
	for range flips {
		bit := w.rng.IntN(8 * (len(frame) - wire.FrameOverhead))
		frame[wire.FrameOverhead+bit/8] ^= 1 << (bit % 8)
	}
}

// capture shows a frame at a port of the switch to the trace checker.
func (w *world) capture(node int, frame []byte) {
	if w.checker == nil {
		return
	}
	w.captured++
	w.seen = capture.Packet{Link: capture.LinkEthernet, Len: len(frame), Data: frame}
	w.checker.Packet(check.Ref{Number: w.captured}, &w.seen)
}

// atSwitch is a frame's arrival at the switch.
func (w *world) atSwitch(node int, frame []byte) {
	p := &w.p
	src, dst, err := wire.ParseFrame(frame, p)
	if err != nil {
		w.refused(wire.ReasonOf(err), nil)
		return
	}
	w.capture(node, frame)
	w.tell("at the switch", node, atSwitch, frame)
	w.lanes(p)
	epoch := p.Epoch
	out := w.sw.Handle(w.clock(0), agg.Ingress{Port: w.port(node), Src: ipNumber(src.IP), ToService: dst.IP == service.IP}, p)
	w.refused(out.Reason, p)
	plan := w.plan(epoch)
	switch out.Dest {
	case agg.ToSender:
		w.transmit(node, atHost, wire.AppendFrame(w.buffer(), service, src, p, false)) // damage may have made a server's answer a question
	case agg.ToAll:
		for r := range w.s.Workers {
			w.toWorker(r, p)
		}
	case agg.ToCohort:
		for m := plan.Cohort; m != 0; m &= m - 1 {
			w.toWorker(bits.TrailingZeros64(m), p)
		}
	case agg.ToServer:
		w.toServer(plan.Servers[out.Server], src, p)
	case agg.ToServerAsService:
		w.toServer(plan.Servers[out.Server], service, p)
	case agg.ToAddress:
		if r := int(dst.IP[3]) - 1; dst.IP[2] == 0 && r < w.s.Workers {
			w.toWorker(r, p)
		}
	}
}

// lanes clears what Decode leaves from earlier packets.
func (w *world) lanes(p *wire.Packet) { clear(p.Lanes[int(p.Blocks)*wire.BlockLanes:]) }

func (w *world) toWorker(r int, p *wire.Packet) {
	w.transmit(r, atHost, wire.AppendFrame(w.buffer(), service, w.workers[r].addr, p, false))
}

func (w *world) toServer(s int, src wire.Addr, p *wire.Packet) {
	// A checksum that was absent stays so: the switch only corrects it.
	w.transmit(w.s.Workers+s, atHost, wire.AppendFrame(w.buffer(), src, serverAddr(s), p, w.s.Damage != Unprotected))
}

// atServer is a frame's arrival at a server.
func (w *world) atServer(s int, frame []byte) {
	p := &w.p
	src, _, err := wire.ParseFrame(frame, p)
	if err != nil {
		w.refused(wire.ReasonOf(err), nil)
		return
	}
	w.tell("at the server", w.s.Workers+s, atHost, frame)
	w.lanes(p)
	question := p.Header
	out := w.servers[s].Handle(w.clock(s+1), p)
	w.refused(out.Reason, p)
	if out.Reason == wire.ReasonNone && question.Flags&wire.FlagAsync != 0 {
		if err := w.running.add(s, &question); err != nil {
			w.failf("%v", err)
		}
	}
	if w.closings != nil && p.Job == w.jobID() {
		if err := w.closings.answers(w.clock(s+1), &p.Header, out.Dest, w.s.all()); err != nil {
			w.failf("%v", err)
		}
	}
	dst := service
	switch out.Dest {
	case agg.Nowhere:
		return
	case agg.ToSender:
		dst = src
	}
	w.transmit(w.s.Workers+s, atSwitch, wire.AppendFrame(w.buffer(), serverAddr(s), dst, p, false))
}

// refused checks and counts a packet's reason at an aggregator. p is nil when its form was wrong.
func (w *world) refused(why wire.Reason, p *wire.Packet) {
	w.report.Reasons[why]++
	switch {
	case w.s.Damage == Unprotected || !why.Fault():
	case p == nil:
		if w.report.Damaged == 0 {
			w.failf("an aggregator refuses a packet (%v), and none was damaged", why)
		}
	case why != wire.ReasonStale && why != wire.ReasonEpoch && why != wire.ReasonUnknownJob: // those were late
		w.failf("an aggregator refuses a packet (%v) of job %d, epoch %d, rank %d, round %d, chunk %d",
			why, p.Job, p.Epoch, p.Rank, p.Round, p.Chunk)
	}
}
