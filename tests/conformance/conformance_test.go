package conformance

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"xagg/bmv2/engine"
	"xagg/wire"
)

var (
	flagSeed  = flag.Uint64("seed", 0, "run the traces of this seed instead of fresh ones")
	flagSteps = flag.Int("steps", 400, "inputs per trace")
)

// target is an implementation of the switch that a scenario was programmed into.
type target interface {
	name() string
	// send hands the target an input and returns all the frames that it sends because of it.
	send(in input) ([]output, error)
	// reasons returns the packets counted so far, by reason.
	reasons() ([]int64, error)
}

// program is a target that runs xagg.p4, whose counters the controller reads.
type program interface {
	target
	// counters returns what the counters say, by their names and the cell or the key of the entry.
	counters() (map[string]engine.CounterValue, error)
}

// sameCounters fails the test where the counters of two targets differ after the same inputs, and returns how many contributions
// of members they have counted.
func sameCounters(t *testing.T, a, b program) (members uint64) {
	t.Helper()
	x, err := a.counters()
	if err != nil {
		t.Fatalf("%s: %v", a.name(), err)
	}
	y, err := b.counters()
	if err != nil {
		t.Fatalf("%s: %v", b.name(), err)
	}
	for _, cell := range slices.Sorted(maps.Keys(x)) {
		if v, ok := y[cell]; !ok || v != x[cell] {
			t.Errorf("counter %s: %s: %+v; %s: %+v (there: %v)", cell, a.name(), x[cell], b.name(), v, ok)
		}
		if strings.HasPrefix(cell, "member_traffic ") {
			members += x[cell].Packets
		}
	}
	if len(x) != len(y) {
		t.Errorf("counters: %s has %d, %s has %d", a.name(), len(x), b.name(), len(y))
	}
	return members
}

// clock is the time of targets that take it as an argument: the same for all of them at the same input, in steps that
// grow from 0 to 65 ms and begin again. So the time fields tell steps apart, and 32 bits hold those of a long trace.
type clock struct{ n, now uint64 }

// tick returns the time of the next input in microseconds.
func (c *clock) tick() uint64 {
	step := c.n % 256
	c.n++
	c.now += step * step
	return c.now
}

// normal brings the outputs of one input into the form in which they are compared: sorted by port, with copies for one
// port in their order, and blanked where implementations may differ.
func normal(in input, outs []output, sameClock bool) []output {
	outs = slices.Clone(outs)
	slices.SortStableFunc(outs, func(a, b output) int { return cmp.Compare(a.port, b.port) })
	for i := range outs {
		outs[i].frame = blank(in, outs[i].frame, sameClock)
	}
	return outs
}

// blank returns the frame with zeros in place of what a switch's own clock put into it, unless the clocks are the same,
// and of what a CTRL answer does not define.
func blank(in input, f []byte, sameClock bool) []byte {
	var was, is wire.Packet
	if _, _, err := wire.ParseFrame(in.frame, &was); err != nil {
		return f
	}
	if _, _, err := wire.ParseFrame(f, &is); err != nil {
		return f
	}
	ctrl := in.port == cpuPort && is.Type == wire.TypeCtrl
	if !ctrl && (was.Type != wire.TypeGrad || is.Type == wire.TypeGrad || is.Type == wire.TypeNack) {
		return f
	}
	f = slices.Clone(f)
	if !sameClock {
		clear(f[offX+wire.OffSpreadUs : offX+wire.OffNextEpoch])
		if is.Type == wire.TypePartial {
			clear(f[offUDPSum : offUDPSum+2])
		}
	}
	if ctrl {
		clear(f[min(offX+wire.HeaderLen+int(wire.BlocksFor(int(is.Elems)))*wire.BlockLen, len(f)):])
	}
	return f
}

// check reports what is wrong with the outputs of one input by themselves, before anything is blanked: packets that the
// switch made, in the protocol's own terms.
func check(in input, outs []output) error {
	var was, p wire.Packet
	if in.change != nil {
		return nil
	}
	if _, _, err := wire.ParseFrame(in.frame, &was); err != nil || in.port == cpuPort {
		return nil
	}
	for _, o := range outs {
		if _, _, err := wire.ParseFrame(o.frame, &p); err != nil {
			return fmt.Errorf("an output of port %d: %w", o.port, err)
		}
		if p.Type == wire.TypePartial && o.frame[offUDPSum] == 0 && o.frame[offUDPSum+1] == 0 {
			return fmt.Errorf("an output of port %d: a PARTIAL without a checksum", o.port)
		}
		if len(o.frame) > len(in.frame) {
			return fmt.Errorf("an output of port %d is longer than its question: %d bytes", o.port, len(o.frame))
		}
		if was.Type != wire.TypeGrad {
			continue
		}
		if p.BlockedUs > p.SpreadUs && p.Type != wire.TypeGrad {
			return fmt.Errorf("an output of port %d: %d us of %d blocked", o.port, p.BlockedUs, p.SpreadUs)
		}
	}
	return nil
}

// compare returns a description of the differences between what two targets sent, "" when there are none.
func compare(aName string, a []output, bName string, b []output) string {
	if slices.EqualFunc(a, b, func(x, y output) bool { return x.port == y.port && bytes.Equal(x.frame, y.frame) }) {
		return ""
	}
	var s strings.Builder
	for i := range max(len(a), len(b)) {
		var x, y output
		describe := func(outs []output, o *output) string {
			if i >= len(outs) {
				return "nothing"
			}
			*o = outs[i]
			return fmt.Sprintf("port %d, %d bytes", o.port, len(o.frame))
		}
		fmt.Fprintf(&s, "output %d: %s: %s; %s: %s\n", i, aName, describe(a, &x), bName, describe(b, &y))
		if x.port != y.port || !bytes.Equal(x.frame, y.frame) {
			s.WriteString(sideBySide(x.frame, y.frame))
		}
	}
	return s.String()
}

// sideBySide is a hexdump of two frames in which lines that differ are marked; of long runs of equal lines only the
// first is shown.
func sideBySide(a, b []byte) string {
	const width = 16
	line := func(f []byte, at int) []byte { return f[min(at, len(f)):min(at+width, len(f))] }
	var s strings.Builder
	equal := 0
	for at := 0; at < max(len(a), len(b)); at += width {
		x, y, mark := line(a, at), line(b, at), ' '
		if !bytes.Equal(x, y) {
			mark, equal = '!', 0
		} else if equal++; equal > 4 {
			continue
		}
		fmt.Fprintf(&s, "  %c %04x  %-47s  %-47s\n", mark, at, spaced(x), spaced(y))
	}
	return s.String()
}

// dump is a hexdump of a frame's headers.
func dump(f []byte) string { return hex.Dump(f[:min(len(f), 112)]) }

func spaced(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	return strings.TrimSuffix(fmt.Sprintf("% x", b), " ")
}

// run feeds the trace to all targets and fails the test at the first difference from the first of them.
func run(t *testing.T, trace []input, sameClock bool, targets ...target) {
	t.Helper()
	var programs []program
	for _, tg := range targets {
		if p, ok := tg.(program); ok {
			programs = append(programs, p)
		}
	}
	members := uint64(0) // contributions that were counted of them, at most; a plan that goes takes them along
	for i, in := range trace {
		var want []output
		for n, tg := range targets {
			outs, err := tg.send(in)
			if err != nil {
				t.Fatalf("input %d: %s: %v", i, tg.name(), err)
			}
			if err := check(in, outs); err != nil {
				t.Fatalf("input %d (%s): %s: %v", i, in, tg.name(), err)
			}
			outs = normal(in, outs, sameClock)
			if n == 0 {
				want = outs
			} else if diff := compare(targets[0].name(), want, tg.name(), outs); diff != "" {
				t.Fatalf("input %d: %s\n%s%s", i, in, dump(in.frame), diff)
			}
		}
		// Counted at once, so that a difference names its input.
		var counted []int64
		for n, tg := range targets {
			c, err := tg.reasons()
			if err != nil {
				t.Fatalf("input %d: %s: %v", i, tg.name(), err)
			}
			if n == 0 {
				counted = c
				continue
			}
			for r := range wire.NumReasons {
				if c[r] != counted[r] {
					t.Fatalf("input %d: %s\n%scounted as %v: %s: %d; %s: %d", i, in, dump(in.frame),
						wire.Reason(r), targets[0].name(), counted[r], tg.name(), c[r])
				}
			}
		}
		for _, p := range programs[1:] {
			if members = max(members, sameCounters(t, programs[0], p)); t.Failed() {
				t.Fatalf("input %d: %s\n%s", i, in, dump(in.frame))
			}
		}
	}
	if len(programs) > 1 && members == 0 {
		t.Error("no contribution of a member was counted")
	}
}

// String describes an input in a line.
func (in input) String() string {
	if in.change != nil {
		return in.change.String()
	}
	at := fmt.Sprintf("port %d", in.port)
	if in.port == cpuPort {
		at = fmt.Sprintf("packet-out to port %d", in.egress)
	}
	what := "no packet of the protocol"
	var p wire.Packet
	if _, _, err := wire.ParseFrame(in.frame, &p); err == nil {
		what = fmt.Sprintf("%+v", p.Header)
	} else if len(in.frame) >= offX+wire.HeaderLen && binary.BigEndian.Uint16(in.frame[offUDP+2:]) == wire.Port {
		what = err.Error()
	}
	return fmt.Sprintf("%s, %d bytes, %s", at, len(in.frame), what)
}

// seeds returns the seeds of a run: fresh ones, unless one was asked for.
func seeds(n int) []uint64 {
	if *flagSeed != 0 {
		return []uint64{*flagSeed}
	}
	s := make([]uint64, n)
	for i := range s {
		s[i] = rand.Uint64() >> 32
	}
	return s
}
