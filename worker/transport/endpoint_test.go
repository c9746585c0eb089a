package transport

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"xagg/agg"
	"xagg/wire"
)

// net is two endpoints and a switch without links: what one sends is there.
type net struct {
	*testing.T
	sw   *agg.Switch
	ends [2]*Endpoint
	now  time.Duration
}

func newNet(t *testing.T) *net {
	n := &net{T: t, sw: agg.NewSwitch(8)}
	members := map[uint8]agg.Member{0: {Port: 1}, 1: {Port: 2}}
	err := n.sw.Install(agg.SwitchPlan{Job: 1, Epoch: 1, Ranks: 3, Cohort: 3, Base: 4, Pool: 2}, members, nil)
	if err != nil {
		t.Fatal(err)
	}
	for r := range n.ends {
		n.ends[r] = New(Config{Job: 1, Epoch: 1, Rank: r, Ranks: 2, Pool: 2, MaxChunks: 2})
	}
	return n
}

// pump carries packets for the given ranks until nothing is due.
func (n *net) pump(ranks ...int) {
	batch := make([][]byte, 0, 1)
	for moved := true; moved; {
		moved = false
		for _, r := range ranks {
			for _, b := range n.ends[r].Due(n.now, batch) {
				moved = true
				n.send(r, b)
			}
		}
	}
}

func (n *net) send(rank int, b []byte) {
	var p wire.Packet
	if err := p.Decode(b); err != nil {
		n.Fatal(err)
	}
	to := []int{rank}
	switch out := n.sw.Handle(uint64(n.now.Microseconds()), agg.Ingress{Port: uint16(rank + 1)}, &p); out.Dest {
	case agg.Nowhere:
		return
	case agg.ToAll:
		to = []int{0, 1}
	}
	answer := make([]byte, p.Len())
	p.Encode(answer)
	for _, r := range to {
		if err := n.ends[r].Take(n.now, answer); err != nil {
			n.Fatal(err)
		}
	}
}

func (n *net) begin(rank int, key string, data []float32) {
	if _, err := n.ends[rank].Begin(n.now, key, data); err != nil {
		n.Fatal(err)
	}
}

// TestAllReduce: a vector of more lanes than a round has goes in as many rounds as it needs, after a scout; the next of
// the same tensor needs none.
func TestAllReduce(t *testing.T) {
	n := newNet(t)
	for step, want := range []Info{
		{Round: 0, Rounds: 3, Chunks: 4},
		{Round: 3, Rounds: 2, Chunks: 3},
	} {
		data := [2][]float32{make([]float32, 600), make([]float32, 600)}
		for i := range data[0] {
			data[0][i], data[1][i] = float32(i), 0.5
		}
		for r := range n.ends {
			n.begin(r, "k", data[r])
		}
		n.now += time.Millisecond
		n.pump(0, 1)
		for r, e := range n.ends {
			if !e.Done() {
				t.Fatalf("step %d: rank %d is not done: %v", step, r, e.Overdue(n.now))
			}
			if i := e.Info(); i.Round != want.Round || i.Rounds != want.Rounds || i.Chunks != want.Chunks || i.Mask != 3 ||
				i.Packets != uint64(want.Chunks) || i.Duration != time.Millisecond {
				t.Errorf("step %d: info %+v", step, i)
			}
			for i, x := range data[r] {
				if x != float32(i)+0.5 {
					t.Fatalf("step %d: rank %d: value %d is %g", step, r, i, x)
				}
			}
			if at, ok := e.Deadline(); ok {
				t.Errorf("step %d: rank %d wants to be asked at %v", step, r, at)
			}
		}
	}
}

// TestOverdue: an endpoint knows whom it waits for as soon as an aggregator has told it.
func TestOverdue(t *testing.T) {
	n := newNet(t)
	n.ends[0].BeginInt32(n.now, "k", []int32{1})
	n.pump(0)
	if late := n.ends[0].Overdue(time.Second); len(late.Missing) != 0 || late.Left != 1 || late.Waited != time.Second {
		t.Errorf("before any answer: %+v", late)
	}
	at, ok := n.ends[0].Deadline()
	if !ok {
		t.Fatal("no deadline while an answer is outstanding")
	}
	n.now = at
	n.pump(0)
	if late := n.ends[0].Overdue(n.now); !slices.Equal(late.Missing, []int{1}) || late.Server {
		t.Errorf("after a WAIT: %+v", late)
	}
}

// TestBegin: what cannot be begun, and that it leaves the endpoint as it was.
func TestBegin(t *testing.T) {
	n := newNet(t)
	var bad *NonFiniteError
	if _, err := n.ends[0].Begin(0, "k", []float32{0, float32(math.NaN())}); !errors.As(err, &bad) || bad.Index != 1 {
		t.Errorf("NaN: %v", err)
	}
	if _, err := n.ends[0].Begin(0, "k", []float32{0}); err == nil {
		t.Error("a tensor of another length was begun")
	}
	if batch := n.ends[0].Due(0, make([][]byte, 0, 1)); len(batch) > 0 || !n.ends[0].Done() {
		t.Error("something was begun")
	}
}
