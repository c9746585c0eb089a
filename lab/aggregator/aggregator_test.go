package aggregator

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"xagg/lab/netns"
	"xagg/tests/require"
)

// testOptions are for a few milliseconds of traffic.
func testOptions(t *testing.T) Options {
	require.Have(t, require.XDP, require.Netns)
	return Options{
		Workers: 3, Values: granularity, Bytes: 2e6, Repeat: 1, Limit: 0.2, TCPServer: testServer, RunDir: t.TempDir(),
		Progress: t.Logf, Log: slog.New(slog.DiscardHandler),
	}
}

// supported skips where the kernel lacks what the error says.
func supported(t *testing.T, err error) {
	t.Helper()
	if lacks, ok := errors.AsType[*UnsupportedError](err); ok {
		err = &require.NotSupportedError{Feature: require.XDP, Err: lacks}
	}
	require.Check(t, err)
}

func noLabs(t *testing.T, dir string) {
	t.Helper()
	if records, err := netns.Records(dir); err != nil || len(records) != 0 {
		t.Errorf("left behind: %v %v", records, err)
	}
}

// TestRun measures everything once.
func TestRun(t *testing.T) {
	opts := testOptions(t)
	report, err := Run(t.Context(), opts)
	supported(t, err)
	noLabs(t, opts.RunDir)
	if !report.Complete || len(report.Measurements) != 6*len(report.CoreSets) || len(report.Ratios) != 8*len(report.CoreSets) {
		t.Fatalf("complete: %v, %d measurements, %d ratios", report.Complete, len(report.Measurements), len(report.Ratios))
	}
	for _, m := range report.Measurements {
		overXDP := m.Lanes != 0
		if m.Bytes < opts.Bytes || m.Seconds <= 0 || m.CPU <= 0 || (m.Threads > 0) != overXDP || (m.Process > 0) == overXDP ||
			(m.ProgramNs > 0) != overXDP || m.Foreign > m.Process {
			t.Errorf("%+v", m)
		}
		// Nobody can have run longer than the clock on the wall says, but for the moments between the readings.
		set := report.CoreSets[slices.IndexFunc(report.CoreSets, func(s CoreSet) bool { return s.Name == m.Cores })]
		if most := float64(len(set.Aggregator)) * m.Seconds; m.CPU > 1.05*most+1e-3 {
			t.Errorf("%s on %q: %v s of processor time in %v s", m.Subject, m.Cores, m.CPU, m.Seconds)
		}
	}
}

// oneLink makes a lab and returns it with the link for XDP servers on one processor.
func oneLink(t *testing.T, opts Options) *link {
	t.Helper()
	sets, err := coreSets()
	if err != nil {
		t.Fatal(err)
	}
	b, err := newSetting(t.Context(), opts, sets[:1])
	supported(t, err)
	t.Cleanup(func() {
		if err := b.lab.Close(); err != nil {
			t.Error(err)
		}
		noLabs(t, opts.RunDir)
	})
	return b.links[linkName(kindXDP, sets[0])]
}

// TestWrongSums: one lane of one sum that differs from the answers is an error that says so.
func TestWrongSums(t *testing.T) {
	opts := testOptions(t)
	l := oneLink(t, opts)
	for _, subject := range []Subject{XDPFrames, XDPSockets} {
		r, err := newXDPRun(l, oneCase{subject, 256}, opts)
		supported(t, err)
		if err := r.send(t.Context(), 2); err != nil {
			t.Fatal(err)
		}
		var a loadAnswer
		if err := r.objects.Answers.Lookup(uint32(3), &a); err != nil {
			t.Fatal(err)
		}
		a.Lanes[127] ^= 1 << 63
		if err := r.objects.Answers.Put(uint32(3), &a); err != nil {
			t.Fatal(err)
		}
		if err := r.send(t.Context(), 2); err == nil || !strings.Contains(err.Error(), "wrong") {
			t.Errorf("%s: %v", subject, err)
		}
		if err := r.check(); err == nil {
			t.Errorf("%s: the sums are right", subject)
		}
		if err := r.close(); err != nil {
			t.Error(err)
		}
	}
}

// TestRefused: a contribution that was refused is an error, even where all results are right.
func TestRefused(t *testing.T) {
	opts := testOptions(t)
	l := oneLink(t, opts)
	r, err := newXDPRun(l, oneCase{XDPSockets, 64}, opts)
	supported(t, err)
	defer r.close()
	if err := r.send(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	if err := r.check(); err != nil {
		t.Fatal(err)
	}
	s := r.sockets[0]
	if err := s.sendGroup(0, 0); err != nil { // the first round once more: it is stale
		t.Fatal(err)
	}
	if err := r.send(t.Context(), 2); err == nil {
		err = r.check()
		if err == nil {
			t.Error("no error")
		}
	}
}

// TestInterrupted: what is interrupted leaves nothing behind, and reports what was finished.
func TestInterrupted(t *testing.T) {
	opts := testOptions(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	opts.Bytes, opts.Repeat = 1e6, 1000
	opts.Progress = func(format string, args ...any) {
		if args[0] == 2 { // the first repetition is done
			opts.Progress = nil
			cancel()
		}
	}
	report, err := Run(ctx, opts)
	if !errors.Is(err, context.Canceled) {
		supported(t, err)
		t.Fatalf("%v", err)
	}
	noLabs(t, opts.RunDir)
	if report.Complete || len(report.Measurements) < 6 || len(report.Rows) == 0 {
		t.Errorf("complete: %v, %d measurements, %d rows", report.Complete, len(report.Measurements), len(report.Rows))
	}
}
