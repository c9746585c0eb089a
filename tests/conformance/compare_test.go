package conformance

import (
	"fmt"
	"testing"

	"xagg/wire"
)

// programmed returns the targets that need no real switch, programmed with a scenario.
func programmed(t *testing.T, sc *scenario) (*embedded, *model) {
	t.Helper()
	e, err := newEmbedded(sc)
	if err != nil {
		t.Fatal(err)
	}
	m, err := newModel(sc)
	if err != nil {
		t.Fatal(err)
	}
	return e, m
}

// TestReal compares the engine and the model with the real switch on fresh traces.
func TestReal(t *testing.T) {
	for _, sc := range untimed() {
		for _, seed := range seeds(1) {
			t.Run(fmt.Sprintf("%s/seed %d", sc.name, seed), func(t *testing.T) {
				real := startReal(t, &sc)
				e, m := programmed(t, &sc)
				run(t, sc.trace(seed, *flagSteps), false, real, e, m)
			})
		}
	}
}

// TestEngine compares the engine with the model on fresh traces, time fields and all; it needs no real switch.
func TestEngine(t *testing.T) {
	for _, sc := range scenarios {
		for _, seed := range seeds(2) {
			t.Run(fmt.Sprintf("%s/seed %d", sc.name, seed), func(t *testing.T) {
				e, m := programmed(t, &sc)
				run(t, sc.trace(seed, *flagSteps), true, e, m)
			})
		}
	}
}

// TestCoverage keeps the traces honest: together the recorded ones reach every reason that a switch counts under and
// no other, and every kind of answer.
func TestCoverage(t *testing.T) {
	var counted [wire.NumReasons]int64
	answers := map[string]int{}
	for _, sc := range untimed() {
		_, m := programmed(t, &sc)
		for i, in := range read(t, &sc).inputs {
			before := m.counted
			outs, err := m.send(in)
			if err != nil {
				t.Fatalf("%s: input %d: %v", sc.name, i, err)
			}
			reason := wire.ReasonNone
			for r := range counted {
				if m.counted[r] > before[r] {
					reason = wire.Reason(r)
				}
			}
			var was, is wire.Packet
			_, _, inErr := wire.ParseFrame(in.frame, &was)
			for _, o := range outs {
				src, _, err := wire.ParseFrame(o.frame, &is)
				if err != nil || inErr != nil {
					continue
				}
				answers[fmt.Sprintf("%v to %v", was.Type, is.Type)]++
				switch {
				case was.Type != wire.TypeGrad || in.port == cpuPort:
				case reason == wire.ReasonDuplicate && is.Type == wire.TypePartial && src.IP == service.IP:
					answers["flush"]++
				case reason == wire.ReasonForwarded && m.owns(&was):
					answers["forwarded after a flush"]++
				case was.Flags&wire.FlagAsync != 0:
					answers["ASYNC "+reason.String()]++
				}
			}
			if len(outs) > 1 {
				answers["multicast"]++
			}
		}
		for r := range counted {
			counted[r] += m.counted[r]
		}
	}
	for r, n := range counted {
		switch reason := wire.Reason(r); reason {
		case wire.ReasonOverlap, wire.ReasonClock, wire.ReasonLate, wire.ReasonHeld:
			// A switch asks for a single bit, keeps no clocks, and passes on what comes after a close.
			if n != 0 {
				t.Errorf("%d inputs are counted as %v, which only a server does", n, reason)
			}
		default:
			if n == 0 {
				t.Errorf("no input is counted as %v", reason)
			}
		}
	}
	for _, want := range []string{
		"GRAD to GRAD", "GRAD to PARTIAL", "GRAD to RESULT", "GRAD to WAIT", "GRAD to NACK", "CTRL to CTRL",
		"RESULT to RESULT", "ACK to ACK", "WAIT to WAIT", "NACK to NACK", "multicast",
		"flush", "forwarded after a flush", "ASYNC shape", "ASYNC steered",
	} {
		if answers[want] < 3 {
			t.Errorf("%s: %d of the recorded traces' outputs, want more", want, answers[want])
		}
	}
	t.Logf("reasons %v, answers %v", counted, answers)
}
