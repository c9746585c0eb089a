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
	for _, sc := range scenarios {
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

// TestCoverage keeps the traces honest: together the recorded ones reach every reason that a switch counts under, and
// every kind of answer.
func TestCoverage(t *testing.T) {
	var counted [wire.NumReasons]int64
	answers := map[string]int{}
	for _, sc := range scenarios {
		_, m := programmed(t, &sc)
		for i, in := range read(t, &sc).inputs {
			outs, err := m.send(in)
			if err != nil {
				t.Fatalf("%s: input %d: %v", sc.name, i, err)
			}
			var was, is wire.Packet
			_, _, inErr := wire.ParseFrame(in.frame, &was)
			for _, o := range outs {
				if _, _, err := wire.ParseFrame(o.frame, &is); err == nil && inErr == nil {
					answers[fmt.Sprintf("%v to %v", was.Type, is.Type)]++
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
		// A switch never sees an overlap: it asks for a single bit.
		if reason := wire.Reason(r); n == 0 && reason != wire.ReasonOverlap {
			t.Errorf("no input is counted as %v", reason)
		}
	}
	for _, want := range []string{
		"GRAD to GRAD", "GRAD to PARTIAL", "GRAD to RESULT", "GRAD to WAIT", "GRAD to NACK", "CTRL to CTRL",
		"RESULT to RESULT", "ACK to ACK", "WAIT to WAIT", "NACK to NACK", "multicast",
	} {
		if answers[want] < 3 {
			t.Errorf("%s: %d of the recorded traces' outputs, want more", want, answers[want])
		}
	}
	t.Logf("reasons %v, answers %v", counted, answers)
}
