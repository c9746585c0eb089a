package controller

import (
	"context"
	"fmt"

	"xagg/controller/p4rt"
	"xagg/wire"
)

// ReadSlot reads a slot of the switch, index counted from 0 through the whole switch, with the first blocks (0..4)
// 64-lane blocks of its lanes. It asks by a CTRL packet: bmv2 does not let anybody read registers over P4Runtime. The
// switch does not answer for a slot that it does not have, so ctx should end some time.
func (c *Controller) ReadSlot(ctx context.Context, index uint32, blocks uint8) (wire.Packet, error) {
	if int(index) >= c.intent.slots {
		return wire.Packet{}, fmt.Errorf("read slot %d: the switch has the slots 0..%d", index, c.intent.slots-1)
	}
	if blocks > wire.MaxBlocks {
		return wire.Packet{}, fmt.Errorf("read slot %d: %d blocks are asked for, a slot has %d", index, blocks, wire.MaxBlocks)
	}
	session, err := c.links.session()
	if err != nil {
		return wire.Packet{}, fmt.Errorf("read slot %d: %w", index, err)
	}
	// The answer comes back with the question's addresses: the source port tells whose it is.
	self := wire.Addr{MAC: c.cfg.Service.MAC, IP: c.cfg.Service.IP.As4(), Port: uint16(0x8000 | c.questions.Add(1))}
	service := wire.Addr{MAC: c.cfg.Service.MAC, IP: c.cfg.Service.IP.As4(), Port: wire.Port}
	packets, stop := session.Packets(func(p p4rt.Packet) bool {
		var answer wire.Packet
		src, _, err := wire.ParseFrame(p.Payload, &answer)
		return err == nil && answer.Type == wire.TypeCtrl && src == self
	})
	defer stop()

	question := wire.Packet{Header: wire.Header{Type: wire.TypeCtrl, Seq: index, Blocks: blocks}}
	if err := session.SendPacket(p4rt.Packet{
		Payload:  wire.AppendFrame(nil, self, service, &question, false),
		Metadata: []p4rt.Param{{Name: "egress_port", Value: p4rt.Uint(uint64(c.cfg.Switch.CPUPort))}},
	}); err != nil {
		return wire.Packet{}, fmt.Errorf("read slot %d: %w", index, err)
	}
	select {
	case p := <-packets:
		var answer wire.Packet
		_, _, err := wire.ParseFrame(p.Payload, &answer)
		return answer, err
	case <-ctx.Done():
		return wire.Packet{}, fmt.Errorf("read slot %d: no answer from the switch: %w", index, context.Cause(ctx))
	}
}
