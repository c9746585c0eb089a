package xdp

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"xagg/wire"
)

// contention is a job of which several senders, on several processors, send every contribution, in whatever order. It
// knows what answers may say, whatever the order was: its judge looks at all of them.
type contention struct {
	plan   Plan
	rounds uint32 // that are sent; async: contributions of each rank to each chunk
	damage bool   // some of the copies

	mu       sync.Mutex
	results  map[chunkID]*wire.Packet // the first RESULT of each chunk
	services map[chunkID]int          // RESULTs to the service
	clocks   map[uint32][]uint32      // async: the largest ones seen, by chunk and rank
	sums     map[[2]uint32]*wire.Packet
	answers  map[wire.Type]int
	wrong    error // the first thing that was
}

type chunkID struct{ round, chunk uint32 }

// contentions are jobs of every consistency.
func contentions() map[string]*contention {
	job := func(ranks uint64, rounds uint32, more Plan) *contention {
		more.Job, more.Epoch, more.Ranks = 5, 1, ranks
		more.Lease = Lease{Chunks: 2, Rounds: 4}
		more.ServiceIP, more.ServiceMAC = netip.AddrFrom4(serviceAddr.IP), serviceAddr.MAC
		c := &contention{
			plan: more, rounds: rounds, results: make(map[chunkID]*wire.Packet), services: make(map[chunkID]int),
			clocks: make(map[uint32][]uint32), sums: make(map[[2]uint32]*wire.Packet), answers: make(map[wire.Type]int),
		}
		for chunk := range more.Lease.Chunks {
			c.clocks[chunk] = make([]uint32, wire.MaxRanks)
		}
		return c
	}
	return map[string]*contention{
		"sync":          job(math.MaxUint64, 50, Plan{}),
		"quorum":        job(0xff, 400, Plan{Quorum: 3}),
		"quorum, wait":  job(0xff, 150, Plan{Quorum: 3, WaitUs: 300}),
		"async":         job(0xff, 200, Plan{Async: true, Staleness: 2}),
		"async, strict": job(0xff, 100, Plan{Async: true}),
	}
}

// lane is a value of a contribution. In async the first 64 lanes count the contributions of each rank.
func (c *contention) lane(round, chunk uint32, rank uint8, i int) int32 {
	if c.plan.Async && i < wire.MaxRanks {
		return int32(bits.OnesCount64(1 << i & (1 << rank)))
	}
	return int32(round*1000+chunk*100) + int32(rank)*int32(i)
}

// sum is the lane of the first n contributions of a rank together.
func (c *contention) sum(n, chunk uint32, rank uint8, i int) int32 {
	if i < wire.MaxRanks {
		return int32(n) * c.lane(0, chunk, rank, i)
	}
	return int32(n)*c.lane(0, chunk, rank, i) + int32(n*(n-1)/2)*1000
}

func (c *contention) frame(round, chunk uint32, rank uint8) []byte {
	p := grad(rank, 256)
	p.Round, p.Chunk, p.Amax = round, chunk, rank
	if c.plan.Async {
		p.Flags = wire.FlagAsync
	}
	for i := range p.Lanes {
		p.Lanes[i] = c.lane(round, chunk, rank, i)
	}
	p.Seal()
	return wire.AppendFrame(nil, workerAddr(rank), serverAddr, p, true)
}

// judge takes an answer.
func (c *contention) judge(frame []byte) {
	p := new(wire.Packet)
	_, dst, err := wire.ParseFrame(frame, p)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err != nil:
	case p.SpreadUs > 60e6: // processors may take the lock in another order than the time
		err = fmt.Errorf("with a spread of more than a minute")
	case p.Type == wire.TypeResult && c.plan.Async:
		err = c.judgeSum(p, uint8(dst.Port-workerAddr(0).Port))
	case p.Type == wire.TypeResult:
		err = c.judgeResult(p, dst)
	case p.Type == wire.TypeAck && !c.plan.Async && p.Contributors>>(dst.Port-workerAddr(0).Port)&1 == 1:
	case p.Type == wire.TypeWait && c.plan.Async && p.Contributors != c.plan.Ranks &&
		p.Contributors>>(dst.Port-workerAddr(0).Port)&1 == 1:
	case p.Type == wire.TypeNack && p.Reason == wire.ReasonStale: // of an earlier round, on links: overtaken
	default:
		err = fmt.Errorf("which is no answer")
	}
	c.answers[p.Type]++
	if err != nil && c.wrong == nil {
		c.wrong = fmt.Errorf("answer to %v: %+v: %w", dst, p.Header, err)
	}
}

// judgeResult checks that the RESULT is what everybody else was told, and the sum of its mask.
func (c *contention) judgeResult(p *wire.Packet, dst wire.Addr) error {
	id := chunkID{p.Round, p.Chunk}
	if dst == serviceAddr {
		if c.services[id]++; c.services[id] > 1 {
			return fmt.Errorf("closed again")
		}
	} else if late := p.Contributors>>(dst.Port-workerAddr(0).Port)&1 == 0; late != (p.Flags&wire.FlagLate != 0) {
		return fmt.Errorf("late is %v", late)
	}
	p.Flags &^= wire.FlagLate
	if first := c.results[id]; first != nil {
		if *p != *first {
			return fmt.Errorf("another RESULT was seen: %s", cmp.Diff(first, p))
		}
		return nil
	}
	c.results[id] = p
	need := c.plan.Ranks
	if n := bits.OnesCount64(p.Contributors); c.plan.Quorum != 0 && n >= int(c.plan.Quorum) {
		need = 0
	}
	if p.Contributors&need != need || p.Contributors&^c.plan.Ranks != 0 || !p.TagOK() || p.Flags != wire.FlagLast|wire.FlagServer ||
		int(p.Amax) != bits.Len64(p.Contributors)-1 || p.Contributors>>p.Rank&1 == 0 || p.BlockedUs > p.SpreadUs {
		return fmt.Errorf("want the mask %#x, tag ok is %v", need, p.TagOK())
	}
	for i, got := range p.Lanes {
		var want int32
		for m := p.Contributors; m != 0; m &= m - 1 {
			want += c.lane(p.Round, p.Chunk, uint8(bits.TrailingZeros64(m)), i)
		}
		if got != want {
			return fmt.Errorf("lane %d is %d, want %d", i, got, want)
		}
	}
	return nil
}

// judgeSum checks that a running sum has whole contributions in it, each rank's first ones, and that the asker's is
// among them and was not too early.
func (c *contention) judgeSum(p *wire.Packet, asker uint8) error {
	round := p.Round
	p.Round = 0
	var have uint64
	var additions uint32
	for rank := range uint8(wire.MaxRanks) {
		clock := uint32(p.Lanes[rank])
		additions += clock
		c.clocks[p.Chunk][rank] = max(c.clocks[p.Chunk][rank], clock)
		if clock > round {
			have |= 1 << rank
		}
		if c.plan.Ranks>>rank&1 == 1 && clock+c.plan.Staleness < round {
			return fmt.Errorf("round %d of rank %d was added when rank %d was at %d", round, asker, rank, clock)
		}
	}
	if p.Contributors != have || have>>asker&1 == 0 || p.Seq != additions || p.Flags != wire.FlagAsync|wire.FlagServer ||
		!wire.DifferenceOK(p.Job, p.Chunk, additions, [2]uint32{}, p.Tag, p.Lanes[:]) {
		return fmt.Errorf("round %d of rank %d: want mask %#x and %d additions; clocks %d", round, asker, have, additions, p.Lanes[:8])
	}
	p.Contributors = 0
	id := [2]uint32{p.Chunk, p.Seq}
	if first := c.sums[id]; first != nil {
		if *p != *first {
			return fmt.Errorf("another sum of %d additions was seen: %s", p.Seq, cmp.Diff(first, p))
		}
		return nil
	}
	c.sums[id] = p
	for i := wire.MaxRanks; i < wire.MaxLanes; i++ {
		var want int32
		for m := c.plan.Ranks; m != 0; m &= m - 1 {
			rank := uint8(bits.TrailingZeros64(m))
			want += c.sum(uint32(p.Lanes[rank]), p.Chunk, rank, i)
		}
		if p.Lanes[i] != want {
			return fmt.Errorf("lane %d of %d additions is %d, want %d", i, additions, p.Lanes[i], want)
		}
	}
	return nil
}

// next returns the round of rank's contribution to a chunk that is to be sent, and whether there is one.
func (c *contention) next(chunk uint32, rank uint8, rng *rand.Rand) (uint32, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.plan.Async {
		clock := c.clocks[chunk][rank]
		if clock > 0 && rng.IntN(4) == 0 {
			return clock - 1, true // again
		}
		return clock, clock < c.rounds
	}
	for round := range c.rounds { // a chunk's rounds one after the other, as workers send them
		if c.results[chunkID{round, chunk}] == nil {
			if round > 0 && rng.IntN(3) == 0 {
				return round - 1, true // again, or late
			}
			return round, true
		}
	}
	return 0, false
}

// pass sends one contribution of every rank to every chunk that is not done, in random order, and reports whether there
// were any.
func (c *contention) pass(rng *rand.Rand, send func(frame []byte) error) (more bool, err error) {
	chunks := int(c.plan.Lease.Chunks)
	for _, i := range rng.Perm(wire.MaxRanks * chunks) {
		chunk, rank := uint32(i%chunks), uint8(i/chunks)
		if c.plan.Ranks>>rank&1 == 0 {
			continue
		}
		round, ok := c.next(chunk, rank, rng)
		if !ok {
			continue
		}
		more = true
		frame := c.frame(round, chunk, rank)
		if c.damage && rng.IntN(5) == 0 {
			frame[wire.FrameOverhead+wire.HeaderLen+rng.IntN(1024)] ^= 1
		}
		if err := send(frame); err != nil {
			return more, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return more, c.wrong
}

// finish checks what is left when all is done: nothing was lost and nothing was added twice.
func (c *contention) finish(t *testing.T, server *Server) {
	t.Helper()
	counts, err := server.Reasons()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("on %d processors: %v, answers %v", runtime.NumCPU(), reasonMap(counts), c.answers)
	want := uint64(bits.OnesCount64(c.plan.Ranks)) * uint64(c.rounds) * uint64(c.plan.Lease.Chunks)
	for chunk := range c.plan.Lease.Chunks {
		if !c.plan.Async {
			break
		}
		var sum, clocks xaggSlot
		for at, slot := range map[uint32]*xaggSlot{chunk: &sum, c.plan.Lease.Chunks + chunk: &clocks} {
			if err := server.objects.Arena.Lookup(c.plan.Lease.Base+at, slot); err != nil {
				t.Fatal(err)
			}
		}
		for rank := range uint8(wire.MaxRanks) {
			if n := clocks.Lanes[rank]; n != laneOf(&sum, int(rank)) || n != c.rounds*uint32(c.plan.Ranks>>rank&1) {
				t.Errorf("chunk %d: clock of rank %d is %d, %d contributions are in", chunk, rank, n, laneOf(&sum, int(rank)))
			}
		}
		if last := c.sums[[2]uint32{chunk, sum.Round}]; uint64(sum.Round) != want/uint64(c.plan.Lease.Chunks) || last == nil {
			t.Errorf("chunk %d: %d additions, RESULT was seen: %v", chunk, sum.Round, last != nil)
		}
	}
	if c.plan.Quorum != 0 {
		want = 0
		for _, p := range c.results {
			want += uint64(bits.OnesCount64(p.Contributors))
		}
		if counts[wire.ReasonLate] == 0 {
			t.Error("nothing was late")
		}
	}
	if counts[wire.ReasonNone] != want {
		t.Errorf("%d contributions were summed, want %d", counts[wire.ReasonNone], want)
	}
	if c.damage != (counts[wire.ReasonChecksum] != 0) {
		t.Errorf("%d checksums were wrong", counts[wire.ReasonChecksum])
	}
}

// TestPitfall31 runs the program on several processors at once, as RSS does. Every contribution is sent by every one of
// them, some of the copies damaged: each must count once, a damaged one never, and whoever sees a full mask must see the
// lanes of all of it. Each chunk must give one RESULT to the service, from whichever processor closed it.
func TestPitfall31(t *testing.T) {
	const processors = 4
	for name, c := range contentions() {
		t.Run(name, func(t *testing.T) {
			server := load(t, c.plan.Lease.Slots())
			if err := server.Install(c.plan); err != nil {
				t.Fatal(err)
			}
			c.damage = true
			send := func(frame []byte) error {
				verdict, answer, err := server.objects.Xagg.Test(frame)
				switch {
				case err != nil:
					return err
				case verdict == verdictTX:
					c.judge(answer)
				case verdict != verdictDrop:
					return fmt.Errorf("verdict %d", verdict)
				}
				return nil
			}
			var all sync.WaitGroup
			for processor := range uint64(processors) {
				all.Go(func() {
					rng := rand.New(rand.NewPCG(processor, 31))
					for more, err := true, error(nil); more; {
						if more, err = c.pass(rng, send); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			all.Wait()
			c.finish(t, server)
			for id := range c.results {
				if c.services[id] != 1 {
					t.Errorf("round %d chunk %d: %d RESULTs to the service", id.round, id.chunk, c.services[id])
				}
			}
		})
	}
}
