package agg

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestEveryRuleIsTested takes the rules away one by one and demands that the package's own tests fail without each.
//
// A rule is taken away in the source text of a function. So that one build serves all rules, the build is given every
// changed function beside the right one, which calls the changed one when the environment names its rule.
func TestEveryRuleIsTested(t *testing.T) {
	if testing.Short() { // as in each of its own runs
		t.Skip("builds and runs the tests once more, and in part once per rule")
	}
	gocmd, err := exec.LookPath("go")
	if err != nil {
		t.Skipf("no go command: %v", err)
	}
	binary := buildMutants(t, gocmd)
	// Whoever takes much longer than the right program hangs, however busy the machine is.
	limit := 10 * time.Minute
	run := func(t *testing.T, number int, tests string) ([]byte, error) {
		cmd := exec.CommandContext(t.Context(), binary, "-test.run="+tests, "-test.short", "-test.failfast",
			"-test.timeout="+limit.String(), "-rapid.nofailfile", "-rapid.shrinktime=0s", "-rapid.seed=3", "-rapid.checks=1000")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", mutantEnv, number), "GOMAXPROCS=1")
		return cmd.CombinedOutput()
	}
	begin := time.Now()
	if out, err := run(t, -1, ""); err != nil {
		t.Fatalf("the tests fail with all rules: %v\n%s", err, out)
	}
	limit = 30*time.Second + 10*time.Since(begin)
	for i, m := range mutants {
		t.Run(m.rule, func(t *testing.T) {
			t.Parallel()
			out, err := run(t, i, "TestScripts") // the quickest
			if err == nil {
				out, err = run(t, i, "")
			}
			if err == nil {
				t.Errorf("no test fails without this rule")
			} else if !bytes.Contains(out, []byte("FAIL")) && !bytes.Contains(out, []byte("panic: ")) {
				t.Fatalf("the tests did not run: %v\n%s", err, out)
			}
		})
	}
}

const mutantEnv = "XAGG_AGG_MUTANT"

// buildMutants builds the package's tests with all mutants and returns the binary's path.
func buildMutants(t *testing.T, gocmd string) string {
	dir := t.TempDir()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"mutant.go": fmt.Sprintf(`package agg

import (
	"os"
	"strconv"
)

var mutantNumber, _ = strconv.Atoi(os.Getenv(%q))
`, mutantEnv)}
	for i, m := range mutants {
		text, ok := files[m.file]
		if !ok {
			source, err := os.ReadFile(m.file)
			if err != nil {
				t.Fatal(err)
			}
			text = string(source)
		}
		if files[m.file], err = m.addTo(text, i); err != nil {
			t.Fatalf("%s: %v", m.rule, err)
		}
	}
	replace := make(map[string]string)
	for name, text := range files {
		replace[filepath.Join(here, name)] = filepath.Join(dir, name)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o644); err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "agg.test")
	cmd := exec.CommandContext(t.Context(), gocmd, "test", "-c", "-vet=off", "-overlay="+filepath.Join(dir, "overlay.json"), "-o", binary, ".")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the mutants: %v\n%s", err, out)
	}
	return binary
}

// addTo adds the function that lacks the rule to a file, and a call of it to the right one.
func (m *mutant) addTo(text string, number int) (string, error) {
	original, _, _ := strings.Cut(text, mutantsBelow)
	if n := strings.Count(original, m.old); n != 1 {
		return "", fmt.Errorf("%s has %d times %q, want once: the rule has moved", m.file, n, m.old)
	}
	at := strings.Index(original, m.old)
	right, err := functionAt(original, at)
	if err != nil {
		return "", err
	}
	changed := original[:at] + m.new + original[at+len(m.old):]
	wrong, err := functionAt(changed, at)
	if err != nil {
		return "", err
	}
	if !strings.Contains(text, mutantsBelow) {
		text += mutantsBelow
	}
	name := fmt.Sprintf("%s_%d", right.Name.Name, number)
	offset := func(p token.Pos) int { return int(p) - 1 } // the only file of its set
	call := name + "("
	if right.Recv != nil {
		call = right.Recv.List[0].Names[0].Name + "." + call
	}
	for _, field := range right.Type.Params.List {
		for _, n := range field.Names {
			call += n.Name + ", "
		}
	}
	call += ")"
	if right.Type.Results != nil {
		call = "return " + call
	} else {
		call += "; return"
	}
	body := offset(right.Body.Lbrace) + 1
	// On the same line, so that lines keep their numbers; m.old stays as it is for the next mutant.
	text = text[:body] + fmt.Sprintf(" if mutantNumber == %d { %s };", number, call) + text[body:]
	decl := changed[offset(wrong.Pos()):offset(wrong.End())]
	id := offset(wrong.Name.Pos()) - offset(wrong.Pos())
	return text + decl[:id] + name + decl[id+len(wrong.Name.Name):] + "\n\n", nil
}

const mutantsBelow = "\n// Mutants.\n\n"

// functionAt returns the function that the text has at an offset.
func functionAt(text string, at int) (*ast.FuncDecl, error) {
	f, err := parser.ParseFile(token.NewFileSet(), "", text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && int(fn.Pos())-1 <= at && at < int(fn.End())-1 {
			fn.Doc = nil // so that its position is that of its keyword
			return fn, nil
		}
	}
	return nil, fmt.Errorf("no function at offset %d", at)
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
	{"switch: forwarding", "switch.go", "		}\n		return plan.forward(p, wire.ReasonForwarded)", "		}\n		return refuse(p, wire.ReasonStale)"},
	{"switch: FORWARDED", "switch.go", "	p.Flags |= wire.FlagForwarded\n", ""},
	{"switch: shape", "switch.go", " || !slot.fits(p):", ":"},
	{"switch: round and chunk are shape", "switch.go", "slot.round != p.Round || slot.chunk != p.Chunk || ", ""},
	{"switch: a duplicate does not add", "switch.go", "case slot.mask&own == 0:", "case !slot.closed:"},
	{"switch: a duplicate at an open slot is told", "switch.go", "		slot.tell(wire.TypeWait, now, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}",
		"		return Outcome{Reason: wire.ReasonDuplicate}"},
	{"switch: a duplicate's RESULT to the sender only", "switch.go", "		slot.put(wire.TypeResult, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}",
		"		slot.put(wire.TypeResult, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToAll}"},
	{"switch: a repeated PARTIAL in the sender's name", "switch.go", "wire.ReasonDuplicate, Dest: ToServer,", "wire.ReasonDuplicate, Dest: ToServerAsService,"},
	{"switch: a first PARTIAL in the service's name", "switch.go", "Outcome{Dest: ToServerAsService,", "Outcome{Dest: ToServer,"},
	{"switch: a PARTIAL is repeated", "switch.go", "		slot.put(wire.TypePartial, p)\n		return Outcome{Reason: wire.ReasonDuplicate, Dest: ToServer, Server: plan.server(p)}",
		"		return Outcome{Reason: wire.ReasonDuplicate}"},
	{"switch: close on the cohort", "switch.go", "	if slot.mask != plan.Cohort {", "	if slot.mask != plan.Ranks {"},
	{"switch: a closed slot stays closed", "switch.go", "	slot.closed = true\n	if plan.final", "	if plan.final"},
	{"switch: no running sums", "switch.go", "case p.Flags&wire.FlagAsync != 0:", "case false:"},
	{"switch: CTRL says closed", "switch.go", "	if p.Reason = 0; slot.closed {", "	if p.Reason = 0; false {"},
	{"switch: flush", "switch.go", "case !slot.closed && plan.Quorum && now", "case false && now"},
	{"switch: flush in quorum only", "switch.go", "!slot.closed && plan.Quorum && now", "!slot.closed && now"},
	{"switch: flush after wait", "switch.go", " && now-slot.firstAt >= uint64(plan.WaitUs):", ":"},
	{"switch: flush since the first arrival", "switch.go", "now-slot.firstAt >= ", "now-slot.lastAt >= "},
	{"switch: flush at wait", "switch.go", "now-slot.firstAt >= ", "now-slot.firstAt > "},
	{"switch: a flush closes", "switch.go", "		slot.closed = true\n		slot.put", "		slot.put"},
	{"switch: nothing is flushed twice", "switch.go", "case !slot.closed && plan.Quorum", "case plan.Quorum"},
	{"switch: a flush in the service's name", "switch.go", "wire.ReasonDuplicate, Dest: ToServerAsService,", "wire.ReasonDuplicate, Dest: ToServer,"},
	{"switch: who comes after a flush does not add", "switch.go", "case slot.mask&own == 0 && slot.closed:", "case false:"},
	{"switch: who comes after a flush is passed on", "switch.go", "by a flush\n		return plan.forward(p, wire.ReasonForwarded)", "by a flush\n		return refuse(p, wire.ReasonLate)"},
	{"switch: quorum needs a server", "switch.go", "case e.final() && e.Quorum:", "case false:"},
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
	{"server: closed first", "server.go", "case slot.closed:", "case false:"},
	{"server: a closed slot stays closed", "server.go", "if slot.closed = plan.closes(now, slot); slot.closed {", "if plan.closes(now, slot) {"},
	{"server: who is late is told", "server.go", "case slot.closed && p.Contributors&^slot.mask != 0:", "case false:"},
	{"server: LATE", "server.go", "		p.Flags |= wire.FlagLate\n", ""},
	{"server: late in part is late", "server.go", "slot.closed && p.Contributors&^slot.mask != 0:", "slot.closed && p.Contributors&slot.mask == 0:"},
	{"server: late RESULTs to the sender only", "server.go", "Reason: wire.ReasonLate, Dest: ToSender}", "Reason: wire.ReasonLate, Dest: ToService}"},
	{"server: SERVER", "server.go", "	p.Flags |= wire.FlagServer\n", ""},
	{"server: all ranks close", "server.go", "return slot.mask == plan.Ranks || ", "return "},
	{"server: quorum", "server.go", "plan.Quorum != 0 &&", "false &&"},
	{"server: quorum is optional", "server.go", "plan.Quorum != 0 &&", "true &&"},
	{"server: quorum of k", "server.go", " >= plan.Quorum &&", " > plan.Quorum &&"},
	{"server: enough ranks", "server.go", "uint32(bits.OnesCount64(slot.mask)) >= plan.Quorum && ", ""},
	{"server: quorum after wait", "server.go", " && now-slot.firstAt >= uint64(plan.WaitUs)", ""},
	{"server: quorum at wait", "server.go", "now-slot.firstAt >= ", "now-slot.firstAt > "},
	{"server: wait since the first arrival", "server.go", "now-slot.firstAt >= ", "now-slot.lastAt >= "},
	{"server: a duplicate is one, even if it closes", "server.go", "	if !added {\n", "	if !added && !plan.closes(now, slot) {\n"},
	{"server: a duplicate closes for all", "server.go", "		out.Dest = ToService\n		return out", "		if added {\n			out.Dest = ToService\n		}\n		return out"},
	{"server: what is known in part is no fault in quorum", "server.go", "!= 0 && plan.Quorum == 0:", "!= 0:"},
	{"server: quorum of ranks that are there", "server.go", "case plan.Quorum > uint32(bits.OnesCount64(plan.Ranks)):", "case false:"},

	{"server: a duplicate's RESULT to the sender only", "server.go", "return Outcome{Reason: wire.ReasonDuplicate, Dest: ToSender}", "return Outcome{Reason: wire.ReasonDuplicate, Dest: ToService}"},
	{"server: what is known in part is not added", "server.go", "case slot.mask&p.Contributors == 0:", "case p.Contributors&^slot.mask != 0:"},
	{"server: a duplicate does not add", "server.go", "case slot.mask&p.Contributors == 0:", "case p.Contributors&^slot.mask == 0 || slot.mask&p.Contributors == 0:"},
	{"server: overlap is refused", "server.go", "case p.Contributors&^slot.mask != 0 && plan.Quorum == 0:", "case false:"},
	{"server: a PARTIAL's ACK to the cohort", "server.go", "if added && p.Type == wire.TypePartial {", "if false {"},
	{"server: a duplicate's ACK to the sender only", "server.go", "if added && p.Type == wire.TypePartial {", "if p.Type == wire.TypePartial {"},
	{"server: the slot remembers the next epoch", "server.go", "		slot.result(p)\n		return Outcome{Reason: wire.ReasonDuplicate,", "		slot.result(p)\n		p.NextEpoch = announced(p.Chunk, plan.NextEpoch)\n		return Outcome{Reason: wire.ReasonDuplicate,"},
	{"server: two rounds at least", "server.go", "plan.Rounds < 2 || ", ""},
	{"server: rounds are a power of two", "server.go", " || !powerOfTwo(plan.Rounds):", ":"},
	{"server: round mod rounds", "server.go", "round := p.Round & (plan.Rounds - 1)", "round := uint32(0)"},

	// Running sums.
	{"async: asked for by the plan", "server.go", "case plan.Async && p.Type == wire.TypeGrad:", "case p.Type == wire.TypeGrad:"},
	{"async: GRADs only", "server.go", "case plan.Async && p.Type == wire.TypeGrad:", "case plan.Async:"},
	{"async: asked for by the packet", "server.go", "case p.Flags&wire.FlagAsync == 0:", "case p.Flags&wire.FlagAsync == 0 && !plan.Async:"},
	{"async: no quorum", "server.go", "case plan.Async && plan.Quorum != 0:", "case false:"},
	{"async: four rounds", "server.go", "case plan.Async && plan.Rounds != asyncRounds:", "case false:"},
	{"async: scouts have slots of their own", "server.go", "round = 2 + p.Round&1", "round = p.Round & 1"},
	{"async: scouts have two rounds", "server.go", "round = 2 + p.Round&1", "round = 2"},
	{"async: claim from another job", "async.go", "sum.job != p.Job || ", ""},
	{"async: claim from another epoch", "async.go", " || sum.epoch != p.Epoch", ""},
	{"async: additions count from 0", "async.go", "		sum.seq = 0\n", ""},
	{"async: clocks begin at 0", "async.go", "		clocks.lanes = zeros(clocks.lanes, wire.MaxRanks)\n", "		clocks.lanes = append(clocks.lanes, make([]int32, wire.MaxRanks)...)\n"},
	{"async: shape", "async.go", "if !sum.fits(p) {", "if false {"},
	{"async: nothing is left out", "async.go", "case early > 0:", "case false:"},
	{"async: what is older is ignored", "async.go", "case early < -1:", "case false:"},
	{"async: what is older is not answered", "async.go", "return drop(wire.ReasonStale)", "return refuse(p, wire.ReasonStale)"},
	{"async: a duplicate does not add", "async.go", "case early == -1:", "case false:"},
	{"async: staleness", "async.go", "if sum.mask != plan.Ranks {", "if false {"},
	{"async: staleness of all ranks", "async.go", "if sum.mask != plan.Ranks {", "if sum.mask == 0 {"},
	{"async: staleness is the plan's", "async.go", "p.Round, int64(plan.Staleness))", "p.Round, 0)"},
	{"async: WAIT names who is near", "async.go", "			sum.tell(wire.TypeWait, sum.firstAt, p)\n", "			sum.tell(wire.TypeWait, sum.firstAt, p)\n			p.Contributors = plan.Ranks &^ sum.mask\n"},
	{"async: there are no times", "async.go", "		sum.at(now)\n", ""},
	{"async: WAIT has no times", "async.go", "sum.firstAt, p)", "now, p)"},
	{"async: tags do not wrap", "async.go", "			sum.tag[t] %= wire.P // there is no bound on the number of additions\n", "			_ = t\n"},
	{"async: additions are counted", "async.go", "		sum.seq++\n", ""},
	{"async: clocks go on", "async.go", "		clocks.lanes[p.Rank]++\n", ""},
	{"async: a RESULT names who has come", "async.go", "sum.mask = plan.within(clocks.lanes, p.Round, -1)", "sum.mask = plan.within(clocks.lanes, p.Round, 0)"},
	{"async: a RESULT tells the additions", "async.go", "	p.Seq = sum.seq\n", ""},
	{"async: the epoch that is armed", "async.go", "	p.NextEpoch = announced(p.Chunk, plan.NextEpoch)\n", ""},
	{"async: serial-number order", "async.go", "int64(int32(round)-clock) <= behind", "int64(round)-int64(uint32(clock)) <= behind"},
	{"async: ranks of the plan", "async.go", "return ranks & plan.Ranks", "return ranks"},

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
	{"switch: an open slot tells since when", "switch.go", "		p.SpreadUs = uint32(now - slot.firstAt)\n", ""},
	{"window: an ACK covers the ranks in it", "window.go", "	if !mine {\n		return EventNone\n	}\n	if h.Type == wire.TypeAck", "	if h.Type == wire.TypeAck"},
	{"window: a WAIT does not open", "window.go", "	if h.Type == wire.TypeAck {\n		w.opened", "	if true {\n		w.opened"},
	{"window: an ACK opens", "window.go", "	if h.Type == wire.TypeAck {\n		w.opened", "	if false {\n		w.opened"},
	{"window: seq - pool of another round was answered", "window.go", "return !w.has(before) || w.at(before).open", "return !w.has(before) || true || w.at(before).open"},
	{"window: a round waits for the one that is depth before it", "window.go", "len(w.rounds) < w.cfg.Depth || w.rounds[0].left == 0", "len(w.rounds) <= w.cfg.Depth"},
	{"window: epoch of an answer", "window.go", "h.Epoch != r.epoch || ", ""},
	{"window: quorum", "window.go", "bits.OnesCount64(ranks) >= w.cfg.Quorum", "true"},
	{"window: quorum of the job's ranks", "window.go", "w.cfg.Quorum > 0 && ranks&^w.cfg.Ranks == 0 &&", "w.cfg.Quorum > 0 &&"},
	{"window: what was not sent is in no RESULT", "window.go", "(h.Type != wire.TypeResult || mine)", "h.Type != wire.TypeResult"},
	{"window: quorum asks when the timer runs out", "window.go", "	if w.cfg.Quorum > 0 {\n		w.again(i)\n		return\n	}\n", ""},
	{"window: quorum asks more and more rarely", "window.go", "		c.due = now + w.patience(c) // nobody", "		// nobody"},
	{"window: quorum asks when a chunk may be closed", "window.go", "			c.due = now + max(open, w.rtt.srtt)\n", ""},
	{"window: who asks alone measures the network", "window.go", "				w.at(c).alone = true\n", ""},
	{"window: a timeout makes an answer ambiguous", "window.go", "	w.at(i).alone = false\n", ""},
	{"window: stale with a quorum", "window.go", "h.Reason == wire.ReasonStale && w.cfg.Quorum == 0:", "h.Reason == wire.ReasonStale:"},
	{"window: quorum polls in the congestion window", "window.go", "if w.cfg.Quorum == 0 && now >= w.nextPoll {", "if now >= w.nextPoll {"},
	{"window: a poll without room waits for a timer", "window.go", "if w.cfg.Quorum == 0 || w.flight < w.limit {", "if true {"},
	{"window: async asks when the timer runs out", "window.go", "	if w.cfg.Async {\n		w.lose(now, i) // it would have been answered\n		return\n	}\n", ""},
	{"window: async takes a RESULT with this rank", "window.go", "ranks&^w.cfg.Ranks == 0 && ranks>>w.cfg.Rank&1 != 0", "ranks&^w.cfg.Ranks == 0"},
	{"window: async takes a RESULT of the job's ranks", "window.go", "return ranks&^w.cfg.Ranks == 0 && ranks>>w.cfg.Rank&1 != 0", "return ranks>>w.cfg.Rank&1 != 0"},
	{"window: what is held is tried again when others were added", "window.go", "		r.held.push(seq)\n", ""},
	{"window: held is not overdue", "window.go", "				break // held, see Handle\n", ""},
	{"window: a held chunk is probed", "window.go", "if !w.cfg.Async && wire.SerialLess(i, w.newest) {", "if wire.SerialLess(i, w.newest) {"},
	{"window: ranks that were missing move on", "window.go", "		c.mask = 0 // ranks move on\n", ""},
	{"window: async asks more and more rarely", "window.go", "w.cfg.Quorum > 0 || w.cfg.Async {\n		c.due", "w.cfg.Quorum > 0 {\n		c.due"},
	{"window: a forgotten chunk is probed", "window.go", "	if c.state != timedOut {\n		c.state = timedOut\n		w.silent.push(i)\n	}\n", ""},
	{"window: what was forgotten is sent again when a RESULT comes", "window.go", "		w.known()\n		w.result(now", "		w.result(now"},
	{"window: what was forgotten is sent again when a chunk is held", "window.go", "	w.known()\n	if c.state", "	if c.state"},
	{"window: what was forgotten is sent again in async jobs alone", "window.go", "	w.blank = w.cfg.Async", "	w.blank = true"},
	{"window: a forgotten chunk is not in flight", "window.go", "	if c.state == inFlight {\n		w.flight--\n	}\n	if c.state != timedOut", "	if c.state != timedOut"},
	{"window: probes slow down when nobody knows the plan", "window.go", "	if w.interval == 0 {\n		w.asked = true", "	if false {\n		w.asked = true"},
	{"window: rounds under older epochs are finished", "window.go", "if r := &w.rounds[i]; r.left > 0 {", "if r := &w.rounds[i]; false && r.left > 0 {"},
	{"restart: announcements are forgotten", "restart.go", "w.epoch, w.next, w.base = epoch, epoch, seq", "w.epoch, w.base = epoch, seq"},
	{"restart: a new numbering", "restart.go", "w.epoch, w.next, w.base = epoch, epoch, seq", "w.epoch, w.next = epoch, epoch"},
	{"restart: nothing is in flight", "restart.go", "w.flight, w.delivered, w.undo = 0, 0, 0", "w.delivered, w.undo = 0, 0"},
	{"restart: missing chunks alone have seqs", "restart.go", "return r.ids[seq-r.seq]", "return seq - r.seq"},
	{"restart: a final chunk is not taken again", "restart.go", "return r.seq + uint32(i), ok", "return r.seq + uint32(i), ok || i < len(r.ids)"},
	{"window: full mask", "window.go", "if !w.Enough(h.Contributors) {", "if false {"},
	{"window: job", "window.go", "h.Job != w.cfg.Job || ", ""},
	{"window: round", "window.go", " || back >= uint32(len(w.rounds))", ""},
	{"window: a RESULT counts once", "window.go", "if c.state == finished || c.sends == 0", "if c.sends == 0"},
	{"window: stale is no refusal", "window.go", "		case h.Reason == wire.ReasonStale && w.cfg.Quorum == 0:", "		case false:"},
	{"window: seq has no gap", "window.go", "seq := w.NextSeq()", "seq := w.NextSeq() + 1"},
	{"window: the epoch changes at the next round only", "window.go", "			r.announced = h.NextEpoch\n", "			r.announced, r.epoch = h.NextEpoch, h.NextEpoch\n"},
	{"window: the epoch changes after depth rounds", "window.go", "e := w.rounds[0].announced", "e := w.rounds[len(w.rounds)-1].announced"},
	{"window: chunk 0 announces", "window.go", "		if h.Chunk == 0 {\n			r.announced", "		if h.NextEpoch != 0 {\n			r.announced"},
	{"window: the newest epoch", "window.go", " && wire.SerialLess16(w.next, e)", ""},
	{"window: resends", "window.go", "	w.lost.push(i)\n", ""},
	{"window: congestion window", "window.go", "w.limit = max(w.limitMin, w.limit/2)", "w.limit = max(w.limitMin, w.limit)"},
	{"window: least congestion window", "window.go", "w.limit = max(w.limitMin, w.limit/2)", "w.limit = max(1, w.limit/2)"},
	{"window: growth", "window.go", "		w.limit++\n", ""},
	{"window: halved once per flight", "window.go", "if w.at(i).sent >= w.cut {", "if true {"},
	{"window: a spurious timeout is undone", "window.go", "		w.limit = max(w.limit, w.undo)\n", ""},
	{"window: a later RESULT tells a loss from a wait", "window.go", "	if wire.SerialLess(i, w.newest) {\n		w.lose(now, i)\n		return\n	}\n", ""},
	{"window: a RESULT makes lost what is silent before it", "window.go", "		case timedOut:\n			w.lose(now, j)\n", ""},
	{"window: a RESULT makes overdue what is delivered before it", "window.go", "			w.at(j).state = overdue\n", ""},
	{"window: delivered behind a RESULT is overdue", "window.go", "if !w.cfg.Async && wire.SerialLess(i, w.newest) {", "if false {"},
	{"window: what is overdue has time to come", "window.go", "w.at(j).due = now + w.rtt.rto", "w.at(j).due = now"},
	{"window: polls slow down", "window.go", "min(w.rtt.rto<<min(c.sends, 2), rtoMax)", "w.rtt.rto"},
	{"window: polls slow down to a bound", "window.go", "w.rtt.rto<<min(c.sends, 2)", "w.rtt.rto<<c.sends"},
	{"window: one probe at a time", "window.go", "if now >= w.nextProbe {", "if true {"},
	{"window: a probe has time to be answered", "window.go", "w.nextProbe = now + 2*w.rtt.rto", "w.nextProbe = now"},
	{"window: probes are slow while a rank is missing", "window.go", "max(4*w.interval, probeMin)", "0"},
	{"window: probes become rare", "window.go", "max(4*w.interval, probeMin)", "probeMin"},
	{"window: probes do not end", "window.go", "min(max(4*w.interval, probeMin), probeMax)", "max(4*w.interval, probeMin)"},
	{"window: an answer counts for one probe", "window.go", "	if !w.asked {\n		return\n	}\n", ""},
	{"window: probes become frequent when the round moves", "window.go", "	w.interval /= 4\n", ""},
	{"window: no probe while the round moves", "window.go", "now + max(w.interval, w.rtt.rto)", "now"},
	{"window: polls do not come at once", "window.go", "w.nextPoll = now + pollGap", "w.nextPoll = now"},
	{"window: wait as told", "window.go", "w.cfg.Wait = wait", "_ = wait"},
	{"window: Karn", "window.go", "case c.sends > 1:", "case false:"},
	{"window: who was last measures the network", "window.go", "case h.Rank != w.cfg.Rank:", "case false:"},
	{"rtt: at most", "rtt.go", "min(max(e.srtt+4*e.variance, rtoMin), rtoMax)", "max(e.srtt+4*e.variance, rtoMin)"},
	{"rtt: at least", "rtt.go", "max(e.srtt+4*e.variance, rtoMin)", "max(e.srtt+4*e.variance, rtoMin/10)"},
	{"rtt: variance", "rtt.go", "e.srtt+4*e.variance", "e.srtt"},

	// Changing a plan: rules that the test's own controller keeps.
	{"plan: each epoch has its half", "change_test.go", "return uint32(epoch%2) * 8", "return 0"},
	{"plan: removed only when all have finished", "change_test.go", "wire.SerialLess16(w.Epoch(), epoch)", "wire.SerialLess16(w.nextEpoch(), epoch)"},
	{"plan: the next change waits for it", "change_test.go", "		if !s.finished(next.Epoch) {\n			s.step--\n		}", "		s.step = 99"},
}
