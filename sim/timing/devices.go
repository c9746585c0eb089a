package timing

import (
	"maps"
	"math/bits"
	"time"

	"xagg/controller"
	"xagg/policy/telemetry"
	"xagg/wire"
)

// devices are the counters of switch and servers, as a controller reads them, and what it makes of them.
type devices struct {
	sw      telemetry.SwitchReading
	servers []serverCounters
	read    telemetry.Devices
}

type serverCounters struct {
	packets uint64
	summed  map[seat]*telemetry.Arrivals
}

// seat is a rank of a job.
type seat struct {
	job  uint16
	rank uint8
}

// watchDevices has counters kept and read as long as jobs run.
func (w *world) watchDevices() {
	w.devices = &devices{sw: telemetry.SwitchReading{Members: map[telemetry.Member]telemetry.Count{}}}
	for range w.servers {
		w.devices.servers = append(w.devices.servers, serverCounters{summed: map[seat]*telemetry.Arrivals{}})
	}
	w.agenda.at(controller.DeviceEvery, w.readDevices)
}

func (w *world) readDevices() {
	if !w.running() {
		return
	}
	d, now := w.devices, w.agenda.now
	sw := d.sw
	sw.Members = maps.Clone(sw.Members)
	maps.DeleteFunc(sw.Members, func(m telemetry.Member, _ telemetry.Count) bool { return w.byID(m.Job).installed[m.Epoch] == nil })
	d.read.AddSwitch(now, sw)
	for i, v := range w.servers {
		c := &d.servers[i]
		r := telemetry.ServerReading{
			Slots: uint64(v.slots), SlotsUsed: uint64(v.slots), Packets: c.packets,
			Run: telemetry.Run{Frames: c.packets, Time: time.Duration(c.packets) * w.costs.ServerPacket, Watched: now},
		}
		for _, a := range c.summed {
			r.Ranks = append(r.Ranks, *a)
		}
		d.read.AddServer(now, v.name, r)
	}
	w.agenda.at(now+controller.DeviceEvery, w.readDevices)
}

// atSwitch counts a packet that the switch has handled: what it was when it came, and what became of it.
func (d *devices) atSwitch(came *wire.Header, bytes int, why wire.Reason) {
	if d == nil {
		return
	}
	d.sw.Handled.Packets++
	d.sw.Handled.Bytes += uint64(bytes)
	switch {
	case why == wire.ReasonDuplicate:
		d.sw.Duplicates++
	case why.Fault():
		d.sw.Refused++
	}
	if came.Type == wire.TypeGrad && why != wire.ReasonUnknownJob && why != wire.ReasonEpoch {
		m := telemetry.Member{Job: came.Job, Epoch: came.Epoch, Rank: int(came.Rank)}
		n := d.sw.Members[m]
		d.sw.Members[m] = telemetry.Count{Packets: n.Packets + 1, Bytes: n.Bytes + uint64(bytes)}
	}
}

// atServer counts a packet that a server has handled; spread is what its answer says.
func (d *devices) atServer(server int, came *wire.Header, why wire.Reason, spread uint32) {
	if d == nil {
		return
	}
	c := &d.servers[server]
	c.packets++
	if why != wire.ReasonNone {
		return
	}
	s := seat{came.Job, came.Rank}
	a := c.summed[s]
	if a == nil {
		a = &telemetry.Arrivals{Job: s.job, Rank: int(s.rank)}
		c.summed[s] = a
	}
	if came.Type == wire.TypePartial {
		a.Partials++
		return
	}
	a.Packets++
	a.LagLog2[bits.Len32(spread|1)-1]++
}
