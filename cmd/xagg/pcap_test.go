package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"xagg/wire"
)

// pcapOf returns a capture of the frames on Ethernet.
func pcapOf(frames ...[]byte) []byte {
	b := []byte{0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0}
	for i, f := range frames {
		for _, v := range []int{i, 0, len(f), len(f)} {
			b = binary.LittleEndian.AppendUint32(b, uint32(v))
		}
		b = append(b, f...)
	}
	return b
}

func TestPcapCheck(t *testing.T) {
	service := wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0xff, 0xfe}, IP: [4]byte{10, 77, 255, 254}, Port: wire.Port}
	var frames [][]byte
	result := wire.Packet{Header: wire.Header{
		Type: wire.TypeResult, Job: 1, Epoch: 1, Rank: 1, Blocks: 1, Chunk: 1, Elems: 3, Contributors: 3,
	}}
	worker := func(rank uint8) wire.Addr {
		return wire.Addr{MAC: [6]byte{2, 0x78, 0x61, 0, 0, rank + 1}, IP: [4]byte{10, 77, 0, rank + 1}, Port: wire.Port}
	}
	for rank := range uint8(2) {
		g := wire.Packet{Header: wire.Header{
			Type: wire.TypeGrad, Job: 1, Epoch: 1, Rank: rank, Blocks: 1, Chunk: 1, Elems: 3, Contributors: 1 << rank,
		}}
		copy(g.Lanes[:], []int32{int32(rank), -5, 7})
		g.Seal()
		for i, v := range g.Lanes {
			result.Lanes[i] += v
		}
		for i, v := range g.Tag {
			result.Tag[i] += v
		}
		frames = append(frames, wire.AppendFrame(nil, worker(rank), service, &g, true))
	}
	frames = append(frames, wire.AppendFrame(nil, service, worker(0), &result, false))
	result.Lanes[2]++
	altered := wire.AppendFrame(nil, service, worker(1), &result, false)
	damaged := bytes.Clone(frames[0])
	damaged[100] ^= 1

	dir := t.TempDir()
	file := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("good.pcap", pcapOf(frames...))
	for name, c := range map[string]struct {
		args   []string
		stdin  []byte
		code   int
		stdout []string
		stderr string
	}{
		"good":           {[]string{good}, nil, exitOK, []string{"ok: every result", "checked: 1 RESULT and 0 PARTIALs"}, ""},
		"several files":  {[]string{file("a.pcap", pcapOf(frames[0])), file("b.pcap", pcapOf(frames[1:]...))}, nil, exitOK, []string{"ok:"}, ""},
		"standard input": {[]string{"-"}, pcapOf(frames...), exitOK, []string{"ok:"}, ""},
		"altered": {[]string{file("altered.pcap", pcapOf(append(frames, altered)...))}, nil, exitFailure,
			[]string{"violation: 1 packet breaks", "altered.pcap: packet 4: sum: RESULT of job 1 epoch 1 round 0 chunk 1, ranks 0-1: ", "lane 2 is +1 off", "00000000  02 78 61 00 00 02 02 78"}, ""},
		"damaged": {[]string{file("damaged.pcap", pcapOf(append(frames, damaged)...))}, nil, exitFailure,
			[]string{"packet 4: checksum: wrong checksum: UDP"}, ""},
		"incomplete": {[]string{file("incomplete.pcap", pcapOf(frames[1:]...))}, nil, exitDifferences,
			[]string{"incomplete: contributions to 1 chunk", "lacks the contribution of rank 0"}, ""},
		"no packets":     {[]string{file("none.pcap", pcapOf())}, nil, exitDifferences, []string{"incomplete: no packet"}, ""},
		"no capture":     {[]string{good, file("text", []byte("hello world"))}, nil, exitFailure, nil, "text: not a readable capture file: begins with"},
		"no such file":   {[]string{filepath.Join(dir, "missing")}, nil, exitFailure, nil, "missing: no such file"},
		"no argument":    {nil, nil, exitUsage, nil, "want 'xagg pcap check FILE"},
		"unknown form":   {[]string{"-o", "xml", good}, nil, exitUsage, nil, `-o "xml": want text or json`},
		"unknown option": {[]string{"--nonsense", good}, nil, exitUsage, nil, "unknown flag"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			env := &env{stdin: bytes.NewReader(c.stdin), stdout: &stdout, stderr: &stderr}
			if code := run(t.Context(), env, append([]string{"pcap", "check"}, c.args...)); code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			for _, want := range c.stdout {
				if !strings.Contains(stdout.String(), want) {
					t.Errorf("stdout lacks %q:\n%s", want, &stdout)
				}
			}
			if c.stdout == nil && stdout.Len() > 0 {
				t.Errorf("stdout:\n%s", &stdout)
			}
			if !strings.Contains(stderr.String(), c.stderr) || c.stderr == "" && stderr.Len() > 0 {
				t.Errorf("stderr: %q, want %q", &stderr, c.stderr)
			}
		})
	}

	var stdout, stderr bytes.Buffer
	code := run(t.Context(), &env{stdout: &stdout, stderr: &stderr}, []string{"pcap", "check", "-o", "json", good})
	var report struct {
		Verdict string
		Files   []struct{ Name string }
	}
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil || code != exitOK || report.Verdict != "ok" || report.Files[0].Name != good {
		t.Errorf("exit code %d, %v\n%s%s", code, err, &stdout, &stderr)
	}
}
