// Package dataplane sends frames to a simple_switch_grpc that was started with --dp-grpc-server-addr and receives what
// leaves it: a switch without network interfaces and so without privileges, and with an end to wait for, since the
// switch says when it has no packet left.
//
// The service is behavioral-model's p4.bm.DataplaneInterface; its two messages are encoded here.
package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"xagg/internal/endpoint"
)

// Frame is a frame at a port of the switch.
type Frame struct {
	Port  uint16
	Bytes []byte
}

// MaxBatch is the number of frames that Exchange takes at most: each egress queue of the switch holds 64 packets and
// drops silently what is more.
const MaxBatch = 16

// Client talks to one switch.
type Client struct {
	conn   *endpoint.Conn
	device uint64
	next   uint64 // id of the next frame
}

// Dial prepares a client for the switch whose data plane is at addr. It does not wait for it.
func Dial(addr string, device uint64) (*Client, error) {
	conn, err := endpoint.Dial(addr)
	if err != nil {
		return nil, fmt.Errorf("dial data plane at %s: %w", addr, err)
	}
	return &Client{conn: conn, device: device, next: 1}, nil
}

// Close closes the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Exchange sends frames to the switch in order, waits until it has no packet left, and returns what left it for each
// of them. Packets that leave by the CPU port are not among them.
func (c *Client) Exchange(ctx context.Context, in []Frame) ([][]Frame, error) {
	if len(in) > MaxBatch {
		return nil, fmt.Errorf("exchange %d frames: the most is %d", len(in), MaxBatch)
	}
	out, _, err := c.patiently(ctx, in, nil)
	return out, err
}

// Watch calls do, waits until the switch has no packet left, and returns what left it meanwhile: the way to see what
// comes of a packet-out. The switch sends nothing before it has noticed that it is watched, so it is asked first:
// probe is a frame that it answers by exactly one.
func (c *Client) Watch(ctx context.Context, probe Frame, do func() error) ([]Frame, error) {
	_, out, err := c.patiently(ctx, []Frame{probe}, do)
	return out, err
}

// patiently is exchange, and again until the data plane is ready.
func (c *Client) patiently(ctx context.Context, in []Frame, do func() error) (out [][]Frame, other []Frame, err error) {
	for {
		out, other, err := c.exchange(ctx, in, do)
		if err == nil {
			return out, other, nil
		}
		// The switch answers before its data plane is ready, and then says so without having taken a frame.
		if st := status.Convert(err); st.Code() != codes.Unavailable || st.Message() != "not ready" {
			return nil, nil, fmt.Errorf("exchange frames with the switch: %w", err)
		}
		select {
		case <-time.After(retryDelay):
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("exchange frames with the switch: %w: %w", ctx.Err(), err)
		}
	}
}

const retryDelay = 10 * time.Millisecond

// exchange sends frames and returns what came of each of them, and what came of something else. If do is not nil, it
// is called when the first frame was answered, before the end of sending.
func (c *Client) exchange(ctx context.Context, in []Frame, do func() error) (out [][]Frame, other []Frame, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	stream, err := c.conn.NewStream(ctx, desc, "/p4.bm.DataplaneInterface/PacketStream",
		grpc.ForceCodec(raw{}), grpc.WaitForReady(true))
	if err != nil {
		return nil, nil, err
	}
	first := c.next
	for _, f := range in {
		var b []byte
		b = protowire.AppendTag(b, 1, protowire.VarintType)
		b = protowire.AppendVarint(b, c.next)
		b = protowire.AppendTag(b, 2, protowire.VarintType)
		b = protowire.AppendVarint(b, c.device)
		b = protowire.AppendTag(b, 3, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(f.Port))
		b = protowire.AppendTag(b, 4, protowire.BytesType)
		b = protowire.AppendBytes(b, f.Bytes)
		c.next++
		if err := stream.SendMsg(&b); errors.Is(err, io.EOF) {
			break // the switch has ended the stream, and receiving says why
		} else if err != nil {
			return nil, nil, err
		}
	}
	if do == nil {
		if err := stream.CloseSend(); err != nil {
			return nil, nil, err
		}
	}
	out = make([][]Frame, len(in))
	for {
		var b []byte
		if err := stream.RecvMsg(&b); errors.Is(err, io.EOF) {
			return out, other, nil
		} else if err != nil {
			return nil, nil, err
		}
		id, f, err := decode(b)
		if err != nil {
			return nil, nil, err
		}
		switch {
		case id == 0:
			other = append(other, f)
		case id < first || id >= first+uint64(len(in)):
			return nil, nil, fmt.Errorf("answer to frame %d, which was not sent", id)
		default:
			out[id-first] = append(out[id-first], f)
		}
		if do != nil && id == first {
			if err := errors.Join(do(), stream.CloseSend()); err != nil {
				return nil, nil, err
			}
			do = nil
		}
	}
}

func decode(b []byte) (id uint64, f Frame, err error) {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return 0, f, protowire.ParseError(n)
		}
		b = b[n:]
		switch {
		case num == 1 && typ == protowire.VarintType:
			id, n = protowire.ConsumeVarint(b)
		case num == 3 && typ == protowire.VarintType:
			var v uint64
			v, n = protowire.ConsumeVarint(b)
			f.Port = uint16(v)
		case num == 4 && typ == protowire.BytesType:
			var v []byte
			v, n = protowire.ConsumeBytes(b)
			f.Bytes = append([]byte(nil), v...)
		default:
			n = protowire.ConsumeFieldValue(num, typ, b)
		}
		if n < 0 {
			return 0, f, protowire.ParseError(n)
		}
		b = b[n:]
	}
	return id, f, nil
}

// raw passes encoded messages through.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (raw) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), b...)
	return nil
}

func (raw) Name() string { return "proto" }
