package timing

import (
	"math/bits"
	"time"

	"xagg/agg"
	"xagg/wire"
)

// host is what is attached to a port of the switch. Its address is the port's number.
type host struct {
	up, down *line
	receive  func(f frame)
}

// transmit puts a frame on a line at time t, from which it arrives somewhere.
func (w *world) transmit(l *line, t time.Duration, f frame, arrive func(f frame)) {
	if left, ok := l.send(t, f.len(), w.rng); ok {
		w.agenda.at(left+w.costs.Hop, func() { arrive(f) })
	}
}

// send sends a host's frame to the switch at time t.
func (w *world) send(from address, t time.Duration, f frame) {
	w.transmit(w.hosts[from].up, t, f, w.pipeline.arrive)
}

// micros is the time of aggregators' clocks.
func (w *world) micros() uint64 { return uint64(w.agenda.now / time.Microsecond) }

// decode decodes a frame's payload into the packet that all aggregators share. A payload that nobody can read ends the run.
func (w *world) decode(f frame) bool {
	if err := w.packet.Decode(f.payload); err != nil {
		w.failf("a packet from port %d: %v", f.src, err)
		return false
	}
	clear(w.packet.Lanes[int(w.packet.Blocks)*wire.BlockLanes:])
	return true
}

// encode returns the payload of the shared packet.
func (w *world) encode() []byte {
	b := make([]byte, wire.MaxLen)
	return b[:w.packet.Encode(b)]
}

// switched is a packet's turn in the switch.
func (w *world) switched(f frame) (until time.Duration) {
	until = w.agenda.now
	if !w.decode(f) {
		return until
	}
	p := &w.packet
	j, epoch, came := w.byID(p.Job), p.Epoch, p.Header
	out := w.sw.Handle(w.micros(), agg.Ingress{Port: uint16(f.src), Src: uint32(f.src), ToService: f.dst == service}, p)
	w.count(out.Reason)
	w.devices.atSwitch(&came, f.len(), out.Reason)
	var payload []byte
	leave := func(src, dst address) {
		if payload == nil {
			payload = w.encode()
		}
		until += w.costs.SwitchCopy
		h := &w.hosts[dst]
		w.transmit(h.down, until, frame{src, dst, payload}, h.receive)
	}
	switch plan := j.installed[epoch]; out.Dest {
	case agg.ToSender:
		leave(service, f.src)
	case agg.ToAll, agg.ToCohort:
		ranks := j.all()
		if out.Dest == agg.ToCohort {
			ranks = plan.Cohort
		}
		for m := ranks; m != 0; m &= m - 1 {
			leave(service, j.ranks[bits.TrailingZeros64(m)].address)
		}
	case agg.ToServer:
		leave(f.src, w.serverAddress(plan.servers[out.Server]))
	case agg.ToServerAsService:
		leave(service, w.serverAddress(plan.servers[out.Server]))
	case agg.ToAddress:
		leave(service, f.dst)
	}
	return until
}

// served is a packet's turn at a server.
func (w *world) served(server int, f frame) (until time.Duration) {
	if !w.decode(f) {
		return w.agenda.now
	}
	came := w.packet.Header
	out := w.servers[server].aggregator.Handle(w.micros(), &w.packet)
	w.count(out.Reason)
	w.devices.atServer(server, &came, out.Reason, w.packet.SpreadUs)
	if out.Dest == agg.Nowhere {
		return w.agenda.now
	}
	dst := service
	if out.Dest == agg.ToSender {
		dst = f.src
	}
	self := w.serverAddress(server)
	w.send(self, w.agenda.now, frame{self, dst, w.encode()})
	return w.agenda.now
}

// count counts a packet by what an aggregator has done with it. What only a faulty program sends ends the run.
func (w *world) count(why wire.Reason) {
	if why.Fault() && why != wire.ReasonStale && why != wire.ReasonEpoch && why != wire.ReasonUnknownJob { // those were late
		p := &w.packet
		w.failf("an aggregator refuses a packet (%v) of job %d, epoch %d, rank %d, round %d, chunk %d", why, p.Job, p.Epoch, p.Rank, p.Round, p.Chunk)
	}
}
