package telemetry

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const second = time.Second

// filled returns a snapshot of a job of so many ranks and one server, s0.
func filled(d *Devices, now time.Duration, job uint16, ranks int) *Snapshot {
	s := &Snapshot{Job: Job{Size: float64(ranks)}, Ranks: make([]Rank, ranks), Servers: []Server{{Name: "s0", Ready: true}}}
	d.Fill(s, now, job)
	return s
}

func near(got, want float64) bool { return math.Abs(got-want) <= 1e-9*max(1, math.Abs(want)) }

func TestSwitchRates(t *testing.T) {
	var d Devices
	plan := func(epoch uint16, rank int) Member { return Member{Job: 7, Epoch: epoch, Rank: rank} }
	read := func(at time.Duration, instance, handled uint64, members map[Member]Count) {
		d.AddSwitch(at, SwitchReading{
			Instance: instance, Handled: Count{handled, 100 * handled}, Duplicates: handled / 10, Refused: handled / 20, Members: members,
		})
	}
	read(second, 1, 1000, map[Member]Count{plan(1, 0): {600, 60000}, plan(1, 1): {400, 40000}})
	if s := filled(&d, second, 7, 2); s.Switch.Known || s.Switch.PacketsPerSecond != 0 || s.Ranks[0].SwitchPackets != 0 {
		t.Errorf("one reading says nothing of a rate: %+v", s.Switch)
	}
	// The plan changes: what the old one counted goes with it, and the new one counts from 0.
	read(3*second, 1, 1400, map[Member]Count{plan(1, 0): {700, 70000}, plan(1, 1): {420, 42000}, plan(2, 0): {100, 10000}, {8, 1, 0}: {50, 5000}})
	read(5*second, 1, 1800, map[Member]Count{plan(2, 0): {300, 30000}, plan(2, 1): {20, 2000}, {8, 1, 0}: {50, 5000}})
	s := filled(&d, 5*second, 7, 2)
	w := s.Switch
	if !w.Known || !near(w.PacketsPerSecond, 200) || !near(w.BytesPerSecond, 20000) || !near(w.DuplicateShare, 0.1) || !near(w.RefusedShare, 0.05) {
		t.Errorf("switch: %+v", w)
	}
	for rank, want := range []float64{(100 + 100 + 200) / 4.0, (20 + 20) / 4.0} {
		if r := s.Ranks[rank]; !near(r.SwitchPackets, want) || !near(r.SwitchBytes, 100*want) {
			t.Errorf("rank %d: %v packets/s, %v bytes/s, want %v", rank, r.SwitchPackets, r.SwitchBytes, want)
		}
	}
	if other := filled(&d, 5*second, 8, 1).Ranks[0]; !near(other.SwitchPackets, 12.5) {
		t.Errorf("the other job's rank: %v", other.SwitchPackets)
	}
	if got := d.Total(7, 0); got != (Count{1000, 100000}) {
		t.Errorf("total %v", got)
	}

	// A switch that was restarted counts anew.
	read(6*second, 2, 10, map[Member]Count{plan(3, 0): {10, 1000}})
	if s := filled(&d, 6*second, 7, 2); s.Switch.Known || s.Switch.PacketsPerSecond != 0 {
		t.Errorf("after a restart: %+v", s.Switch)
	}
	read(7*second, 2, 110, map[Member]Count{plan(3, 0): {110, 11000}})
	if s := filled(&d, 7*second, 7, 2); !near(s.Switch.PacketsPerSecond, 100) || !near(s.Ranks[0].SwitchPackets, 100) {
		t.Errorf("after a restart, and a second reading: %+v", s.Switch)
	}
	if got := d.Total(7, 0); got != (Count{1110, 111000}) {
		t.Errorf("total %v", got)
	}
	d.Forget(func(job uint16) bool { return job == 8 })
	if d.Total(7, 0) != (Count{}) || d.Total(8, 0) != (Count{50, 5000}) {
		t.Errorf("totals of jobs that are no more: %v", d.totals)
	}

	// Nobody reads for a while: then nothing is known, and what was before is left out afterwards.
	if s := filled(&d, 7*second+Stale+1, 7, 2); s.Switch.Known || s.Ranks[0].SwitchPackets != 0 {
		t.Errorf("an old reading: %+v", s.Switch)
	}
	read(107*second, 2, 1110, nil)
	if s := filled(&d, 107*second, 7, 2); !near(s.Switch.PacketsPerSecond, 10) {
		t.Errorf("after a pause: %+v", s.Switch)
	}
	read(106*second, 2, 5000, nil) // time does not run back
	if s := filled(&d, 107*second, 7, 2); !near(s.Switch.PacketsPerSecond, 10) {
		t.Errorf("after an older reading: %+v", s.Switch)
	}
}

// TestWindowOfReadings: rates are over the last readings, and over no others.
func TestWindowOfReadings(t *testing.T) {
	var d Devices
	total := uint64(0)
	for i := range 20 {
		if i >= 10 {
			total += 100
		}
		d.AddSwitch(time.Duration(i)*second, SwitchReading{Instance: 1, Handled: Count{Packets: total}})
		want := 100 * float64(min(max(i-9, 0), Readings)) / float64(max(min(i, Readings), 1))
		if got := filled(&d, time.Duration(i)*second, 1, 1).Switch.PacketsPerSecond; !near(got, want) {
			t.Errorf("reading %d: %v packets/s, want %v", i, got, want)
		}
	}
}

func TestServerRates(t *testing.T) {
	var d Devices
	read := func(at time.Duration, packets, frames uint64, ran, watched time.Duration, ranks ...Arrivals) {
		d.AddServer(at, "s0", ServerReading{
			Instance: 5, Slots: 100, SlotsUsed: 40, Packets: packets, Run: Run{frames, ran, watched}, Ranks: ranks,
		})
	}
	lags := func(job uint16, rank int, partials uint64, buckets map[int]uint64) Arrivals {
		a := Arrivals{Job: job, Rank: rank, Partials: partials}
		for i, n := range buckets {
			a.LagLog2[i] = n
			a.Packets += n
		}
		return a
	}
	read(second, 100, 10, 2*time.Microsecond, 50*time.Millisecond, lags(7, 0, 0, map[int]uint64{0: 5}), lags(7, 1, 100, map[int]uint64{9: 1}))
	read(2*second, 700, 110, 22*time.Microsecond, 100*time.Millisecond, lags(7, 0, 0, map[int]uint64{0: 105}), lags(7, 1, 300, map[int]uint64{9: 51, 12: 50}))
	s := filled(&d, 2*second, 7, 2)
	v := s.Servers[0]
	if !v.Known || !v.Timed || v.PacketsPerSecond != 600 || v.Slots != 100 || v.SlotsUsed != 40 || !near(v.NsPerPacket, 200) || !near(v.CPU, 20e-6/50e-3) {
		t.Errorf("server: %+v", v)
	}
	a, b := s.Ranks[0], s.Ranks[1]
	if a.Arrivals != 100 || !near(a.ArrivalP50, 1e-6) || !near(a.ArrivalP99, 1.98e-6) {
		t.Errorf("rank 0: %+v", a)
	}
	if b.Arrivals != 100 || !near(b.ArrivalP50, 1024e-6) || !near(b.ArrivalP95, (4096+0.9*4096)*1e-6) {
		t.Errorf("rank 1: %+v", b)
	}
	if !near(s.Job.PartialShare, 0.5) {
		t.Errorf("partial share %v", s.Job.PartialShare)
	}

	// A server's agent that was restarted measures running time anew, and a job that begins anew counts from 0.
	read(3*second, 800, 20, 5*time.Microsecond, 10*time.Millisecond, lags(7, 0, 0, map[int]uint64{3: 1}))
	s = filled(&d, 3*second, 7, 2)
	if v = s.Servers[0]; v.PacketsPerSecond != 350 || !near(v.NsPerPacket, 200) || s.Ranks[0].Arrivals != 101 {
		t.Errorf("after a restart: %+v, %+v", v, s.Ranks[0])
	}

	// Of a server that cannot say how long its program runs, and of one that nobody has read.
	var none Devices
	none.AddServer(second, "s0", ServerReading{Instance: 1, Packets: 10})
	none.AddServer(2*second, "s0", ServerReading{Instance: 1, Packets: 20})
	if v := filled(&none, 2*second, 7, 1).Servers[0]; !v.Known || v.Timed || v.PacketsPerSecond != 10 || v.NsPerPacket != 0 || v.CPU != 0 {
		t.Errorf("without running times: %+v", v)
	}
	if v := filled(&Devices{}, 2*second, 7, 1).Servers[0]; v.Known || v.PacketsPerSecond != 0 {
		t.Errorf("not read: %+v", v)
	}
}

// TestDevicesTakeAnything: whatever counters say, also where they fall, begin anew or stand still while time does anything, a
// snapshot has only numbers that rules can be given.
func TestDevicesTakeAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var d Devices
		count := rapid.Uint64Range(0, 1<<63)
		small := rapid.Uint64Range(0, 3)
		now := time.Duration(0)
		totals := map[int]uint64{}
		for range rapid.IntRange(1, 30).Draw(t, "readings") {
			now += time.Duration(rapid.Int64Range(-1e9, 10e9).Draw(t, "step"))
			now = max(now, 0)
			if rapid.Bool().Draw(t, "switch") {
				r := SwitchReading{
					Instance: small.Draw(t, "instance"), Handled: Count{count.Draw(t, "packets"), count.Draw(t, "bytes")},
					Duplicates: count.Draw(t, "duplicates"), Refused: count.Draw(t, "refused"), Members: map[Member]Count{},
				}
				for rank := range 3 {
					r.Members[Member{1, uint16(small.Draw(t, "epoch")), rank}] = Count{count.Draw(t, "p") >> 8, count.Draw(t, "b") >> 8}
				}
				d.AddSwitch(now, r)
			} else {
				r := ServerReading{
					Instance: small.Draw(t, "instance"), Slots: small.Draw(t, "slots"), SlotsUsed: small.Draw(t, "used"), Packets: count.Draw(t, "packets"),
					Run: Run{count.Draw(t, "frames"), time.Duration(count.Draw(t, "ran") >> 8), time.Duration(count.Draw(t, "watched") >> 8)},
				}
				for rank := range 3 {
					a := Arrivals{Job: 1, Rank: rank, Packets: count.Draw(t, "p") >> 8, Partials: count.Draw(t, "partials") >> 8}
					a.LagLog2[rapid.IntRange(0, LagBuckets-1).Draw(t, "bucket")] = count.Draw(t, "n") >> 8
					r.Ranks = append(r.Ranks, a)
				}
				d.AddServer(now, "s0", r)
			}
			if err := filled(&d, now, 1, 3).Check(); err != nil {
				t.Fatal(err)
			}
			for rank := range 3 {
				total := d.Total(1, rank).Packets
				if total < totals[rank] {
					t.Fatalf("total of rank %d fell from %d to %d", rank, totals[rank], total)
				}
				totals[rank] = total
			}
		}
	})
}

// TestSlotTimes: Little's law, by rounds.
func TestSlotTimes(t *testing.T) {
	w := NewWindow(2, 4)
	for n := range uint32(4) {
		for rank := range 2 {
			held := 20 * time.Millisecond
			if rank == 0 {
				held = 5 * time.Millisecond // lost some results, and got them as they were answered again
			}
			report := Report{Rank: rank, Rounds: []Round{{
				Number: n, Compute: 6 * time.Millisecond, Comm: 4 * time.Millisecond, Chunks: 8, Held: held, Blocked: held / 4,
			}}}
			if err := w.Add(second, report); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := Snapshot{Job: Job{Size: 2, Pool: 16}}
	w.Fill(&s, second, 1)
	if j := s.Job; !near(j.BusySlots, 2) || !near(j.SlotOccupancy, 0.125) || !near(j.BlockedSlotTime, 0.005) || !near(j.BlockedShare, 0.25) {
		t.Errorf("%+v", j)
	}
	if err := w.Add(second, Report{Rounds: []Round{{Number: 9, Held: 1, Blocked: 2}}}); err == nil {
		t.Error("slots that wait longer for the last rank than for all are taken")
	}
}
