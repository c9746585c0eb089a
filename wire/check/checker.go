// Package check judges captures of the aggregation protocol: each packet by itself, and all packets together by the
// protocol's first property, that every RESULT is the sum of exactly the contributions in its mask, each added once.
// Whether the mask has all ranks or, in quorum, those who came in time makes no difference.
//
// A capture may hold the same packet many times: seen at the port where it came in and again where it went out, sent
// again, multicast to every rank. All that counts is what packets say of a chunk: for each (job, epoch, round, chunk)
//
//   - a rank contributes one thing. Further GRADs of the rank must be equal in lanes, tag, amax and flags, the marks of
//     their way (RESEND, FORWARDED, addresses) excepted;
//   - a PARTIAL or RESULT is the sum of the GRADs of its mask in lanes and tag, their largest amax, their sticky flags;
//   - there is one RESULT. Further ones must be equal, the time fields and LATE excepted;
//   - a rank is in one PARTIAL at most, or in equal ones;
//   - all agree on the chunk's shape: elems, exponent, LAST, MODULAR and seq.
//
// A recovery sums a round's unfinished chunks again under a newer epoch. A rank's contribution stays the same under every
// epoch, if it comes from the same address and port; a rank that came back without its memory has others. The RESULTs may differ
// in their masks: a worker that is frozen takes none, and whether it had taken an older one is not to be seen in packets.
// Such chunks are counted.
//
// Packets with ASYNC tell of running sums. All RESULTs of as many additions must be equal, masks and time fields excepted. Each
// of these states must be the one before it and the next contribution of the rank that it names as the last, in the order of
// the rank's rounds, and a RESULT's mask the ranks that have come to its round.
//
// The order of the packets does not matter for the verdict. A mask may name a rank whose GRAD the capture lacks: then
// the sum cannot be checked and the capture is incomplete. So it is when a running sum has states that were not captured.
package check

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"

	"xagg/wire"
	"xagg/wire/capture"
)

// Options bound what a check keeps. The zero value means the defaults.
type Options struct {
	// Findings is how many violations and how many incomplete chunks are told in detail, at most; all are counted.
	// Default 20.
	Findings int
	// Chunks is how many chunks are held in memory, at most, some 400 bytes each at four ranks. Beyond it the oldest
	// rounds are closed: what comes for them later is checked by itself only. Default 1,000,000.
	Chunks int
	// Held is how many bytes of packets are held for their hexdump while they wait for contributions. Default 64 MiB.
	Held int
}

// Ref names a packet: a file, as an index into Report.Files, and the packet's number in it, counted from 1.
type Ref struct {
	File, Number int
}

// place is what a chunk is known by.
type place struct {
	job, epoch   uint16
	round, chunk uint32
}

func (p place) String() string {
	return fmt.Sprintf("job %d epoch %d round %d chunk %d", p.job, p.epoch, p.round, p.chunk)
}

func placeOf(h *wire.Header) place { return place{h.Job, h.Epoch, h.Round, h.Chunk} }

// roundKey is a round, under whatever epochs.
type roundKey struct {
	job   uint16
	round uint32
}

// shape is what all packets of a chunk agree on.
type shape struct {
	elems    uint16
	exponent int8
	flags    wire.Flags
	seq      uint32
}

func (s shape) String() string {
	text := fmt.Sprintf("%d lanes, exponent %d, seq %d", s.elems, s.exponent, s.seq)
	if s.flags&wire.FlagLast != 0 {
		text += ", LAST"
	}
	if s.flags&wire.FlagModular != 0 {
		text += ", MODULAR"
	}
	if s.flags&wire.FlagAsync != 0 {
		text += ", ASYNC"
	}
	return text
}

func shapeOf(h *wire.Header) shape {
	return shape{h.Elems, h.Exponent, h.Flags & wire.ShapeFlags, h.Seq}
}

// value is what is summed: the lanes as a fingerprint, and what goes with them.
type value struct {
	lanes uint64
	tag   [2]uint32
	amax  uint8
	flags wire.Flags // the sticky ones
}

// contribution is a GRAD.
type contribution struct {
	value
	rank uint8
	from sender
}

// sender is the address and port that a GRAD comes from.
type sender struct {
	ip   [4]byte
	port uint16
}

// sum is a PARTIAL or RESULT.
type sum struct {
	value
	typ       wire.Type
	rank      uint8
	nextEpoch uint16
	server    bool // closed by a server
	mask      uint64
	checked   bool // compared with its contributions; if not, they have not all been seen
	at        Ref
	frame     []byte // until it is checked
}

func (s *sum) same(t *sum) bool {
	return s.value == t.value && s.mask == t.mask && s.rank == t.rank && s.nextEpoch == t.nextEpoch && s.server == t.server
}

// chunk is what is known of one chunk under one epoch.
type chunk struct {
	epoch   uint16
	shape   shape
	first   Ref    // the packet that told it
	seen    uint64 // ranks in grads
	claimed uint64 // ranks that a mask of any answer or sum has named
	grads   []contribution
	sums    []sum
	result  bool // a RESULT is in sums
}

// Checker takes the packets of a capture one by one. Use [New].
type Checker struct {
	opts    Options
	hash    *hasher
	report  Report
	rounds  map[roundKey]map[uint32][]*chunk // by chunk number, one for each epoch
	order   []roundKey                       // of the rounds, oldest first
	retired map[roundKey]bool
	jobs    map[uint16]bool
	sums    map[sumKey]*runningSum
	// sumOrder is that of the sums' first packets.
	sumOrder []sumKey
	chunks   int // held
	held     int // bytes of frames of sums
	p        wire.Packet
}

// New returns a Checker that has seen nothing yet.
func New(opts Options) *Checker {
	if opts.Findings <= 0 {
		opts.Findings = 20
	}
	if opts.Chunks <= 0 {
		opts.Chunks = 1_000_000
	}
	if opts.Held <= 0 {
		opts.Held = 64 << 20
	}
	return &Checker{
		opts: opts, hash: newHasher(rand.Uint64N),
		rounds: map[roundKey]map[uint32][]*chunk{}, retired: map[roundKey]bool{}, jobs: map[uint16]bool{},
		sums: map[sumKey]*runningSum{},
		report: Report{
			SchemaVersion: SchemaVersion, Types: map[string]int{}, OtherLinks: map[string]int{}, Incomplete: []Incomplete{},
		},
	}
}

// Packet takes the next packet. Its data are not kept.
func (c *Checker) Packet(at Ref, p *capture.Packet) {
	c.report.Packets++
	switch p.Link {
	case capture.LinkEthernet, capture.LinkLinuxSLL, capture.LinkLinuxSLL2:
	default:
		c.report.OtherLinks[p.Link.String()]++
		return
	}
	ip, ok := p.IPv4()
	if !ok {
		c.report.Foreign++
		return
	}
	src, dst, err := wire.ParseIPv4(ip, &c.p)
	if errors.Is(err, wire.ErrNotXAgg) || src.Port != wire.Port && dst.Port != wire.Port {
		c.report.Foreign++ // or cut before its ports: nobody can tell
		return
	}
	c.report.XAgg++
	if err != nil {
		c.report.Malformed++
		reason, detail := wireReason(wire.ReasonOf(err)), err.Error()
		if p.Cut() && (reason == wireReason(wire.ReasonShort) || reason == wireReason(wire.ReasonLength)) {
			reason = wireReason(wire.ReasonShort)
			detail = fmt.Sprintf("only %d of %d bytes were captured: capture with a larger snap length", len(p.Data), p.Len)
		}
		c.violation(at, faultf(reason, "%s", detail), nil, p.Data)
		return
	}
	c.report.Types[c.p.Type.String()]++
	f := checkSummed(c.p.Type, binary.BigEndian.Uint16(ip[offUDPChecksum:]))
	if f == nil {
		f = c.take(at, sender{src.IP, src.Port}, &c.p, p.Data)
	}
	if f != nil {
		c.violation(at, f, &c.p.Header, p.Data)
	}
}

// take checks a decoded packet and adds what it says to what is known of its chunk.
func (c *Checker) take(at Ref, from sender, p *wire.Packet, frame []byte) *fault {
	if f := checkForm(p); f != nil {
		return f
	}
	if p.Type == wire.TypeNack || p.Type == wire.TypeCtrl {
		return nil // they say nothing of a chunk that would have to fit
	}
	if p.Flags&wire.FlagAsync != 0 {
		return c.async(at, p, frame)
	}
	tagOK := !p.HasLanes() || p.TagOK()
	if p.Type == wire.TypeGrad && !tagOK {
		return c.explainGrad(p)
	}
	ch, late := c.lookup(at, &p.Header, tagOK)
	if late {
		c.report.Late++
	}
	if ch == nil {
		if !tagOK {
			return faultf(wireReason(wire.ReasonTag), "the tag does not fit the lanes, the place and the mask")
		}
		return nil
	}
	if s := shapeOf(&p.Header); s != ch.shape {
		f := faultf(wireReason(wire.ReasonShape), "%s, but another packet of the chunk says %s", s, ch.shape)
		f.other = ch.first
		return f
	}
	switch p.Type {
	case wire.TypeGrad:
		return c.grad(ch, from, p)
	case wire.TypePartial, wire.TypeResult:
		return c.sum(ch, at, p, frame, tagOK)
	default:
		ch.claimed |= p.Contributors
		return nil
	}
}

// lookup returns the packet's chunk; a new one, with the packet's shape, only if create is set. late says that the
// chunk's round was closed to save memory.
func (c *Checker) lookup(at Ref, h *wire.Header, create bool) (ch *chunk, late bool) {
	key := roundKey{h.Job, h.Round}
	r := c.rounds[key]
	if r == nil {
		if c.retired[key] {
			return nil, true
		}
		if !create {
			return nil, false
		}
		r = map[uint32][]*chunk{}
		c.rounds[key] = r
		c.order = append(c.order, key)
		c.jobs[h.Job] = true
		c.report.Rounds++
	}
	for _, ch := range r[h.Chunk] {
		if ch.epoch == h.Epoch {
			return ch, false
		}
	}
	if !create {
		return nil, false
	}
	ch = &chunk{epoch: h.Epoch, shape: shapeOf(h), first: at}
	r[h.Chunk] = append(r[h.Chunk], ch)
	c.chunks++
	switch len(r[h.Chunk]) {
	case 1:
		c.report.Chunks++
	case 2:
		c.report.Resummed++
	}
	for c.chunks > c.opts.Chunks && c.order[0] != key {
		c.retired[c.order[0]] = true
		c.closeRound(c.order[0])
		c.order = c.order[1:]
	}
	return ch, false
}

func (c *Checker) value(p *wire.Packet) value {
	return value{c.hash.sum(p.Lanes[:p.Elems]), p.Tag, p.Amax, p.Flags & wire.StickyFlags}
}

// grad takes a contribution whose tag fits.
func (c *Checker) grad(ch *chunk, from sender, p *wire.Packet) *fault {
	v := c.value(p)
	if i := ch.find(p.Rank); i >= 0 {
		if ch.grads[i].value == v {
			return nil
		}
		return faultf(ReasonConflict, "rank %d has contributed something else before: %s",
			p.Rank, c.differences(&ch.grads[i].value, &v, int(p.Elems)))
	}
	for _, other := range c.rounds[roundKey{p.Job, p.Round}][p.Chunk] {
		if f := c.sameAs(other, ch, v, from, p); f != nil {
			return f
		}
	}
	ch.grads = append(ch.grads, contribution{v, p.Rank, from})
	ch.seen |= 1 << p.Rank
	c.settle(ch, placeOf(&p.Header))
	return nil
}

// sameAs compares the contribution p to ch with the rank's contribution to the chunk under another epoch.
func (c *Checker) sameAs(other, ch *chunk, v value, from sender, p *wire.Packet) *fault {
	i := other.find(p.Rank)
	if i < 0 || other.grads[i].from != from {
		return nil
	}
	a, b := other.shape, ch.shape
	a.seq, b.seq = 0, 0
	if a != b {
		return faultf(wireReason(wire.ReasonShape), "%s, but under epoch %d rank %d said %s", ch.shape, other.epoch, p.Rank, other.shape)
	}
	if old := &other.grads[i].value; *old != v {
		return faultf(ReasonConflict, "rank %d has contributed something else under epoch %d: %s",
			p.Rank, other.epoch, c.differences(old, &v, int(p.Elems)))
	}
	return nil
}

func (ch *chunk) find(rank uint8) int {
	if ch.seen>>rank&1 == 0 {
		return -1
	}
	return slices.IndexFunc(ch.grads, func(g contribution) bool { return g.rank == rank })
}

// settle checks the sums whose last missing contribution has come.
func (c *Checker) settle(ch *chunk, at place) {
	for i := range ch.sums {
		s := &ch.sums[i]
		if s.checked || s.mask&^ch.seen != 0 {
			continue
		}
		s.checked = true
		c.count(s)
		if f := c.explain(ch, s); f != nil {
			c.violation(s.at, f, &wire.Header{
				Type: s.typ, Job: at.job, Epoch: at.epoch, Round: at.round, Chunk: at.chunk, Contributors: s.mask,
			}, s.frame)
		}
		c.held -= len(s.frame)
		s.frame = nil
	}
}

func (c *Checker) count(s *sum) {
	if s.typ == wire.TypeResult {
		c.report.Results++
	} else {
		c.report.Partials++
	}
}

// sum takes a PARTIAL or RESULT.
func (c *Checker) sum(ch *chunk, at Ref, p *wire.Packet, frame []byte, tagOK bool) *fault {
	ch.result = ch.result || p.Type == wire.TypeResult
	s := sum{
		value: c.value(p), typ: p.Type, rank: p.Rank, nextEpoch: p.NextEpoch, mask: p.Contributors, at: at,
		server:  p.Flags&wire.FlagServer != 0,
		checked: p.Contributors&^ch.seen == 0,
	}
	if !tagOK {
		if s.checked {
			if f := c.explain(ch, &s); f != nil {
				return f
			}
		}
		return faultf(wireReason(wire.ReasonTag), "the tag does not fit the lanes, the place and the mask")
	}
	ch.claimed |= s.mask
	for i := range ch.sums {
		old := &ch.sums[i]
		switch {
		case old.typ != s.typ:
		case old.same(&s):
			return nil
		case s.typ == wire.TypeResult || old.mask == s.mask:
			return c.conflict(ch, old, &s)
		case old.mask&s.mask != 0:
			return faultf(ReasonTwice, "%s is in another PARTIAL too, of %s", ranks(old.mask&s.mask), ranks(old.mask))
		}
	}
	if s.checked {
		if f := c.explain(ch, &s); f != nil {
			return f
		}
		c.count(&s)
	} else if c.held+len(frame) <= c.opts.Held {
		s.frame = slices.Clone(frame)
		c.held += len(frame)
	}
	ch.sums = append(ch.sums, s)
	return nil
}

// conflict tells how s differs from an earlier sum that it should be equal to; if s is no sum of its mask, that.
func (c *Checker) conflict(ch *chunk, old, s *sum) *fault {
	if s.checked {
		if f := c.explain(ch, s); f != nil {
			return f
		}
	}
	var diffs []string
	if old.mask != s.mask {
		diffs = append(diffs, fmt.Sprintf("the mask was %#x and is %#x", old.mask, s.mask))
	} else if old.value != s.value {
		diffs = append(diffs, c.differences(&old.value, &s.value, int(ch.shape.elems)))
	}
	if old.rank != s.rank {
		diffs = append(diffs, fmt.Sprintf("the last contributor was %d and is %d", old.rank, s.rank))
	}
	if old.nextEpoch != s.nextEpoch {
		diffs = append(diffs, fmt.Sprintf("the next epoch was %d and is %d", old.nextEpoch, s.nextEpoch))
	}
	if old.server != s.server {
		diffs = append(diffs, fmt.Sprintf("SERVER was %t and is %t", old.server, s.server))
	}
	return faultf(ReasonConflict, "an earlier %s of the chunk says something else: %s", s.typ, strings.Join(diffs, ", "))
}

// explain compares a sum with the contributions of its mask, which have all been seen, and returns nil when it is what
// it should be.
func (c *Checker) explain(ch *chunk, s *sum) *fault {
	var want value
	for i := range ch.grads {
		if g := &ch.grads[i]; s.mask>>g.rank&1 != 0 {
			want.lanes = add(want.lanes, g.lanes)
			want.tag[0] += g.tag[0]
			want.tag[1] += g.tag[1]
			want.amax = max(want.amax, g.amax)
			want.flags |= g.flags
		}
	}
	if s.value == want {
		return nil
	}
	lanes := sub(s.lanes, want.lanes)
	tag := subTag(s.tag, want.tag)
	for i := range ch.grads {
		g := &ch.grads[i]
		in := s.mask>>g.rank&1 != 0
		switch {
		case in && lanes == g.lanes && tag == subTag(g.tag, [2]uint32{}):
			return faultf(ReasonTwice, "rank %d is counted twice", g.rank)
		case lanes == g.lanes && tag == subTag(g.tag, [2]uint32{}):
			return faultf(wireReason(wire.ReasonMask), "rank %d is summed but not in the mask", g.rank)
		case in && lanes == sub(0, g.lanes) && tag == subTag([2]uint32{}, g.tag):
			return faultf(wireReason(wire.ReasonMask), "rank %d is in the mask but not summed", g.rank)
		}
	}
	reason := ReasonSum
	if lanes == 0 && s.tag != want.tag {
		reason = wireReason(wire.ReasonTag)
	}
	return faultf(reason, "not the sum of %s: %s", ranks(s.mask), c.differences(&want, &s.value, int(ch.shape.elems)))
}

// subTag returns a - b mod p.
func subTag(a, b [2]uint32) [2]uint32 {
	for t := range a {
		a[t] = (a[t]%wire.P + wire.P - b[t]%wire.P) % wire.P
	}
	return a
}

// explainGrad tells what is wrong with a GRAD whose tag does not fit: if the rank's true contribution is known, where
// it differs.
func (c *Checker) explainGrad(p *wire.Packet) *fault {
	detail := "the tag does not fit the lanes and the place"
	if ch, _ := c.lookup(Ref{}, &p.Header, false); ch != nil && ch.shape == shapeOf(&p.Header) {
		if i := ch.find(p.Rank); i >= 0 {
			v := c.value(p)
			detail += "; compared with the rank's other GRAD, " + c.differences(&ch.grads[i].value, &v, int(p.Elems))
		}
	}
	return faultf(wireReason(wire.ReasonTag), "%s", detail)
}

// differences says in words how got differs from want in n lanes and the rest.
func (c *Checker) differences(want, got *value, n int) string {
	var diffs []string
	if d := sub(got.lanes, want.lanes); d != 0 {
		switch lane, change, ok := c.hash.single(d, n); {
		case !ok:
			diffs = append(diffs, "several lanes differ")
		case change%(1<<32) == 0:
			diffs = append(diffs, fmt.Sprintf("lane %d has overflowed, it is %+d off", lane, change))
		default:
			diffs = append(diffs, fmt.Sprintf("lane %d is %+d off", lane, change))
		}
	}
	for t := range got.tag {
		if got.tag[t] != want.tag[t] {
			diffs = append(diffs, fmt.Sprintf("tag %d is %d instead of %d", t, got.tag[t], want.tag[t]))
		}
	}
	if got.amax != want.amax {
		diffs = append(diffs, fmt.Sprintf("amax is %d instead of %d", got.amax, want.amax))
	}
	if got.flags != want.flags {
		diffs = append(diffs, fmt.Sprintf("SATURATED is %t instead of %t", got.flags != 0, want.flags != 0))
	}
	return strings.Join(diffs, ", ")
}

func (c *Checker) violation(at Ref, f *fault, h *wire.Header, frame []byte) {
	c.report.ViolationCount++
	if len(c.report.Violations) >= c.opts.Findings {
		return
	}
	v := Violation{Ref: at, Reason: f.reason, Detail: f.detail, Other: f.other, Frame: slices.Clone(frame)}
	if h != nil {
		v.Packet = fmt.Sprintf("%s of %s", h.Type, placeOf(h))
		if h.Flags&wire.FlagAsync != 0 && h.Type == wire.TypeResult {
			v.Packet += fmt.Sprintf(", %d additions", h.Seq)
		}
		if h.Contributors != 0 {
			v.Packet += ", " + ranks(h.Contributors)
		}
	}
	c.report.Violations = append(c.report.Violations, v)
}

// closeRound accounts for what the round's chunks still lack, and forgets them.
func (c *Checker) closeRound(key roundKey) {
	r := c.rounds[key]
	numbers := make([]uint32, 0, len(r))
	for n := range r {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	for _, n := range numbers {
		for _, ch := range r[n] {
			c.closeChunk(ch, place{key.job, ch.epoch, key.round, n})
		}
	}
	delete(c.rounds, key)
}

func (c *Checker) closeChunk(ch *chunk, at place) {
	c.chunks--
	for i := range ch.sums {
		c.held -= len(ch.sums[i].frame)
	}
	if !ch.result && ch.seen != 0 {
		c.report.Unfinished++
	}
	if missing := ch.claimed &^ ch.seen; missing != 0 {
		c.incomplete(Incomplete{Job: at.job, Epoch: at.epoch, Round: at.round, Chunk: at.chunk, Ranks: list(missing)})
	}
}

func (c *Checker) incomplete(i Incomplete) {
	c.report.IncompleteCount++
	if len(c.report.Incomplete) < c.opts.Findings {
		c.report.Incomplete = append(c.report.Incomplete, i)
	}
}

// Finish returns the verdict on all packets. The Checker must not be used afterwards.
func (c *Checker) Finish() *Report {
	for _, key := range c.order {
		c.closeRound(key)
	}
	c.finishSums()
	r := &c.report
	r.Jobs = len(c.jobs)
	switch {
	case r.ViolationCount > 0:
		r.Verdict = Violated
	case r.IncompleteCount > 0 || r.XAgg == 0:
		r.Verdict = Lacking
	default:
		r.Verdict = OK
	}
	return r
}

// list returns the ranks of a mask.
func list(mask uint64) []int {
	var l []int
	for ; mask != 0; mask &= mask - 1 {
		l = append(l, bits.TrailingZeros64(mask))
	}
	return l
}

// ranks names the ranks of a mask: "rank 3", "ranks 0-2,5".
func ranks(mask uint64) string {
	if bits.OnesCount64(mask) == 1 {
		return fmt.Sprintf("rank %d", bits.TrailingZeros64(mask))
	}
	var b strings.Builder
	b.WriteString("ranks ")
	for sep := ""; mask != 0; sep = "," {
		first := bits.TrailingZeros64(mask)
		n := bits.TrailingZeros64(^(mask >> first)) // 64 for a full mask
		if n > 1 {
			fmt.Fprintf(&b, "%s%d-%d", sep, first, first+n-1)
		} else {
			fmt.Fprintf(&b, "%s%d", sep, first)
		}
		mask &^= (1<<n - 1) << first
	}
	return b.String()
}
