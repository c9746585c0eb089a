package engine

// Values of standard_metadata.instance_type, as simple_switch numbers them.
const (
	instanceNormal      = 0
	instanceReplication = 5
)

// maxGrowth is the number of bytes that a packet may grow by: simple_switch allocates no more.
const maxGrowth = 512

// Emit takes a frame that leaves the switch. The frame is valid only during the call. An Emit must not call the
// Program it is called from.
type Emit func(port uint16, frame []byte)

// Process runs a frame, as received on a port, through the switch. now is the time in microseconds since the switch
// started. Every copy that leaves is given to emit, in simple_switch's order: ingress is complete before the first
// egress, and the copies of a multicast follow instance and port.
func (p *Program) Process(port uint16, frame []byte, now uint64, emit Emit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m, std := &p.m, &p.std
	clear(m.phv)
	m.exit = false
	m.length = uint64(len(frame))
	m.register = m.length
	m.data = frame
	std.ingressPort.set(m.phv, uint64(port))
	std.packetLength.set(m.phv, m.length)
	std.ingressTS.set(m.phv, now)

	std.parserError.set(m.phv, uint64(p.parse(m)))
	std.checksumError.set(m.phv, p.verifyChecksums(m))
	m.run(p.ingress)
	m.exit = false

	if group := std.group.get(m.phv); group != 0 {
		std.instanceType.set(m.phv, instanceReplication)
		replicas := p.groups[uint16(group)]
		if len(replicas) > 1 {
			copy(p.saved, m.phv)
		}
		register := m.register
		for i, r := range replicas {
			if r.Port > MaxReplicationPort {
				continue
			}
			if i > 0 {
				copy(m.phv, p.saved)
			}
			m.register = register
			m.exit = false
			std.rid.set(m.phv, uint64(r.Instance))
			p.send(m, r.Port, now, emit)
		}
		return
	}
	spec := std.egressSpec.get(m.phv)
	if spec == p.drop {
		return
	}
	std.instanceType.set(m.phv, instanceNormal)
	p.send(m, uint16(spec), now, emit)
}

// run walks a pipeline until it ends or an action exits.
func (m *machine) run(n flowNode) {
	for n != nil && !m.exit {
		n = n.exec(m)
	}
}

// send runs the egress pipeline for one copy and gives it out.
func (p *Program) send(m *machine, port uint16, now uint64, emit Emit) {
	std := &p.std
	if std.priority.get(m.phv) != 0 {
		return // there is one queue per port, priority 0; simple_switch drops what asks for another
	}
	std.enqTS.set(m.phv, now)
	std.enqDepth.set(m.phv, 0)
	std.egressTS.set(m.phv, now)
	std.deqDelta.set(m.phv, 0)
	std.deqDepth.set(m.phv, 0)
	std.egressPort.set(m.phv, uint64(port))
	std.egressSpec.set(m.phv, p.drop+1) // anything but the drop port, cut to the field's width
	std.packetLength.set(m.phv, m.register)
	m.run(p.egress)
	if std.egressSpec.get(m.phv) == p.drop {
		return
	}
	for _, s := range p.update {
		if s.cond == nil || s.cond(m) {
			s.target.set(m.phv, s.calc.output(m))
		}
	}
	size := len(m.data)
	for _, h := range p.order {
		if h.isValid(m.phv) {
			size += h.nbytes
		}
	}
	if size > int(m.length)+maxGrowth {
		return
	}
	if cap(p.out) < size {
		p.out = make([]byte, size)
	}
	out := p.out[:size]
	at := 0
	for _, h := range p.order {
		if h.isValid(m.phv) {
			h.deparse(m.phv, out[at:at+h.nbytes])
			at += h.nbytes
		}
	}
	copy(out[at:], m.data)
	emit(port, out)
}

// verifyChecksums returns 1 if a checksum is wrong.
func (p *Program) verifyChecksums(m *machine) uint64 {
	var bad uint64
	for _, s := range p.verify {
		if !s.target.hdr.isValid(m.phv) || s.cond != nil && !s.cond(m) {
			continue
		}
		if s.calc.output(m) != s.target.get(m.phv) {
			bad = 1
		}
	}
	return bad
}
