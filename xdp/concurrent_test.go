package xdp

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"xagg/wire"
)

// TestConcurrent runs the program on several processors at once, as RSS does. Every contribution is sent by every one of
// them, some of the copies damaged: each must count once, a damaged one never, and each chunk must give one RESULT to
// the service, from whichever processor completed it.
func TestConcurrent(t *testing.T) {
	const ranks, chunks, rounds, processors = 64, 1, 80, 4
	server := load(t, 2*chunks)
	plan := Plan{Job: 5, Epoch: 1, Ranks: ^uint64(0), Lease: Lease{Chunks: chunks, Rounds: 2},
		ServiceIP: netip.AddrFrom4(serviceAddr.IP), ServiceMAC: serviceAddr.MAC}
	if err := server.Install(plan); err != nil {
		t.Fatal(err)
	}
	contribution := func(round, chunk uint32, rank uint8) *wire.Packet {
		p := grad(rank, 256)
		p.Round, p.Chunk = round, chunk
		for i := range p.Lanes {
			p.Lanes[i] = int32(round*1000+chunk*100) + int32(rank)*int32(i)
		}
		p.Seal()
		return p
	}
	for round := range uint32(rounds) {
		var sent [ranks * chunks][]byte
		for i := range sent {
			chunk, rank := uint32(i%chunks), uint8(i/chunks)
			sent[i] = wire.AppendFrame(nil, workerAddr(rank), serverAddr, contribution(round, chunk, rank), true)
		}
		var mu sync.Mutex
		results := make(map[uint32]int)
		var all sync.WaitGroup
		for processor := range uint64(processors) {
			all.Go(func() {
				rng := rand.New(rand.NewPCG(processor, uint64(round)))
				for _, i := range rng.Perm(ranks * chunks) {
					chunk, rank := uint32(i%chunks), uint8(i/chunks)
					frame := bytes.Clone(sent[i])
					// The last processor's copies are all sound, so that every chunk is completed.
					damaged := processor != processors-1 && rng.IntN(3) == 0
					if damaged {
						frame[wire.FrameOverhead+wire.HeaderLen+rng.IntN(1024)] ^= 1
					}
					verdict, answer, err := server.objects.Xagg.Test(frame)
					if err != nil {
						t.Error(err)
						return
					}
					if damaged {
						if verdict != verdictDrop {
							t.Errorf("damaged frame: verdict %d", verdict)
						}
						continue
					}
					var p wire.Packet
					_, dst, err := wire.ParseFrame(answer, &p)
					if verdict != verdictTX || err != nil {
						t.Errorf("verdict %d, answer: %v", verdict, err)
						return
					}
					if p.Type == wire.TypeAck {
						if p.Contributors>>rank&1 == 0 {
							t.Errorf("ACK does not cover rank %d: %#x", rank, p.Contributors)
						}
						continue
					}
					if p.Type != wire.TypeResult || p.Contributors != plan.Ranks || !p.TagOK() {
						t.Errorf("answer %+v, tag %v", p.Header, p.TagOK())
					}
					for i, v := range p.Lanes {
						if want := ranks*int32(round*1000+chunk*100) + ranks*(ranks-1)/2*int32(i); v != want {
							t.Errorf("round %d chunk %d lane %d is %d, want %d", round, chunk, i, v, want)
							return
						}
					}
					if dst == serviceAddr {
						mu.Lock()
						results[chunk]++
						mu.Unlock()
					}
				}
			})
		}
		all.Wait()
		for chunk := range uint32(chunks) {
			if results[chunk] != 1 {
				t.Errorf("round %d chunk %d: %d results to the service", round, chunk, results[chunk])
			}
		}
		if t.Failed() {
			return
		}
	}
	counts, err := server.Reasons()
	if err != nil {
		t.Fatal(err)
	}
	if counts[wire.ReasonNone] != ranks*chunks*rounds || counts[wire.ReasonChecksum] == 0 {
		t.Errorf("reasons %v", reasonMap(counts))
	}
	t.Logf("on %d processors: %v", runtime.NumCPU(), reasonMap(counts))
}
