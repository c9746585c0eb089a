package check

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"xagg/wire"
	"xagg/wire/capture"
	"xagg/wire/internal/capturetest"
)

func checkWith(t *testing.T, opts Options, files ...[]byte) *Report {
	t.Helper()
	var inputs []Input
	for i, f := range files {
		inputs = append(inputs, Input{fmt.Sprintf("file%d", i), bytes.NewReader(f)})
	}
	r, err := Files(inputs, opts)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func pcap(items []item) []byte {
	return capturetest.Pcap(binary.LittleEndian, false, capture.LinkEthernet, packets(items))
}

// everyForm calls f with the capture in each format and link type.
func everyForm(t *testing.T, items []item, f func(t *testing.T, file []byte)) {
	ps := packets(items)
	for _, link := range capturetest.Links {
		t.Run("pcap/"+link.String(), func(t *testing.T) { f(t, capturetest.Pcap(binary.BigEndian, true, link, ps)) })
		t.Run("pcapng/"+link.String(), func(t *testing.T) { f(t, capturetest.Pcapng(binary.LittleEndian, link, ps)) })
	}
}

func TestGoodCaptures(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			items := append(foreign(), script(mode)...)
			types := map[string]int{}
			for i := range items {
				if items[i].raw == nil {
					types[items[i].p.Type.String()]++
				}
			}
			want := Report{
				SchemaVersion: 1, Verdict: OK, Files: []File{{"file0", len(items), false}}, Packets: len(items),
				XAgg: len(items) - 5, Types: types, Foreign: 5, OtherLinks: map[string]int{},
				Jobs: 1, Rounds: 4, Chunks: 10, Results: 10, Incomplete: []Incomplete{},
			}
			if mode == "hybrid" {
				want.Partials = 10
			}
			everyForm(t, items, func(t *testing.T, file []byte) {
				if got := check(t, file); !reflect.DeepEqual(*got, want) {
					t.Errorf("report %+v\nwant %+v", *got, want)
				}
			})
		})
	}
}

// What may happen in a good run, and what may be captured of it.
func TestHarmless(t *testing.T) {
	for name, edit := range map[string]func([]item) []item{
		"captured twice": func(items []item) []item {
			return append(items, items...)
		},
		"GRAD resent": func(items []item) []item {
			g := items[grad(items, 2)]
			wait := g
			wait.src, wait.dst, wait.checksum = g.dst, g.src, false
			wait.p = short(wire.TypeWait, g.p)
			wait.p.Contributors |= 1
			wait.p.SpreadUs = 77
			g.p = resent(g.p)
			return insert(items, grad(items, 2)+1, g, wait)
		},
		"GRAD resent after the result, and forwarded": func(items []item) []item {
			g := items[grad(items, 2)]
			g.p = resent(g.p)
			f := g
			f.dst, f.p = serverAddr(1), forwarded(g.p)
			return append(items, g, f, items[find(items, wire.TypeResult)[0]])
		},
		"first GRAD not captured, the one resent is": func(items []item) []item {
			g := items[grad(items, 1)]
			g.p = resent(g.p)
			return append(dropRank(items, 1), g)
		},
		"GRAD without checksum": func(items []item) []item {
			items[grad(items, 2)].checksum = false
			return items
		},
		"RESULT with other times, sent again": func(items []item) []item {
			r := items[find(items, wire.TypeResult)[0]]
			r.p.SpreadUs, r.p.BlockedUs = 99, 98
			return append(items, r)
		},
		"GRAD refused": func(items []item) []item {
			g := items[grad(items, 2)]
			nack := g
			nack.src, nack.dst, nack.checksum = g.dst, g.src, false
			nack.p = short(wire.TypeNack, g.p)
			nack.p.Tag, nack.p.Reason = g.p.Tag, wire.ReasonEpoch
			return insert(items, grad(items, 2)+1, nack)
		},
		"slot read": func(items []item) []item {
			c := items[find(items, wire.TypeResult)[0]]
			c.p.Type, c.p.Flags = wire.TypeCtrl, 0xff
			return append(items, c)
		},
		"backwards": func(items []item) []item {
			slices.Reverse(items)
			return items
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, mode := range modes {
				r := check(t, pcap(edit(script(mode))))
				if r.Verdict != OK || r.Results != 10 || r.Unfinished != 0 {
					t.Errorf("%s: %s", mode, text(t, r))
				}
			}
		})
	}
}

func text(t *testing.T, r *Report) string {
	t.Helper()
	var b strings.Builder
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestViolations(t *testing.T) {
	// Each edit returns the index of the packet that is to be blamed.
	result := func(edit func(items []item, p *wire.Packet)) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			i := find(items, wire.TypeResult)[0]
			edit(items, &items[i].p)
			return items, i
		}
	}
	lastResult := func(edit func(p *wire.Packet)) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			i := find(items, wire.TypeResult)
			edit(&items[i[len(i)-1]].p)
			return items, i[len(i)-1]
		}
	}
	gradOf := func(rank uint8, edit func(p *wire.Packet)) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			i := grad(items, rank)
			edit(&items[i].p)
			return items, i
		}
	}
	// again appends another copy of a packet of the type, changed.
	again := func(typ wire.Type, edit func(p *wire.Packet)) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			c := items[find(items, typ)[0]]
			edit(&c.p)
			return append(items, c), len(items)
		}
	}
	addRank := func(items []item, p *wire.Packet, rank uint8) {
		g := items[grad(items, rank)].p
		accumulate(p, &g, p.Type)
	}
	subtract := func(items []item, p *wire.Packet, rank uint8) {
		g := items[grad(items, rank)].p
		for i, v := range g.Lanes {
			p.Lanes[i] -= v
		}
		for t, v := range g.Tag {
			p.Tag[t] -= v
		}
	}
	damage := func(index func([]item) int, off int, bits ...byte) func([]item) ([]item, int) {
		return func(items []item) ([]item, int) {
			i := index(items)
			raw := items[i].frame()
			raw[off] ^= append(bits, 0x10)[0]
			items[i].raw, items[i].p = raw, wire.Packet{}
			return items, i
		}
	}
	firstGrad := func(items []item) int { return grad(items, 0) }
	firstResult := func(items []item) int { return find(items, wire.TypeResult)[0] }

	damageType := func(typ wire.Type) func([]item) ([]item, int) {
		return damage(firstResult, 42, byte(wire.TypeResult^typ))
	}

	for name, c := range map[string]struct {
		mode   string
		edit   func([]item) ([]item, int)
		reason Reason
		detail string
	}{
		// A packet by itself.
		"GRAD damaged":          {"switch", damage(firstGrad, 300), "checksum", "UDP"},
		"GRAD's mask damaged":   {"server", damage(firstGrad, 42+wire.OffContributors), "checksum", "UDP"},
		"RESULT's TTL damaged":  {"hybrid", damage(firstResult, 14+8), "checksum", "IPv4"},
		"version":               {"switch", damage(firstResult, 42), "version", "0, want 1"},
		"type":                  {"switch", lastResult(func(p *wire.Packet) { p.Type = 15 }), "type", "15"},
		"blocks":                {"switch", damage(firstResult, 42+wire.OffBlocks), "length", ""},
		"reserved":              {"switch", damage(firstResult, 42+wire.HeaderLen-1), "length", "reserved"},
		"total length":          {"switch", damage(firstResult, 14+3), "length", ""},
		"RESULT's flag damaged": {"server", lastResult(func(p *wire.Packet) { p.Flags |= wire.FlagForwarded }), "field", "flags 0x4c"},
		"RESULT's reason":       {"server", lastResult(func(p *wire.Packet) { p.Reason = 3 }), "field", "reason 3"},
		"RESULT made a PARTIAL": {"switch", damageType(wire.TypePartial), "field", "without a UDP checksum"},
		"RESULT made an ACK":    {"switch", damageType(wire.TypeAck), "field", "tag"},
		"RESULT with checksum": {"switch", func(items []item) ([]item, int) {
			i := firstResult(items)
			items[i].checksum = true
			return items, i
		}, "field", "UDP checksum"},
		"PARTIAL without checksum": {"hybrid", func(items []item) ([]item, int) {
			i := find(items, wire.TypePartial)[0]
			items[i].checksum = false
			return items, i
		}, "field", "without a UDP checksum"},
		"unnamed flag":        {"server", gradOf(2, func(p *wire.Packet) { p.Flags |= 0x20 }), "field", "flags 0x20"},
		"next epoch, chunk 1": {"server", lastResult(func(p *wire.Packet) { p.NextEpoch = 3 }), "field", "next epoch 3"},
		"next epoch, PARTIAL": {"hybrid", again(wire.TypePartial, func(p *wire.Packet) { p.NextEpoch = 3 }), "field", "next epoch 3"},
		"next epoch, PARTIAL of chunk 0": {"hybrid", func(items []item) ([]item, int) {
			i := slices.IndexFunc(items, func(i item) bool { return i.p.Type == wire.TypePartial && i.p.Chunk == 0 })
			items[i].p.NextEpoch = 2
			return items, i
		}, "field", "next epoch 2"},
		"ACK with tag":             {"server", again(wire.TypeAck, func(p *wire.Packet) { p.Tag[1] = 1 }), "field", "tag"},
		"ACK with lanes":           {"server", again(wire.TypeAck, func(p *wire.Packet) { p.Blocks = 1 }), "length", "1 blocks"},
		"ACK with next epoch":      {"server", again(wire.TypeAck, func(p *wire.Packet) { p.NextEpoch = 1 }), "field", "next epoch 1"},
		"ACK of nobody":            {"server", again(wire.TypeAck, func(p *wire.Packet) { p.Contributors = 0 }), "mask", "empty"},
		"ACK of other shape":       {"server", again(wire.TypeAck, func(p *wire.Packet) { p.Elems-- }), "shape", "255 lanes"},
		"NACK without reason":      {"server", again(wire.TypeAck, func(p *wire.Packet) { p.Type = wire.TypeNack }), "field", "reason 0"},
		"NACK with unknown reason": {"server", again(wire.TypeAck, func(p *wire.Packet) { p.Type, p.Reason = wire.TypeNack, wire.NumReasons }), "field", "reason 26"},
		"NACK with times":          {"server", again(wire.TypeAck, func(p *wire.Packet) { p.Type, p.Reason, p.SpreadUs = wire.TypeNack, 3, 1 }), "field", "spread 1"},
		"GRAD of rank 64":          {"switch", gradOf(3, func(p *wire.Packet) { p.Rank = 64 }), "rank", "64"},
		"GRAD of two ranks":        {"switch", gradOf(3, func(p *wire.Packet) { p.Contributors |= 1 }), "mask", "0x9"},
		"GRAD of another":          {"switch", gradOf(3, func(p *wire.Packet) { p.Contributors = 1 }), "mask", "0x1"},
		"GRAD with large tag":      {"switch", gradOf(3, func(p *wire.Packet) { p.Tag[0] += wire.P }), "tag", "below 67108859"},
		"GRAD's lane":              {"switch", gradOf(3, func(p *wire.Packet) { p.Lanes[255]-- }), "tag", "does not fit"},
		"GRAD's tag":               {"switch", gradOf(3, func(p *wire.Packet) { p.Tag[1] ^= 1 }), "tag", "does not fit"},
		"GRAD's round":             {"switch", gradOf(3, func(p *wire.Packet) { p.Round++ }), "tag", "does not fit"},
		"copy's lane":              {"server", again(wire.TypeGrad, func(p *wire.Packet) { p.Lanes[17] += 5 }), "tag", "lane 17 is +5 off"},
		"copy's lanes":             {"server", again(wire.TypeGrad, func(p *wire.Packet) { p.Lanes[17] += 5; p.Lanes[18] -= 5 }), "tag", "several lanes differ"},
		"lane beyond elems": {"switch", func(items []item) ([]item, int) {
			for i := range items {
				if p := &items[i].p; p.Type == wire.TypeResult && p.Elems == 65 {
					p.Lanes[127] = -4
					return items, i
				}
			}
			panic("no chunk of 65 lanes")
		}, "length", "lane 127 is -4"},

		// A RESULT.
		"lane":                         {"switch", result(func(_ []item, p *wire.Packet) { p.Lanes[200]++ }), "sum", "lane 200 is +1 off"},
		"lane's sign":                  {"hybrid", lastResult(func(p *wire.Packet) { p.Lanes[3] ^= math.MinInt32 }), "sum", "lane 3 is"},
		"two lanes":                    {"server", lastResult(func(p *wire.Packet) { p.Lanes[3]++; p.Lanes[4]-- }), "sum", "several lanes differ"},
		"lane that the tag cannot see": {"server", lastResult(func(p *wire.Packet) { p.Lanes[3] += wire.P }), "sum", "lane 3 is +67108859 off"},
		"tag":                          {"switch", lastResult(func(p *wire.Packet) { p.Tag[0]++ }), "tag", "tag 0 is"},
		"tag by p":                     {"switch", lastResult(func(p *wire.Packet) { p.Tag[1] += wire.P }), "tag", "tag 1 is"},
		"mask bit less":                {"switch", lastResult(func(p *wire.Packet) { p.Contributors &^= 1 }), "mask", "rank 0 is summed but not in the mask"},
		"mask bit less, last":          {"switch", lastResult(func(p *wire.Packet) { p.Contributors &^= 8 }), "mask", "lacks the last contributor"},
		"mask bit more":                {"switch", lastResult(func(p *wire.Packet) { p.Contributors |= 1 << 63 }), "tag", "does not fit"},
		"mask empty":                   {"switch", lastResult(func(p *wire.Packet) { p.Contributors = 0 }), "mask", "lacks the last contributor"},
		"amax":                         {"switch", lastResult(func(p *wire.Packet) { p.Amax = 102 }), "sum", "amax is 102 instead of 103"},
		"SATURATED lost":               {"switch", lastResult(func(p *wire.Packet) { p.Flags &^= wire.FlagSaturated }), "sum", "SATURATED is false instead of true"},
		"LAST": {"switch", lastResult(func(p *wire.Packet) { p.Flags |= wire.FlagLast }), "shape",
			"256 lanes, exponent 12, seq 2, LAST, but another packet of the chunk says 256 lanes, exponent 12, seq 2"},
		"exponent":                       {"switch", lastResult(func(p *wire.Packet) { p.Exponent++ }), "shape", "exponent 13, seq 2, but"},
		"seq":                            {"switch", lastResult(func(p *wire.Packet) { p.Seq++ }), "shape", "seq 3, but"},
		"elems":                          {"switch", lastResult(func(p *wire.Packet) { p.Elems-- }), "length", "lane 255"},
		"chunk":                          {"switch", lastResult(func(p *wire.Packet) { p.Chunk = 2 }), "tag", "does not fit"},
		"job":                            {"switch", lastResult(func(p *wire.Packet) { p.Job = 8 }), "tag", "does not fit"},
		"counts twice":                   {"hybrid", result(func(items []item, p *wire.Packet) { addRank(items, p, 3) }), "twice", "rank 3 is counted twice"},
		"counts the switch's rank twice": {"hybrid", result(func(items []item, p *wire.Packet) { addRank(items, p, 1) }), "twice", "rank 1 is counted twice"},
		"counts two twice":               {"server", result(func(items []item, p *wire.Packet) { addRank(items, p, 3); addRank(items, p, 2) }), "sum", "several lanes differ"},
		"lacks a rank":                   {"server", result(func(items []item, p *wire.Packet) { subtract(items, p, 2) }), "mask", "rank 2 is in the mask but not summed"},
		"of another chunk": {"switch", result(func(items []item, p *wire.Packet) {
			for i := range items {
				if q := &items[i].p; q.Type == wire.TypeResult && q.Round == 1 && q.Chunk == 0 {
					p.Lanes, p.Tag = q.Lanes, q.Tag
				}
			}
		}), "sum", "several lanes"},
		"with fewer ranks than before": {"switch", func(items []item) ([]item, int) {
			r := items[find(items, wire.TypeResult)[0]]
			subtract(items, &r.p, 0)
			r.p.Contributors &^= 1
			return append(items, r), len(items)
		}, "conflict", "the mask was 0xf and is 0xe"},
		"other last contributor": {"switch", lastResult(func(p *wire.Packet) { p.Rank = 0 }), "conflict", "the last contributor was 3 and is 0"},
		"other next epoch": {"switch", func(items []item) ([]item, int) {
			for i := range slices.Backward(items) {
				if p := &items[i].p; p.Type == wire.TypeResult && p.Chunk == 0 {
					p.NextEpoch = 3
					return items, i
				}
			}
			panic("no chunk 0")
		}, "conflict", "the next epoch was 2 and is 3"},

		// A PARTIAL.
		"PARTIAL's lane":       {"hybrid", again(wire.TypePartial, func(p *wire.Packet) { p.Lanes[9] += 2 }), "sum", "lane 9 is +2 off"},
		"PARTIAL's lanes by p": {"hybrid", again(wire.TypePartial, func(p *wire.Packet) { p.Lanes[9] -= 2 * wire.P }), "sum", "lane 9 is -134217718 off"},
		"PARTIAL's mask":       {"hybrid", again(wire.TypePartial, func(p *wire.Packet) { p.Contributors |= 8 }), "mask", "rank 3 is in the mask but not summed"},
		"PARTIAL's last rank":  {"hybrid", again(wire.TypePartial, func(p *wire.Packet) { p.Rank = 0 }), "conflict", "the last contributor was 2 and is 0"},
		"PARTIAL counts twice": {"hybrid", func(items []item) ([]item, int) {
			i := find(items, wire.TypePartial)[0]
			addRank(items, &items[i].p, 1)
			return items, i
		}, "twice", "rank 1 is counted twice"},
		"rank in two PARTIALs": {"hybrid", func(items []item) ([]item, int) {
			p := items[find(items, wire.TypePartial)[0]]
			addRank(items, &p.p, 3)
			subtract(items, &p.p, 0)
			p.p.Contributors = 0b1110
			return append(items, p), len(items)
		}, "twice", "ranks 1-2 is in another PARTIAL too, of ranks 0-2"},

		// A rank that says two things, both of them sound.
		"other GRAD": {"server", func(items []item) ([]item, int) {
			g := items[grad(items, 2)]
			g.p.Lanes[7] += 100
			g.p.Seal()
			g.p.Flags |= wire.FlagResend
			return append(items, g), len(items)
		}, "conflict", "lane 7 is +100 off, tag 0"},
		"other amax":      {"switch", again(wire.TypeGrad, func(p *wire.Packet) { p.Amax = 1 }), "conflict", "amax is 1 instead of 100"},
		"other SATURATED": {"switch", again(wire.TypeGrad, func(p *wire.Packet) { p.Flags |= wire.FlagSaturated }), "conflict", "SATURATED is true instead of false"},
		"other exponent":  {"switch", again(wire.TypeGrad, func(p *wire.Packet) { p.Exponent-- }), "shape", "exponent 11, seq 2, but"},
		"forwarded GRAD that the server gets differs": {"hybrid", func(items []item) ([]item, int) {
			var last int
			for _, i := range find(items, wire.TypeGrad) {
				if items[i].p.Flags&wire.FlagForwarded != 0 {
					last = i
				}
			}
			p := &items[last].p
			p.Lanes[0] = -p.Lanes[0]
			p.Seal()
			return items, last
		}, "conflict", "lane 0"},
		"overflow": {"switch", func(items []item) ([]item, int) {
			for _, i := range find(items, wire.TypeGrad) {
				items[i].p.Lanes[5] = 1 << 30
				items[i].p.Seal()
			}
			var sum wire.Packet
			for _, i := range find(items, wire.TypeGrad) {
				accumulate(&sum, &items[i].p, wire.TypeResult)
			}
			rs := find(items, wire.TypeResult)
			for _, i := range rs {
				items[i].p = sum
			}
			return items, rs[0]
		}, "sum", "lane 5 has overflowed, it is -4294967296 off"},
	} {
		t.Run(name, func(t *testing.T) {
			items, blamed := c.edit(script(c.mode))
			frame := items[blamed].frame()
			everyForm(t, items, func(t *testing.T, file []byte) {
				r := check(t, file)
				if r.Verdict != Violated || len(r.Violations) == 0 {
					t.Fatalf("%s", text(t, r))
				}
				v := r.Violations[0]
				if v.File != 0 || v.Number != blamed+1 || v.Reason != c.reason || !strings.Contains(v.Detail, c.detail) {
					t.Errorf("packet %d, want %d: %s, want %s: %s, want %q", v.Number, blamed+1, v.Reason, c.reason, v.Detail, c.detail)
				}
				// The frame behind the link's header, which differs from form to form.
				if !bytes.HasSuffix(v.Frame, frame[14:]) {
					t.Errorf("frame\n% x\nwant\n% x", v.Frame, frame)
				}
				dump := hex.Dump(v.Frame)
				if s := text(t, r); !strings.Contains(s, fmt.Sprintf("file0: packet %d: %s: ", blamed+1, c.reason)) || !strings.Contains(s, dump) {
					t.Errorf("text:\n%s", s)
				}
			})
		})
	}
}

// Every single bit of the lanes, the mask, the tag and the amax of one copy of a RESULT.
func TestEveryBitOfAResult(t *testing.T) {
	j := newJob(3, 4, 0b0111)
	j.round(0, 2)
	last := len(j.items) - 1
	ps := packets(j.items)
	frame := ps[last].Frame
	bits := func(from, to int) {
		for i := from; i < to; i++ {
			for bit := range 8 {
				frame[wire.FrameOverhead+i] ^= 1 << bit
				r := check(t, capturetest.Pcap(binary.LittleEndian, true, capture.LinkEthernet, ps))
				if r.Verdict != Violated || r.Violations[0].Number != last+1 {
					t.Errorf("byte %d, bit %d: %s", i, bit, text(t, r))
				}
				frame[wire.FrameOverhead+i] ^= 1 << bit
			}
		}
	}
	bits(wire.OffAmax, wire.OffSpreadUs)
	bits(wire.HeaderLen, wire.HeaderLen+wire.BlockLen)
}

func TestIncomplete(t *testing.T) {
	want := []Incomplete{{7, 1, 1, 1, []int{2}, 0}}
	for name, c := range map[string]struct {
		edit func([]item) []item
		want []Incomplete
	}{
		"GRAD":      {func(items []item) []item { return dropRank(items, 2) }, want},
		"two GRADs": {func(items []item) []item { return dropRank(dropRank(items, 0), 3) }, []Incomplete{{7, 1, 1, 1, []int{0, 3}, 0}}},
		"GRAD damaged beyond recognition": {func(items []item) []item {
			i := grad(items, 2)
			items = dropRank(items, 2)
			return insert(items, i, item{raw: make([]byte, 60)})
		}, want},
		"beginning": {func(items []item) []item {
			for i := range slices.Backward(items) {
				if p := &items[i].p; p.Type == wire.TypeGrad && p.Round == 1 && p.Chunk == 1 && p.Rank == 2 {
					return items[i+1:]
				}
			}
			panic("no such rank")
		}, []Incomplete{{7, 1, 1, 1, []int{0, 1, 2}, 0}}},
		"ACK tells of a rank": {func(items []item) []item {
			a := items[grad(items, 3)]
			a.p = short(wire.TypeAck, a.p)
			a.p.Contributors = 1<<3 | 1<<40
			a.checksum = false
			return append(items, a)
		}, []Incomplete{{7, 1, 1, 1, []int{40}, 0}}},
		"RESULT of another epoch": {func(items []item) []item {
			r := items[find(items, wire.TypeResult)[0]]
			r.p.Epoch = 9
			return append(items, r)
		}, []Incomplete{{7, 9, 1, 1, []int{0, 1, 2, 3}, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, mode := range modes {
				items := c.edit(script(mode))
				everyForm(t, items, func(t *testing.T, file []byte) {
					r := check(t, file)
					if r.Verdict != Lacking || !reflect.DeepEqual(r.Incomplete, c.want) || r.IncompleteCount != len(c.want) {
						t.Errorf("%s: %+v\n%s", mode, r.Incomplete, text(t, r))
					}
				})
			}
		})
	}
	r := check(t, pcap(dropRank(script("switch"), 2)))
	if s := text(t, r); !strings.HasPrefix(s, "incomplete: contributions to 1 chunk were not captured\n") ||
		!strings.Contains(s, "incomplete: job 7 epoch 1 round 1 chunk 1 lacks the contribution of rank 2\n") {
		t.Errorf("text:\n%s", s)
	}

	for name, items := range map[string][]item{"nothing": nil, "foreign packets": foreign()} {
		r := check(t, pcap(items))
		if r.Verdict != Lacking || !strings.HasPrefix(text(t, r), "incomplete: no packet of the protocol") {
			t.Errorf("%s: %s", name, text(t, r))
		}
	}
}

// A violation weighs more than something missing.
func TestBoth(t *testing.T) {
	items := dropRank(script("switch"), 2)
	items[0].p.Tag[0] ^= 1
	if r := check(t, pcap(items)); r.Verdict != Violated || r.IncompleteCount != 2 {
		t.Error(text(t, r))
	}
}

func TestUnfinished(t *testing.T) {
	// The capture ends before the result of chunk (1, 1).
	items := script("switch")
	r := check(t, pcap(items[:find(items, wire.TypeResult)[0]]))
	if r.Verdict != OK || r.Unfinished != 1 || r.Results != 2 {
		t.Error(text(t, r))
	}
	// A chunk of which only an answer was seen has no contributions that a RESULT is missing for.
	ack := items[0]
	ack.p, ack.checksum = short(wire.TypeAck, ack.p), false
	if r := check(t, pcap([]item{ack})); r.Verdict != Lacking || r.Unfinished != 0 || r.Chunks != 1 {
		t.Error(text(t, r))
	}
	r = check(t, pcap(items[:2]))
	if s := text(t, r); r.Verdict != OK || !strings.HasPrefix(s, "ok: nothing is wrong, but there is no RESULT") {
		t.Error(s)
	}
}

// The verdict does not depend on the order of the packets, nor do the counts.
func TestAnyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, mode := range modes {
		good := script(mode)
		bad := script(mode)
		i := find(bad, wire.TypeResult)[0]
		bad[i].p.Lanes[0] += wire.P // only the contributions tell
		lacking := dropRank(script(mode), 1)
		for range 20 {
			for verdict, items := range map[Verdict][]item{OK: good, Violated: bad, Lacking: lacking} {
				shuffled := slices.Clone(items)
				rng.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
				r := check(t, pcap(shuffled))
				if r.Verdict != verdict || verdict == OK && r.Results != 10 {
					t.Fatalf("%s, want %s: %s", mode, verdict, text(t, r))
				}
				if verdict == Violated && (len(r.Violations) == 0 || len(r.Violations[0].Frame) == 0) {
					t.Fatalf("%s: no frame: %+v", mode, r.Violations)
				}
			}
		}
	}
}

// A port a file, merged by time: the packet is blamed by its file and its number there.
func TestFilesAreMerged(t *testing.T) {
	items := script("hybrid")
	blamed := find(items, wire.TypeResult)[0]
	items[blamed].p.Lanes[100]++
	ps := packets(items)
	var parts [3][]capturetest.Packet
	var file, number int
	for i, p := range ps {
		n := i * i % 3
		if parts[n] = append(parts[n], p); i == blamed {
			file, number = n, len(parts[n])
		}
	}
	r := check(t,
		capturetest.Pcap(binary.LittleEndian, true, capture.LinkEthernet, parts[0]),
		capturetest.Pcapng(binary.BigEndian, capture.LinkLinuxSLL2, parts[1]),
		capturetest.Pcap(binary.BigEndian, false, capture.LinkLinuxSLL, parts[2]))
	if len(r.Violations) != 1 || r.Violations[0].Ref != (Ref{file, number}) || r.Violations[0].Reason != ReasonSum {
		t.Errorf("want file %d, packet %d: %s", file, number, text(t, r))
	}
	if r.Packets != len(ps) || len(r.Files) != 3 || r.Files[1].Packets != len(parts[1]) {
		t.Errorf("files %+v", r.Files)
	}
	// What one file lacks is in the others.
	if r := check(t, capturetest.Pcap(binary.LittleEndian, true, capture.LinkEthernet, parts[0])); r.Verdict != Lacking {
		t.Error(text(t, r))
	}
}

func TestCutPackets(t *testing.T) {
	items := append(script("switch"), foreign()...)
	ps := packets(items)
	for i := range ps {
		ps[i].Cut = 96
	}
	for _, link := range capturetest.Links {
		r := check(t, capturetest.Pcapng(binary.LittleEndian, link, ps))
		if r.Verdict != Violated || r.ViolationCount != len(items)-5 || r.Malformed != len(items)-5 || r.Foreign != 5 {
			t.Fatalf("%v: %s", link, text(t, r))
		}
		if v := r.Violations[0]; v.Reason != "short" || !strings.Contains(v.Detail, "only 96 of ") {
			t.Errorf("%v: %+v", link, v)
		}
	}
	// Cut before the ports nobody can tell whose a packet is.
	for i := range ps {
		ps[i].Cut = 30
	}
	r := check(t, capturetest.Pcap(binary.LittleEndian, true, capture.LinkEthernet, ps))
	if r.Verdict != Lacking || r.Foreign != len(items) {
		t.Error(text(t, r))
	}
}

func TestTruncatedFile(t *testing.T) {
	items := script("hybrid")
	file := pcap(append(items, items[0]))
	r := check(t, file[:len(file)-1])
	if r.Verdict != OK || r.Packets != len(items) || !r.Files[0].Truncated || !strings.Contains(text(t, r), "in the midst") {
		t.Error(text(t, r))
	}
}

func TestOtherLinkType(t *testing.T) {
	r := check(t, capturetest.Pcap(binary.LittleEndian, true, 127, packets(script("switch"))))
	if s := text(t, r); r.Verdict != Lacking || r.OtherLinks["link type 127"] != r.Packets || !strings.Contains(s, "of link type 127 skipped") {
		t.Error(s)
	}
}

func TestUnreadableFiles(t *testing.T) {
	good := pcap(script("switch"))
	damaged := append(slices.Clone(good), bytes.Repeat([]byte{0xff}, 100)...)
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"text":    {[]byte("not a capture"), "read bad: not a readable capture file: begins with"},
		"empty":   {nil, "read bad: not a readable capture file: 0 bytes"},
		"damaged": {damaged, fmt.Sprintf("read bad: after packet %d: not a readable capture file", len(script("switch")))},
	} {
		_, err := Files([]Input{{"good", bytes.NewReader(good)}, {"bad", bytes.NewReader(c.file)}}, Options{})
		if !errors.Is(err, capture.ErrFormat) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Rounds that are closed to save memory are accounted for all the same; what comes for them later is not.
func TestMemoryIsBounded(t *testing.T) {
	j := newJob(1, 3, 0b111)
	for round := range uint32(50) {
		j.round(round, 64, 64)
	}
	first := slices.Clone(j.items)
	j.items = slices.DeleteFunc(j.items, func(i item) bool {
		return i.p.Type == wire.TypeGrad && i.p.Rank == 1 && i.p.Round == 3
	})
	j.items = slices.DeleteFunc(j.items, func(i item) bool { return i.p.Type == wire.TypeResult && i.p.Round == 4 })
	late := first[0]
	late.p.Lanes[0] += 1 // its own tag still tells
	items := append(j.items, first[0], late)

	c := New(Options{Chunks: 7})
	for i, p := range packets(items) {
		c.Packet(Ref{0, i + 1}, &capture.Packet{Link: capture.LinkEthernet, Len: len(p.Frame), Data: p.Frame})
		if c.chunks > 7 || len(c.rounds) > 4 {
			t.Fatalf("%d chunks and %d rounds are held", c.chunks, len(c.rounds))
		}
	}
	r := c.Finish()
	if c.held != 0 {
		t.Errorf("%d bytes of frames are held in the end", c.held)
	}
	if r.Chunks != 100 || r.Rounds != 50 || r.Results != 96 || r.Unfinished != 2 || r.Late != 1 || r.IncompleteCount != 2 || r.ViolationCount != 1 {
		t.Error(text(t, r))
	}
}

func TestFindingsAreBounded(t *testing.T) {
	j := newJob(1, 3, 0b111)
	for round := range uint32(10) {
		j.round(round, 64)
	}
	items := slices.DeleteFunc(j.items, func(i item) bool { return i.p.Type == wire.TypeGrad && i.p.Rank == 1 })
	for i := range items {
		if items[i].p.Type == wire.TypeGrad && items[i].p.Rank == 0 {
			items[i].p.Tag[0] ^= 1
		}
	}
	r := checkWith(t, Options{Findings: 3}, pcap(items))
	if r.ViolationCount != 10 || len(r.Violations) != 3 || r.IncompleteCount != 10 || len(r.Incomplete) != 3 {
		t.Error(text(t, r))
	}
	if s := text(t, r); !strings.Contains(s, "and 7 more violations\n") || !strings.Contains(s, "and 7 more incomplete chunks\n") {
		t.Error(s)
	}
}

// When too many sums wait for contributions their bytes are not held, but they are checked.
func TestHeldFramesAreBounded(t *testing.T) {
	items := script("switch")
	for _, i := range find(items, wire.TypeResult) {
		items[i].p.Lanes[0] += wire.P
	}
	slices.Reverse(items)
	// One at a time is held and let go when its contributions have come.
	one := len(items[0].frame())
	for _, i := range find(items, wire.TypeResult) {
		one = max(one, len(items[i].frame()))
	}
	if r := checkWith(t, Options{Held: one}, pcap(items)); len(r.Violations) != 1 || len(r.Violations[0].Frame) != one {
		t.Error(text(t, r))
	}
	r := checkWith(t, Options{Held: 1}, pcap(items))
	if r.Verdict != Violated || len(r.Violations) != 1 || len(r.Violations[0].Frame) != 0 || !strings.Contains(text(t, r), "too many packets waited") {
		t.Error(text(t, r))
	}
}

func TestJSON(t *testing.T) {
	items := script("switch")
	i := find(items, wire.TypeResult)[0]
	items[i].p.Lanes[9]--
	r := check(t, pcap(items))
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var got struct {
		SchemaVersion  int    `json:"schema_version"`
		Verdict        string `json:"verdict"`
		ViolationCount int    `json:"violation_count"`
		Types          map[string]int
		Violations     []map[string]any
		Incomplete     []Incomplete
	}
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.SchemaVersion != 1 || got.Verdict != "violation" || got.ViolationCount != 1 || got.Types["RESULT"] != 40 || got.Incomplete == nil {
		t.Errorf("JSON:\n%s", &b)
	}
	want := map[string]any{
		"file": "file0", "number": float64(i + 1), "packet": "RESULT of job 7 epoch 1 round 1 chunk 1, ranks 0-3", "reason": "sum",
		"detail": "not the sum of ranks 0-3: lane 9 is -1 off", "hexdump": hex.Dump(items[i].frame()),
	}
	if len(got.Violations) != 1 || !reflect.DeepEqual(got.Violations[0], want) {
		t.Errorf("violations %v\nwant %v", got.Violations, want)
	}

	b.Reset()
	if err := check(t, pcap(script("switch"))).WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	if s := b.String(); !strings.Contains(s, `"violations": []`) || !strings.Contains(s, `"incomplete": []`) {
		t.Errorf("JSON:\n%s", s)
	}
}

func TestRanks(t *testing.T) {
	for mask, want := range map[uint64]string{
		1: "rank 0", 1 << 63: "rank 63", 0b1101: "ranks 0,2-3", math.MaxUint64: "ranks 0-63", 0b111: "ranks 0-2",
		1<<63 | 1<<62 | 1: "ranks 0,62-63",
	} {
		if got := ranks(mask); got != want {
			t.Errorf("ranks(%#x) = %q, want %q", mask, got, want)
		}
	}
}

// Whoever contradicts a packet names it: which of the two is wrong, a capture does not tell.
func TestOther(t *testing.T) {
	items := script("switch")
	first := grad(items, 0)
	items[first].checksum = false // or the checksum would tell
	items[first].p.Seq++
	r := check(t, pcap(items))
	if len(r.Violations) == 0 {
		t.Fatal("no violation")
	}
	for _, v := range r.Violations {
		if want := (Ref{0, first + 1}); v.Other != want || v.Reason != "shape" {
			t.Errorf("packet %d: %s against %v, want shape against %v", v.Number, v.Reason, v.Other, want)
		}
	}
	var text, object bytes.Buffer
	if err := errors.Join(r.WriteText(&text), r.WriteJSON(&object)); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("file0: packet %d", first+1)
	if !strings.Contains(text.String(), "(one of the two is wrong: this one, or "+want+")") ||
		!strings.Contains(object.String(), `"other": "`+want+`"`) {
		t.Errorf("want %q in\n%s\n%s", want, text.String(), object.String())
	}
}

func FuzzFiles(f *testing.F) {
	j := newJob(7, 2, 0b01) // small: a scout and a chunk of one block
	j.round(0, 0)
	j.round(1, 3)
	f.Add(pcap(j.items), pcap(foreign()))
	f.Add(capturetest.Pcapng(binary.BigEndian, capture.LinkLinuxSLL2, packets(j.items[:9])), pcap(j.items[9:]))
	f.Add(pcap(asyncScript()[:40]), pcap(quorumScript()[:30]))
	f.Add(pcap(nil), []byte{})
	f.Fuzz(func(t *testing.T, a, b []byte) {
		c := New(Options{Chunks: 3, Findings: 2, Held: 2000})
		c.hash = newHasher(rand.New(rand.NewPCG(1, 2)).Uint64N) // the fuzzer wants the same way for the same input
		r, err := c.files([]Input{{"a", bytes.NewReader(a)}, {"b", bytes.NewReader(b)}})
		if err != nil {
			return
		}
		text(t, r)
		if err := r.WriteJSON(new(bytes.Buffer)); err != nil {
			t.Fatal(err)
		}
		if (r.Verdict == Violated) != (r.ViolationCount > 0) || r.XAgg+r.Foreign > r.Packets || r.Malformed > r.XAgg {
			t.Fatalf("%+v", r)
		}
	})
}

// A capture of many chunks, to see what a packet costs in time and a chunk in memory.
func BenchmarkChecker(b *testing.B) {
	var frames [][]byte
	j := newJob(1, 4, 0b0111)
	for chunk := range uint32(100) {
		j.chunk(0, chunk, 256, false)
	}
	var bytes int64
	for i := range j.items {
		frames = append(frames, j.items[i].frame())
		bytes += int64(len(frames[i]))
	}
	b.SetBytes(bytes / int64(len(frames)))
	b.ReportAllocs()
	c, n := New(Options{}), 0
	for b.Loop() {
		if n == len(frames) {
			if r := c.Finish(); r.Verdict != OK || r.Results != 100 {
				b.Fatalf("%+v", r)
			}
			c, n = New(Options{}), 0
		}
		f := frames[n]
		n++
		c.Packet(Ref{0, n}, &capture.Packet{Link: capture.LinkEthernet, Len: len(f), Data: f})
	}
}
