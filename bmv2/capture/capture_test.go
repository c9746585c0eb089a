package capture_test

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/gopacket/pcapgo"

	"xagg/bmv2/capture"
	"xagg/bmv2/internal/vethtest"
	"xagg/bmv2/port"
)

type packet struct {
	iface string
	time  time.Time
	data  []byte
}

func read(t *testing.T, r io.Reader) (out []packet) {
	t.Helper()
	// A reader that was not told which interfaces to expect.
	ng, err := pcapgo.NewNgReader(r, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	if err != nil {
		t.Fatal(err)
	}
	for {
		data, ci, err := ng.ReadPacketData()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		i, err := ng.Interface(ci.InterfaceIndex)
		if err != nil {
			t.Fatal(err)
		}
		if ci.Length != len(data) {
			t.Errorf("length %d of %d bytes", ci.Length, len(data))
		}
		out = append(out, packet{i.Name, ci.Timestamp, data})
	}
}

func TestWriter(t *testing.T) {
	var file bytes.Buffer
	w := capture.NewWriter(&file)
	a, b := w.AddInterface("port 1"), w.AddInterface("port 22 (veth22)")
	at := time.Unix(1_700_000_000, 123_456_789)
	var want []packet
	for i := range 9 {
		p := packet{"port 1", at.Add(time.Duration(i) * time.Nanosecond), bytes.Repeat([]byte{byte(i)}, 60+i)}
		iface := a
		if i%3 == 0 {
			p.iface, iface = "port 22 (veth22)", b
		}
		w.Write(iface, p.time, capture.Out, p.data)
		want = append(want, p)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	w.Write(a, at, capture.In, []byte("late")) // and ignored
	got := read(t, &file)
	if len(got) != len(want) {
		t.Fatalf("%d packets, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i].iface != want[i].iface || !got[i].time.Equal(want[i].time) || !bytes.Equal(got[i].data, want[i].data) {
			t.Errorf("packet %d: %v\nwant %v", i, got[i], want[i])
		}
	}
}

func TestWriterSaysWhatFailed(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	w := capture.NewWriter(f)
	if err := w.Close(); err == nil {
		t.Error("no error from a closed file")
	}
}

// TestInterfaces captures at both ends of a link: every frame is there twice, once out and once in.
func TestInterfaces(t *testing.T) {
	s := vethtest.New(t, 1)
	file := filepath.Join(t.TempDir(), "links.pcapng")
	c, err := capture.Start(file, s.Path, []capture.Interface{{Name: "s0", Label: "switch"}, {Name: "h0"}})
	if err != nil {
		t.Fatal(err)
	}
	p, err := port.Open("s0", port.Options{NetNS: s.Path})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	const frames = 300
	for i := range frames {
		f := append([]byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5}, make([]byte, 60)...)
		f[14], f[15] = byte(i>>8), byte(i)
		if err := p.Send([][]byte{f}); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	count := map[string]int{}
	for _, p := range read(t, f) {
		if p.data[12] == 0x88 && p.data[13] == 0xb5 {
			count[p.iface]++
		}
	}
	if count["switch"] != frames || count["h0"] != frames {
		t.Errorf("captured %v, want %d of each", count, frames)
	}
}

func TestStartErrors(t *testing.T) {
	s := vethtest.New(t, 1)
	file, odd := filepath.Join(t.TempDir(), "x"), []capture.Interface{{Name: "s0"}, {Name: "s9"}}
	if _, err := capture.Start(file, s.Path, odd); err == nil {
		t.Error("no error from an interface that is not there")
	}
	if _, err := capture.Start("/no/such/folder/x", s.Path, []capture.Interface{{Name: "s0"}}); err == nil {
		t.Error("no error from a folder that is not there")
	}
}
