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
			Plan{HandOver: map[int][]ChunkID{}, Lacks: map[int][]ChunkID{}, CanReturn: true},
		},
		{
			"between two rounds: nothing is missing",
			map[int]State{
				0: {First: 7, Next: 7, Boundary: 7, Seq: 30, Rounds: []Held{held(6, 2, 0, 1)}},
				1: {First: 7, Next: 7, Boundary: 7, Seq: 30, Rounds: []Held{held(6, 2, 0, 1)}},
			},
			Plan{
				Restart: Restart{Round: 7, Seq: 30}, HandOver: map[int][]ChunkID{}, Lacks: map[int][]ChunkID{},
				Return: 7, ReturnSeq: 30, CanReturn: true, next: 7,
			},
		},
		{
			"one is ahead, one lacks what the other has, and both lack one; the numbers go round",
			map[int]State{
				0: {First: last, Next: last + 1 - 1<<32, Boundary: 1, Seq: 3, Rounds: []Held{held(last, 3, 1), held(0, 4)}},
				1: {First: last, Next: last + 1 - 1<<32, Boundary: 0, Seq: 3, Rounds: []Held{held(last, 3, 0)}},
				2: {First: last, Next: 1, Boundary: 1, Seq: 7, Rounds: []Held{held(last, 3, 0, 1), held(0, 4)}},
			},
			Plan{
				Restart:  Restart{Round: last, Seq: 7, Finals: []Held{held(last, 3, 0, 1), held(0, 4)}},
				HandOver: map[int][]ChunkID{0: {{last, 1}}, 1: {{last, 0}}},
				Lacks:    map[int][]ChunkID{0: {{last, 0}}, 1: {{last, 1}}},
				Return:   1, ReturnSeq: 12, CanReturn: true, next: 1,
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
				Return: 2, ReturnSeq: 2, next: 2,
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
				0: {First: 5, Next: 5, Boundary: 5, Rounds: []Held{held(4, 1, 0)}},
				2: {First: 3, Next: 4, Boundary: 4, Rounds: []Held{held(3, 1)}},
			},
			&BehindError{}, "rank 2 has not finished round 3",
		},
		{
			"ahead of all",
			map[int]State{0: {First: 1, Next: 1, Boundary: 1}, 1: {Began: 3, First: 3, Next: 4, Boundary: 4, Rounds: []Held{held(3, 1)}}},
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
