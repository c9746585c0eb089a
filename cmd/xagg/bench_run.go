package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"xagg/bmv2"
	"xagg/lab/bench"
	"xagg/lab/netns"
	"xagg/lab/report"
	"xagg/lab/results"
	"xagg/lab/scenario"
	"xagg/lab/testbed"
)

// benchRun is a command line of `xagg bench run`.
type benchRun struct {
	env          *env
	files, modes []string
	out, output  string
	appendTo     bool
	force        bool
	repeat       int
	rounds       int
	sw, simple   string
	hosts        string
	existing     *testbed.Existing // of hosts; nil = a lab is made
	timeLimit    time.Duration
	scenarios    []*scenario.Scenario
	texts        []string
	log          *slog.Logger
	terminal     bool
	command      []string
}

func newBenchRunCommand(env *env) *cobra.Command {
	b := &benchRun{env: env}
	cmd := &cobra.Command{
		Use:   "run [-f] SCENARIO.yaml...",
		Short: "Run scenarios in every mode, interleaved and repeated",
		Long: `Run every scenario in every mode, several times, in a lab of network namespaces, and write what was measured to a
file of JSON lines, a line as soon as a run is over. Needs root.

A scenario says how many workers there are, their links, how long they compute, what goes wrong, and what they
all-reduce. All modes of a scenario run in the same lab, one after the other, every second repetition backwards.
The report of the file is made by 'xagg bench report'.

Modes: tcp (a parameter server), ring (all-reduce in a ring over TCP), gloo and mpi (these libraries, where they are
installed), switch, server, hybrid; server/quorum and hybrid/quorum, which close chunks without the slowest; auto and
auto/quorum, whose plan follows what is measured; server/async, which waits for nobody. Where a scenario does not allow a mode, or the machine lacks what it takes, the run is listed as skipped.`,
		Example: `  xagg bench run scenarios/*.yaml
  xagg bench run -f scenarios/slow-4.yaml --modes switch,hybrid,hybrid/quorum --repeat 5 --out slow.jsonl
  xagg bench run -f 'scenarios/*.yaml' --time-limit 10m --repeat 2`,
		RunE: func(cmd *cobra.Command, args []string) error {
			b.files = append(b.files, args...)
			b.command = append([]string{"xagg"}, os.Args[min(1, len(os.Args)):]...)
			// What the controller, and the rest of a lab, log is for whoever asks; the progress says what goes on.
			b.log, _ = newLogger(env.stderr, "warn", cmd.Flag("log-format").Value.String())
			b.terminal = isTerminal(env.stderr)
			return b.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringSliceVarP(&b.files, "file", "f", nil, "files with scenarios, or patterns such as 'scenarios/*.yaml'; repeatable")
	f.StringSliceVar(&b.modes, "modes", names(scenario.DefaultModes), "modes to run, or all")
	f.IntVar(&b.repeat, "repeat", 3, "repetitions of everything")
	f.IntVar(&b.rounds, "rounds", 0, "rounds that are measured, of every scenario (default: what it says)")
	f.StringVar(&b.out, "out", "results.jsonl", "file for the results, as JSON lines")
	f.BoolVar(&b.appendTo, "append", false, "add to the file if it is there")
	f.BoolVar(&b.force, "force", false, "replace the file if it is there")
	f.StringVar(&b.sw, "switch", testbed.SwitchEngine, "engine (embedded) or simple_switch_grpc (must be installed)")
	f.StringVar(&b.hosts, "hosts", "", "JSON file with hosts and a switch that are there already, for one scenario (bmv2/mininet/bench.py makes them)")
	f.StringVar(&b.simple, "simple-switch", "", "path of simple_switch_grpc (default: the one on the PATH)")
	f.DurationVar(&b.timeLimit, "time-limit", 0, "refuse to begin what takes longer than this by the estimate (default: none)")
	f.StringVarP(&b.output, "output", "o", "text", "what to print when all is over: text (a summary), jsonl (the results) or gobench (Go's benchmark format)")
	return cmd
}

// summaries write what -o asks for.
var summaries = map[string]func(io.Writer, *results.File) error{
	"text": func(w io.Writer, f *results.File) error {
		a, err := results.Analyze(results.DefaultLimit, f)
		if err != nil {
			return err
		}
		d := report.Compare(a)
		d.Sections = d.Sections[:1] // the answer; the rest is for who asks for the report
		return d.WriteText(w)
	},
	"jsonl":   func(io.Writer, *results.File) error { return nil }, // written line by line as runs end
	"gobench": func(w io.Writer, f *results.File) error { return report.WriteBenchmarks(w, f) },
}

func (b *benchRun) run(ctx context.Context) error {
	modes, err := b.check()
	if err != nil {
		return err
	}
	versions, missing := bench.Libraries(ctx, modes)
	suite := &bench.Suite{Scenarios: b.scenarios, Modes: modes, Repeat: b.repeat, Missing: b.missing(missing)}
	steps := suite.Steps()
	estimate := bench.Estimate(steps)
	fmt.Fprintf(b.env.stderr, "%d scenarios, %d modes, %d repetitions: %s\n", len(b.scenarios), len(modes), b.repeat, spellSteps(steps, estimate))
	if b.timeLimit > 0 && estimate > b.timeLimit {
		return usagef("--time-limit %v: all of it takes about %v; ask for fewer scenarios, modes, repetitions or rounds, or allow more time",
			b.timeLimit, estimate.Round(time.Second))
	}
	if err := netns.Available(); err != nil {
		return fmt.Errorf("%w; run it by sudo, or in a container with these capabilities", err)
	}
	file, err := b.create()
	if err != nil {
		return err
	}
	defer file.Close()
	var out io.Writer = file
	if b.output == "jsonl" {
		out = io.MultiWriter(file, b.env.stdout)
	}
	suite.Header = b.header(modes)
	maps.Copy(suite.Header.Versions, versions)
	suite.Open = func(ctx context.Context, s *scenario.Scenario) (bench.Place, error) {
		cfg := bench.BedConfig{Switch: b.sw, SimpleSwitch: b.simple, Modes: modes, Log: b.log}
		if b.existing != nil {
			return bench.OpenExisting(ctx, s, b.existing, cfg)
		}
		return bench.OpenBed(ctx, s, cfg)
	}
	show := newBenchProgress(b.env.stderr, b.terminal, steps)
	suite.Begins, suite.Took = show.begins, show.took
	summary, err := suite.Run(ctx, out)
	show.close()
	if ctx.Err() != nil {
		if summary == (bench.Summary{}) {
			return &exitError{exitInterrupted, errors.New("interrupted before anything was finished; everything that was started is removed")}
		}
		return &exitError{exitInterrupted, fmt.Errorf("interrupted; everything that was started is removed. What was finished is in %s; 'xagg bench report %[1]s' makes the report of it", b.out)}
	}
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	fmt.Fprintf(b.env.stderr, "%d runs finished, %d failed, %d skipped; 'xagg bench report %s' makes the report\n", summary.Finished,
		summary.Failed, summary.Skipped, b.out)
	if summary.Finished > 0 {
		if err := b.summarize(); err != nil {
			return err
		}
	}
	if summary.Failed > 0 {
		return &exitError{exitFailure, fmt.Errorf("%d of %d runs failed", summary.Failed, len(steps))}
	}
	return nil
}

// check reads what the command line names, and returns the modes.
func (b *benchRun) check() (modes []scenario.Mode, err error) {
	switch {
	case len(b.files) == 0:
		return nil, usagef("no scenarios: name files, as in 'xagg bench run scenarios/*.yaml'")
	case b.repeat < 1:
		return nil, usagef("--repeat %d: want at least 1", b.repeat)
	case b.rounds < 0 || b.rounds > scenario.MaxRounds:
		return nil, usagef("--rounds %d: want 1 to %d, or 0 for what each scenario says", b.rounds, scenario.MaxRounds)
	case b.timeLimit < 0:
		return nil, usagef("--time-limit %v: want a positive duration", b.timeLimit)
	case b.appendTo && b.force:
		return nil, usagef("--append and --force exclude each other")
	case b.sw != testbed.SwitchEngine && b.sw != testbed.SwitchSimpleSwitch:
		return nil, usagef("--switch %q: want %s or %s", b.sw, testbed.SwitchEngine, testbed.SwitchSimpleSwitch)
	case summaries[b.output] == nil:
		return nil, usagef("--output %q: want text, jsonl or gobench", b.output)
	}
	if modes, err = parseModes(b.modes); err != nil {
		return nil, err
	}
	seen := map[string]string{}
	for _, pattern := range b.files {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, usagef("file %q: %w", pattern, err)
		}
		if len(paths) == 0 {
			return nil, usagef("file %q: there is none", pattern)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				return nil, fmt.Errorf("read scenario: %w", err)
			}
			s, err := scenario.Parse(path, text)
			if err != nil {
				return nil, &exitError{exitUsage, err}
			}
			if b.rounds > 0 {
				s.Rounds = b.rounds
				if err := s.Validate(); err != nil {
					return nil, usagef("%s with --rounds %d: %w", path, b.rounds, err)
				}
			}
			if other, twice := seen[s.Name]; twice {
				return nil, usagef("%s: scenario %s is in %s already; names are unique in a suite", path, s.Name, other)
			}
			seen[s.Name] = path
			b.scenarios, b.texts = append(b.scenarios, s), append(b.texts, string(text))
		}
	}
	if b.hosts != "" {
		if len(b.scenarios) != 1 {
			return nil, usagef("--hosts: want one scenario, which these hosts have the links of; there are %d", len(b.scenarios))
		}
		if b.existing, err = testbed.ReadExisting(b.hosts); err != nil {
			return nil, err
		}
		b.sw = b.existing.Switch.Kind
	}
	if _, err := os.Stat(b.out); err == nil && !b.appendTo && !b.force {
		return nil, usagef("--out %s: the file is there; say --append to add to it, --force to replace it, or name another", b.out)
	}
	return modes, nil
}

func parseModes(list []string) (modes []scenario.Mode, err error) {
	for _, name := range list {
		if name == "all" {
			return scenario.Modes(), nil
		}
		mode, err := scenario.ParseMode(name)
		if err != nil {
			return nil, usagef("--modes: %w, or all", err)
		}
		for _, other := range modes {
			if other == mode {
				return nil, usagef("--modes: %s is there twice", mode)
			}
		}
		modes = append(modes, mode)
	}
	if len(modes) == 0 {
		return nil, usagef("--modes is empty: want %s", strings.Join(names(scenario.Modes()), ", "))
	}
	return modes, nil
}

func names(modes []scenario.Mode) (names []string) {
	for _, m := range modes {
		names = append(names, string(m))
	}
	return names
}

// missing returns the function that says what the machine lacks for a mode, beside what is known of some.
func (b *benchRun) missing(known map[scenario.Mode]string) func(scenario.Mode) string {
	var noSwitch string
	if b.sw == testbed.SwitchSimpleSwitch && b.existing == nil {
		if _, err := bmv2.FindSimpleSwitch(b.simple); err != nil {
			noSwitch = err.Error() // all modes go through it
		}
	}
	return func(m scenario.Mode) string {
		if noSwitch != "" {
			return noSwitch
		}
		return known[m]
	}
}

// create opens the file for the results.
func (b *benchRun) create() (*os.File, error) {
	flags := os.O_WRONLY | os.O_CREATE
	switch {
	case b.appendTo:
		flags |= os.O_APPEND
	case b.force:
		flags |= os.O_TRUNC
	default:
		flags |= os.O_EXCL
	}
	file, err := os.OpenFile(b.out, flags, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return nil, usagef("--out %s: the file is there by now", b.out)
	}
	if err != nil {
		return nil, fmt.Errorf("write results: %w", err)
	}
	return file, nil
}

// header returns what is written before the first run.
func (b *benchRun) header(modes []scenario.Mode) results.Header {
	h := bench.Machine()
	h.Time, h.Command = time.Now(), b.command
	h.Lab, h.Switch, h.Repeat = "netns", b.sw, b.repeat
	if b.existing != nil {
		h.Lab = b.existing.Lab
	}
	h.Emulated = bench.Emulated
	h.Modes = names(modes)
	for i, s := range b.scenarios {
		h.Scenarios = append(h.Scenarios, results.Scenario{
			Name: s.Name, About: s.About, YAML: b.texts[i], Heterogeneous: s.Heterogeneous(),
		})
	}
	return h
}

// summarize prints what -o asks for.
func (b *benchRun) summarize() error {
	file, err := os.Open(b.out)
	if err != nil {
		return fmt.Errorf("read results: %w", err)
	}
	defer file.Close()
	all, err := results.Read(b.out, file)
	if err != nil {
		return err
	}
	return summaries[b.output](b.env.stdout, all)
}

// spellSteps says what is going to be done, and how long it takes.
func spellSteps(steps []bench.Step, estimate time.Duration) string {
	skipped := 0
	for _, s := range steps {
		if s.Skip != "" {
			skipped++
		}
	}
	return fmt.Sprintf("%d runs, %d of them skipped, about %v", len(steps), skipped, estimate.Round(time.Second))
}

// benchProgress shows how far a suite is: on a terminal in one line that is written again, else a line per run.
type benchProgress struct {
	w        io.Writer
	terminal bool

	mu    sync.Mutex
	p     *bench.Progress
	began time.Time // of the run under way
	stop  chan struct{}
	group sync.WaitGroup
}

// clearLine goes to the beginning of a terminal's line and clears it.
const clearLine = "\r\x1b[K"

func newBenchProgress(w io.Writer, terminal bool, steps []bench.Step) *benchProgress {
	p := &benchProgress{w: w, terminal: terminal, p: bench.NewProgress(steps), stop: make(chan struct{})}
	if terminal {
		p.group.Go(func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					p.mu.Lock()
					p.show()
					p.mu.Unlock()
				case <-p.stop:
					return
				}
			}
		})
	}
	return p
}

func (p *benchProgress) show() {
	if !p.began.IsZero() {
		fmt.Fprint(p.w, clearLine+p.p.Now(time.Since(p.began)))
	}
}

func (p *benchProgress) begins(bench.Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began = time.Now()
	if p.terminal {
		p.show()
	}
}

func (p *benchProgress) took(step bench.Step, run *results.Run) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.p.Over(step, time.Since(p.began))
	p.began = time.Time{}
	if p.terminal {
		fmt.Fprint(p.w, clearLine)
		if run.Failed == "" {
			return // the line is for what is under way
		}
	}
	fmt.Fprintln(p.w, p.p.Line(step, run))
}

func (p *benchProgress) close() {
	close(p.stop)
	p.group.Wait()
	if p.terminal {
		fmt.Fprint(p.w, clearLine)
	}
}
