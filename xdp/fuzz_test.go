package xdp

import (
	"testing"
	"time"

	"xagg/tests/require"
)

// FuzzFrame gives any frame twice to an empty server and to the reference, and compares what they do. The kernel's part
// is not instrumented, so that making inputs smaller leads nowhere:
//
//	go test ./xdp -run NONE -fuzz FuzzFrame -fuzzminimizetime 1x
func FuzzFrame(f *testing.F) {
	require.Have(f, require.XDP)
	tr := newTrace(1, testPlans(1))
	for range 200 {
		f.Add(tr.next())
	}
	server := load(f, testSlots)
	for _, plan := range tr.plans {
		if err := server.Install(plan); err != nil {
			f.Fatal(err)
		}
	}
	start := time.Now()
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) < 14 || len(frame) > 2000 { // PROG_RUN refuses less than an Ethernet header, links more than 1,514
			t.Skip()
		}
		memory := NewMemory(testSlots)
		for i := range memory.slots {
			if err := server.objects.Arena.Put(i, xaggSlot{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, plan := range tr.plans {
			if err := memory.Install(plan); err != nil {
				t.Fatal(err)
			}
		}
		for n := range 2 {
			answer := memory.Handle(uint64(time.Since(start).Microseconds()), frame, nil)
			verdict, got, err := server.objects.Xagg.Test(frame)
			if err != nil {
				t.Fatal(err)
			}
			expect(t, n, frame, verdict, got, answer)
		}
	})
}
