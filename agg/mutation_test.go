package agg

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestEveryRuleIsTested takes the rules away one by one and demands that the package's own tests fail without each. A rule is
// taken away in the source text; the go command is told to read the changed file instead.
func TestEveryRuleIsTested(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the package once per rule")
	}
	gocmd := filepath.Join(runtime.GOROOT(), "bin", "go")
	if _, err := os.Stat(gocmd); err != nil {
		if gocmd, err = exec.LookPath("go"); err != nil {
			t.Skipf("no go command: %v", err)
		}
	}
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	for _, m := range mutants {
		t.Run(m.rule, func(t *testing.T) {
			t.Parallel()
			slots <- struct{}{}
			defer func() { <-slots }()

			source, err := os.ReadFile(m.file)
			if err != nil {
				t.Fatal(err)
			}
			if n := bytes.Count(source, []byte(m.old)); n != 1 {
				t.Fatalf("%s has %d times %q, want once: the rule has moved", m.file, n, m.old)
			}
			out, err := testMutant(t, gocmd, m.file, strings.Replace(string(source), m.old, m.new, 1))
			switch {
			case err == nil:
				t.Errorf("no test fails without this rule")
			case !bytes.Contains(out, []byte("--- FAIL")) && !bytes.Contains(out, []byte("panic:")):
				t.Fatalf("the tests did not run: %v\n%s", err, out)
			}
		})
	}
}

// testMutant runs the package's quick tests with another text for one file.
func testMutant(t *testing.T, gocmd, file, text string) ([]byte, error) {
	dir := t.TempDir()
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	changed, overlay := filepath.Join(dir, file), filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(changed, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(wd, file): changed}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(overlay, replace, 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := exec.CommandContext(ctx, gocmd, "test", "-short", "-failfast", "-count=1", "-vet=off", "-timeout=60s",
		"-ldflags=-s -w", "-overlay="+overlay, ".", "-rapid.nofailfile", "-rapid.shrinktime=0s")
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "GOFLAGS=")
	return cmd.CombinedOutput()
}

// A mutant is the package without one rule.
type mutant struct {
	rule, file, old, new string
}

var mutants = []mutant{
	// Admission.
	{"switch: the rank belongs to the job", "switch.go", "case own&plan.Ranks == 0:", "case false:"},
	{"switch: port", "switch.go", "case in.Port != plan.members[p.Rank].Port:", "case false:"},
	{"switch: source", "switch.go", "case in.Src != plan.members[p.Rank].Src:", "case false:"},
	{"switch: own bit only", "switch.go", "case p.Contributors != own:", "case false:"},
	{"switch: tag in range", "switch.go", "case !tagInRange(p):", "case false:"},
	{"switch: steering", "switch.go", "case own&plan.Cohort == 0:", "case false:"},
	{"server: the rank belongs to the job", "server.go", "case bit(p.Rank)&plan.Ranks == 0:", "case false:"},
	{"server: own bit only", "server.go", "case p.Type == wire.TypeGrad && p.Contributors != bit(p.Rank),", "case false,"},
	{"server: some rank", "server.go", "p.Contributors == 0, ", ""},
	{"server: ranks of the job only", "server.go", ", p.Contributors&^plan.Ranks != 0:", ":"},
	{"server: tag in range", "server.go", "case p.Type == wire.TypeGrad && !tagInRange(p):", "case false:"},
	{"server: chunk in range", "server.go", "case p.Chunk >= plan.Chunks:", "case p.Chunk >= 2*plan.Chunks:"},

	// Switch slots.
	{"switch: claim from another job", "switch.go", "case slot.job != p.Job || ", "case "},
	{"switch: claim from another epoch", "switch.go", "slot.epoch != p.Epoch || ", ""},
	{"switch: claim from an older seq", "switch.go", " || wire.SerialLess(slot.seq, p.Seq):", ":"},
	{"switch: no claim from a newer seq", "switch.go", "wire.SerialLess(slot.seq, p.Seq)", "slot.seq != p.Seq"},
	{"switch: serial-number order", "switch.go", "wire.SerialLess(slot.seq, p.Seq)", "slot.seq < p.Seq"},
	{"switch: a newer owner has its own row", "switch.go", "case slot.seq != p.Seq: // newer", "case false:"},
	{"switch: stale is answered", "switch.go", "return refuse(p, wire.ReasonStale)", "return drop(wire.ReasonStale)"},
	{"switch: forwarding", "switch.go", "return plan.forward(p, wire.ReasonForwarded)", "return refuse(p, wire.ReasonStale)"},
	{"switch: FORWARDED", "switch.go", "	p.Flags |= wire.FlagForwarded\n", ""},
	{"switch: shape", "switch.go", " || !slot.fits(p):", ":"},
	{"switch: round and chunk are shape", "switch.go", "slot.round != p.Round || slot.chunk != p.Chunk || ", ""},
	{"switch: a duplicate does not add", "switch.go", "case slot.mask&own == 0:", "case slot.mask != plan.Cohort:"},
	{"switch: a duplicate at an open slot is told", "switch.go", "		slot.tell(wire.TypeWait, now, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}",
		"		return Outcome{Reason: wire.ReasonDuplicate}"},
	{"switch: a duplicate's RESULT to the sender only", "switch.go", "		slot.put(wire.TypeResult, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}",
		"		slot.put(wire.TypeResult, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToAll}"},
	{"switch: a repeated PARTIAL in the sender's name", "switch.go", "wire.ReasonDuplicate, Dest: ToServer,", "wire.ReasonDuplicate, Dest: ToServerAsService,"},
	{"switch: a first PARTIAL in the service's name", "switch.go", "Outcome{Dest: ToServerAsService,", "Outcome{Dest: ToServer,"},
	{"switch: a PARTIAL is repeated", "switch.go", "		slot.put(wire.TypePartial, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToServer, Server: plan.server(p)}",
		"		return Outcome{Reason: wire.ReasonDuplicate}"},
	{"switch: close on the cohort", "switch.go", "	switch {\n	case slot.mask != plan.Cohort:\n		return Outcome{}", "	switch {\n	case slot.mask != plan.Ranks:\n		return Outcome{}"},
	{"switch: chunk mod servers", "switch.go", "int(p.Chunk % uint32(plan.Servers))", "0"},
	{"switch: two versions", "switch.go", "p.Seq&(2*plan.Pool-1)", "p.Seq&(plan.Pool-1)"},
	{"switch: answers from servers' ports only", "switch.go", "case !slices.Contains(plan.servers, in.Port):", "case false:"},
	{"switch: answers to one are not multicast", "switch.go", "case !in.ToService:", "case false:"},
	{"switch: ACKs to the cohort only", "switch.go", "case p.Type == wire.TypeResult:", "case true:"},
	{"switch: the slot remembers the next epoch", "switch.go", "		slot.put(wire.TypeResult, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}",
		"		slot.put(wire.TypeResult, p)\n		p.NextEpoch = announced(p.Chunk, plan.NextEpoch)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}"},
	{"switch: pool is a power of two", "switch.go", "case !powerOfTwo(e.Pool) && (e.Pool != 0 || e.Cohort != 0):", "case false:"},

	// Server slots.
	{"server: claim from another job", "server.go", "s.epoch == 0 || s.job != p.Job", "s.epoch == 0"},
	{"server: claim of a new slot", "server.go", "s.epoch == 0 || s.job != p.Job", "s.job != p.Job"},
	{"server: claim from an older owner", "server.go", "case order < 0:", "case order < 0 && slot.epoch == 0:"},
	{"server: no claim from a newer owner", "server.go", "case order < 0:", "case order != 0:"},
	{"server: a newer owner has its own row", "server.go", "case order > 0:", "case false:"},
	{"server: round before epoch", "server.go", "cmp.Or(int(int32(s.round-p.Round)), int(int16(s.epoch-p.Epoch)))", "cmp.Or(int(int16(s.epoch-p.Epoch)), int(int32(s.round-p.Round)))"},
	{"server: rounds in serial-number order", "server.go", "int(int32(s.round-p.Round))", "int(s.round)-int(p.Round)"},
	{"server: epochs in serial-number order", "server.go", "int(int16(s.epoch-p.Epoch))", "int(s.epoch)-int(p.Epoch)"},
	{"server: shape", "server.go", "case !slot.fits(p):", "case false:"},
	{"server: closed first", "server.go", "case slot.mask == plan.Ranks: // closed", "case false: // closed"},
	{"server: a duplicate's RESULT to the sender only", "server.go", "Reason: wire.ReasonDuplicate, Dest: ToSender}\n	case slot.mask&p", "Reason: wire.ReasonDuplicate, Dest: ToService}\n	case slot.mask&p"},
	{"server: what is known in part is not added", "server.go", "case slot.mask&p.Contributors == 0:", "case p.Contributors&^slot.mask != 0:"},
	{"server: a duplicate does not add", "server.go", "case slot.mask&p.Contributors == 0:", "case p.Contributors&^slot.mask == 0 || slot.mask&p.Contributors == 0:"},
	{"server: overlap is refused", "server.go", "case p.Contributors&^slot.mask != 0:", "case false:"},
	{"server: a PARTIAL's ACK to the cohort", "server.go", "case partial:", "case false:"},
	{"server: a duplicate's ACK to the sender only", "server.go", "case !added:\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}", "case !added && !partial:\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}"},
	{"server: the slot remembers the next epoch", "server.go", "		slot.put(wire.TypeResult, p)\n		return Outcome{Reason: wire.ReasonDuplicate,", "		slot.put(wire.TypeResult, p)\n		p.NextEpoch = announced(p.Chunk, plan.NextEpoch)\n		return Outcome{Reason: wire.ReasonDuplicate,"},
	{"server: two rounds at least", "server.go", "plan.Rounds < 2 || ", ""},
	{"server: rounds are a power of two", "server.go", " || !powerOfTwo(plan.Rounds):", ":"},
	{"server: round mod rounds", "server.go", "(p.Round&(plan.Rounds-1))*plan.Chunks", "0"},

	// What slots keep.
	{"slot: SATURATED is sticky", "slot.go", "	s.sticky |= p.Flags & wire.StickyFlags\n", ""},
	{"slot: amax is the largest", "slot.go", "	s.amax = max(s.amax, p.Amax)\n", ""},
	{"slot: last contributor", "slot.go", "	s.last = p.Rank\n", ""},
	{"slot: tags add", "slot.go", "	s.tag[1] += p.Tag[1]\n", ""},
	{"slot: times", "slot.go", "s.prevAt, s.lastAt = s.lastAt, now", "s.lastAt = now"},
	{"slot: exponent is shape", "slot.go", "s.exponent == p.Exponent && ", ""},
	{"slot: chunk 0 announces", "slot.go", "if chunk != 0 {", "if false {"},
	{"slot: leases fit", "slot.go", "if uint64(base)+slots > uint64(have) {", "if false {"},

	// Workers.
	{"window: seq - pool was answered", "window.go", "range min(chunks, w.cfg.Pool)", "range min(chunks, 2*w.cfg.Pool)"},
	{"window: an ACK covers the ranks in it", "window.go", "	if !mine {\n		return EventNone\n	}\n	if h.Type == wire.TypeAck", "	if h.Type == wire.TypeAck"},
	{"window: a WAIT does not open", "window.go", "	if h.Type == wire.TypeAck {\n		w.opened", "	if true {\n		w.opened"},
	{"window: an ACK opens", "window.go", "	if h.Type == wire.TypeAck {\n		w.opened", "	if false {\n		w.opened"},
	{"window: opens once", "window.go", "	if w.chunks[i].open {\n		return\n	}\n", ""},
	{"window: full mask", "window.go", "if h.Contributors != w.cfg.Ranks {", "if false {"},
	{"window: job", "window.go", " || h.Job != w.cfg.Job", ""},
	{"window: round", "window.go", " || h.Round != w.round", ""},
	{"window: a RESULT counts once", "window.go", "if c.state == unsent || c.state == finished {", "if c.state == unsent {"},
	{"window: stale is no refusal", "window.go", "if !mine || h.Reason == wire.ReasonStale {", "if !mine {"},
	{"window: seq has no gap", "window.go", "w.base += uint32(len(w.chunks))", "w.base += uint32(len(w.chunks)) + 1"},
	{"window: the epoch changes at the next round only", "window.go", "		w.next = h.NextEpoch\n", "		w.next, w.epoch = h.NextEpoch, h.NextEpoch\n"},
	{"window: chunk 0 announces", "window.go", "	if i == 0 && h.NextEpoch", "	if h.NextEpoch"},
	{"window: the newest epoch", "window.go", " && wire.SerialLess16(w.next, h.NextEpoch)", ""},
	{"window: resends", "window.go", "	w.lost.push(i)\n", ""},
	{"window: congestion window", "window.go", "w.limit = max(1, w.limit/2)", "w.limit = max(1, w.limit)"},
	{"window: growth", "window.go", "		w.limit++\n", ""},
	{"window: halved once per flight", "window.go", "if c.sent >= w.cut {", "if true {"},
	{"window: a spurious timeout is undone", "window.go", "		w.limit = max(w.limit, w.undo)\n", ""},
	{"window: polls are slow", "window.go", "max(pollMin, w.rtt.timeout())", "w.rtt.timeout()"},
	{"window: polls slow down", "window.go", " << min(c.polls, 8)", ""},
	{"window: polls do not come at once", "window.go", "w.nextPoll = now + pollGap", "w.nextPoll = now"},
	{"window: Karn", "window.go", "case c.sends > 1:", "case false:"},
	{"window: who was last measures the network", "window.go", "case h.Type == wire.TypeResult && h.Rank != w.cfg.Rank:", "case false:"},
	{"rtt: back-off", "rtt.go", "		e.backoff++\n", ""},
	{"rtt: the back-off is bounded", "rtt.go", "if e.timeout() < rtoMax {", "if true {"},
	{"rtt: the back-off ends", "rtt.go", "{ e.backoff = 0 }", "{}"},
	{"rtt: variance", "rtt.go", "e.srtt+4*e.variance", "e.srtt"},

	// Changing a plan: rules that the test's own controller keeps.
	{"plan: each epoch has its half", "change_test.go", "return uint32(epoch%2) * 8", "return 0"},
	{"plan: removed only when all have finished", "change_test.go", "(w.next != epoch || !w.Done())", "w.next != epoch"},
	{"plan: the next change waits for it", "change_test.go", "		if !s.finished(next.Epoch) {\n			s.step--\n		}", "		s.step = 99"},
}
