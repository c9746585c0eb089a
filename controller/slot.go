package controller

import (
	"context"
	"fmt"
	"slices"
	"time"

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
	var answer wire.Packet
	err := c.askSlots(ctx, []uint32{index}, blocks, func(_ uint32, p *wire.Packet) { answer = *p })
	if err != nil {
		return wire.Packet{}, fmt.Errorf("read slot %d: %w", index, err)
	}
	return answer, nil
}

const (
	// slotsAtOnce is how many questions for slots are under way at once: well below the packet-ins that a session keeps
	// for a reader, and few enough that they do not stand in the way of a job's packets.
	slotsAtOnce = 16
	// slotsPause is the least time from one bunch of questions to the next: at most 4,000 questions a second.
	slotsPause = 4 * time.Millisecond
)

// readSlots reads the headers of slots, a bounded number at a time and a second.
func (c *Controller) readSlots(ctx context.Context, indexes []uint32) (map[uint32]wire.Header, error) {
	headers := make(map[uint32]wire.Header, len(indexes))
	for bunch := range slices.Chunk(indexes, slotsAtOnce) {
		pause := time.NewTimer(slotsPause)
		asking, cancel := context.WithTimeout(ctx, lookTimeout)
		err := c.askSlots(asking, bunch, 0, func(index uint32, p *wire.Packet) { headers[index] = p.Header })
		cancel()
		if err != nil {
			pause.Stop()
			return headers, fmt.Errorf("read slots %d to %d: %w", bunch[0], bunch[len(bunch)-1], err)
		}
		<-pause.C
	}
	return headers, nil
}

// askSlots asks for slots, all at once, and has take called with each answer. It returns when all have come.
func (c *Controller) askSlots(ctx context.Context, indexes []uint32, blocks uint8, take func(uint32, *wire.Packet)) error {
	session, err := c.links.session()
	if err != nil {
		return err
	}
	// The answer comes back with the question's addresses: the source port tells whose it is. A slot's own seq is no help.
	service := wire.Addr{MAC: c.cfg.Service.MAC, IP: c.cfg.Service.IP.As4(), Port: wire.Port}
	asked := make(map[wire.Addr]uint32, len(indexes))
	for _, index := range indexes {
		self := service
		self.Port = uint16(0x8000 | c.questions.Add(1))
		asked[self] = index
	}
	packets, stop := session.Packets(func(p p4rt.Packet) bool {
		var answer wire.Packet
		src, _, err := wire.ParseFrame(p.Payload, &answer)
		_, mine := asked[src]
		return err == nil && answer.Type == wire.TypeCtrl && mine
	})
	defer stop()
	for self, index := range asked {
		question := wire.Packet{Header: wire.Header{Type: wire.TypeCtrl, Seq: index, Blocks: blocks}}
		if err := session.SendPacket(p4rt.Packet{
			Payload:  wire.AppendFrame(nil, self, service, &question, false),
			Metadata: []p4rt.Param{{Name: "egress_port", Value: p4rt.Uint(uint64(c.cfg.Switch.CPUPort))}},
		}); err != nil {
			return err
		}
	}
	answered := make(map[uint32]bool, len(indexes))
	for len(answered) < len(indexes) {
		select {
		case p := <-packets:
			var answer wire.Packet
			src, _, err := wire.ParseFrame(p.Payload, &answer)
			if err != nil {
				return err
			}
			answered[asked[src]] = true
			take(asked[src], &answer)
		case <-ctx.Done():
			return fmt.Errorf("no answer from the switch: %w", context.Cause(ctx))
		}
	}
	return nil
}
