package controller

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/goccy/go-yaml"

	"xagg/controller/p4rt"
	"xagg/internal/strictyaml"
	"xagg/policy"
)

// StateSchema is the version of the state file's form. A controller reads the one that it writes.
const StateSchema = 1

// NoState as the path of the state file has nothing kept.
const NoState = "none"

// DefaultState returns where the state of a controller is kept that is started with a configuration file and not told
// otherwise: beside that file.
func DefaultState(config string) string { return config + ".state" }

// StateError says that a state file cannot be used. It is left as it is.
type StateError struct {
	Path string
	Err  error
}

// Error says what is wrong, and what can be done.
func (e *StateError) Error() string {
	return fmt.Sprintf("state file %s: %v; nothing was changed: name another file with --state, or move this one away to begin "+
		"without the jobs that it has", e.Path, e.Err)
}

// Unwrap returns what is wrong.
func (e *StateError) Unwrap() error { return e.Err }

// savedState is what a controller has to know after a restart: its intent, who the ranks are, and by what it recognizes
// the memory of its devices.
type savedState struct {
	SchemaVersion int           `yaml:"schema_version"`
	Switch        string        `yaml:"switch"`   // name
	Pipeline      uint64        `yaml:"pipeline"` // cookie of the switch's; 0 = none yet
	Servers       []savedServer `yaml:"servers"`
	NextID        uint16        `yaml:"next_id"`
	Jobs          []savedJob    `yaml:"jobs"`
}

type savedServer struct {
	Name     string `yaml:"name"`
	Instance uint64 `yaml:"instance"` // of its arena
	Slots    uint64 `yaml:"slots"`    // of it; 0 = not known
}

type savedJob struct {
	Spec   JobSpec       `yaml:"spec"`
	ID     uint16        `yaml:"id"`
	Rule   policy.Static `yaml:"rule"` // that the configuration had for it when its plan was decided
	Plan   savedPlan     `yaml:"plan"`
	Change *savedChange  `yaml:"change"`
	Homes  []string      `yaml:"homes"` // servers that have memory for it
	Lease  savedSpan     `yaml:"lease"`
	RIDs   savedSpan     `yaml:"rids"`
	Groups savedSpan     `yaml:"groups"`
	State  state         `yaml:"state"` // never installing: what is not installed waits for its ranks again
	Error  string        `yaml:"error"` // aborted: why
	Odd    []uint32      `yaml:"odd"`   // aborted: the ranks that caused it
	Seats  []savedSeat   `yaml:"seats"` // by rank; none unless all have joined
	Left   uint64        `yaml:"left"`  // mask
}

type savedPlan struct {
	Epoch       uint16   `yaml:"epoch"`
	Cohort      uint64   `yaml:"cohort"`
	Steered     uint64   `yaml:"steered"`
	Servers     []string `yaml:"servers"`
	Pool        int      `yaml:"pool"`
	Explanation string   `yaml:"explanation"`
	// Quorum and Wait are those that were decided, 0 and 0 in a job without a quorum, and in files of before plans had them: the
	// job's own. Enough is the quorum that holds, 0 = Quorum.
	Quorum int           `yaml:"quorum"`
	Wait   time.Duration `yaml:"wait"`
	Enough int           `yaml:"enough"`
}

type savedChange struct {
	From  savedPlan `yaml:"from"`
	To    savedPlan `yaml:"to"`
	Stage string    `yaml:"stage"`
}

type savedSpan struct {
	Base int `yaml:"base"`
	Size int `yaml:"size"`
}

type savedSeat struct {
	IP      netip.Addr `yaml:"ip"` // of its host
	UDPPort uint16     `yaml:"udp_port"`
	Digest  string     `yaml:"digest"`
	Epoch   uint16     `yaml:"epoch"` // that it has begun a round under
	Round   uint32     `yaml:"round"` // that it began with
	Gone    bool       `yaml:"gone"`  // the job runs without it
	Fresh   bool       `yaml:"fresh"`
	Missed  bool       `yaml:"missed"`
	Lost    string     `yaml:"lost"` // why it cannot take part any more; empty = it can
}

var stageNames = map[stage]string{stageBeside: "beside", stageArmed: "armed", stageRetiring: "retiring"}

// stateHeader begins a state file; the checksum of what follows ends the line.
const stateHeader = "# State of an xagg controller, which alone should write it. sha256 of the lines below: "

// encode writes a state as a file has it.
func (s *savedState) encode() ([]byte, error) {
	body, err := yaml.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode state: %w", err)
	}
	return sign(body), nil
}

// sign puts the first line before the others.
func sign(body []byte) []byte {
	return append(fmt.Appendf(nil, "%s%x\n", stateHeader, sha256.Sum256(body)), body...)
}

// decodeState reads what encode has written. It checks that it is whole, not that it is sound.
func decodeState(name string, src []byte) (*savedState, error) {
	line, body, _ := bytes.Cut(src, []byte("\n"))
	sum, ok := bytes.CutPrefix(line, []byte(stateHeader))
	switch {
	case len(src) == 0:
		return nil, errors.New("it is empty")
	case !ok:
		return nil, errors.New("it is not a controller's state")
	case string(sum) != fmt.Sprintf("%x", sha256.Sum256(body)):
		return nil, errors.New("it is damaged: its checksum does not fit")
	}
	var head struct {
		SchemaVersion int `yaml:"schema_version"`
	}
	if err := yaml.Unmarshal(body, &head); err != nil {
		return nil, err
	}
	if head.SchemaVersion != StateSchema {
		return nil, fmt.Errorf("it has schema version %d, and this program knows version %d alone", head.SchemaVersion, StateSchema)
	}
	var s savedState
	if err := strictyaml.Decode(name, body, &s, strictyaml.Text[netip.Addr](), strictyaml.Text[MAC]()); err != nil {
		return nil, err
	}
	return &s, nil
}

// snapshot returns the state as it is. c.mu is held.
func (c *Controller) snapshot() *savedState {
	s := &savedState{SchemaVersion: StateSchema, Switch: c.cfg.Switch.Name, Pipeline: c.pipeline, NextID: c.intent.nextID}
	for _, name := range slices.Sorted(maps.Keys(c.arenas)) {
		s.Servers = append(s.Servers, savedServer{name, c.arenas[name], c.intent.serverSlots[name]})
	}
	for _, j := range c.intent.sorted() {
		s.Jobs = append(s.Jobs, saveJob(j, c.meets[j.spec.Name]))
	}
	return s
}

func saveJob(j *job, meet *rendezvous) savedJob {
	s := savedJob{
		Spec: j.spec, ID: j.id, Rule: j.rule, Plan: savePlan(j.plan), Homes: j.homes,
		Lease: saveSpan(j.lease), RIDs: saveSpan(j.rids), Groups: saveSpan(j.groups),
		State: meet.state, Odd: meet.odd, Left: meet.left,
	}
	if c := j.change; c != nil {
		s.Change = &savedChange{From: savePlan(c.from), To: savePlan(c.to), Stage: stageNames[c.stage]}
	}
	if meet.err != nil {
		s.Error = meet.err.Error()
	}
	switch {
	case meet.state == stateInstalling && meet.settled:
		s.State = stateRunning // somebody may be told
	case meet.state == stateInstalling:
		s.State = stateWaiting // nobody has been told
	}
	if s.State != stateWaiting && j.members != nil {
		for _, seat := range meet.seats {
			s.Seats = append(s.Seats, saveSeat(seat, s.State == stateRunning))
		}
	}
	return s
}

// saveSeat returns a seat of a job, which may run. Who came back and waits to be let in has to come again.
func saveSeat(s *seat, runs bool) savedSeat {
	saved := savedSeat{
		IP: s.member.host.IP, UDPPort: s.member.udpPort, Digest: s.digest, Epoch: s.epoch, Round: s.round,
	}
	if !runs {
		return saved
	}
	saved.Gone = s.deaf || s.returning()
	saved.Fresh, saved.Missed = s.fresh, s.missed
	if s.lost != nil {
		saved.Lost = s.lost.Error()
	}
	return saved
}

func (s *savedSeat) restore(host Host) *seat {
	restored := &seat{
		member: member{host, s.UDPPort}, digest: s.Digest, epoch: s.Epoch, round: s.Round,
		deaf: s.Gone, fresh: s.Fresh, missed: s.Missed,
	}
	if s.Lost != "" {
		restored.lost = errors.New(s.Lost)
	}
	return restored
}

func savePlan(p plan) savedPlan {
	d := p.decision
	return savedPlan{p.epoch, d.Cohort, d.Steered, d.Servers, d.Pool, d.Explanation, d.Quorum, d.Wait, p.quorum}
}

func saveSpan(s span) savedSpan { return savedSpan{s.base, s.size} }

func (s savedSpan) restore() span { return span{s.Base, s.Size} }

// restore returns the plan, of a job that was created with this consistency.
func (p savedPlan) restore(own Consistency) plan {
	if p.Quorum == 0 {
		p.Quorum, p.Wait = own.Quorum, own.Wait
	}
	return plan{p.Epoch, policy.Decision{
		Plan: policy.Plan{
			Cohort: p.Cohort, Steered: p.Steered, Servers: p.Servers, Pool: p.Pool, Quorum: p.Quorum, Wait: p.Wait,
		}, Explanation: p.Explanation,
	}, cmp.Or(p.Enough, p.Quorum)}
}

// restore fills an empty intent with the jobs of a state, and returns where their ranks meet. A state that cannot be one
// of this configuration is an error.
func (s *savedState) restore(in *intent) (map[string]*rendezvous, error) {
	if s.Switch != in.cfg.Switch.Name {
		return nil, fmt.Errorf("it is of switch %q, and the configuration has switch %q", s.Switch, in.cfg.Switch.Name)
	}
	meets := make(map[string]*rendezvous)
	in.nextID = s.NextID
	for _, saved := range s.Jobs {
		j, meet, err := saved.restore(in)
		if err != nil {
			return nil, fmt.Errorf("job %q: %w", saved.Spec.Name, err)
		}
		in.jobs[j.spec.Name], meets[j.spec.Name] = j, meet
	}
	return meets, nil
}

func (s *savedJob) restore(in *intent) (*job, *rendezvous, error) {
	j := &job{
		spec: s.Spec.complete(), id: s.ID, rule: s.Rule, plan: s.Plan.restore(s.Spec.Consistency), lease: s.Lease.restore(), rids: s.RIDs.restore(), groups: s.Groups.restore(),
	}
	if err := s.Spec.Validate(); err != nil {
		return nil, nil, err
	}
	if j.settle(j.decision.Plan); len(s.Homes) > 0 {
		j.homes = slices.DeleteFunc(s.Homes, func(name string) bool { return !slices.Contains(in.serverNames(), name) })
	}
	if j.rule.Rule == "" { // of a file that does not say
		j.rule = in.ruleOf(j.spec)
	}
	if j.id == 0 || in.byID(j.id) != nil {
		return nil, nil, fmt.Errorf("its id %d is none or another job's", j.id)
	}
	if _, there := in.jobs[j.spec.Name]; there {
		return nil, nil, errors.New("it is there twice")
	}
	if c := s.Change; c != nil {
		j.change = &change{from: c.From.restore(j.spec.Consistency), to: c.To.restore(j.spec.Consistency)}
		known := false
		for stage, name := range stageNames {
			if name == c.Stage {
				j.change.stage, known = stage, true
			}
		}
		if !known {
			return nil, nil, fmt.Errorf("its plan changes in the unknown stage %q", c.Stage)
		}
		if j.change.to.epoch != nextEpoch(j.change.from.epoch) {
			return nil, nil, fmt.Errorf("its plan changes from epoch %d to %d", j.change.from.epoch, j.change.to.epoch)
		}
	}
	for _, p := range append(j.plans(), j.plan) {
		if err := j.checkPlan(in, p); err != nil {
			return nil, nil, err
		}
	}
	if err := j.checkSpans(in); err != nil {
		return nil, nil, err
	}
	if err := in.checkTables(j); err != nil {
		return nil, nil, err
	}
	meet, err := s.meet(in, j)
	return j, meet, err
}

// checkPlan checks a plan that was read from a file.
func (j *job) checkPlan(in *intent, p plan) error {
	d := p.decision
	switch {
	case p.epoch == 0:
		return errors.New("its plan has no epoch")
	case d.Cohort&d.Steered != 0 || d.Cohort|d.Steered != j.ranks():
		return fmt.Errorf("its plan of epoch %d does not say of each rank where it is summed", p.epoch)
	case d.Steered != 0 && len(d.Servers) == 0:
		return fmt.Errorf("its plan of epoch %d steers ranks to no server", p.epoch)
	case d.Pool < 1 || bits.OnesCount(uint(d.Pool)) != 1 || d.Pool > in.slots || j.lease.size != policy.SlotsPerPool*d.Pool:
		return fmt.Errorf("its plan of epoch %d has a pool of %d, and it has %d slots", p.epoch, d.Pool, j.lease.size)
	case !j.checkQuorum(p):
		return fmt.Errorf("its plan of epoch %d has a quorum of %d of %d within %s, and it was created as %s", p.epoch, p.quorum, d.Quorum,
			d.Wait, j.spec.Consistency)
	}
	for i, name := range d.Servers {
		if slices.Contains(d.Servers[:i], name) {
			return fmt.Errorf("its plan of epoch %d names server %q twice", p.epoch, name)
		}
		if !slices.Contains(in.serverNames(), name) {
			return fmt.Errorf("its plan of epoch %d needs server %q, which the configuration does not have", p.epoch, name)
		}
	}
	return j.spec.Consistency.allows(d.Plan)
}

// checkQuorum reports whether a plan that was read from a file may have the quorum and the wait that it has.
func (j *job) checkQuorum(p plan) bool {
	least := j.spec.Consistency.Quorum // 0 = the job has none
	if least == 0 {
		return p.quorum == 0 && p.decision.Quorum == 0 && p.decision.Wait == 0
	}
	return least <= p.quorum && p.quorum <= p.decision.Quorum && p.decision.Quorum <= j.spec.Ranks && policy.CheckWait("wait", p.decision.Wait) == nil
}

// checkSpans checks that what a job has of the switch is there, and no other job's.
func (j *job) checkSpans(in *intent) error {
	for _, r := range []struct {
		what         string
		of           func(*job) span
		size, lo, hi int
	}{
		{"slots", func(j *job) span { return j.lease }, j.lease.size, 0, in.slots},
		{"replica numbers", func(j *job) span { return j.rids }, j.spec.Ranks, 1, 1 << 16},
		{"multicast groups", func(j *job) span { return j.groups }, groupsPerJob, floodGroup + 1, p4rt.MaxGroup + 1},
	} {
		s := r.of(j)
		if s.size != r.size || s.base < r.lo || s.base > r.hi-s.size {
			return fmt.Errorf("it has the %d %s from %d on, and there are %d..%d", s.size, r.what, s.base, r.lo, r.hi-1)
		}
		for _, other := range in.jobs {
			if t := r.of(other); s.base < t.base+t.size && t.base < s.base+s.size {
				return fmt.Errorf("it has %s of job %q", r.what, other.spec.Name)
			}
		}
	}
	return nil
}

// meet returns where the ranks of a restored job are: those of a running one are expected back.
func (s *savedJob) meet(in *intent, j *job) (*rendezvous, error) {
	r := newRendezvous(j)
	if s.Left&^j.ranks() != 0 {
		return nil, fmt.Errorf("ranks %s have left, and there are %d", policy.FormatMask(s.Left), j.spec.Ranks)
	}
	if len(s.Seats) > 0 {
		if len(s.Seats) != j.spec.Ranks {
			return nil, fmt.Errorf("it has %d seats for %d ranks", len(s.Seats), j.spec.Ranks)
		}
		for rank, saved := range s.Seats {
			i := slices.IndexFunc(in.cfg.Hosts, func(h Host) bool { return h.IP == saved.IP })
			if i < 0 {
				return nil, fmt.Errorf("its rank %d is at %s, which is none of the configured hosts", rank, saved.IP)
			}
			r.seats[rank] = saved.restore(in.cfg.Hosts[i])
		}
		j.members = r.members()
	}
	r.state, r.left, r.odd, r.settled = s.State, s.Left, s.Odd, len(s.Seats) > 0
	switch s.State {
	case stateWaiting:
		if len(s.Seats) > 0 || s.Left != 0 {
			return nil, errors.New("it waits for ranks that have joined")
		}
	case stateRunning:
		if len(s.Seats) == 0 {
			return nil, errors.New("it runs without ranks")
		}
		if n := bits.OnesCount64(r.joined()); n < r.enough {
			return nil, fmt.Errorf("it runs with %d ranks, and needs %d", n, r.enough)
		}
		r.awaited = r.joined() &^ r.left
		close(r.ready)
	case stateFinished:
		close(r.over)
	case stateAborted:
		r.err = errors.New(cmp.Or(s.Error, "it was aborted"))
		close(r.over)
	default:
		return nil, fmt.Errorf("it is in the unknown state %q", s.State)
	}
	return r, nil
}

// load takes up what an earlier controller has kept, if there is anything.
func (c *Controller) load() error {
	if c.cfg.State == "" || c.cfg.State == NoState {
		return nil
	}
	src, err := os.ReadFile(c.cfg.State)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read state: %w", err)
	}
	s, err := decodeState(filepath.Base(c.cfg.State), src)
	if err == nil {
		c.meets, err = s.restore(&c.intent)
	}
	if err != nil {
		return &StateError{c.cfg.State, err}
	}
	c.pipeline = s.Pipeline
	for _, server := range s.Servers {
		c.arenas[server.Name] = server.Instance
		c.intent.serverSlots[server.Name] = server.Slots
	}
	c.saved = src
	for name := range c.meets {
		c.errs[name] = errNotSeen
	}
	c.log.Info("jobs of an earlier controller are taken over", "state", c.cfg.State, "jobs", len(c.meets))
	return nil
}

var errNotSeen = errors.New("the controller was restarted and has not seen all of its devices yet")

// save keeps the state, if it is another than the one that was kept last. Nothing is told to a device before what is wanted
// of it is kept: a controller that is killed knows after its restart what it may have done. Neither c.mu nor c.saving is
// held.
func (c *Controller) save() error {
	if c.cfg.State == "" || c.cfg.State == NoState {
		return nil
	}
	c.saving.Lock()
	defer c.saving.Unlock()
	c.mu.Lock()
	s := c.snapshot()
	text, err := s.encode()
	c.mu.Unlock()
	if err != nil || bytes.Equal(text, c.saved) {
		return err
	}
	if err := writeFile(c.cfg.State, text); err != nil {
		return fmt.Errorf("keep state: %w", err)
	}
	c.saved = text
	return nil
}

// trySave is save where nothing can be done about an error: the next save tries again.
func (c *Controller) trySave() {
	if err := c.save(); err != nil {
		c.log.Error("state is not kept", "err", err)
	}
}

// writeFile replaces a file as a whole: whoever reads it after a crash finds what it was or what it is to be.
func writeFile(path string, text []byte) error {
	next := path + ".tmp"
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		os.Remove(next)
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}
