package p4rt

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// Value is a P4Runtime byte string in its canonical form: big-endian, without leading zeros, at least one byte (see
// "Bytestrings" of the P4Runtime specification). It is comparable.
type Value string

// Uint returns the value of an integer.
func Uint(v uint64) Value {
	return Bytes([]byte{
		byte(v >> 56), byte(v >> 48), byte(v >> 40), byte(v >> 32), byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v),
	})
}

// Bytes returns the value of a big-endian byte string of any length, such as an address.
func Bytes(b []byte) Value {
	if len(b) == 0 {
		return "\x00"
	}
	for len(b) > 1 && b[0] == 0 {
		b = b[1:]
	}
	return Value(b)
}

// Bits returns the number of bits that the value needs; zero needs none.
func (v Value) Bits() int {
	if len(v) == 0 {
		return 0
	}
	return (len(v)-1)*8 + bits.Len8(v[0])
}

// Uint returns the value as an integer, and false when it does not fit.
func (v Value) Uint() (uint64, bool) {
	var n uint64
	for i := range len(v) {
		if n>>56 != 0 {
			return 0, false
		}
		n = n<<8 | uint64(v[i])
	}
	return n, true
}

// String writes the value for people: decimal up to 32 bits, hexadecimal beyond.
func (v Value) String() string {
	if n, ok := v.Uint(); ok && n>>32 == 0 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%#x", string(v))
}

// Entity is something that is written to a switch: an [Entry] or a [Group].
type Entity interface {
	// Key names the entity uniquely on its switch, for people and as a map key.
	Key() string
	// String is the key with what the entity says.
	String() string
	entity()
}

// Match is a key field of a table entry.
type Match struct {
	Field  string // name as in the P4Info
	Value  Value
	Prefix int // longest-prefix match: length in bits, 1..width; exact match: 0
}

// Param is a parameter of an action or a metadata field of a packet.
type Param struct {
	Name  string // as in the P4Info
	Value Value
}

// Entry is a table entry. One whose Default is set is the table's default action, and has no Match.
type Entry struct {
	Table   string // name as in the P4Info
	Match   []Match
	Action  string // name as in the P4Info
	Params  []Param
	Default bool
}

func (Entry) entity() {}

// Key is the table with the match fields in the order of their names.
func (e Entry) Key() string {
	if e.Default {
		return e.Table + "[default]"
	}
	fields := make([]string, len(e.Match))
	for i, m := range e.Match {
		fields[i] = m.Field + "=" + m.Value.String()
		if m.Prefix != 0 {
			fields[i] += fmt.Sprintf("/%d", m.Prefix)
		}
	}
	slices.Sort(fields)
	return e.Table + "[" + strings.Join(fields, " ") + "]"
}

// String is the key with the action and its parameters.
func (e Entry) String() string {
	params := make([]string, len(e.Params))
	for i, p := range e.Params {
		params[i] = p.Name + "=" + p.Value.String()
	}
	return fmt.Sprintf("%s -> %s(%s)", e.Key(), e.Action, strings.Join(params, " "))
}

// Group is a multicast group.
type Group struct {
	ID       uint32 // 1..32767 on bmv2
	Replicas []Replica
}

// Replica is one copy that a multicast group makes.
type Replica struct {
	Port     uint32 // egress port, at most 511 on bmv2
	Instance uint32 // egress_rid, 16 bits on bmv2; (Port, Instance) is unique within a group
}

// MaxGroup is the highest multicast group id that simple_switch_grpc takes.
const MaxGroup = 32767

func (Group) entity() {}

// Key is the group with its id.
func (g Group) Key() string { return fmt.Sprintf("multicast group %d", g.ID) }

// String is the key with the replicas as port:instance.
func (g Group) String() string {
	replicas := make([]string, len(g.Replicas))
	for i, r := range g.Replicas {
		replicas[i] = fmt.Sprintf("%d:%d", r.Port, r.Instance)
	}
	return fmt.Sprintf("%s -> {%s}", g.Key(), strings.Join(replicas, " "))
}

// Equal reports whether two entities are the same to a switch.
func Equal(a, b Entity) bool {
	switch a := a.(type) {
	case Entry:
		b, ok := b.(Entry)
		return ok && a.Key() == b.Key() && a.Action == b.Action && sameSet(a.Params, b.Params)
	case Group:
		b, ok := b.(Group)
		return ok && a.ID == b.ID && sameSet(a.Replicas, b.Replicas)
	}
	return a == nil && b == nil
}

// sameSet reports whether a and b hold the same elements in whatever order; elements are unique within each.
func sameSet[T comparable](a, b []T) bool {
	if len(a) != len(b) {
		return false
	}
	for _, x := range a {
		if !slices.Contains(b, x) {
			return false
		}
	}
	return true
}

// Op is what an update does.
type Op uint8

// The operations. Their zero value is not one of them.
const (
	Insert Op = iota + 1
	Modify
	Delete
)

// String returns the operation's name.
func (o Op) String() string {
	switch o {
	case Insert:
		return "insert"
	case Modify:
		return "modify"
	case Delete:
		return "delete"
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

// Update is one change of a [Session.Write].
type Update struct {
	Op     Op
	Entity Entity
}

// String is the operation with its entity; of a deleted one only the key matters.
func (u Update) String() string {
	if u.Op == Delete {
		return u.Op.String() + " " + u.Entity.Key()
	}
	return u.Op.String() + " " + u.Entity.String()
}
