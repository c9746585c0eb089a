package recovery

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

// held is a round with the given chunks' RESULTs.
func held(round, chunks uint32, have ...uint32) Held {
	h := NewHeld(round, chunks)
	for _, c := range have {
		h.Set(c)
	}
	return h
}

func TestMake(t *testing.T) {
	const last = 1<<32 - 1 // the last round number
	for _, c := range []struct {
		name   string
		states map[int]State
		want   Plan
	}{
		{
			"nothing has begun",
			map[int]State{0: {}, 1: {}},
			Plan{HandOver: map[int][]ChunkID{}, Lacks: map[int][]ChunkID{}},
		},
		{
			"between two rounds: nothing is missing",
			map[int]State{
				0: {First: 7, Next: 7, Boundary: 7, Seq: 30, AllReduces: 5, Rounds: []Held{held(6, 2, 0, 1)}},
				1: {First: 7, Next: 7, Boundary: 7, Seq: 30, AllReduces: 5, Rounds: []Held{held(6, 2, 0, 1)}},
			},
			Plan{
				Restart: Restart{Round: 7, Seq: 30}, HandOver: map[int][]ChunkID{}, Lacks: map[int][]ChunkID{},
				Return: 7, ReturnSeq: 30, ReturnAllReduce: 5, next: 7,
			},
		},
		{
			"ranks came back for all-reduces of which one has not begun everywhere",
			map[int]State{
				0: {First: 7, Next: 7, Boundary: 7, AllReduces: 5, Returns: []uint64{1, 5}},
				1: {First: 7, Next: 9, Boundary: 9, AllReduces: 6, Returns: []uint64{2, 4, 5, 8}, Rounds: []Held{held(7, 1), held(8, 1)}},
			},
			Plan{
				Restart:  Restart{Round: 7, Finals: []Held{held(7, 1), held(8, 1)}, Returns: []uint64{5, 8}},
				HandOver: map[int][]ChunkID{}, Lacks: map[int][]ChunkID{}, Return: 9, ReturnSeq: 2, ReturnAllReduce: 6, next: 9,
			},
		},
		{
			"one is ahead, one lacks what the other has, and both lack one; the numbers go round",
			map[int]State{
				0: {First: last, Next: last + 1 - 1<<32, Boundary: 1, Seq: 3, AllReduces: 10, Rounds: []Held{held(last, 3, 1), held(0, 4)}},
				1: {First: last, Next: last + 1 - 1<<32, Boundary: 0, Seq: 3, AllReduces: 9, Rounds: []Held{held(last, 3, 0)}},
				2: {First: last, Next: 1, Boundary: 1, Seq: 7, AllReduces: 10, Rounds: []Held{held(last, 3, 0, 1), held(0, 4)}},
			},
			Plan{
				Restart:  Restart{Round: last, Seq: 7, Finals: []Held{held(last, 3, 0, 1), held(0, 4)}},
				HandOver: map[int][]ChunkID{0: {{last, 1}}, 1: {{last, 0}}},
				Lacks:    map[int][]ChunkID{0: {{last, 0}}, 1: {{last, 1}}},
				Return:   1, ReturnSeq: 12, ReturnAllReduce: 10, next: 1,
			},
		},
		{
			"a rank without a round of its own is given what nobody who is there has begun",
			map[int]State{
				0: {First: 2, Next: 2, Boundary: 2, Seq: 2, Rounds: []Held{held(3, 1, 0)}},
				1: {First: 2, Next: 2, Boundary: 2, Seq: 2},
			},
			Plan{
				Restart:  Restart{Round: 2, Seq: 2, Finals: []Held{held(3, 1, 0)}},
				HandOver: map[int][]ChunkID{0: {{3, 0}}}, Lacks: map[int][]ChunkID{1: {{3, 0}}},
				Return: 2, ReturnSeq: 2, next: 2, ahead: true,
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Make(c.states)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}

func TestMakeFails(t *testing.T) {
	for _, c := range []struct {
		name   string
		states map[int]State
		want   error
		text   string
	}{
		{
			"too far behind",
			map[int]State{
				0: {First: 5, Next: 5, Boundary: 5, AllReduces: 5, Rounds: []Held{held(4, 1, 0)}},
				2: {First: 3, Next: 4, Boundary: 4, AllReduces: 4, Rounds: []Held{held(3, 1)}},
			},
			&BehindError{}, "rank 2 has not finished round 3",
		},
		{
			"ahead of all",
			map[int]State{0: {First: 1, Next: 1, Boundary: 1}, 1: {Began: 3, First: 3, Next: 4, Boundary: 4, AllReduces: 1, Rounds: []Held{held(3, 1)}}},
			&AheadError{}, "rank 1 came back for a round after 2",
		},
		{
			"two lengths",
			map[int]State{
				0: {First: 1, Next: 2, Boundary: 2, Rounds: []Held{held(1, 4)}},
				3: {First: 1, Next: 2, Boundary: 2, Rounds: []Held{held(1, 5)}},
			},
			&DisagreementError{}, "round 1 has 4 chunks at rank 0 and 5 at rank 3",
		},
		{
			"two counts",
			map[int]State{0: {First: 2, Next: 2, Boundary: 2, AllReduces: 2}, 1: {First: 2, Next: 2, Boundary: 2, AllReduces: 1}},
			&CountError{}, "2 all-reduces take the rounds before 2 at rank 0, and 1 those before 2 at rank 1",
		},
		{
			"one count of two lengths",
			map[int]State{0: {First: 2, Next: 2, Boundary: 2, AllReduces: 1}, 1: {First: 1, Next: 1, Boundary: 1, AllReduces: 1}},
			&CountError{}, "",
		},
		{"order", map[int]State{0: {First: 2, Next: 1, Boundary: 1}}, &StateError{}, "first, next and boundary are 2, 1 and 1"},
		{"no boundary", map[int]State{0: {First: 2, Next: 2, Boundary: 1}}, &StateError{}, "2, 2 and 1"},
		{"no round", map[int]State{4: {Next: 1, Boundary: 1}}, &StateError{}, "rank 4: round 0 is missing"},
		{"a gap", map[int]State{0: {Next: 1, Boundary: 2, Rounds: []Held{held(0, 1), held(2, 1)}}}, &StateError{}, "round 1 is missing"},
		{"twice", map[int]State{0: {Next: 1, Boundary: 1, Rounds: []Held{held(0, 1), held(0, 1)}}}, &StateError{}, "round 0 comes after round 0"},
		{"no chunks", map[int]State{0: {Next: 1, Boundary: 1, Rounds: []Held{{}}}}, &StateError{}, "0 chunks"},
		{"short", map[int]State{0: {Next: 1, Boundary: 1, Rounds: []Held{{Chunks: 65, Bits: []uint64{0}}}}}, &StateError{}, "1 words"},
		{"beyond", map[int]State{0: {Next: 1, Boundary: 1, Rounds: []Held{{Chunks: 1, Bits: []uint64{2}}}}}, &StateError{}, "beyond"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Make(c.states)
			if err == nil || reflect.TypeOf(err) != reflect.TypeOf(c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v (%T), want a %T with %q", err, err, c.want, c.text)
			}
			if behind, ok := errors.AsType[*BehindError](err); ok && behind.Rank != 2 {
				t.Errorf("it names rank %d", behind.Rank)
			}
		})
	}
}

// TestLetIn: a rank comes back when the rounds that it begins have room at the servers.
func TestLetIn(t *testing.T) {
	p, err := Make(map[int]State{
		0: {First: 10, Next: 12, Boundary: 16, Seq: 20, AllReduces: 3, Returns: []uint64{5}, Rounds: []Held{
			held(10, 1, 0), held(11, 1), held(12, 1), held(13, 1), held(14, 1), held(15, 1)}},
		1: {First: 10, Next: 10, Boundary: 10, Seq: 18, AllReduces: 2},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		depth, rounds uint32
		want          bool
	}{{2, 7, true}, {3, 8, true}, {2, 6, false}, {4, 8, false}} { // rounds 16 and 17 take the memory of 9 and 10, which are over
		if got := p.CanReturn(c.depth, c.rounds); got != c.want {
			t.Errorf("depth %d, %d rounds: %t", c.depth, c.rounds, got)
		}
	}
	for range 2 {
		p.LetIn()
	}
	if want := []uint64{3, 5}; !reflect.DeepEqual(p.Returns, want) {
		t.Errorf("returns %v, want %v", p.Returns, want)
	}
}
