package agg

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"xagg/wire"
)

var update = flag.Bool("update", false, "write what the scripts print into them")

// TestScripts runs the scripts in testdata. A script has blocks: command lines, a line of dashes, and the lines that the
// commands are to print, up to an empty line. Lines that begin with # are comments. The file's name up to the first
// underscore says what the commands are for.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		t.Run(name, func(t *testing.T) {
			kind, _, _ := strings.Cut(name, "_")
			var s interface {
				run(cmd string, a *args) string
			}
			switch kind {
			case "switch":
				s = &switchScript{Switch: NewSwitch(16)}
			case "server":
				s = &serverScript{Server: NewServer(64)}
			case "window":
				s = &windowScript{}
			default:
				t.Fatalf("nothing runs scripts for %q", kind)
			}
			old, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			is, err := runScript(old, s.run)
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(file, is, 0o644); err != nil {
					t.Fatal(err)
				}
			} else if diff := cmp.Diff(string(old), string(is)); diff != "" {
				t.Errorf("the script prints something else (-want +got):\n%s", diff)
			}
		})
	}
}

// runScript returns the script with what its commands print now.
func runScript(script []byte, run func(cmd string, a *args) string) ([]byte, error) {
	var out, printed bytes.Buffer
	expected := false // we are behind the dashes
	lines := bufio.NewScanner(bytes.NewReader(script))
	for n := 1; lines.Scan(); n++ {
		line := lines.Text()
		switch {
		case line == "":
			expected = false
		case expected:
			continue
		case line == "----":
			expected = true
			fmt.Fprintf(&out, "%s\n%s", line, printed.Bytes())
			printed.Reset()
			continue
		case !strings.HasPrefix(line, "#"):
			cmd, a, err := parse(line)
			if err == nil {
				printed.WriteString(run(cmd, a))
				err = a.err
			}
			if err != nil {
				return nil, fmt.Errorf("line %d: %q: %w", n, line, err)
			}
			for name := range a.values {
				if !a.used[name] {
					return nil, fmt.Errorf("line %d: %q: nothing takes %s", n, line, name)
				}
			}
		}
		fmt.Fprintln(&out, line)
	}
	if printed.Len() > 0 {
		return nil, fmt.Errorf("the last commands have no line of dashes")
	}
	return out.Bytes(), lines.Err()
}

// args are a command's name=value pairs. The first error is kept.
type args struct {
	values map[string]string
	used   map[string]bool
	err    error
}

func parse(line string) (string, *args, error) {
	fields := strings.Fields(line)
	a := &args{values: make(map[string]string), used: make(map[string]bool)}
	for _, f := range fields[1:] {
		name, value, _ := strings.Cut(f, "=")
		if _, twice := a.values[name]; twice {
			return "", nil, fmt.Errorf("%s is given twice", name)
		}
		a.values[name] = value
	}
	return fields[0], a, nil
}

func (a *args) has(name string) bool {
	a.used[name] = true
	_, ok := a.values[name]
	return ok
}

func (a *args) num(name string, otherwise int64) int64 {
	if !a.has(name) {
		return otherwise
	}
	n, err := strconv.ParseInt(a.values[name], 0, 64)
	a.note(err)
	return n
}

func (a *args) note(err error) {
	if a.err == nil {
		a.err = err
	}
}

func (a *args) time(name string) time.Duration {
	if !a.has(name) {
		return 0
	}
	d, err := time.ParseDuration(a.values[name])
	a.note(err)
	return d
}

// mask reads ranks like 0-2,5; none is the empty mask.
func (a *args) mask(name string, otherwise uint64) uint64 {
	if !a.has(name) {
		return otherwise
	}
	var m uint64
	for part := range strings.SplitSeq(a.values[name], ",") {
		if part == "none" {
			continue
		}
		from, to, ok := strings.Cut(part, "-")
		if !ok {
			to = from
		}
		lo, err := strconv.ParseUint(from, 10, 6)
		a.note(err)
		hi, err := strconv.ParseUint(to, 10, 6)
		a.note(err)
		for r := lo; r <= hi; r++ {
			m |= 1 << r
		}
	}
	return m
}

func (a *args) lanes(otherwise ...int32) []int32 {
	if !a.has("lanes") {
		return otherwise
	}
	var lanes []int32
	for part := range strings.SplitSeq(a.values["lanes"], ",") {
		v, err := strconv.ParseInt(part, 10, 32)
		a.note(err)
		lanes = append(lanes, int32(v))
	}
	return lanes
}

// packet reads a GRAD or PARTIAL. Where nothing is given, chunk and seq are equal and lane 0 is the rank and 1.
func (a *args) packet(t wire.Type) *wire.Packet {
	rank := uint8(a.num("rank", 0))
	lanes := a.lanes(int32(rank) + 1)
	if a.has("scout") {
		lanes = nil
	}
	elems := len(lanes)
	p := &wire.Packet{Header: wire.Header{
		Type: t, Job: uint16(a.num("job", 1)), Epoch: uint16(a.num("epoch", 1)), Rank: rank,
		Chunk: uint32(a.num("chunk", 0)), Round: uint32(a.num("round", 0)),
		Elems: uint16(a.num("elems", int64(elems))), Exponent: int8(a.num("exp", 0)), Amax: uint8(a.num("amax", 0)),
		Contributors: a.mask("mask", bit(rank)),
		SpreadUs:     0xdead, BlockedUs: 0xdead, NextEpoch: 0xdead, // no answer may keep these
	}}
	p.Seq = uint32(a.num("seq", int64(p.Chunk)))
	p.Blocks = uint8(a.num("blocks", int64(wire.BlocksFor(int(p.Elems)))))
	p.Flags = a.flags()
	copy(p.Lanes[:], lanes)
	if t == wire.TypePartial {
		// The tag of a sum of the ranks in the mask.
		l := wire.TagLanes(p.Lanes[:p.Elems])
		for i := range p.Tag {
			p.Tag[i] = l[i]
			for m := p.Contributors; m != 0; m &= m - 1 {
				p.Tag[i] += wire.TagPlace(p.Job, p.Round, p.Chunk, uint8(bits.TrailingZeros64(m)))[i]
			}
		}
	} else {
		p.Seal()
	}
	if a.has("tag") {
		p.Tag = [2]uint32{0, uint32(a.num("tag", 0))}
	}
	return p
}

var flagNames = []string{"last", "resend", "forwarded", "saturated", "modular", "late", "server", "async"}

func (a *args) flags() wire.Flags {
	var f wire.Flags
	for i, name := range flagNames {
		if a.has(name) {
			f |= 1 << i
		}
	}
	return f
}

func showMask(m uint64) string {
	var s []string
	for ; m != 0; m &= m - 1 {
		s = append(s, strconv.Itoa(bits.TrailingZeros64(m)))
	}
	return "{" + strings.Join(s, ",") + "}"
}

// tagFits checks a packet's tag, that of a running sum as the difference to the sum of nothing.
func tagFits(p *wire.Packet) bool {
	if p.Flags&wire.FlagAsync == 0 {
		return p.TagOK()
	}
	additions := uint32(1)
	if p.Type == wire.TypeResult {
		additions = p.Seq
	}
	return wire.DifferenceOK(p.Job, p.Chunk, additions, [2]uint32{}, p.Tag, p.Lanes[:p.Elems])
}

// show prints all of a packet: fields that are zero are left out, but the type.
func show(p *wire.Packet) string {
	var b strings.Builder
	b.WriteString(p.Type.String())
	for i, name := range flagNames {
		if p.Flags>>i&1 != 0 {
			b.WriteString(" " + name)
		}
	}
	field := func(name string, v int64) {
		if v != 0 {
			fmt.Fprintf(&b, " %s=%d", name, v)
		}
	}
	field("job", int64(p.Job))
	field("epoch", int64(p.Epoch))
	field("rank", int64(p.Rank))
	field("blocks", int64(p.Blocks))
	field("seq", int64(p.Seq))
	field("round", int64(p.Round))
	field("chunk", int64(p.Chunk))
	field("elems", int64(p.Elems))
	field("exp", int64(p.Exponent))
	field("amax", int64(p.Amax))
	fmt.Fprintf(&b, " mask=%s", showMask(p.Contributors))
	switch {
	case p.Tag == [2]uint32{}:
	case tagFits(p):
		b.WriteString(" tag=fits")
	default:
		b.WriteString(" tag=bad")
	}
	field("spread", int64(p.SpreadUs))
	field("blocked", int64(p.BlockedUs))
	field("next", int64(p.NextEpoch))
	switch {
	case p.Type == wire.TypeCtrl && p.Reason == slotClosed:
		b.WriteString(" closed")
	case p.Reason != wire.ReasonNone:
		fmt.Fprintf(&b, " reason=%v", p.Reason)
	}
	if p.Blocks > 0 {
		lanes := p.Lanes[:int(p.Blocks)*wire.BlockLanes]
		for len(lanes) > int(p.Elems) && lanes[len(lanes)-1] == 0 {
			lanes = lanes[:len(lanes)-1]
		}
		fmt.Fprintf(&b, " lanes=%d", lanes)
	}
	return b.String()
}

var destNames = [...]string{"", "sender", "service", "all", "cohort", "server", "server as service", "address"}

// outcome prints what became of a packet.
func outcome(out Outcome, p *wire.Packet) string {
	switch out.Dest {
	case Nowhere:
		return fmt.Sprintf("%v\n", out.Reason)
	case ToServer, ToServerAsService:
		return fmt.Sprintf("%v -> %s %d: %s\n", out.Reason, destNames[out.Dest], out.Server, show(p))
	default:
		return fmt.Sprintf("%v -> %s: %s\n", out.Reason, destNames[out.Dest], show(p))
	}
}

func installed(err error) string {
	if err != nil {
		return err.Error() + "\n"
	}
	return ""
}

// switchScript: install, remove, arm, grad, partial, result, ack, wait, nack, slot.
type switchScript struct {
	*Switch
	now int64 // of the last packet, and of a question for a slot that does not say
}

func (s *switchScript) run(cmd string, a *args) string {
	job, epoch := uint16(a.num("job", 1)), uint16(a.num("epoch", 1))
	in := Ingress{Port: uint16(a.num("port", a.num("rank", 0)+1)), Src: uint32(a.num("src", 0x0a4d0001+a.num("rank", 0)))}
	switch cmd {
	case "install":
		ranks := a.mask("ranks", 0)
		members := make(map[uint8]Member)
		for m := a.mask("members", ranks); m != 0; m &= m - 1 {
			r := uint8(bits.TrailingZeros64(m))
			members[r] = modelMember(r)
		}
		servers := int(a.num("servers", 0))
		return installed(s.Install(SwitchPlan{Job: job, Epoch: epoch, Ranks: ranks, Cohort: a.mask("cohort", ranks),
			Servers: servers, Base: uint32(a.num("base", 0)), Pool: uint32(a.num("pool", 1)),
			Quorum: a.has("quorum"), WaitUs: uint32(a.num("wait", 0))}, members,
			modelServerPorts(int(a.num("ports", int64(servers))))))
	case "remove":
		s.Remove(job, epoch)
	case "arm":
		s.Arm(job, epoch, uint16(a.num("next", 0)))
	case "grad", "partial":
		p := a.packet(map[string]wire.Type{"grad": wire.TypeGrad, "partial": wire.TypePartial}[cmd])
		s.now = a.num("t", 0)
		return outcome(s.Handle(uint64(s.now), in, p), p)
	case "result", "ack", "wait", "nack":
		types := map[string]wire.Type{"result": wire.TypeResult, "ack": wire.TypeAck, "wait": wire.TypeWait, "nack": wire.TypeNack}
		p := &wire.Packet{Header: wire.Header{Type: types[cmd], Job: job, Epoch: epoch, Contributors: a.mask("mask", 0)}}
		in.ToService = a.has("service")
		s.now = a.num("t", 0)
		return outcome(s.Handle(uint64(s.now), in, p), p)
	case "slot":
		p := &wire.Packet{Header: wire.Header{Type: wire.TypeCtrl, Blocks: uint8(a.num("blocks", 0))}}
		if !s.Slot(uint64(a.num("t", s.now)), uint32(a.num("index", 0)), p) {
			return "no such slot\n"
		}
		return show(p) + "\n"
	default:
		a.note(fmt.Errorf("no such command"))
	}
	return ""
}

// serverScript: install, remove, arm, grad, partial, result.
type serverScript struct {
	*Server
}

func (s *serverScript) run(cmd string, a *args) string {
	job, epoch := uint16(a.num("job", 1)), uint16(a.num("epoch", 1))
	switch cmd {
	case "install":
		return installed(s.Install(ServerPlan{Job: job, Epoch: epoch, Ranks: a.mask("ranks", 0),
			Base: uint32(a.num("base", 0)), Chunks: uint32(a.num("chunks", 1)), Rounds: uint32(a.num("rounds", 2)),
			Quorum: uint32(a.num("quorum", 0)), WaitUs: uint32(a.num("wait", 0)), Async: a.has("async"), Staleness: uint32(a.num("staleness", 0))}))
	case "remove":
		s.Remove(job, epoch)
	case "arm":
		s.Arm(job, epoch, uint16(a.num("next", 0)))
	case "grad", "partial", "result":
		types := map[string]wire.Type{"grad": wire.TypeGrad, "partial": wire.TypePartial, "result": wire.TypeResult}
		p := a.packet(types[cmd])
		return outcome(s.Handle(uint64(a.num("t", 0)), p), p)
	default:
		a.note(fmt.Errorf("no such command"))
	}
	return ""
}

// windowScript: window, begin, next (all that is due), at, rto, epoch, result, ack, wait, nack, waits, missing, stats.
// t= sets the clock before the command.
type windowScript struct {
	*Window
	now time.Duration
}

func (s *windowScript) run(cmd string, a *args) string {
	if a.has("t") {
		s.now = a.time("t")
	}
	types := map[string]wire.Type{
		"result": wire.TypeResult, "ack": wire.TypeAck, "wait": wire.TypeWait, "nack": wire.TypeNack, "grad": wire.TypeGrad,
	}
	switch cmd {
	case "window":
		s.Window = NewWindow(WindowConfig{Job: 1, Epoch: uint16(a.num("epoch", 1)), Rank: uint8(a.num("rank", 0)),
			Ranks: a.mask("ranks", 3), Pool: uint32(a.num("pool", 2)),
			Depth: int(a.num("depth", 0)), Quorum: int(a.num("quorum", 0)), Wait: a.time("wait"), Async: a.has("async")})
	case "begin":
		chunks := uint32(a.num("chunks", 1))
		if !s.MayBegin() {
			return "not yet\n"
		}
		round, epoch := s.Begin(s.now, chunks)
		return fmt.Sprintf("round %d epoch %d\n", round, epoch)
	case "at": // as if so many rounds and chunks had been before: a long job's counters
		s.Window.round, s.base, s.chunks = uint32(a.num("round", 0)), uint32(a.num("seq", 0)), nil
		s.rounds, s.left = nil, 0
	case "next":
		var b strings.Builder
		for {
			send, ok := s.Next(s.now)
			if !ok {
				break
			}
			b.WriteString("send ")
			if s.cfg.Depth > 1 {
				fmt.Fprintf(&b, "round %d chunk ", send.Round)
			}
			fmt.Fprintf(&b, "%d seq %d", send.Chunk, send.Seq)
			if send.Resend {
				b.WriteString(" resend")
			}
			b.WriteString("\n")
		}
		if at, ok := s.Deadline(); ok {
			fmt.Fprintf(&b, "look again at %v\n", at)
		} else {
			b.WriteString("nothing outstanding\n")
		}
		return b.String()
	case "result", "ack", "wait", "nack", "grad":
		h := &wire.Header{
			Type: types[cmd], Job: uint16(a.num("job", 1)), Epoch: uint16(a.num("epoch", int64(s.epoch))), Rank: uint8(a.num("rank", int64(s.cfg.Rank))),
			Round: uint32(a.num("round", int64(s.Window.round))), Chunk: uint32(a.num("chunk", 0)), NextEpoch: uint16(a.num("next", 0)),
			Contributors: a.mask("mask", bit(s.cfg.Rank)), SpreadUs: uint32(a.time("spread") / time.Microsecond),
		}
		if cmd == "result" {
			h.Contributors = a.mask("mask", s.cfg.Ranks)
		}
		for r := range wire.Reason(wire.NumReasons) {
			if a.has("reason") && r.String() == a.values["reason"] {
				h.Reason = r
			}
		}
		return s.Handle(s.now, h).String() + "\n"
	case "waits":
		s.SetWait(a.time("wait"))
	case "missing":
		ranks, first, chunks := s.Missing()
		return fmt.Sprintf("ranks %s, %d chunks from %d on, done %v\n", showMask(ranks), chunks, first, s.Done())
	case "stats":
		return fmt.Sprintf("%+v\n", s.Stats())
	case "epoch":
		return fmt.Sprintf("epoch %d\n", s.Epoch())
	case "rto":
		return fmt.Sprintf("rto %v, window %d\n", s.rtt.rto, s.limit)
	default:
		a.note(fmt.Errorf("no such command"))
	}
	return ""
}
