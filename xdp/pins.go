package xdp

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ErrAgentRuns says that another agent has the pins.
var ErrAgentRuns = errors.New("another xagg server runs there; stop it first")

// The names of what may be pinned besides the maps of the object.
const (
	pinRecord = "record"
	pinLink   = "link" // of the program
	pinPeer   = "peer" // link of the program that passes all, where the server attached one
)

// pinNames are the names of everything that a server may have pinned, in the order of their removal: the program goes
// first, and the record, by which everything else is known, last.
var pinNames = []string{
	pinLink, pinPeer, xaggMapArena, xaggMapPlans, xaggMapJobs, xaggMapReasons, xaggMapRanks, pinRecord,
}

// pins is a directory on a BPF file system in which a server's maps and links outlive the process that made them.
// Whoever has it holds a lock on it, which the kernel releases when the process dies, however it dies. What is in it is
// known by the record that it holds.
type pins struct {
	dir  string
	lock *os.File
}

// patience is how long an agent waits for the pins: somebody may just be looking at them, or about to end.
const patience = time.Second

// openPins takes a directory, and makes it where it is not there. [ErrAgentRuns] when another process has it.
func openPins(dir string) (*pins, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	onBPFFS, err := isBPFFS(dir)
	if err != nil {
		return nil, fmt.Errorf("open pins: %w", err)
	}
	if !onBPFFS {
		return nil, fmt.Errorf("open pins: %s is on no BPF file system; 'mount -t bpf bpf %s' makes one", dir, bpffs)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(patience / 50) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("open pins: %w", err)
		}
		p, err := lockPins(dir)
		if err == nil {
			return p, nil
		}
		again := errors.Is(err, ErrAgentRuns) || errors.Is(err, fs.ErrNotExist) // whoever had it has removed it
		if !again || time.Now().After(deadline) {
			return nil, fmt.Errorf("open pins: %w", err)
		}
	}
}

// lockPins takes a directory that is there, else it returns [fs.ErrNotExist].
func lockPins(dir string) (*pins, error) {
	lock, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	switch err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
	case nil:
	case unix.EWOULDBLOCK:
		lock.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, ErrAgentRuns)
	default:
		lock.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(lock.Fd()), &stat); err != nil {
		lock.Close()
		return nil, fmt.Errorf("look at %s: %w", dir, err)
	}
	if stat.Nlink == 0 {
		lock.Close()
		return nil, fs.ErrNotExist
	}
	return &pins{dir, lock}, nil
}

// close lets go of the directory and leaves what is in it.
func (p *pins) close() error { return p.lock.Close() }

// String returns the directory, or that there is none.
func (p *pins) String() string {
	if p == nil {
		return "none"
	}
	return p.dir
}

func (p *pins) path(name string) string { return filepath.Join(p.dir, name) }

// read returns the record of what is pinned; ok is false where nothing is. What has no record is not ours.
func (p *pins) read() (r record, ok bool, err error) {
	entries, err := os.ReadDir(p.dir)
	if err != nil {
		return r, false, err
	}
	if len(entries) == 0 {
		return r, false, nil
	}
	m, err := ebpf.LoadPinnedMap(p.path(pinRecord), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return r, false, fmt.Errorf("%s holds %s, which no xagg server has pinned; choose another directory with --pin",
			p.dir, entries[0].Name())
	}
	if err != nil {
		return r, false, fmt.Errorf("open %s: %w", p.path(pinRecord), explain(err))
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return r, false, fmt.Errorf("look at %s: %w", p.path(pinRecord), err)
	}
	if info.Name != recordMapName {
		return r, false, fmt.Errorf("%s is no xagg server's; choose another directory with --pin", p.path(pinRecord))
	}
	if info.ValueSize != recordSpec.ValueSize {
		return record{Complete: 1}, true, nil // of a version that kept another record: its hash is not ours either
	}
	r, err = readRecord(m)
	return r, err == nil, err
}

// clear removes everything that a server has pinned there. Its programs are detached when it returns; its memory is free
// when nobody holds the maps open any more.
func (p *pins) clear() error {
	// The kernel lets go of what was pinned only some time after it was unpinned.
	for _, name := range []string{pinLink, pinPeer} {
		if err := detach(p.path(name)); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	for _, name := range pinNames {
		if err := os.Remove(p.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}

// detach detaches the program of a link that is pinned, if it is.
func detach(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, explain(err))
	}
	defer l.Close()
	if err := l.Detach(); err != nil {
		return fmt.Errorf("detach %s: %w", path, explain(err))
	}
	return nil
}

// remove removes everything, the directory too, and lets go of it.
func (p *pins) remove() error {
	err := p.clear()
	if err == nil {
		err = os.Remove(p.dir)
	}
	// The folder of all servers' pins goes with the last; while there are others it is not empty.
	if parent := filepath.Dir(p.dir); err == nil && parent == filepath.Join(bpffs, "xagg") {
		_ = os.Remove(parent)
	}
	return errors.Join(err, p.close())
}

// pin makes a server that is attached outlive this process.
func (s *Server) pin(p *pins) error {
	err := s.recordMap.Pin(p.path(pinRecord))
	for name, m := range s.maps() {
		if err == nil {
			err = m.Pin(p.path(name))
		}
	}
	for name, l := range map[string]link.Link{pinLink: s.link, pinPeer: s.peer} {
		if err == nil && l != nil {
			err = l.Pin(p.path(name))
		}
	}
	if err == nil {
		s.record.Complete = 1
		err = s.writeRecord()
	}
	if err != nil {
		return fmt.Errorf("pin in %s: %w", p.dir, explain(err))
	}
	return nil
}

// maps returns the object's maps by name.
func (s *Server) maps() map[string]*ebpf.Map {
	o := &s.objects
	return map[string]*ebpf.Map{
		xaggMapArena: o.Arena, xaggMapPlans: o.Plans, xaggMapJobs: o.Jobs, xaggMapReasons: o.Reasons, xaggMapRanks: o.Ranks,
	}
}

// PinnedServer is what a server's agent has pinned.
type PinnedServer struct {
	Dir       string
	Interface string
	Agent     bool // an agent runs
	Attached  bool // the program is attached to an interface that exists
}

// PinnedServers returns the servers that are pinned on this machine, as far as this process may see them.
func PinnedServers() ([]PinnedServer, error) {
	mounts, err := os.ReadFile("/proc/thread-self/mounts") // /proc/self is the first thread, which may have others
	if err != nil {
		return nil, fmt.Errorf("find BPF file systems: %w", err)
	}
	var servers []PinnedServer
	var errs []error
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[2] != "bpf" {
			continue
		}
		found, err := pinnedBelow(unescapeMount.Replace(fields[1]))
		servers, errs = append(servers, found...), append(errs, err)
	}
	slices.SortFunc(servers, func(a, b PinnedServer) int { return strings.Compare(a.Dir, b.Dir) })
	return slices.Compact(servers), errors.Join(errs...) // a file system may be mounted twice at a place
}

// unescapeMount undoes how /proc/thread-self/mounts spells paths (getmntent(3)).
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func pinnedBelow(root string) ([]PinnedServer, error) {
	var servers []PinnedServer
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case entry.IsDir() || entry.Name() != pinRecord:
			return nil
		}
		s, err := look(filepath.Dir(path))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errNotOurs) {
			return nil
		}
		if err != nil {
			return err
		}
		servers = append(servers, s)
		return nil
	})
	if err != nil {
		return servers, fmt.Errorf("look for pinned servers in %s: %w", root, err)
	}
	return servers, nil
}

// errNotOurs says that a pin called record is somebody else's.
var errNotOurs = errors.New("not pinned by an xagg server")

// look says what is pinned in a directory.
func look(dir string) (s PinnedServer, err error) {
	p, err := lockPins(dir)
	switch {
	case errors.Is(err, ErrAgentRuns):
		p, s.Agent = &pins{dir: dir}, true
	case err != nil:
		return s, err
	default:
		defer p.close()
	}
	r, ok, err := p.read()
	if err != nil || !ok {
		return s, errors.Join(err, errNotOurs)
	}
	s.Dir, s.Interface = dir, r.iface()
	l, err := link.LoadPinnedLink(p.path(pinLink), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	defer l.Close()
	ifindex, _, err := attachedTo(l)
	s.Attached = ifindex != 0
	return s, err
}

// RemovePins removes what is pinned in a directory, unless an agent runs there.
func RemovePins(dir string) error {
	p, err := lockPins(dir)
	if err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	if _, _, err := p.read(); err != nil {
		return errors.Join(err, p.close())
	}
	return p.remove()
}

// attachedTo returns the number of the interface that a link has its program at, 0 when that is gone, and the program's.
func attachedTo(l link.Link) (ifindex int, program ebpf.ProgramID, err error) {
	info, err := l.Info()
	if err != nil {
		return 0, 0, err
	}
	xdp := info.XDP()
	if xdp == nil {
		return 0, 0, fmt.Errorf("link %d is not of an XDP program", info.ID)
	}
	return int(xdp.Ifindex), info.Program, nil
}
