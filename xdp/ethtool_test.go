package xdp

import (
	"bytes"
	"encoding/binary"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtool gives a structure of linux/ethtool.h to an interface of the thread's namespace, by ioctl SIOCETHTOOL. The
// answer is written into it.
func ethtool(t *testing.T, iface string, arg []byte) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // the union is longer than a pointer
	}{data: unsafe.Pointer(&arg[0])}
	copy(req.name[:unix.IFNAMSIZ-1], iface)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
		t.Fatalf("ethtool %s, command %#x: %v", iface, arg[:4], errno)
	}
}

// words are the beginning of an argument of ethtool.
func words(v ...uint32) (b []byte) {
	for _, w := range v {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

// ethtoolStats returns a driver's counters, as 'ethtool -S' does.
func ethtoolStats(t *testing.T, iface string) map[string]uint64 {
	t.Helper()
	const statSet, nameLen = 1, 32                              // ETH_SS_STATS, ETH_GSTRING_LEN
	info := words(unix.ETHTOOL_GSSET_INFO, 0, 1<<statSet, 0, 0) // a mask of 64 bits, and the set's size
	ethtool(t, iface, info)
	n := binary.NativeEndian.Uint32(info[16:])
	names := append(words(unix.ETHTOOL_GSTRINGS, statSet, n), make([]byte, n*nameLen)...)
	ethtool(t, iface, names)
	values := append(words(unix.ETHTOOL_GSTATS, n), make([]byte, n*8)...)
	ethtool(t, iface, values)
	stats := make(map[string]uint64, n)
	for i := range n {
		name, _, _ := bytes.Cut(names[12+i*nameLen:][:nameLen], []byte{0})
		stats[string(name)] = binary.NativeEndian.Uint64(values[8+8*i:])
	}
	return stats
}
