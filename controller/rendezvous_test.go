package controller

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func seatOf(rank int, digest string) seat {
	ip := netip.AddrFrom4([4]byte{10, 77, 0, byte(rank + 1)})
	return seat{member: member{Host{Name: fmt.Sprint("w", rank), IP: ip}, 19860}, digest: digest}
}

func jobOf(ranks int) *job { return &job{spec: JobSpec{Name: "train", Ranks: ranks}} }

// meet seats ranks with the given digests.
func meet(t *testing.T, digests ...string) *rendezvous {
	t.Helper()
	r := newRendezvous(jobOf(len(digests)))
	for rank, d := range digests {
		if err := r.join(rank, seatOf(rank, d)); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func TestDisagreement(t *testing.T) {
	for _, tt := range []struct {
		digests []string
		odd     []uint32
		err     string
	}{
		{[]string{"a"}, nil, ""},
		{[]string{"a", "a", "a"}, nil, ""},
		{[]string{"a", "a", "b"}, []uint32{2}, `rank 2 has "b", the others have "a"`},
		{[]string{"b", "a", "a"}, []uint32{0}, `rank 0 has "b", the others have "a"`},
		{[]string{"a", "b"}, []uint32{1}, `rank 1 has "b", the others have "a"`}, // a tie: rank 0 counts
		{[]string{"b", "c", "a", "a", "c"}, []uint32{0, 2, 3}, `rank 2-3 has "a", rank 0 has "b", the others have "c"`},
		{[]string{"b", "c", "a", "a", "a"}, []uint32{0, 1}, `rank 0 has "b", rank 1 has "c", the others have "a"`},
	} {
		r := meet(t, tt.digests...)
		if tt.err == "" {
			if r.state != stateInstalling || r.err != nil {
				t.Errorf("%v: %s, %v", tt.digests, r.state, r.err)
			}
			continue
		}
		if r.state != stateAborted || !slices.Equal(r.odd, tt.odd) || !strings.HasSuffix(r.err.Error(), ": "+tt.err) {
			t.Errorf("%v: %s, odd %v: %v", tt.digests, r.state, r.odd, r.err)
		}
	}
}

func TestRendezvous(t *testing.T) {
	isClosed := func(ch <-chan struct{}) bool {
		select {
		case <-ch:
			return true
		default:
			return false
		}
	}
	t.Run("all leave", func(t *testing.T) {
		r := meet(t, "a", "a")
		if err := r.leave(0); err == nil {
			t.Error("a rank left before the job began")
		}
		if isClosed(r.ready) {
			t.Error("ready before the switch is")
		}
		r.installed()
		if !isClosed(r.ready) || r.state != stateRunning {
			t.Errorf("state %s", r.state)
		}
		if err := r.leave(1); err != nil || isClosed(r.over) {
			t.Errorf("one left: %v, over %v", err, isClosed(r.over))
		}
		r.gone(1) // its stream ends before the others have left
		if err := r.leave(1); err != nil || r.state != stateRunning {
			t.Errorf("left twice: %v, %s", err, r.state)
		}
		if err := r.leave(0); err != nil || !isClosed(r.over) || r.state != stateFinished || r.err != nil {
			t.Errorf("all left: %v, %s, %v", err, r.state, r.err)
		}
		r.gone(0)
		if r.state != stateFinished {
			t.Errorf("state %s", r.state)
		}
	})
	t.Run("a rank dies in the barrier", func(t *testing.T) {
		r := newRendezvous(jobOf(2))
		for range 3 {
			if err := r.join(0, seatOf(0, "a")); err != nil {
				t.Fatal(err)
			}
			r.gone(0)
		}
		if r.joined() != 0 || r.state != stateWaiting {
			t.Errorf("joined %b, %s", r.joined(), r.state)
		}
	})
	t.Run("a rank dies while running", func(t *testing.T) {
		r := meet(t, "a", "a", "a")
		r.installed()
		r.gone(2)
		if !isClosed(r.over) || r.state != stateAborted || !slices.Equal(r.odd, []uint32{2}) ||
			r.err.Error() != "rank 2 on host w2 went away without leaving" {
			t.Errorf("%s, odd %v, %v", r.state, r.odd, r.err)
		}
		r.gone(1)
		if !slices.Equal(r.odd, []uint32{2}) {
			t.Errorf("the second to go is blamed: %v", r.odd)
		}
	})
	t.Run("a rank dies while the switch is being programmed", func(t *testing.T) {
		r := meet(t, "a", "a")
		r.gone(0)
		r.installed()
		if isClosed(r.ready) || r.state != stateAborted {
			t.Errorf("ready %v, %s", isClosed(r.ready), r.state)
		}
	})
	t.Run("seats", func(t *testing.T) {
		r := newRendezvous(jobOf(3))
		if err := r.join(1, seatOf(1, "a")); err != nil {
			t.Fatal(err)
		}
		var serr *seatError
		if err := r.join(1, seatOf(2, "a")); !errors.As(err, &serr) || !strings.Contains(err.Error(), "rank 1 of job \"train\" has joined already, from 10.77.0.2") {
			t.Errorf("same rank: %v", err)
		}
		if err := r.join(2, seatOf(1, "a")); !errors.As(err, &serr) || !strings.Contains(err.Error(), "rank 2 needs another port") {
			t.Errorf("same address and port: %v", err)
		}
		other := seatOf(1, "a")
		other.member.udpPort++
		if err := r.join(2, other); err != nil {
			t.Errorf("same address, another port: %v", err)
		}
	})
}

// TestRendezvousNeverGetsStuck: whatever ranks do, a rendezvous ends well exactly when all leave, and nobody is let go
// before all have joined.
func TestRendezvousNeverGetsStuck(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 4).Draw(t, "ranks")
		r := newRendezvous(jobOf(n))
		gone := make([]bool, n) // since its last join
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			rank := rapid.IntRange(0, n-1).Draw(t, "rank")
			full := !slices.Contains(r.seats, nil)
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				if r.state == stateWaiting && r.join(rank, seatOf(rank, "a")) == nil {
					gone[rank] = false
				}
			case 1:
				if r.seats[rank] != nil && !gone[rank] {
					gone[rank] = true
					before := r.state
					r.gone(rank)
					if (before == stateRunning || before == stateInstalling) && r.left>>rank&1 == 0 && r.state != stateAborted {
						t.Fatalf("rank %d went away while %s, now %s", rank, before, r.state)
					}
				}
			case 2:
				r.installed()
				if r.state == stateRunning && !full {
					t.Fatal("running without all ranks")
				}
			case 3:
				if r.state == stateRunning && !gone[rank] {
					if err := r.leave(rank); err != nil {
						t.Fatal(err)
					}
				}
			}
			if (r.state == stateFinished) != (r.err == nil && r.left == 1<<n-1) {
				t.Fatalf("%s with %b left, %v", r.state, r.left, r.err)
			}
		}
	})
}

// TestFresh: that a rank has come as far as another one began says that all before is over, but of a rank that came back
// itself only when that is known of what it missed.
func TestFresh(t *testing.T) {
	r := &rendezvous{seats: []*seat{{}, {round: 5, fresh: true}, {round: 5, fresh: true}, {round: 9, fresh: true}, nil}}
	for _, c := range []struct {
		rank  int
		round uint32
		want  uint64
	}{
		{1, 7, 0b1110}, // rank 2 began with the same round: neither knows
		{2, 9, 0b1110},
		{0, 4, 0b1110},
		{0, 5, 0b1000},
		{1, 8, 0b1000},
		{1, 9, 0},
	} {
		if r.begins(c.rank, c.round); r.fresh() != c.want {
			t.Errorf("after rank %d has begun round %d: %#b, want %#b", c.rank, c.round, r.fresh(), c.want)
		}
	}
	r = &rendezvous{seats: []*seat{{deaf: true}, {round: 5, fresh: true}, {round: 5, fresh: true}, {round: 9, fresh: true}}}
	if r.fresh() != 0b1000 {
		t.Errorf("when those who were there all the time are gone: %#b", r.fresh())
	}
}
