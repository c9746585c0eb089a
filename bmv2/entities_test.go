package bmv2_test

import (
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"xagg/bmv2/dataplane"
)

type gocmp = cmp.Option

// key orders messages by what they say.
func key(m proto.Message) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return prototext.Format(m)
	}
	return string(b)
}

func sortEntities(list []*p4v1.Entity) {
	slices.SortFunc(list, func(a, b *p4v1.Entity) int { return strings.Compare(key(a), key(b)) })
}

// recordedFrames are frames whose traffic counters have something to count.
func recordedFrames() []dataplane.Frame {
	r := rand.New(rand.NewPCG(5, 6))
	var in []dataplane.Frame
	for range 200 {
		in = append(in, dataplane.Frame{Port: uint16(pick(r, 1, 2, 3)), Bytes: askFrame(r)})
	}
	return in
}
