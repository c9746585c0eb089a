package check

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// SchemaVersion is the version of a Report's JSON form.
const SchemaVersion = 1

// Verdict is what a check comes to.
type Verdict string

// The verdicts.
const (
	// OK: every packet is in order and every PARTIAL and RESULT is the sum that it should be.
	OK Verdict = "ok"
	// Lacking: nothing is wrong with what was captured, but the contributions of some ranks were not, or nothing was.
	Lacking Verdict = "incomplete"
	// Violated: at least one packet breaks the protocol.
	Violated Verdict = "violation"
)

// Report is the outcome of a check.
type Report struct {
	SchemaVersion int     `json:"schema_version"`
	Verdict       Verdict `json:"verdict"`

	Files      []File         `json:"files"`
	Packets    int            `json:"packets"`     // in all files
	XAgg       int            `json:"xagg"`        // of them of this protocol
	Types      map[string]int `json:"types"`       // of XAgg, by type
	Malformed  int            `json:"malformed"`   // of XAgg, too damaged to have a type
	Foreign    int            `json:"foreign"`     // of another protocol, skipped
	OtherLinks map[string]int `json:"other_links"` // of a link type that is not read, skipped

	Jobs       int `json:"jobs"`
	Rounds     int `json:"rounds"`
	Chunks     int `json:"chunks"`
	Resummed   int `json:"resummed"`   // chunks that there are under more than one epoch
	Results    int `json:"results"`    // RESULTs that were compared with their contributions, each chunk's once
	Partials   int `json:"partials"`   // PARTIALs likewise
	Unfinished int `json:"unfinished"` // chunks with contributions and without a RESULT
	Late       int `json:"late"`       // packets of what was forgotten to save memory, checked by themselves only

	RunningSums int `json:"running_sums"`
	Additions   int `json:"additions"` // to running sums, that were compared with the contributions

	ViolationCount  int          `json:"violation_count"`
	Violations      []Violation  `json:"violations"` // the first of them
	IncompleteCount int          `json:"incomplete_count"`
	Incomplete      []Incomplete `json:"incomplete"` // the first of them
}

// File is a file of the capture.
type File struct {
	Name      string `json:"name"`
	Packets   int    `json:"packets"`
	Truncated bool   `json:"truncated"` // it ends in the midst of a packet
}

// Violation is a packet that breaks the protocol.
type Violation struct {
	Ref
	Packet string // its type, place and ranks, as far as it could be decoded
	Reason Reason
	Detail string
	Other  Ref    // the packet that says otherwise, which may be the wrong one of the two; zero if there is no such one
	Frame  []byte // as captured; empty if too many packets waited to be checked
}

// Incomplete is a chunk of which a packet names contributors that were not captured, or a running sum with additions that
// were not.
type Incomplete struct {
	Job   uint16 `json:"job"`
	Epoch uint16 `json:"epoch"`
	Round uint32 `json:"round"`
	Chunk uint32 `json:"chunk"`
	Ranks []int  `json:"ranks"` // whose contributions are missing
	// Additions is how many states of a running sum in a row are missing, 0 if it is one rank's contribution.
	Additions int `json:"additions,omitempty"`
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	type violation struct {
		File    string `json:"file"`
		Number  int    `json:"number"`
		Packet  string `json:"packet,omitempty"`
		Reason  Reason `json:"reason"`
		Detail  string `json:"detail"`
		Other   string `json:"other,omitempty"`
		Hexdump string `json:"hexdump"`
	}
	type plain Report
	out := struct {
		plain
		Violations []violation `json:"violations"`
	}{plain(*r), []violation{}}
	for _, v := range r.Violations {
		out.Violations = append(out.Violations, violation{
			r.name(v.File), v.Number, v.Packet, v.Reason, v.Detail, r.other(v), hex.Dump(v.Frame),
		})
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(out)
}

// WriteText writes the report for people: the verdict, what led to it, and what was seen.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	switch {
	case r.Verdict == OK && r.Results == 0 && r.Additions == 0:
		b.WriteString("ok: nothing is wrong, but there is no RESULT to check\n")
	case r.Verdict == OK:
		b.WriteString("ok: every result is the sum of exactly the contributions in its mask\n")
	case r.Verdict == Violated:
		fmt.Fprintf(&b, "violation: %s\n", plural(r.ViolationCount, "packet breaks", "packets break")+" the protocol")
	case r.XAgg == 0:
		b.WriteString("incomplete: no packet of the protocol was captured\n")
	default:
		fmt.Fprintf(&b, "incomplete: contributions to %s were not captured\n", plural(r.IncompleteCount, "chunk", "chunks"))
	}
	for _, v := range r.Violations {
		fmt.Fprintf(&b, "\n%s: packet %d: %s: ", r.name(v.File), v.Number, v.Reason)
		if v.Packet != "" {
			fmt.Fprintf(&b, "%s: ", v.Packet)
		}
		fmt.Fprintf(&b, "%s\n", v.Detail)
		if other := r.other(v); other != "" {
			fmt.Fprintf(&b, "(one of the two is wrong: this one, or %s)\n", other)
		}
		if len(v.Frame) > 0 {
			b.WriteString(hex.Dump(v.Frame))
		} else {
			b.WriteString("(too many packets waited for contributions to keep this one's bytes)\n")
		}
	}
	more(&b, r.ViolationCount-len(r.Violations), "violation")
	if len(r.Incomplete) > 0 {
		b.WriteString("\n")
	}
	for _, i := range r.Incomplete {
		if i.Additions > 0 {
			fmt.Fprintf(&b, "incomplete: job %d epoch %d chunk %d: the running sum lacks %s\n",
				i.Job, i.Epoch, i.Chunk, plural(i.Additions, "addition", "additions"))
			continue
		}
		fmt.Fprintf(&b, "incomplete: %s lacks the contribution of %s\n", place{i.Job, i.Epoch, i.Round, i.Chunk}, ranksOf(i.Ranks))
	}
	more(&b, r.IncompleteCount-len(r.Incomplete), "incomplete chunk")

	b.WriteString("\n")
	for _, f := range r.Files {
		fmt.Fprintf(&b, "%s: %s", f.Name, plural(f.Packets, "packet", "packets"))
		if f.Truncated {
			b.WriteString(", the file ends in the midst of one more")
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "%s of the protocol", plural(r.XAgg, "packet", "packets"))
	sep := ": "
	for _, name := range slices.Sorted(maps.Keys(r.Types)) {
		fmt.Fprintf(&b, "%s%d %s", sep, r.Types[name], name)
		sep = ", "
	}
	if r.Malformed > 0 {
		fmt.Fprintf(&b, "%s%d malformed", sep, r.Malformed)
	}
	fmt.Fprintf(&b, "; %d of others\n", r.Foreign)
	for _, link := range slices.Sorted(maps.Keys(r.OtherLinks)) {
		fmt.Fprintf(&b, "%s of %s skipped: only Ethernet, LINUX_SLL and LINUX_SLL2 are read\n",
			plural(r.OtherLinks[link], "packet", "packets"), link)
	}
	fmt.Fprintf(&b, "%s, %s, %s; checked: %s and %s\n", plural(r.Jobs, "job", "jobs"), plural(r.Rounds, "round", "rounds"),
		plural(r.Chunks, "chunk", "chunks"), plural(r.Results, "RESULT", "RESULTs"), plural(r.Partials, "PARTIAL", "PARTIALs"))
	if r.RunningSums > 0 {
		fmt.Fprintf(&b, "%s; checked: %s\n", plural(r.RunningSums, "running sum", "running sums"), plural(r.Additions, "addition", "additions"))
	}
	if r.Resummed > 0 {
		fmt.Fprintf(&b, "%s summed under more than one epoch\n", plural(r.Resummed, "chunk", "chunks"))
	}
	if r.Unfinished > 0 {
		fmt.Fprintf(&b, "%s without a RESULT\n", plural(r.Unfinished, "chunk", "chunks"))
	}
	if r.Late > 0 {
		fmt.Fprintf(&b, "%s came late, for what was forgotten to save memory\n", plural(r.Late, "packet", "packets"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// other names the packet that a violation contradicts, or returns nothing.
func (r *Report) other(v Violation) string {
	if v.Other == (Ref{}) {
		return ""
	}
	return fmt.Sprintf("%s: packet %d", r.name(v.Other.File), v.Other.Number)
}

func (r *Report) name(file int) string {
	if file < len(r.Files) {
		return r.Files[file].Name
	}
	return fmt.Sprintf("file %d", file)
}

func more(b *strings.Builder, n int, what string) {
	if n > 0 {
		fmt.Fprintf(b, "\nand %s\n", plural(n, "more "+what, "more "+what+"s"))
	}
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func ranksOf(list []int) string {
	var mask uint64
	for _, r := range list {
		mask |= 1 << r
	}
	return ranks(mask)
}
