package fault

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestInjector has several senders on several paths; every frame comes out once, when it is due.
func TestInjector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := NewInjector([]Spec{mustParse(t, "delay=10ms,delayed=0.5,reorder=0.2")})
		const ports, senders, frames = 4, 3, 200
		start := time.Now()
		var mu sync.Mutex
		got, late := map[uint16]int{}, 0
		var group sync.WaitGroup
		for port := uint16(1); port <= ports; port++ {
			p := j.Path(port, In, func([]byte) {
				mu.Lock()
				defer mu.Unlock()
				got[port]++
				if time.Since(start) >= 10*time.Millisecond {
					late++
				}
			})
			for range senders {
				group.Go(func() {
					for i := range frames {
						p.Send(number(i))
					}
				})
			}
		}
		group.Wait()
		time.Sleep(20 * time.Millisecond) // of the bubble's time
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		var all Counts
		for _, c := range j.Counts() {
			if c.Direction != In || got[c.Port] != senders*frames || c.Frames != senders*frames {
				t.Errorf("%d frames came out: %+v", got[c.Port], c)
			}
			all.Add(c.Counts)
		}
		if late != int(all.Delayed) {
			t.Errorf("%d frames came late, %d were delayed", late, all.Delayed)
		}
		j.Close()
		j.Close()
	})
}

// TestInjectorClosed sends nothing after Close, and knows paths without faults.
func TestInjectorClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := NewInjector([]Spec{mustParse(t, "delay=1s,port=1")})
		if p := j.Path(2, In, nil); p != nil {
			t.Error("port 2 has a faulty path")
		}
		p := j.Path(1, Out, func([]byte) { t.Error("a frame came after the end") })
		p.Send(number(1))
		j.Close()
		time.Sleep(2 * time.Second)
	})
}
