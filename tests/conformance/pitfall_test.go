package conformance

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"xagg/bmv2"
	"xagg/bmv2/dataplane"
	"xagg/p4"
	"xagg/wire"
)

// What other systems of this kind, and programs for bmv2, got wrong: the number of each test is its row in a list of
// such pitfalls. These run on every implementation, the real switch included where it is installed.

// everywhere runs a test on every implementation of the switch, programmed with a scenario.
func everywhere(t *testing.T, name string, f func(t *testing.T, sc *scenario, tg target)) {
	t.Helper()
	sc := &scenarios[slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name })]
	e, m := programmed(t, sc)
	for _, tg := range []target{e, m} {
		t.Run(tg.name(), func(t *testing.T) { f(t, sc, tg) })
	}
	t.Run(bmv2.SimpleSwitchBinary, func(t *testing.T) { f(t, sc, startReal(t, sc)) })
}

// gradOf is rank's contribution to seq in so many lanes, all of them v.
func gradOf(pl *plan, rank int, seq uint32, lanes int, v int32) *wire.Packet {
	p := &wire.Packet{Header: wire.Header{Type: wire.TypeGrad, Job: pl.job, Epoch: pl.epoch, Rank: uint8(rank), Seq: seq,
		Round: seq / 4, Chunk: seq % 4, Elems: uint16(lanes), Blocks: wire.BlocksFor(lanes), Contributors: 1 << rank}}
	for i := range lanes {
		p.Lanes[i] = v
	}
	p.Seal()
	return p
}

// from is the packet as worker w sends it.
func from(w int, p *wire.Packet) input {
	h := worker(w)
	return input{port: h.port, frame: wire.AppendFrame(nil, h.addr, service, p, true)}
}

// slotOf is the controller's question for the slot of seq, with so many blocks.
func slotOf(pl *plan, seq uint32, blocks uint8) input {
	p := &wire.Packet{Header: wire.Header{Type: wire.TypeCtrl, Seq: pl.base + seq&(2*pl.pool-1), Blocks: blocks}}
	return input{port: cpuPort, frame: wire.AppendFrame(nil, worker(0).addr, service, p, false)}
}

// ask sends an input and returns what came out.
func ask(t *testing.T, tg target, in input) []output {
	t.Helper()
	outs, err := tg.send(in)
	if err == nil {
		err = check(in, outs)
	}
	if err != nil {
		t.Fatalf("%s: %v", in, err)
	}
	slices.SortStableFunc(outs, func(a, b output) int { return int(a.port) - int(b.port) })
	return outs
}

// packet is the packet of the protocol in an output.
func packet(t *testing.T, o output) *wire.Packet {
	t.Helper()
	p := new(wire.Packet)
	if _, _, err := wire.ParseFrame(o.frame, p); err != nil {
		t.Fatalf("an output of port %d: %v", o.port, err)
	}
	return p
}

// ports are the ports that outputs left by.
func ports(outs []output) string {
	var s []string
	for _, o := range outs {
		s = append(s, fmt.Sprint(o.port))
	}
	return strings.Join(s, " ")
}

// A duplicate of an open chunk that is not answered leaves the sender in doubt; one of a closed chunk that is answered
// to everybody makes each loss cost as much as a chunk.
func TestPitfall04DuplicateIsAnsweredToItsSenderOnly(t *testing.T) {
	everywhere(t, "switch", func(t *testing.T, sc *scenario, tg target) {
		pl := &sc.plans[0]
		for i, step := range []struct {
			rank  int
			ports string
			typ   wire.Type
			mask  uint64
		}{
			{0, "", 0, 0},
			{0, "1", wire.TypeWait, 0b001},
			{2, "", 0, 0},
			{2, "3", wire.TypeWait, 0b101},
			{0, "1", wire.TypeWait, 0b101},
			{1, "1 2 3", wire.TypeResult, 0b111},
			{1, "2", wire.TypeResult, 0b111},
			{0, "1", wire.TypeResult, 0b111},
			{2, "3", wire.TypeResult, 0b111},
		} {
			outs := ask(t, tg, from(step.rank, gradOf(pl, step.rank, 9, 256, 1)))
			if got := ports(outs); got != step.ports {
				t.Fatalf("step %d: answers at ports %q, want %q", i, got, step.ports)
			}
			for _, o := range outs {
				if p := packet(t, o); p.Type != step.typ || p.Contributors != step.mask {
					t.Errorf("step %d: %v of ranks %b, want %v of %b", i, p.Type, p.Contributors, step.typ, step.mask)
				}
			}
		}
	})
}

// bmv2 adds modulo 2^32, and a sum that wrapped looks like any other. Saturating hides it as well. The tag tells.
func TestPitfall12OverflowIsSeen(t *testing.T) {
	const lane = 100
	everywhere(t, "switch", func(t *testing.T, sc *scenario, tg target) {
		for seq, v := range [][3]int64{
			{math.MaxInt32, 0, 0},
			{math.MaxInt32, 1, 0},
			{math.MinInt32, 0, 0},
			{0, math.MinInt32, -1},
			{math.MaxInt32, math.MinInt32, 1},
			{math.MaxInt32, math.MaxInt32, 2}, // 2^32: nothing is left of it
			{math.MinInt32, math.MinInt32, math.MinInt32},
			{1 << 30, 1 << 30, -1},
			{1 << 30, 1 << 30, 0},
			{math.MaxInt32, 1, -1}, // wraps on the way, which does no harm
		} {
			var outs []output
			var sum int64
			for rank, x := range v {
				p := gradOf(&sc.plans[0], rank, uint32(seq), 256, 0)
				p.Lanes[lane] = int32(x)
				p.Seal()
				sum += x
				outs = ask(t, tg, from(rank, p))
			}
			if len(outs) != 3 {
				t.Fatalf("%v: %d outputs, want a RESULT for each rank", v, len(outs))
			}
			p := packet(t, outs[0])
			if got := p.Lanes[lane]; got != int32(sum) {
				t.Errorf("%v: the lane is %d, want %d", v, got, int32(sum))
			}
			if p.Lanes[lane-1] != 0 || p.Lanes[lane+1] != 0 {
				t.Errorf("%v: the lanes beside are %d and %d: a carry went over", v, p.Lanes[lane-1], p.Lanes[lane+1])
			}
			if fits := sum == int64(int32(sum)); p.TagOK() != fits {
				t.Errorf("%v: the tag fits the lanes: %v, want %v", v, p.TagOK(), fits)
			}
		}
	})
}

// mark_to_drop clears mcast_grp on bmv2 as well: where it comes last it undoes a multicast, and where a packet is to be
// dropped that has a group it is the only thing that helps.
func TestPitfall26MarkToDropAndMulticast(t *testing.T) {
	everywhere(t, "switch", func(t *testing.T, sc *scenario, tg target) {
		pl := &sc.plans[0]
		for _, step := range []struct {
			what, ports string
			in          input
		}{
			{"summed", "", from(0, gradOf(pl, 0, 0, 64, 1))},
			{"summed", "", from(1, gradOf(pl, 1, 0, 64, 1))},
			{"a RESULT to all", "1 2 3", from(2, gradOf(pl, 2, 0, 64, 1))},
			{"refused without an answer", "", from(1, gradOf(pl, 2, 0, 64, 1))},
			{"flooded to all but the sender", "1 3", input{port: 2, frame: arpFrame(worker(1), worker(0).addr, 1)}},
			{"an answer that nobody asked for", "", input{port: 2, frame: arpFrame(worker(1), service, 2)}},
			{"no route", "", input{port: 2, frame: wire.AppendUDP(nil, worker(1).addr, wire.Addr{IP: nobody, Port: 9}, nil, false)}},
			{"a RESULT to its sender again", "2", from(1, gradOf(pl, 1, 0, 64, 1))},
		} {
			if got := ports(ask(t, tg, step.in)); got != step.ports {
				t.Errorf("%s: outputs at ports %q, want %q", step.what, got, step.ports)
			}
		}
	})
}

// bmv2 ignores @atomic: only a single action sees and changes registers as one, and egress runs in several threads. So
// one action of the ingress writes all registers of the program, and a chunk's contributions may come all at once.
func TestPitfall27OneActionUpdatesASlot(t *testing.T) {
	t.Run("program", func(t *testing.T) {
		var program struct {
			Actions []struct {
				Name       string
				Primitives []struct{ Op string }
			}
		}
		if err := json.Unmarshal(p4.JSON, &program); err != nil {
			t.Fatal(err)
		}
		users := map[string][]string{}
		for _, a := range program.Actions {
			for _, p := range a.Primitives {
				if strings.HasPrefix(p.Op, "register_") && !slices.Contains(users[p.Op], a.Name) {
					users[p.Op] = append(users[p.Op], a.Name)
				}
			}
		}
		if got := users["register_write"]; !slices.Equal(got, []string{"XaggIngress.update"}) {
			t.Errorf("registers are written by %v", got)
		}
		for _, name := range users["register_read"] {
			if name != "XaggIngress.update" && name != "XaggIngress.read_slot" {
				t.Errorf("registers are read by %s", name)
			}
		}
	})

	sc := &scenarios[0]
	pl := &sc.plans[0]
	ranks, slots := len(pl.workers), int(2*pl.pool)
	// All of a lease's slots at once, in any order.
	batch := func(r *rand.Rand, first uint32) (in []input) {
		for n := range uint32(slots) {
			for rank := range ranks {
				in = append(in, from(rank, gradOf(pl, rank, first+n, 256, int32(rank+1))))
			}
		}
		r.Shuffle(len(in), func(i, j int) { in[i], in[j] = in[j], in[i] })
		return in
	}
	const batches = 100
	together := func(t *testing.T, tg target, send func(in []input) []output) {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 0))
		for b := range batches {
			results := map[uint32]int{}
			for _, o := range send(batch(r, uint32(b*slots))) {
				p := packet(t, o)
				if p.Type != wire.TypeResult || p.Contributors != pl.ranks() || !p.TagOK() || p.Lanes[255] != 1+2+3 {
					t.Fatalf("seed %d: %+v with lanes %d: want a RESULT of all ranks", seed, p.Header, p.Lanes[255])
				}
				results[p.Seq]++
			}
			for n := range uint32(slots) {
				if seq := uint32(b*slots) + n; results[seq] != ranks {
					t.Fatalf("seed %d: seq %d: %d RESULTs, want %d", seed, seq, results[seq], ranks)
				}
			}
		}
		counted, err := tg.reasons()
		if err != nil {
			t.Fatal(err)
		}
		if want := int64(batches * slots * ranks); counted[wire.ReasonNone] != want {
			t.Errorf("%d contributions are counted as summed, want %d", counted[wire.ReasonNone], want)
		}
	}
	t.Run("engine", func(t *testing.T) {
		e, _ := programmed(t, sc)
		together(t, e, func(in []input) (outs []output) {
			var mu sync.Mutex
			var senders sync.WaitGroup
			for _, i := range in {
				senders.Go(func() {
					e.prog.Process(i.port, i.frame, 1, func(port uint16, f []byte) {
						mu.Lock()
						defer mu.Unlock()
						outs = append(outs, output{port, slices.Clone(f)})
					})
				})
			}
			senders.Wait()
			return outs
		})
	})
	t.Run(bmv2.SimpleSwitchBinary, func(t *testing.T) {
		real := startReal(t, sc)
		together(t, real, func(in []input) (outs []output) {
			var frames []dataplane.Frame
			for _, i := range in {
				frames = append(frames, dataplane.Frame{Port: i.port, Bytes: i.frame})
			}
			answers, err := real.plane.Exchange(real.ctx, frames)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range slices.Concat(answers...) {
				outs = append(outs, output{f.Port, f.Bytes})
			}
			return outs
		})
	})
}

// Nobody contributes in another's name: a rank is admitted at one port, from one address, with one bit.
func TestPitfall38NobodySpeaksForAnother(t *testing.T) {
	for _, name := range []string{"switch", "hybrid", "quorum, at once"} {
		t.Run(name, func(t *testing.T) {
			everywhere(t, name, func(t *testing.T, sc *scenario, tg target) {
				pl := &sc.plans[0]
				const seq = 3
				refused := func(what string, in input, want wire.Reason, answers int) {
					t.Helper()
					before, err := tg.reasons()
					if err != nil {
						t.Fatal(err)
					}
					before = slices.Clone(before)
					if outs := ask(t, tg, in); len(outs) != answers {
						t.Errorf("%s: %d outputs, want %d", what, len(outs), answers)
					}
					after, err := tg.reasons()
					if err != nil {
						t.Fatal(err)
					}
					for r := range wire.NumReasons {
						n := int64(0)
						if wire.Reason(r) == want {
							n = 1
						}
						if got := after[r] - before[r]; got != n {
							t.Errorf("%s: counted %d times as %v, want %d", what, got, wire.Reason(r), n)
						}
					}
				}
				for rank, w := range pl.workers {
					p := gradOf(pl, rank, seq, 64, 1000)
					for _, port := range tracePorts {
						if in := from(w, p); port != in.port {
							in.port = port
							refused(fmt.Sprintf("rank %d from port %d", rank, port), in, wire.ReasonPort, 0)
						}
					}
					for other, ow := range pl.workers {
						if other == rank {
							continue
						}
						in := from(ow, p)
						refused(fmt.Sprintf("rank %d from worker %d", rank, ow), in, wire.ReasonPort, 0)
						in.port = worker(w).port
						refused(fmt.Sprintf("rank %d with the address of worker %d", rank, ow), in, wire.ReasonSource, 0)
						q := *p
						q.Contributors = 1 << other
						refused(fmt.Sprintf("rank %d with the bit of rank %d", rank, other), from(w, &q), wire.ReasonMask, 1)
						q.Contributors |= 1 << rank
						refused(fmt.Sprintf("rank %d with two bits", rank), from(w, &q), wire.ReasonMask, 1)
					}
				}
				slot := packet(t, ask(t, tg, slotOf(pl, seq, 0))[0])
				if slot.Epoch != 0 || slot.Contributors != 0 {
					t.Errorf("the slot has an owner: %+v", slot.Header)
				}
				// What the ranks say themselves is summed, and nothing else is in it.
				var sum *wire.Packet
				for rank, w := range pl.workers {
					for _, o := range ask(t, tg, from(w, gradOf(pl, rank, seq, 64, 1))) {
						if p := packet(t, o); p.Type == wire.TypeResult || p.Type == wire.TypePartial {
							sum = p
						}
					}
				}
				if sum == nil || sum.Contributors != pl.cohort || !sum.TagOK() {
					t.Errorf("the sum is %+v, want one of ranks %b", sum, pl.cohort)
				}
			})
		})
	}
}

// A packet may grow by 512 bytes on bmv2 and not at all in an XDP program: an answer is never longer than its question,
// so that a short question cannot get a long slot's lanes.
func TestPitfall41AnswerIsNotLongerThanItsQuestion(t *testing.T) {
	for _, name := range []string{"switch", "hybrid", "quorum, at once"} {
		t.Run(name, func(t *testing.T) {
			everywhere(t, name, func(t *testing.T, sc *scenario, tg target) {
				pl := &sc.plans[0]
				const open, closed = 1, 2
				ask(t, tg, from(pl.workers[0], gradOf(pl, 0, open, 256, 1)))
				for rank, w := range pl.workers {
					ask(t, tg, from(w, gradOf(pl, rank, closed, 256, 1)))
				}
				answered := map[wire.Type]int{}
				for _, seq := range []uint32{closed, open} {
					for lanes := 0; lanes <= 256; lanes += 64 {
						for _, in := range []input{
							from(pl.workers[0], gradOf(pl, 0, seq, lanes, 1)),
							slotOf(pl, seq, wire.BlocksFor(lanes)),
						} {
							for _, o := range ask(t, tg, in) {
								if len(o.frame) > len(in.frame) {
									t.Errorf("%s: an answer of %d bytes", in, len(o.frame))
								}
								answered[packet(t, o).Type]++
							}
						}
					}
				}
				if answered[wire.TypeNack] == 0 || answered[wire.TypeCtrl] != 10 || answered[wire.TypeResult]+answered[wire.TypePartial] == 0 {
					t.Errorf("answers %v: too few to tell", answered)
				}
			})
		})
	}
}

// A packet-in per chunk floods the controller: only its own questions bring any.
func TestPitfall42OnlyQuestionsBringPacketIns(t *testing.T) {
	for _, name := range []string{"switch", "hybrid", "quorum, at once"} {
		t.Run(name, func(t *testing.T) {
			everywhere(t, name, func(t *testing.T, sc *scenario, tg target) {
				seed := rand.Uint64()
				for _, in := range sc.trace(seed, 300) {
					if in.port == cpuPort {
						continue
					}
					for _, o := range ask(t, tg, in) {
						if o.port == cpuPort {
							t.Fatalf("seed %d: %s: a packet-in", seed, in)
						}
					}
				}
				// The real switch's packet-ins come by another way than its frames: with the next question's answer.
				if outs := ask(t, tg, slotOf(&sc.plans[0], 0, 0)); len(outs) != 1 {
					t.Errorf("seed %d: %d packet-ins, want the answer to the question", seed, len(outs))
				}
			})
		})
	}
}
