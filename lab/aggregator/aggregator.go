package aggregator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"slices"
	"time"

	"xagg/lab/netns"
	"xagg/xdp"
)

// UnsupportedError says what the kernel lacks that a measurement needs.
type UnsupportedError struct {
	What  string
	Since string // version of Linux
	Err   error
}

// Error implements error.
func (e *UnsupportedError) Error() string {
	text := fmt.Sprintf("this kernel has no %s: needs Linux %s or newer", e.What, e.Since)
	if e.Err != nil {
		text += fmt.Sprintf(" (%v)", e.Err)
	}
	return text
}

// Unwrap returns the cause.
func (e *UnsupportedError) Unwrap() error { return e.Err }

// Options say what [Run] measures.
type Options struct {
	Workers int     // at most 64
	Values  int     // of a vector, a multiple of 16,384
	Bytes   int64   // of gradients that a measurement sums, at least
	Repeat  int     // measurements of everything
	Limit   float64 // above which the width of an interval makes a ratio not resolved, see [results.Estimate.Resolved]
	// TCPServer returns the command of a process that calls [ServeTCP].
	TCPServer func(addr string, ranks, values int, cpus []int) *exec.Cmd
	Progress  func(format string, args ...any)
	Log       *slog.Logger
	RunDir    string // of the lab; empty: its default
}

// Check reports what is wrong with the options.
func (o Options) Check() error {
	switch {
	case o.Workers < 2 || o.Workers > maxWorkers:
		return fmt.Errorf("%d workers: want 2 to %d", o.Workers, maxWorkers)
	case o.Values < granularity || o.Values%granularity != 0:
		return fmt.Errorf("%d values: want a multiple of %d", o.Values, granularity)
	case o.Bytes < 1 || o.Repeat < 1 || o.Limit <= 0:
		return errors.New("bytes, repetitions and the limit of intervals must be positive")
	}
	return nil
}

// retries is how often a measurement that has stalled is made again.
const retries = 3

// Lanes are the sizes of packets that are measured, in values.
var Lanes = []int{64, 256}

// Run measures everything so many times, in turn, and reports what came of it. When ctx ends it returns what was
// finished, and its error. Nothing of the lab remains.
func Run(ctx context.Context, opts Options) (report *Report, err error) {
	if err := opts.Check(); err != nil {
		return nil, err
	}
	sets, err := coreSets()
	if err != nil {
		return nil, err
	}
	b, err := newSetting(ctx, opts, sets)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.lab.Close()) }()
	report = &Report{
		SchemaVersion: SchemaVersion, Time: time.Now().UTC(), Machine: thisMachine(), XDPMode: string(xdp.Native), Workers: opts.Workers,
		Values: opts.Values, Repeat: opts.Repeat, Limit: opts.Limit, CoreSets: sets, Notes: notes,
	}
	defer report.summarize()
	for repetition := range opts.Repeat {
		for _, set := range sets {
			opts.Progress("repetition %d of %d, processors %q", repetition+1, opts.Repeat, set.Name)
			for _, c := range cases(repetition) {
				m, err := b.measure(ctx, set, c)
				for range retries {
					if !errors.Is(err, errStalled) {
						break
					}
					opts.Progress("%s on processors %q: %v; once more", c.name(), set.Name, err)
					report.Stalled++
					m, err = b.measure(ctx, set, c)
				}
				if err != nil {
					return report, fmt.Errorf("measure %s on processors %q: %w", c.name(), set.Name, err)
				}
				m.Repetition = repetition
				report.Measurements = append(report.Measurements, m)
			}
		}
	}
	report.Complete = true
	return report, nil
}

// oneCase is a subject and, for an XDP server, its packets.
type oneCase struct {
	subject Subject
	lanes   int
}

func (c oneCase) name() string {
	if c.lanes == 0 {
		return string(c.subject)
	}
	return fmt.Sprintf("%s, %d lanes", c.subject, c.lanes)
}

// cases returns all cases in the order of a repetition: every other one goes the other way, so that nothing always
// comes after the same.
func cases(repetition int) []oneCase {
	all := []oneCase{{TCPPlain, 0}, {TCPOffloads, 0}}
	for _, lanes := range Lanes {
		all = append(all, oneCase{XDPFrames, lanes}, oneCase{XDPSockets, lanes})
	}
	if repetition%2 == 1 {
		slices.Reverse(all)
	}
	return all
}

// measure makes one measurement.
func (b *setting) measure(ctx context.Context, set CoreSet, c oneCase) (m Measurement, err error) {
	m = Measurement{Subject: c.subject, Cores: set.Name, Lanes: c.lanes}
	var s subject
	var server *xdpRun
	switch c.subject {
	case TCPPlain, TCPOffloads:
		s, err = newTCPRun(ctx, b.links[linkName(kindOf[c.subject], set)], b.opts)
	default:
		server, err = newXDPRun(b.links[linkName(kindXDP, set)], c, b.opts)
		s = server
	}
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, s.close()) }()

	round := 4 * int64(b.opts.Workers) * int64(b.opts.Values)
	rounds := int((b.opts.Bytes + round - 1) / round)
	warm := max(1, rounds/8)
	m.Bytes = int64(rounds) * round
	if err := s.send(ctx, warm); err != nil {
		return m, err
	}
	meter := s.meter()
	before, err := meter.read()
	if err != nil {
		return m, err
	}
	if err := s.send(ctx, rounds); err != nil {
		return m, err
	}
	after, err := meter.read()
	if err != nil {
		return m, err
	}
	m.Usage = meter.between(before, after)
	if server != nil {
		if m.ProgramNs, err = server.statistics(ctx, warm); err != nil {
			return m, err
		}
	}
	return m, s.check()
}

// subject is one aggregator with its load.
type subject interface {
	send(ctx context.Context, rounds int) error
	check() error
	meter() meter
	close() error
}

// setting is a lab with all links.
type setting struct {
	opts  Options
	lab   *netns.Lab
	links map[string]*link
}

// The kinds of links.
const (
	kindXDP      = "xdp"
	kindPlain    = "plain"
	kindOffloads = "offloads"
)

var kindOf = map[Subject]string{TCPPlain: kindPlain, TCPOffloads: kindOffloads}

// linkName is the name of the aggregator's host at a link.
func linkName(kind string, set CoreSet) string { return kind + "-" + set.Name }

// newSetting makes a lab with three links for each set of processors: one for XDP servers, one for TCP aggregators without
// segmentation offloads, and one with them. Nothing else is on a link, and none is changed between measurements but by
// the XDP programs that come and go on the first.
func newSetting(ctx context.Context, opts Options, sets []CoreSet) (*setting, error) {
	b := &setting{opts: opts, links: make(map[string]*link)}
	spec := netns.Spec{RunDir: opts.RunDir}
	for _, set := range sets {
		for _, kind := range []string{kindXDP, kindPlain, kindOffloads} {
			h := hostFor(len(spec.Hosts)+1, linkName(kind, set), len(set.Aggregator), kind != kindXDP)
			spec.Hosts = append(spec.Hosts, h)
			b.links[h.Name] = &link{host: h, cores: set, kind: kind}
		}
	}
	lab, err := netns.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	b.lab = lab
	for _, l := range b.links {
		l.lab = lab
		if err := l.prepare(opts.Workers); err != nil {
			return nil, errors.Join(err, lab.Close())
		}
	}
	return b, nil
}

// prepare sets a link up for what will run on it.
func (l *link) prepare(workers int) error {
	if err := l.address(workers); err != nil {
		return err
	}
	if err := l.tune(); err != nil {
		return err
	}
	if l.kind == kindXDP {
		return nil // its threads come with its programs
	}
	offload := func(iface string, on bool) error {
		for _, name := range []string{"tso", "gso", "gro"} {
			if err := netns.SetOffload(iface, name, on); err != nil {
				return err
			}
		}
		return nil
	}
	// A veth that is sent whole segments receives by softirqs, GRO or not.
	if err := l.lab.Do(l.host.Name, func() error { return offload(netns.HostInterface, l.kind == kindOffloads) }); err != nil {
		return err
	}
	if err := l.steer(l.host.Name, netns.HostInterface, l.cores.Aggregator); err != nil {
		return err
	}
	if l.kind == kindOffloads {
		if err := l.lab.Do(netns.Switch, func() error { return offload(l.port(), true) }); err != nil {
			return err
		}
		return l.steer(netns.Switch, l.port(), l.cores.Load)
	}
	// The load's end gets GRO for the threads that come with it: what workers receive is not the aggregator's cost. That
	// they also acknowledge less often is to the advantage of TCP.
	_, err := l.napiThreads(netns.Switch, l.port(), l.network(), func() error {
		return errors.Join(offload(l.port(), false), netns.SetOffload(l.port(), "gro", true))
	})
	return err
}

// coreSets returns who runs where: "one", everything on one processor; "apart", the aggregator there and its load on the
// others, so that all bytes come from another processor's cache; and "all", both on all.
func coreSets() ([]CoreSet, error) {
	cpus, err := allowed()
	if err != nil {
		return nil, err
	}
	last := len(cpus) - 1
	sets := []CoreSet{{"one", cpus[last:], cpus[last:]}}
	if last > 0 {
		sets = append(sets, CoreSet{"apart", cpus[last:], cpus[:last]}, CoreSet{"all", cpus, cpus})
	}
	return sets, nil
}
