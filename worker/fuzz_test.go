package worker_test

import (
	"slices"
	"testing"

	"xagg/wire"
)

// FuzzAnswer lets any payload arrive at a worker, in the service's name, before the true answer: the sum is right all
// the same.
func FuzzAnswer(f *testing.F) {
	header := wire.Header{
		Type: wire.TypeResult, Flags: wire.FlagLast | wire.FlagModular, Job: testJob, Epoch: testEpoch, Blocks: 1, Elems: 2,
		Contributors: 1,
	}
	add := func(change func(p *wire.Packet)) {
		p := wire.Packet{Header: header}
		p.Lanes[0], p.Lanes[1] = 40, 2
		change(&p)
		b := make([]byte, p.Len())
		p.Encode(b)
		f.Add(b)
	}
	add(func(p *wire.Packet) { p.Seal() })
	add(func(p *wire.Packet) { p.Lanes[0]++ })
	add(func(p *wire.Packet) { p.Seal(); p.Contributors = 3 })
	add(func(p *wire.Packet) { p.Seal(); p.NextEpoch = testEpoch + 1; p.Round++ })
	for typ := wire.TypeGrad; typ <= wire.TypeCtrl; typ++ {
		if typ != wire.TypeResult {
			add(func(p *wire.Packet) { p.Type, p.Blocks = typ, 0 })
		}
	}
	for reason := wire.Reason(0); reason < wire.NumReasons; reason++ {
		add(func(p *wire.Packet) { p.Type, p.Blocks, p.Reason = wire.TypeNack, 0, reason })
	}
	f.Add([]byte{})
	f.Add(make([]byte, wire.HeaderLen))
	f.Add(make([]byte, 1400))
	f.Fuzz(func(t *testing.T, payload []byte) {
		if len(payload) > wire.MaxLen {
			payload = payload[:wire.MaxLen]
		}
		n := newTestnet(t, netConfig{ranks: 1})
		w := n.join(t)[0]
		n.links[0].In(wire.AppendUDP(nil, service, workerAddr(0), payload, true))
		data := []int32{40, 2}
		if _, err := w.AllReduceInt32(t.Context(), "k", data); err != nil || !slices.Equal(data, []int32{40, 2}) {
			t.Fatalf("sum %v, %v", data, err)
		}
	})
}
