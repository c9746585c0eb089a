package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"xagg/tests/require"
)

// realSwitch is a simple_switch_grpc without network interfaces: frames go in and come out through its gRPC data
// plane. The end of a data plane stream is what makes it a deterministic target: the switch answers a client that has
// finished sending only when no packet is left inside.
type realSwitch struct {
	*session
	ctx   context.Context
	plane *grpc.ClientConn
}

// startReal starts a switch for the length of the test. Its sockets are files, so that no port number can be in use.
func startReal(t *testing.T) *realSwitch {
	t.Helper()
	require.Have(t, require.BMv2)
	dir, err := os.MkdirTemp("", "xt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	control, plane := "unix:"+filepath.Join(dir, "p4rt"), "unix:"+filepath.Join(dir, "plane")

	cmd := exec.Command("simple_switch_grpc", "--no-p4", "--log-console", "-L", "warn", "--",
		"--grpc-server-addr", control, "--cpu-port", fmt.Sprint(cpuPort), "--dp-grpc-server-addr", plane)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(func() {
		cancel()
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("log of simple_switch_grpc:\n%s", log.Bytes()[max(0, log.Len()-1000):])
		}
	})
	s := &realSwitch{ctx: ctx}
	// The first attempts come before the process listens.
	patient := grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.2, MaxDelay: 100 * time.Millisecond}})
	local := grpc.WithTransportCredentials(insecure.NewCredentials())
	conn, err := grpc.NewClient(control, local, patient)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if s.session, err = openSession(ctx, conn); err != nil {
		t.Fatal(err)
	}
	if s.plane, err = grpc.NewClient(plane, local, patient); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.plane.Close() })
	return s
}

// version returns what the switch says its version is.
func realVersion() (string, error) {
	out, err := exec.Command("simple_switch_grpc", "--version").Output()
	return "simple_switch_grpc " + strings.TrimSpace(string(out)), err
}

func (s *realSwitch) name() string { return "simple_switch_grpc" }

func (s *realSwitch) program(p program) error { return s.write(s.ctx, p) }

func (s *realSwitch) reasons() ([]int64, error) { return s.counter(s.ctx, "reasons") }

func (s *realSwitch) send(in input) ([]output, error) {
	stream, err := s.plane.NewStream(s.ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		"/p4.bm.DataplaneInterface/PacketStream", grpc.ForceCodecV2(planeCodec{}), grpc.WaitForReady(true))
	if err != nil {
		return nil, fmt.Errorf("open data plane: %w", err)
	}
	var outs []output
	if in.port == cpuPort {
		// A packet-out comes in by another way than the data plane stream, which carries nothing before its server side
		// has begun: an echo shows that.
		if err := stream.SendMsg(&output{echoPort, echo}); err != nil {
			return nil, fmt.Errorf("inject echo: %w", err)
		}
		if err := stream.RecvMsg(new(output)); err != nil {
			return nil, fmt.Errorf("read echo: %w", err)
		}
		if outs, err = s.packetOuts(in); err != nil {
			return nil, err
		}
	} else if err := stream.SendMsg(&output{in.port, in.frame}); err != nil {
		return nil, fmt.Errorf("inject frame: %w", err)
	}
	if err := stream.CloseSend(); err != nil {
		return nil, fmt.Errorf("close data plane: %w", err)
	}
	for {
		var out output
		if err := stream.RecvMsg(&out); errors.Is(err, io.EOF) {
			return outs, nil
		} else if err != nil {
			return nil, fmt.Errorf("read data plane: %w", err)
		}
		outs = append(outs, out)
	}
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

// planeCodec encodes the data plane's messages, {id = 1, device_id = 2, port = 3, packet = 4}, of which only the last
// two matter here. It spells them by hand because the project has no copy of their description.
type planeCodec struct{}

var _ encoding.CodecV2 = planeCodec{}

func (planeCodec) Name() string { return "proto" }

func (planeCodec) Marshal(v any) (mem.BufferSlice, error) {
	o := v.(*output)
	b := protowire.AppendTag(nil, 3, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(o.port))
	b = protowire.AppendTag(b, 4, protowire.BytesType)
	b = protowire.AppendBytes(b, o.frame)
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

func (planeCodec) Unmarshal(data mem.BufferSlice, v any) error {
	o := v.(*output)
	*o = output{}
	for b := data.Materialize(); len(b) > 0; {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		switch num {
		case 3:
			port, n := protowire.ConsumeVarint(b)
			if n < 0 {
				return protowire.ParseError(n)
			}
			o.port = uint16(port)
		case 4:
			frame, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return protowire.ParseError(n)
			}
			o.frame = frame
		}
		if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
	}
	return nil
}
