package conformance

import (
	"encoding/binary"
	"errors"

	"xagg/agg"
	"xagg/wire"
)

// model is agg.Switch with what it leaves to others: the frame around a packet, and ordinary traffic. It is programmed
// with the scenario itself, not with table entries.
type model struct {
	s       *scenario
	sw      *agg.Switch
	counted [64]int64
	clock
}

func newModel(s *scenario) (*model, error) {
	m := &model{s: s, sw: agg.NewSwitch(slots)}
	for i, pl := range s.plans {
		if pl.later {
			continue
		}
		if err := m.change(&change{op: "install", plan: i}); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *model) change(ch *change) error {
	pl := &m.s.plans[ch.plan]
	switch ch.op {
	case "arm":
		m.sw.Arm(pl.job, pl.epoch, ch.next)
		return nil
	case "remove":
		m.sw.Remove(pl.job, pl.epoch)
		return nil
	}
	members := map[uint8]agg.Member{}
	for r, w := range pl.workers {
		h := worker(w)
		members[uint8(r)] = agg.Member{Port: h.port, Src: binary.BigEndian.Uint32(h.addr.IP[:])}
	}
	var ports []uint16
	for _, n := range pl.servers {
		ports = append(ports, server(n).port)
	}
	return m.sw.Install(agg.SwitchPlan{Job: pl.job, Epoch: pl.epoch, Ranks: pl.ranks(), Cohort: pl.cohort,
		Servers: len(pl.servers), Base: pl.base, Pool: pl.pool, NextEpoch: pl.nextEpoch,
		Quorum: pl.quorum, WaitUs: pl.wait}, members, ports)
}

func (m *model) name() string { return "agg.Switch" }

func (m *model) reasons() ([]int64, error) { return m.counted[:], nil }

func (m *model) send(in input) ([]output, error) {
	if in.change != nil {
		return nil, m.change(in.change)
	}
	now := m.tick()
	if in.port == cpuPort {
		return m.packetOut(in), nil
	}
	if isARP(in.frame) {
		return m.arp(in), nil
	}
	var p wire.Packet
	src, dst, err := wire.ParseFrame(in.frame, &p)
	switch reason := wire.ReasonOf(err); reason {
	case wire.ReasonNone:
		return m.packet(now, in, &p, src, dst), nil
	case wire.ReasonRoute:
		return m.ordinary(in), nil
	default:
		m.counted[reason]++
		return nil, nil
	}
}

// packet handles a packet of the protocol.
func (m *model) packet(now uint64, in input, p *wire.Packet, src, dst wire.Addr) []output {
	pl := m.plan(p)
	o := m.sw.Handle(now, agg.Ingress{Port: in.port, Src: uint32(num(src.IP[:])), ToService: dst.IP == service.IP}, p)
	m.counted[o.Reason]++
	sum := in.frame[offUDPSum] != 0 || in.frame[offUDPSum+1] != 0
	switch o.Dest {
	case agg.ToSender:
		return []output{{in.port, answer(in, dst, src, p, false)}}
	case agg.ToServer, agg.ToServerAsService:
		h := server(pl.servers[o.Server])
		to := h.addr
		to.Port = dst.Port
		if o.Dest == agg.ToServerAsService {
			src = dst
			src.Port, to.Port = wire.Port, wire.Port
		}
		return []output{{h.port, answer(in, src, to, p, sum || p.Type == wire.TypePartial)}}
	case agg.ToAll, agg.ToCohort:
		from := dst // of a GRAD: whom it was sent to
		if o.Reason == wire.ReasonReturned {
			from = service
			from.Port = src.Port
		}
		var outs []output
		for r, w := range pl.workers {
			if h := worker(w); o.Dest == agg.ToAll || pl.cohort>>r&1 != 0 {
				outs = append(outs, output{h.port, answer(in, from, h.addr, p, false)})
			}
		}
		return outs
	case agg.ToAddress:
		from := service
		from.Port = src.Port
		out := m.route(answer(in, from, dst, p, false))
		if out == nil {
			m.counted[o.Reason]-- // counted under what stopped it
		}
		return out
	}
	return nil
}

// owns reports whether a contribution's slot is its chunk's.
func (m *model) owns(p *wire.Packet) bool {
	var slot wire.Packet
	pl := m.plan(p)
	return m.sw.Slot(m.now, pl.base+p.Seq&(2*pl.pool-1), &slot) && slot.Job == p.Job && slot.Epoch == p.Epoch && slot.Seq == p.Seq
}

func (m *model) plan(p *wire.Packet) *plan {
	for i, pl := range m.s.plans {
		if pl.job == p.Job && pl.epoch == p.Epoch {
			return &m.s.plans[i]
		}
	}
	return nil
}

// answer is a frame with the packet p, with what the answered frame says where the protocol says nothing.
func answer(in input, src, dst wire.Addr, p *wire.Packet, sum bool) []byte {
	f := wire.AppendFrame(nil, src, dst, p, sum)
	f[offTOS] = in.frame[offTOS]
	copy(f[offID:offProtocol], in.frame[offID:offProtocol])
	sumIPv4(f)
	return f
}

// ordinary forwards IPv4.
func (m *model) ordinary(in input) []output {
	f := in.frame
	switch {
	case binary.BigEndian.Uint16(f[offEtherType:]) != 0x0800 || f[offVersion]>>4 != 4 || f[offVersion]&0xf < 5:
		m.counted[wire.ReasonRoute]++
		return nil
	case f[offVersion]&0xf == 5 && onesSum(f[offVersion:offUDP]) != 0xffff:
		m.counted[wire.ReasonChecksum]++
		return nil
	}
	return m.route(append([]byte{}, f...))
}

// route sends an IPv4 frame on to its destination.
func (m *model) route(f []byte) []output {
	if f[offTTL] <= 1 {
		m.counted[wire.ReasonTTL]++
		return nil
	}
	for _, h := range m.s.hosts() {
		if h.addr.IP == [4]byte(f[offDstIP:]) {
			copy(f, h.addr.MAC[:])
			f[offTTL]--
			// RFC 1141's shortcut for one step down, but for the one sum that RFC 1624 mends in it.
			sum := uint32(binary.BigEndian.Uint16(f[offIPSum:])) + 0x100
			if sum == 0xffff {
				sum = 0
			}
			binary.BigEndian.PutUint16(f[offIPSum:], uint16(sum+sum>>16))
			return []output{{h.port, f}}
		}
	}
	m.counted[wire.ReasonRoute]++
	return nil
}

func isARP(f []byte) bool {
	return len(f) >= offVersion && f[offEtherType] == 8 && f[offEtherType+1] == 6
}

// arp answers for the service and floods the rest.
func (m *model) arp(in input) []output {
	if len(in.frame) < 42 {
		m.counted[wire.ReasonShort]++
		return nil
	}
	if num(in.frame[38:42]) != num(service.IP[:]) {
		var outs []output
		for _, h := range m.s.hosts() {
			if h.port != in.port {
				outs = append(outs, output{h.port, in.frame})
			}
		}
		return outs
	}
	if in.frame[21] != 1 {
		m.counted[wire.ReasonRoute]++
		return nil
	}
	f := append([]byte{}, in.frame...)
	copy(f, in.frame[6:12])
	copy(f[6:], service.MAC[:])
	f[21] = 2
	copy(f[22:], service.MAC[:])
	copy(f[28:], service.IP[:])
	copy(f[32:42], in.frame[22:32])
	return []output{{in.port, f}}
}

// isCtrl reports whether a frame is a question for a slot, if perhaps for one that there is not.
func isCtrl(f []byte) bool {
	var p wire.Packet
	src, dst, err := wire.ParseFrame(f, &p)
	return !errors.Is(err, wire.ErrNotXAgg) && (src.Port == wire.Port || dst.Port == wire.Port) &&
		f[offX+wire.OffVersionType] == wire.Version<<4|uint8(wire.TypeCtrl)
}

// packetOut answers the controller's questions and sends out what it is told to.
func (m *model) packetOut(in input) []output {
	var p wire.Packet
	_, _, err := wire.ParseFrame(in.frame, &p)
	if errors.Is(err, wire.ErrShort) || isARP(in.frame) && len(in.frame) < 42 {
		m.counted[wire.ReasonShort]++
		return nil
	}
	if !isCtrl(in.frame) {
		return []output{{in.egress, in.frame}}
	}
	if !m.sw.Slot(m.now, p.Seq, &p) {
		m.counted[wire.ReasonRange]++
		return nil
	}
	f := append([]byte{}, in.frame...)
	p.Encode(f[offX:])
	f[offUDPSum], f[offUDPSum+1] = 0, 0
	return []output{{cpuPort, f}}
}
