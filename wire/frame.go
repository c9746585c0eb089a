package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

const (
	// FrameOverhead is the length in bytes of the headers before the UDP payload: Ethernet, IPv4 without options, UDP.
	FrameOverhead = ethernetLen + ipv4Len + udpLen
	// MinFrameLen is the length in bytes of the shortest frame of the protocol: a header without lanes.
	MinFrameLen = FrameOverhead + HeaderLen
	// MaxFrameLen is the length in bytes of the longest frame of the protocol.
	MaxFrameLen = FrameOverhead + MaxLen

	ethernetLen = 14
	ipv4Len     = 20
	udpLen      = 8

	etherTypeIPv4 = 0x0800
	protocolUDP   = 17
)

// Offsets in an Ethernet frame, and in an IPv4 packet without options that carries UDP.
const (
	offDstMAC    = 0
	offSrcMAC    = 6
	offEtherType = 12

	offTotalLen = 2
	offID       = 4
	offFragment = 6
	offTTL      = 8
	offProtocol = 9
	offIPv4Sum  = 10
	offSrcIP    = 12
	offDstIP    = 16
	offUDP      = ipv4Len
	offSrcPort  = offUDP
	offDstPort  = offUDP + 2
	offUDPLen   = offUDP + 4
	offUDPSum   = offUDP + 6
	udpPayload  = offUDP + udpLen
)

const (
	flagDontFragment = 0x4000
	fragmentBits     = 0x3fff // more fragments, fragment offset
	defaultTTL       = 64
)

// Errors of ParseFrame and ParseUDP, beside those of [Packet.Decode].
var (
	// ErrNotXAgg is traffic that is not the protocol's: not Ethernet with IPv4 and UDP, IPv4 with options or in
	// fragments, or neither of the UDP ports is [Port].
	ErrNotXAgg = errors.New("not an aggregation packet")
	// ErrChecksum is a wrong checksum of the IPv4 header, or of UDP where it has one.
	ErrChecksum = errors.New("wrong checksum")
)

// The ways of not being XAgg, allocated once: ordinary traffic passes all the time.
var (
	errEtherType = fmt.Errorf("%w: not IPv4", ErrNotXAgg)
	errOptions   = fmt.Errorf("%w: IPv4 with options", ErrNotXAgg)
	errFragment  = fmt.Errorf("%w: IPv4 fragment", ErrNotXAgg)
	errProtocol  = fmt.Errorf("%w: not UDP", ErrNotXAgg)
	errPort      = fmt.Errorf("%w: another UDP port", ErrNotXAgg)
)

// Addr is one end of a packet's way: all that a frame says about it. Addr values can be compared with ==.
type Addr struct {
	MAC  [6]byte
	IP   [4]byte
	Port uint16
}

// String returns the address as "10.77.0.1:19860 (02:78:61:00:00:01)".
func (a Addr) String() string {
	return fmt.Sprintf("%d.%d.%d.%d:%d (%02x:%02x:%02x:%02x:%02x:%02x)", a.IP[0], a.IP[1], a.IP[2], a.IP[3], a.Port,
		a.MAC[0], a.MAC[1], a.MAC[2], a.MAC[3], a.MAC[4], a.MAC[5])
}

// AppendFrame appends p as a whole Ethernet frame to b and returns the longer slice: IPv4 with identification 0, don't
// fragment and a time to live of 64, and UDP, whose checksum is computed if checksum is set and 0 otherwise. It
// allocates nothing when b has room for [FrameOverhead] + p.Len() more bytes.
func AppendFrame(b []byte, src, dst Addr, p *Packet, checksum bool) []byte {
	b, frame := grow(b, FrameOverhead+p.Len())
	p.Encode(frame[FrameOverhead:])
	putHeaders(frame, src, dst, checksum)
	return b
}

// AppendUDP appends a frame that carries payload to b, like [AppendFrame] does for a packet. The payload may be
// anything of up to 65,507 bytes.
func AppendUDP(b []byte, src, dst Addr, payload []byte, checksum bool) []byte {
	b, frame := grow(b, FrameOverhead+len(payload))
	copy(frame[FrameOverhead:], payload)
	putHeaders(frame, src, dst, checksum)
	return b
}

// grow makes b n bytes longer and returns it and its new part.
func grow(b []byte, n int) (whole, part []byte) {
	l := len(b)
	whole = slices.Grow(b, n)[:l+n]
	return whole, whole[l:]
}

// putHeaders writes the headers before a payload that is in its place already.
func putHeaders(frame []byte, src, dst Addr, checksum bool) {
	_ = frame[FrameOverhead-1]
	copy(frame[offDstMAC:], dst.MAC[:])
	copy(frame[offSrcMAC:], src.MAC[:])
	binary.BigEndian.PutUint16(frame[offEtherType:], etherTypeIPv4)

	ip := frame[ethernetLen:]
	ip[0], ip[1] = 4<<4|ipv4Len/4, 0
	binary.BigEndian.PutUint16(ip[offTotalLen:], uint16(len(ip)))
	binary.BigEndian.PutUint16(ip[offID:], 0)
	binary.BigEndian.PutUint16(ip[offFragment:], flagDontFragment)
	ip[offTTL], ip[offProtocol] = defaultTTL, protocolUDP
	binary.BigEndian.PutUint16(ip[offIPv4Sum:], 0)
	copy(ip[offSrcIP:], src.IP[:])
	copy(ip[offDstIP:], dst.IP[:])
	binary.BigEndian.PutUint16(ip[offIPv4Sum:], ^fold(onesSum(ip[:ipv4Len], 0)))

	binary.BigEndian.PutUint16(ip[offSrcPort:], src.Port)
	binary.BigEndian.PutUint16(ip[offDstPort:], dst.Port)
	binary.BigEndian.PutUint16(ip[offUDPLen:], uint16(len(ip)-offUDP))
	binary.BigEndian.PutUint16(ip[offUDPSum:], 0)
	if checksum {
		sum := ^fold(udpSum(ip))
		if sum == 0 {
			sum = 0xffff // 0 says that there is none (RFC 768)
		}
		binary.BigEndian.PutUint16(ip[offUDPSum:], sum)
	}
}

// ParseFrame reads a whole Ethernet frame and its packet, and makes the checks of form that every aggregator makes,
// in the order of docs/protocol.md: short, length, version, type, length, checksum (0 = none is accepted for UDP).
// Frames of other protocols are [ErrNotXAgg]; for the other errors [ReasonOf] names the reason. The addresses are set
// as far as the frame has them. It allocates only when it fails for another reason than ErrNotXAgg.
func ParseFrame(b []byte, p *Packet) (src, dst Addr, err error) {
	ip, err := etherPayload(b)
	if err != nil {
		return src, dst, err
	}
	src, dst, err = ParseIPv4(ip, p)
	src.MAC, dst.MAC = [6]byte(b[offSrcMAC:]), [6]byte(b[offDstMAC:])
	return src, dst, err
}

// ParseIPv4 is [ParseFrame] without the Ethernet header: b begins with the IPv4 header and the addresses have no MAC.
// Captures of other link types need it.
func ParseIPv4(b []byte, p *Packet) (src, dst Addr, err error) {
	if src, dst, err = parseAddrs(b); err != nil {
		return src, dst, err
	}
	if src.Port != Port && dst.Port != Port {
		return src, dst, errPort
	}
	if want := announced(b); len(b) < want {
		return src, dst, fmt.Errorf("%w: IPv4 packet of %d bytes, want at least %d", ErrShort, len(b), want)
	}
	if err = checkLengths(b); err != nil {
		return src, dst, err
	}
	if err = p.Decode(b[udpPayload:]); err != nil {
		return src, dst, err
	}
	return src, dst, checkSums(b)
}

// ParseUDP reads a whole Ethernet frame with IPv4 and UDP of any port and returns its payload, which is part of b.
// Lengths and checksums are checked as [ParseFrame] does.
func ParseUDP(b []byte) (src, dst Addr, payload []byte, err error) {
	ip, err := etherPayload(b)
	if err != nil {
		return src, dst, nil, err
	}
	src, dst, err = parseAddrs(ip)
	src.MAC, dst.MAC = [6]byte(b[offSrcMAC:]), [6]byte(b[offDstMAC:])
	if err != nil {
		return src, dst, nil, err
	}
	if err = checkLengths(ip); err != nil {
		return src, dst, nil, err
	}
	if err = checkSums(ip); err != nil {
		return src, dst, nil, err
	}
	return src, dst, ip[udpPayload:], nil
}

// etherPayload returns what follows the Ethernet header of a frame with IPv4.
func etherPayload(b []byte) ([]byte, error) {
	if len(b) < ethernetLen {
		return nil, fmt.Errorf("%w: frame of %d bytes", ErrShort, len(b))
	}
	if binary.BigEndian.Uint16(b[offEtherType:]) != etherTypeIPv4 {
		return nil, errEtherType
	}
	return b[ethernetLen:], nil
}

// parseAddrs reads the addresses of an IPv4 packet with UDP.
func parseAddrs(ip []byte) (src, dst Addr, err error) {
	if len(ip) < ipv4Len {
		return src, dst, fmt.Errorf("%w: %d bytes of an IPv4 header", ErrShort, len(ip))
	}
	switch {
	case ip[0]>>4 != 4:
		return src, dst, errEtherType
	case ip[0]&0xf != ipv4Len/4:
		return src, dst, errOptions
	case binary.BigEndian.Uint16(ip[offFragment:])&fragmentBits != 0:
		return src, dst, errFragment
	case ip[offProtocol] != protocolUDP:
		return src, dst, errProtocol
	}
	if len(ip) < udpPayload {
		return src, dst, fmt.Errorf("%w: %d bytes of a UDP header", ErrShort, len(ip)-offUDP)
	}
	src.IP, src.Port = [4]byte(ip[offSrcIP:]), binary.BigEndian.Uint16(ip[offSrcPort:])
	dst.IP, dst.Port = [4]byte(ip[offDstIP:]), binary.BigEndian.Uint16(ip[offDstPort:])
	return src, dst, nil
}

// announced returns the length up to which the headers of an IPv4 packet say that there is something.
func announced(ip []byte) int {
	n := udpPayload + HeaderLen
	if len(ip) >= n && ip[udpPayload+OffVersionType]>>4 == Version && ip[udpPayload+OffBlocks] <= MaxBlocks {
		n += int(ip[udpPayload+OffBlocks]) * BlockLen
	}
	return n
}

// checkLengths checks that the packet ends where IPv4 and UDP say; the payload's own length is Decode's.
func checkLengths(ip []byte) error {
	total := int(binary.BigEndian.Uint16(ip[offTotalLen:]))
	udp := int(binary.BigEndian.Uint16(ip[offUDPLen:]))
	if len(ip) != total || total != ipv4Len+udp {
		return fmt.Errorf("%w: %d bytes, IPv4 says %d, UDP %d", ErrLength, len(ip), total, udp)
	}
	return nil
}

func checkSums(ip []byte) error {
	if fold(onesSum(ip[:ipv4Len], 0)) != 0xffff {
		return fmt.Errorf("%w: IPv4 header", ErrChecksum)
	}
	if sum := binary.BigEndian.Uint16(ip[offUDPSum:]); sum != 0 && fold(udpSum(ip)) != 0xffff {
		// Linux leaves the pseudo header's sum to the device when that offers to compute checksums; on a virtual link
		// no device ever does.
		if sum == fold(onesSum(ip[offSrcIP:offUDP], pseudoSum(ip))) {
			return fmt.Errorf("%w: UDP, unfinished: switch the sending interface's tx checksum offload off", ErrChecksum)
		}
		return fmt.Errorf("%w: UDP", ErrChecksum)
	}
	return nil
}

// udpSum is the unfolded sum over the pseudo header and the UDP packet in ip.
func udpSum(ip []byte) uint64 {
	return onesSum(ip[offSrcIP:], pseudoSum(ip)) // addresses, UDP header and payload lie in one piece
}

// pseudoSum is the part of the pseudo header that is not the addresses, in the byte order that onesSum works in.
func pseudoSum(ip []byte) uint64 {
	return uint64(bits.ReverseBytes16(protocolUDP)) + uint64(binary.LittleEndian.Uint16(ip[offUDPLen:]))
}

// onesSum adds b to sum in one's complement arithmetic, in little-endian order: the sum's byte order does not matter
// until it is folded (RFC 1071), and wide additions with end-around carry fold to the same number.
func onesSum(b []byte, sum uint64) uint64 {
	var c uint64
	for len(b) >= 32 {
		sum, c = bits.Add64(sum, binary.LittleEndian.Uint64(b), 0)
		sum, c = bits.Add64(sum, binary.LittleEndian.Uint64(b[8:]), c)
		sum, c = bits.Add64(sum, binary.LittleEndian.Uint64(b[16:]), c)
		sum, c = bits.Add64(sum, binary.LittleEndian.Uint64(b[24:]), c)
		sum += c // does not wrap: a sum that has carried is at most 2^64-2
		b = b[32:]
	}
	for len(b) >= 8 {
		sum, c = bits.Add64(sum, binary.LittleEndian.Uint64(b), 0)
		sum += c
		b = b[8:]
	}
	if len(b) > 0 {
		var last [8]byte
		copy(last[:], b)
		sum, c = bits.Add64(sum, binary.LittleEndian.Uint64(last[:]), 0)
		sum += c
	}
	return sum
}

// fold returns the 16-bit one's complement sum in network order.
func fold(sum uint64) uint16 {
	sum = sum>>32 + sum&0xffffffff
	sum = sum>>16&0xffff + sum>>32 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	return bits.ReverseBytes16(uint16(sum))
}
