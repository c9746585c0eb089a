package agg

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"xagg/wire"
)

// The state machines are pure: time comes as a value, and there is nothing else to come.
func TestPure(t *testing.T) {
	allowed := []string{"cmp", "fmt", "math", "math/bits", "slices", "time", "xagg/wire"}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range f.Imports {
			if path, _ := strconv.Unquote(spec.Path.Value); !slices.Contains(allowed, path) {
				t.Errorf("%s imports %s", file, path)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s starts a goroutine", file)
			case *ast.SelectorExpr:
				x, ok := n.X.(*ast.Ident)
				if ok && x.Name == "time" && !slices.Contains([]string{"Duration", "Second", "Millisecond", "Microsecond"}, n.Sel.Name) {
					t.Errorf("%s uses time.%s", file, n.Sel.Name)
				}
			}
			return true
		})
	}
}

func TestRTT(t *testing.T) {
	e := newRTT()
	if e.rto != rtoInitial {
		t.Errorf("timeout %v before any sample, want %v", e.rto, rtoInitial)
	}
	for range 100 {
		e.sample(time.Millisecond)
	}
	if e.rto != rtoMin {
		t.Errorf("timeout %v after samples of 1 ms, want %v", e.rto, rtoMin)
	}
	for range 100 {
		e.sample(time.Minute)
	}
	if e.rto != rtoMax {
		t.Errorf("timeout %v after samples of a minute, want %v", e.rto, rtoMax)
	}
}

// A round of many chunks takes little more time for each than a short one has, with losses and waiting chunks too.
func TestWindowLongRound(t *testing.T) {
	const chunks = 200_000
	w := NewWindow(WindowConfig{Job: 1, Epoch: 1, Rank: 0, Ranks: 3, Pool: 64})
	w.Begin(0, chunks)
	var now time.Duration
	steps := 0
	for !w.Done() {
		if steps++; steps > 10*chunks {
			t.Fatalf("%d chunks left after %d steps", w.left, steps)
		}
		send, ok := w.Next(now)
		if !ok {
			at, ok := w.Deadline()
			if !ok {
				t.Fatal("nothing outstanding, and not done")
			}
			now = max(now, at)
			continue
		}
		now += 10 * time.Microsecond
		h := wire.Header{Type: wire.TypeAck, Job: 1, Epoch: 1, Chunk: send.Chunk, Contributors: 1}
		switch {
		case send.Chunk%1000 == 7 && !send.Resend: // lost
			continue
		case send.Resend || send.Chunk%1000 != 8: // else only cached, until it is polled
			h.Type, h.Contributors = wire.TypeResult, 3
		}
		w.Handle(now, &h)
	}
	if got := w.Stats(); got.Results != chunks || got.Resends != 2*chunks/1000 {
		t.Errorf("%+v, want %d results and %d resends", got, chunks, 2*chunks/1000)
	}
}

func TestHandleDoesNotAllocate(t *testing.T) {
	sw, server := benchSwitch(t), benchServer(t)
	w := NewWindow(WindowConfig{Job: modelJob, Epoch: 1, Rank: 0, Ranks: 3, Pool: 4})
	p := [2]*wire.Packet{benchGrad(0), benchGrad(1)}
	var q wire.Packet
	seq := uint32(0)
	run := func() {
		round, _ := w.Begin(0, 1)
		w.Next(0)
		for r := range p {
			q = *p[r]
			q.Seq, q.Round = seq, round
			sw.Handle(uint64(seq), benchIngress(r), &q)
			q = *p[r]
			q.Seq, q.Round = seq, round
			server.Handle(uint64(seq), &q)
		}
		if w.Handle(0, &q.Header) != EventResult {
			t.Fatalf("no RESULT: %+v", q.Header)
		}
		seq++
	}
	for range 16 { // slots take their lanes when they are first used
		run()
	}
	if n := testing.AllocsPerRun(100, run); n != 0 {
		t.Errorf("%v allocations a chunk", n)
	}
}

// A server's slots cost little before they are used: the memory lab leases whole gradients.
func TestUnusedSlotsHaveNoLanes(t *testing.T) {
	s := NewServer(1 << 16)
	for i := range s.slots {
		if s.slots[i].lanes != nil {
			t.Fatal("an unused slot has lanes")
		}
	}
}

func benchSwitch(t testing.TB) *Switch {
	s := NewSwitch(16)
	err := s.Install(SwitchPlan{Job: modelJob, Epoch: 1, Ranks: 3, Cohort: 3, Pool: 4}, modelMembers(2), nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func benchServer(t testing.TB) *Server {
	s := NewServer(8)
	if err := s.Install(ServerPlan{Job: modelJob, Epoch: 1, Ranks: 3, Chunks: 1, Rounds: 8}); err != nil {
		t.Fatal(err)
	}
	return s
}

func benchIngress(rank int) Ingress {
	m := modelMember(uint8(rank))
	return Ingress{Port: m.Port, Src: m.Src}
}

// benchGrad is a GRAD of 256 lanes.
func benchGrad(rank uint8) *wire.Packet {
	p := grad(1, rank, 0, 0, 0, 1)
	p.Elems, p.Blocks = wire.MaxLanes, wire.MaxBlocks
	for i := range p.Lanes {
		p.Lanes[i] = int32(i)
	}
	p.Seal()
	return p
}

// BenchmarkGrad256 is one GRAD of 256 lanes, every second of which completes a chunk and becomes its RESULT.
func BenchmarkGrad256(b *testing.B) {
	run := func(handle func(rank int, p *wire.Packet) Outcome) func(*testing.B) {
		return func(b *testing.B) {
			p := [2]*wire.Packet{benchGrad(0), benchGrad(1)}
			var q wire.Packet
			q.Lanes = p[0].Lanes
			seq := uint32(0)
			b.ReportAllocs()
			for b.Loop() {
				r := int(seq & 1)
				q.Header = p[r].Header // a RESULT's lanes serve as the next GRAD's: their values do not matter
				q.Seq, q.Round = seq/2, seq/2
				if out := handle(r, &q); out.Reason != wire.ReasonNone {
					b.Fatal(fmt.Sprint(out))
				}
				seq++
			}
		}
	}
	sw, server := benchSwitch(b), benchServer(b)
	b.Run("switch", run(func(r int, p *wire.Packet) Outcome { return sw.Handle(0, benchIngress(r), p) }))
	b.Run("server", run(func(_ int, p *wire.Packet) Outcome { return server.Handle(0, p) }))
}

// BenchmarkWindow is one chunk's sending and its RESULT, in rounds of 100,000.
func BenchmarkWindow(b *testing.B) {
	w := NewWindow(WindowConfig{Job: 1, Epoch: 1, Rank: 0, Ranks: 3, Pool: 64})
	h := wire.Header{Type: wire.TypeResult, Job: 1, Epoch: 1, Contributors: 3}
	var now time.Duration
	b.ReportAllocs()
	for b.Loop() {
		if w.Done() {
			h.Round, _ = w.Begin(now, 100_000)
		}
		send, ok := w.Next(now)
		if !ok {
			b.Fatal("nothing to send")
		}
		now += time.Microsecond
		h.Chunk = send.Chunk
		w.Handle(now, &h)
	}
}
