package results

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

// Kinds of lines.
const (
	KindHeader = "header"
	KindRun    = "run"
)

// File is what a file of results holds.
type File struct {
	Name     string
	Sessions []Session
	// Cut says that the last line broke off, as a crash leaves it, and was left out; "" = it did not.
	Cut string
}

// Session is a header and the runs behind it, up to the next header.
type Session struct {
	Header Header
	Runs   []Run
}

// WriteHeader writes a header's line. Its kind and schema version are filled in.
func WriteHeader(w io.Writer, h Header) error {
	h.Kind, h.SchemaVersion = KindHeader, SchemaVersion
	return writeLine(w, h)
}

// WriteRun writes a run's line. Its kind is filled in.
func WriteRun(w io.Writer, r Run) error {
	r.Kind = KindRun
	return writeLine(w, r)
}

// writeLine writes a line in one call, so that a crash cuts off at most the last one.
func writeLine(w io.Writer, v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if _, err := w.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

// Read reads a file of results. name is the file's, for errors, which begin with it and the line's number. Fields that this
// version does not know are left out: they mean nothing to what it knows. A last line that breaks off is no error, see
// [File.Cut].
func Read(name string, r io.Reader) (*File, error) {
	f := &File{Name: name}
	in := bufio.NewReaderSize(r, 1<<20)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		last := errors.Is(err, io.EOF)
		if err != nil && !last {
			return nil, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			if last && !json.Valid(line) {
				f.Cut = fmt.Sprintf("%s:%d: the last line breaks off and was left out", name, n)
			} else if err := f.add(line); err != nil {
				return nil, fmt.Errorf("%s:%d: %w", name, n, err)
			}
		}
		if last {
			break
		}
	}
	if len(f.Sessions) == 0 {
		return nil, fmt.Errorf("%s: no results: want JSON lines as 'xagg bench run' writes them, a header first", name)
	}
	return f, nil
}

// add takes in a line.
func (f *File) add(line []byte) error {
	var is struct {
		Kind          string `json:"kind"`
		SchemaVersion int    `json:"schema_version"`
	}
	if err := json.Unmarshal(line, &is); err != nil {
		return fmt.Errorf("read results: %w", err)
	}
	switch is.Kind {
	case KindHeader:
		if is.SchemaVersion > SchemaVersion {
			return fmt.Errorf("schema version %d: this xagg knows versions up to %d; read it with a newer xagg", is.SchemaVersion, SchemaVersion)
		}
		if is.SchemaVersion < 1 {
			return fmt.Errorf("schema version %d: want 1 to %d", is.SchemaVersion, SchemaVersion)
		}
		var h Header
		if err := json.Unmarshal(line, &h); err != nil {
			return fmt.Errorf("read header: %w", err)
		}
		f.Sessions = append(f.Sessions, Session{Header: h})
		return nil
	case KindRun:
		if len(f.Sessions) == 0 {
			return errors.New("a run before the first header")
		}
		var r Run
		if err := json.Unmarshal(line, &r); err != nil {
			return fmt.Errorf("read run: %w", err)
		}
		return f.Sessions[len(f.Sessions)-1].add(r)
	case "":
		return errors.New(`no "kind": want "header" or "run"`)
	}
	return fmt.Errorf("kind %q: want header or run; if it is of a newer xagg, read it with that", is.Kind)
}

// add takes in a run that makes sense.
func (s *Session) add(r Run) error {
	for _, other := range s.Runs {
		if other.Scenario == r.Scenario && other.Mode == r.Mode && other.Repetition == r.Repetition {
			return fmt.Errorf("run of %s, mode %s, repetition %d is there already", r.Scenario, r.Mode, r.Repetition)
		}
	}
	if err := r.check(s.Header); err != nil {
		return fmt.Errorf("run of %s, mode %s, repetition %d: %w", r.Scenario, r.Mode, r.Repetition, err)
	}
	s.Runs = append(s.Runs, r)
	return nil
}

// check reports what of a run cannot be.
func (r *Run) check(h Header) error {
	known := false
	for _, s := range h.Scenarios {
		known = known || s.Name == r.Scenario
	}
	switch {
	case !known:
		return errors.New("the header before it has no such scenario")
	case r.Mode == "" || r.Repetition < 0:
		return errors.New("want a mode, and a repetition from 0")
	case r.Skipped != "" && r.Failed != "":
		return errors.New("both skipped and failed")
	case !r.Finished():
		return nil
	case len(r.Jobs) == 0:
		return errors.New("no jobs, and neither skipped nor failed")
	}
	for _, j := range r.Jobs {
		if err := j.check(); err != nil {
			return fmt.Errorf("job %q: %w", j.Name, err)
		}
	}
	return nil
}

// check reports what of a job cannot be: times of all kinds are of the same ranks and rounds, at least one of each.
func (j *Job) check() error {
	if len(j.Comm) == 0 || len(j.Comm[0]) == 0 {
		return errors.New("no communication times")
	}
	ranks, rounds := len(j.Comm), len(j.Comm[0])
	for _, m := range []struct {
		name  string
		times [][]float64
	}{{"comm", j.Comm}, {"round", j.Round}, {"compute", j.Compute}, {"floor", j.Floor}} {
		if len(m.times) != ranks {
			return fmt.Errorf("%s has %d ranks, comm %d", m.name, len(m.times), ranks)
		}
		for rank, times := range m.times {
			if len(times) != rounds {
				return fmt.Errorf("%s of rank %d has %d rounds, comm of rank 0 %d", m.name, rank, len(times), rounds)
			}
			for _, t := range times {
				if t < 0 || math.IsInf(t, 0) || math.IsNaN(t) {
					return fmt.Errorf("%s of rank %d: %g seconds", m.name, rank, t)
				}
			}
		}
	}
	for rank, skipped := range j.Skipped {
		if rank >= ranks {
			return fmt.Errorf("skipped has rank %d, comm %d ranks", rank, ranks)
		}
		for i, n := range skipped {
			if n < 0 || n >= rounds || i > 0 && n <= skipped[i-1] {
				return fmt.Errorf("rank %d has skipped rounds %v of %d: want them ascending from 0", rank, skipped, rounds)
			}
		}
	}
	for _, m := range j.Moves {
		if m.Rank < 0 || m.Rank >= ranks || m.Round >= rounds {
			return fmt.Errorf("rank %d is moved in round %d, there are %d ranks and %d rounds", m.Rank, m.Round, ranks, rounds)
		}
	}
	for _, q := range j.Quorums {
		if q.Ranks < 1 || q.Ranks > ranks || q.Wait < 0 || q.Round >= rounds {
			return fmt.Errorf("%d ranks are enough after %g s from round %d on, there are %d ranks and %d rounds", q.Ranks, q.Wait, q.Round, ranks, rounds)
		}
	}
	if len(j.take(j.Comm)) == 0 {
		return errors.New("all rounds were skipped")
	}
	if j.Values < 1 || j.Span <= 0 {
		return fmt.Errorf("%d values in %g seconds", j.Values, j.Span)
	}
	return nil
}

// Finished reports whether a run has measurements.
func (r *Run) Finished() bool { return r.Skipped == "" && r.Failed == "" }

// skipped reports whether a rank computed nothing in a round.
func (j *Job) skipped(rank, round int) bool {
	if rank >= len(j.Skipped) {
		return false
	}
	_, found := slices.BinarySearch(j.Skipped[rank], round)
	return found
}

// take returns what times by rank and round say of rounds that were not skipped.
func (j *Job) take(times [][]float64) []float64 {
	var taken []float64
	for rank := range times {
		for round, t := range times[rank] {
			if !j.skipped(rank, round) {
				taken = append(taken, t)
			}
		}
	}
	return taken
}
