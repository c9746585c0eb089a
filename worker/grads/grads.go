// Package grads is where a job's gradient vectors come from: a directory of .npy files or a generator. A set has a
// number of steps of a training run, and for each step one vector per rank, all of one length.
package grads

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/bits"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"xagg/wire"
	"xagg/worker/npy"
)

// Set is a validated set of gradient vectors. It is safe for concurrent use.
type Set struct {
	ranks int
	steps []string
	lens  []int
	load  func(step, rank int) ([]float32, error)
	made  bool // by Synthetic: every vector can be had and is finite
}

// Ranks returns the number of ranks that every step has a vector for.
func (s *Set) Ranks() int { return s.ranks }

// Steps returns the names of the steps in their order.
func (s *Set) Steps() []string { return slices.Clone(s.steps) }

// Len returns the length of a step's vectors; 0 <= step < len(Steps()).
func (s *Set) Len(step int) int { return s.lens[step] }

// MaxLen returns the length of the longest vectors.
func (s *Set) MaxLen() int { return slices.Max(s.lens) }

// RepeatsPerStep is how often Schedule takes each step before it goes on to the next.
const RepeatsPerStep = 3

// Schedule returns the step of every all-reduce of a run: each RepeatsPerStep times, over and over until there are
// enough. rounds 0 stands for one pass over the steps; at most [MaxRounds] make sense.
func (s *Set) Schedule(rounds int) []int {
	if rounds == 0 {
		rounds = RepeatsPerStep * len(s.steps)
	}
	steps := make([]int, rounds)
	for i := range steps {
		steps[i] = i / RepeatsPerStep % len(s.steps)
	}
	return steps
}

// Vector returns a fresh copy of the vector of a step and a rank. NaN and Inf are errors that name rank and index.
func (s *Set) Vector(step, rank int) ([]float32, error) {
	if step < 0 || step >= len(s.steps) {
		return nil, fmt.Errorf("load gradients: no step %d, there are %d", step, len(s.steps))
	}
	if rank < 0 || rank >= s.ranks {
		return nil, fmt.Errorf("load gradients: no rank %d, there are %d", rank, s.ranks)
	}
	v, err := s.load(step, rank)
	if err != nil {
		return nil, err
	}
	for i, x := range v {
		if f := float64(x); math.IsNaN(f) || math.IsInf(f, 0) {
			return nil, fmt.Errorf("load gradients: step %s, rank %d: value %d is %v, want finite numbers", s.steps[step], rank, i, x)
		}
	}
	return v, nil
}

// MaxSynthetic is the largest number of values of a synthetic vector: 1 GiB of them.
const MaxSynthetic = 1 << 28

// MaxRounds is the largest number of all-reduces of a run.
const MaxRounds = 1 << 20

// Check reads all vectors of the first ranks that a run with these rounds needs, and returns what is wrong with one.
func (s *Set) Check(ranks, rounds int) error {
	if s.made {
		return nil
	}
	needed := s.Schedule(rounds)
	slices.Sort(needed)
	for _, step := range slices.Compact(needed) {
		for rank := range ranks {
			if _, err := s.Vector(step, rank); err != nil {
				return err
			}
		}
	}
	return nil
}

// SyntheticSteps is the number of steps that Parse gives a synthetic set.
const SyntheticSteps = 3

// Parse returns the set that a command line names: a directory, or synthetic:N for N values a vector and ranks ranks.
func Parse(spec string, ranks int) (*Set, error) {
	num, ok := strings.CutPrefix(spec, "synthetic:")
	if !ok {
		set, err := Open(os.DirFS(spec))
		if err != nil {
			return nil, fmt.Errorf("directory %s: %w", spec, err)
		}
		return set, nil
	}
	n, err := strconv.Atoi(num)
	if err != nil || n < 0 || n > MaxSynthetic {
		return nil, fmt.Errorf("parse gradients %q: want synthetic:N with the number of values N, 0 to %d", spec, MaxSynthetic)
	}
	return Synthetic(n, ranks, SyntheticSteps), nil
}

// fileName is what files of a set are called: a step's name, "rank" and the rank.
var fileName = regexp.MustCompile(`^(.*)rank([0-9]{1,9})\.npy$`)

// Open finds the files *rank{R}.npy at the root of fsys. What stands before "rank" (without a separator at its end) is
// the step's name; steps are in the order of their names, other files are ignored. Every step must have the same ranks
// 0..N-1 with vectors of one length. Only headers are read here; Vector reads the values.
func Open(fsys fs.FS) (*Set, error) {
	entries, err := fs.ReadDir(fsys, ".")
	if err != nil {
		if pe, ok := errors.AsType[*fs.PathError](err); ok {
			err = pe.Err // its path is a dot; whoever made fsys knows the name
		}
		return nil, fmt.Errorf("open gradients: want a directory: %w", err)
	}
	files := map[string]map[int]string{} // step, rank: file
	for _, e := range entries {
		m := fileName.FindStringSubmatch(e.Name())
		if m == nil || e.IsDir() {
			continue
		}
		step := strings.TrimRight(m[1], "-_.")
		rank, err := strconv.Atoi(m[2])
		if err != nil || rank >= wire.MaxRanks {
			return nil, fmt.Errorf("open gradients: %s: rank %s, at most %d is possible", e.Name(), m[2], wire.MaxRanks-1)
		}
		if files[step] == nil {
			files[step] = map[int]string{}
		}
		if old, ok := files[step][rank]; ok {
			return nil, fmt.Errorf("open gradients: %s and %s are both rank %d of step %q", old, e.Name(), rank, step)
		}
		files[step][rank] = e.Name()
	}
	if len(files) == 0 {
		return nil, errors.New("open gradients: no files *rank{R}.npy there")
	}
	s := &Set{}
	for step, byRank := range files {
		s.steps = append(s.steps, step)
		for rank := range byRank {
			s.ranks = max(s.ranks, rank+1)
		}
	}
	slices.Sort(s.steps)
	for _, step := range s.steps {
		first := ""
		for rank := range s.ranks {
			name, ok := files[step][rank]
			if !ok {
				return nil, fmt.Errorf("open gradients: step %q has no file of rank %d, but there is a rank %d",
					step, rank, s.ranks-1)
			}
			h, err := header(fsys, name)
			if err != nil {
				return nil, fmt.Errorf("open gradients: %s: %w", name, err)
			}
			if rank == 0 {
				s.lens, first = append(s.lens, h.Len), name
			} else if want := s.lens[len(s.lens)-1]; h.Len != want {
				return nil, fmt.Errorf("open gradients: %s has %d values, %s has %d: ranks of a step must have one length",
					name, h.Len, first, want)
			}
		}
	}
	s.load = func(step, rank int) ([]float32, error) {
		name := files[s.steps[step]][rank]
		f, err := fsys.Open(name)
		if err != nil {
			return nil, fmt.Errorf("load gradients: %w", err)
		}
		defer f.Close()
		v, err := npy.Read(f)
		if err == nil && len(v) != s.lens[step] {
			err = fmt.Errorf("it had %d values before and has %d now", s.lens[step], len(v))
		}
		if err != nil {
			return nil, fmt.Errorf("load gradients: %s: %w", name, err)
		}
		return v, nil
	}
	return s, nil
}

func header(fsys fs.FS, name string) (npy.Header, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return npy.Header{}, err
	}
	defer f.Close()
	h, err := npy.ReadHeader(f)
	if err != nil {
		return npy.Header{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return npy.Header{}, err
	}
	return h, h.CheckSize(info.Size())
}

// Synthetic returns a set of n values a vector that is the same on every machine: it depends on step, rank and index
// alone. The values look like gradients: mostly small, of both signs, with heavy tails.
func Synthetic(n, ranks, steps int) *Set {
	s := &Set{ranks: ranks, made: true}
	for step := range steps {
		s.steps = append(s.steps, fmt.Sprintf("synthetic%03d", step))
		s.lens = append(s.lens, n)
	}
	s.load = func(step, rank int) ([]float32, error) {
		r := rand.New(rand.NewPCG(uint64(step), uint64(rank)))
		v := make([]float32, n)
		for i := range v {
			// A normal number times 2^-k with probability 2^-(k+1): heavy tails, as gradients have them.
			v[i] = float32(math.Ldexp(1e-3*r.NormFloat64(), -bits.TrailingZeros64(r.Uint64())))
		}
		return v, nil
	}
	return s
}
