package conformance

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"xagg/bmv2"
	"xagg/bmv2/dataplane"
	"xagg/bmv2/engine"
	"xagg/tests/require"
)

// realSwitch is a simple_switch_grpc without network interfaces.
type realSwitch struct {
	*session
	*controller
	ctx   context.Context
	plane *dataplane.Client
}

// startReal starts a switch for the length of the test. Its sockets are files, so that no port number can be in use.
func startReal(t *testing.T, sc *scenario) *realSwitch {
	t.Helper()
	require.Have(t, require.BMv2)
	dir, err := os.MkdirTemp("", "xt") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	sw, err := bmv2.StartSimpleSwitch(ctx, bmv2.SimpleSwitchConfig{
		Config:   bmv2.Config{GRPCAddr: "unix:" + filepath.Join(dir, "p4rt"), CPUPort: cpuPort},
		DataAddr: "unix:" + filepath.Join(dir, "plane"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sw.Close() })
	s := &realSwitch{ctx: ctx, controller: newController(sc)}
	conn, err := grpc.NewClient(sw.GRPCAddr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if s.session, err = openSession(ctx, conn); err != nil {
		t.Fatal(err)
	}
	if err := s.write(ctx, s.begin()); err != nil {
		t.Fatal(err)
	}
	if s.plane, err = dataplane.Dial("unix:"+filepath.Join(dir, "plane"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.plane.Close() })
	return s
}

// realVersion returns what the switch says its version is.
func realVersion() (string, error) {
	out, err := exec.Command(bmv2.SimpleSwitchBinary, "--version").Output()
	return bmv2.SimpleSwitchBinary + " " + strings.TrimSpace(string(out)), err
}

func (s *realSwitch) name() string { return bmv2.SimpleSwitchBinary }

func (s *realSwitch) reasons() ([]int64, error) { return s.counter(s.ctx, "reasons") }

func (s *realSwitch) counters() (map[string]engine.CounterValue, error) {
	return s.session.counters(s.ctx)
}

func (s *realSwitch) send(in input) (outs []output, err error) {
	var frames []dataplane.Frame
	if in.change != nil {
		return nil, s.write(s.ctx, s.change(in.change))
	}
	if in.port == cpuPort {
		probe := dataplane.Frame{Port: worker(0).port, Bytes: arpFrame(worker(0), service, 1)}
		frames, err = s.plane.Watch(s.ctx, probe, func() error {
			outs, err = s.packetOuts(in)
			return err
		})
	} else {
		var answers [][]dataplane.Frame
		answers, err = s.plane.Exchange(s.ctx, []dataplane.Frame{{Port: in.port, Bytes: in.frame}})
		if err == nil {
			frames = answers[0]
		}
	}
	for _, f := range frames {
		outs = append(outs, output{f.Port, f.Bytes})
	}
	return outs, err
}

// packetOuts sends a packet-out and a question after it, and returns the packet-ins before the question's answer. Not
// every packet-out is answered, but the ingress has seen it when it has seen the question.
func (s *session) packetOuts(in input) (outs []output, err error) {
	if err := s.packetOut(in.egress, in.frame); err != nil {
		return nil, fmt.Errorf("packet-out: %w", err)
	}
	if err := s.packetOut(0, marker); err != nil {
		return nil, fmt.Errorf("packet-out of the marker: %w", err)
	}
	for {
		frame, err := s.packetIn()
		if err != nil {
			return nil, fmt.Errorf("packet-in: %w", err)
		}
		if isMarker(frame) {
			return outs, nil
		}
		outs = append(outs, output{cpuPort, frame})
	}
}
