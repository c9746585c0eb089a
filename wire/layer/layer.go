// Package layer teaches gopacket the aggregation protocol. Importing it registers the layer type and the protocol's
// UDP port, so that gopacket.NewPacket and every tool built on gopacket decode XAgg packets.
//
// It is a package of its own because gopacket/layers builds tables of several hundred kilobytes when a program starts:
// those who only send and sum packets need package wire alone.
package layer

import (
	"errors"
	"fmt"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"

	"xagg/wire"
)

// LayerTypeXAgg is the registered type of the layer. Its number is of the range that gopacket leaves to applications.
var LayerTypeXAgg = gopacket.RegisterLayerType(1986, gopacket.LayerTypeMetadata{
	Name:    "XAgg",
	Decoder: gopacket.DecodeFunc(decode),
})

func init() {
	layers.RegisterUDPPortLayerType(wire.Port, LayerTypeXAgg)
}

// XAgg is an aggregation packet as a gopacket layer. One value can decode any number of packets in turn, without
// allocating, as a gopacket.DecodingLayerParser does it.
type XAgg struct {
	layers.BaseLayer
	wire.Packet
}

var (
	_ gopacket.DecodingLayer     = (*XAgg)(nil)
	_ gopacket.SerializableLayer = (*XAgg)(nil)
	_ gopacket.ApplicationLayer  = (*XAgg)(nil)
)

// LayerType returns LayerTypeXAgg.
func (*XAgg) LayerType() gopacket.LayerType { return LayerTypeXAgg }

// CanDecode returns LayerTypeXAgg.
func (*XAgg) CanDecode() gopacket.LayerClass { return LayerTypeXAgg }

// NextLayerType returns gopacket.LayerTypeZero: nothing follows the lanes.
func (*XAgg) NextLayerType() gopacket.LayerType { return gopacket.LayerTypeZero }

// Payload returns nil: the lanes are part of the layer.
func (*XAgg) Payload() []byte { return nil }

// DecodeFromBytes reads the packet from a whole UDP payload. Its errors are those of wire.Packet.Decode; the lanes
// beyond the packet's blocks are left as they were.
func (x *XAgg) DecodeFromBytes(data []byte, df gopacket.DecodeFeedback) error {
	if err := x.Decode(data); err != nil {
		if errors.Is(err, wire.ErrShort) {
			df.SetTruncated()
		}
		return err
	}
	x.BaseLayer = layers.BaseLayer{Contents: data}
	return nil
}

// SerializeTo prepends the packet to b. With FixLengths it first sets Blocks to what Elems needs, or to 0 in packets
// that carry no lanes; the blocks of a CTRL are its sender's choice and stay. The tag is the caller's, see
// wire.Packet.Seal.
func (x *XAgg) SerializeTo(b gopacket.SerializeBuffer, opts gopacket.SerializeOptions) error {
	if opts.FixLengths && x.Type != wire.TypeCtrl {
		x.Blocks = 0
		if x.HasLanes() {
			if x.Elems > wire.MaxLanes {
				return fmt.Errorf("serialize XAgg: %d lanes, want at most %d", x.Elems, wire.MaxLanes)
			}
			x.Blocks = wire.BlocksFor(int(x.Elems))
		}
	}
	if x.Blocks > wire.MaxBlocks {
		return fmt.Errorf("serialize XAgg: %d blocks, want at most %d", x.Blocks, wire.MaxBlocks)
	}
	bytes, err := b.PrependBytes(x.Len())
	if err != nil {
		return fmt.Errorf("serialize XAgg: %w", err)
	}
	x.Encode(bytes)
	return nil
}

func decode(data []byte, p gopacket.PacketBuilder) error {
	x := new(XAgg)
	if err := x.DecodeFromBytes(data, p); err != nil {
		return err
	}
	p.AddLayer(x)
	p.SetApplicationLayer(x)
	return nil
}
