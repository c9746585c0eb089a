package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"xagg/bmv2/fault"
)

// AdoptSpec describes a lab whose namespaces and links exist.
type AdoptSpec struct {
	RunDir string         // as in [Spec]
	Switch string         // file through which the switch's namespace can be entered
	Hosts  []ExistingHost // around the switch
	Wires  []string       // files through which namespaces in the middle of links can be entered
}

// ExistingHost is a host that somebody has made.
type ExistingHost struct {
	Host                 // Rate and Bridge are not used: the link is as it is
	Path          string // file through which the host's namespace can be entered
	Interface     string // of the host
	PortInterface string // of the switch's port, in the switch's namespace
}

// Adopted is a lab in namespaces of somebody else, who made them and will remove them: of what [Create] makes it has the
// folder and the processes only. Its methods may be called from several goroutines.
type Adopted struct {
	lab   *Lab
	hosts map[string]ExistingHost
	ports map[int]string
	wires []string
	paths map[string]string
}

// Adopt makes a lab of hosts that exist. First it removes what dead labs left in the same folder.
func Adopt(spec AdoptSpec) (*Adopted, error) {
	a, err := adopt(spec)
	if err != nil {
		return nil, fmt.Errorf("adopt hosts: %w", err)
	}
	return a, nil
}

func adopt(spec AdoptSpec) (*Adopted, error) {
	a := &Adopted{hosts: map[string]ExistingHost{}, ports: map[int]string{}, paths: map[string]string{Switch: spec.Switch}}
	own := Spec{RunDir: spec.RunDir}
	for _, h := range spec.Hosts {
		h.Rate, h.Bridge = 0, false
		own.Hosts = append(own.Hosts, h.Host)
		a.hosts[h.Name], a.ports[h.Port], a.paths[h.Name] = h, h.PortInterface, h.Path
	}
	for i, path := range spec.Wires {
		name := fmt.Sprintf("wire%d", i)
		a.wires, a.paths[name] = append(a.wires, name), path
	}
	if own.RunDir == "" {
		own.RunDir = RunDir
	}
	if err := own.Validate(); err != nil {
		return nil, err
	}
	if _, err := Sweep(own.RunDir); err != nil {
		return nil, err
	}
	journal, id, err := newJournal(own.RunDir, "")
	if err != nil {
		return nil, err
	}
	a.lab = &Lab{
		id: id, dir: filepath.Join(own.RunDir, id), spec: own,
		spaces: map[string]*space{}, injector: fault.NewInjector(nil), launcher: newLauncher(), journal: journal,
	}
	if err := a.enter(); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// enter makes the folder and opens the namespaces.
func (a *Adopted) enter() error {
	l := a.lab
	if _, err := os.Lstat(l.dir); err == nil {
		return fmt.Errorf("%s exists and no record says whose it is", l.dir)
	}
	if err := l.journal.add(entry{Path: l.dir}); err != nil {
		return err
	}
	if err := os.Mkdir(l.dir, 0o755); err != nil {
		return err
	}
	for name, path := range a.paths {
		s := &space{name: path}
		var err error
		if s.handle, err = netns.GetFromPath(path); err != nil {
			return fmt.Errorf("open the network namespace of %s: %w", name, err)
		}
		l.spaces[name] = s
		if s.links, err = netlink.NewHandleAt(s.handle, unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("enter the network namespace of %s: %w", name, err)
		}
	}
	for _, h := range a.hosts {
		for _, e := range []end{{l.spaces[h.Name], h.Interface}, {l.spaces[Switch], h.PortInterface}} {
			if _, err := e.links.LinkByName(e.iface); err != nil {
				return fmt.Errorf("find interface %q of the link of %s in %s: %w", e.iface, h.Name, e.name, err)
			}
		}
	}
	return nil
}

// Dir returns a folder of the lab's own for sockets and other files. It is removed with the lab.
func (a *Adopted) Dir() string { return a.lab.Dir() }

// Hosts returns the lab's hosts.
func (a *Adopted) Hosts() []Host { return a.lab.Hosts() }

// Interface returns the name of a host's interface.
func (a *Adopted) Interface(host string) string { return a.hosts[host].Interface }

// PortInterface returns the name of the interface of a switch port.
func (a *Adopted) PortInterface(port int) string { return a.ports[port] }

// Wires returns the namespaces in the middle of links, by names that [Adopted.Do] takes.
func (a *Adopted) Wires() []string { return a.wires }

// Path returns the file through which a host's network namespace, or that of [Switch], can be entered.
func (a *Adopted) Path(host string) string { return a.paths[host] }

// Do runs f in a host's network namespace, or in the switch's, as [Lab.Do].
func (a *Adopted) Do(host string, f func() error) error { return a.lab.Do(host, f) }

// Start runs a command in a host, or in the switch's namespace, as [Lab.Start].
func (a *Adopted) Start(host string, cmd *exec.Cmd) (*Child, error) { return a.lab.Start(host, cmd) }

// Faults returns nothing: the links are not this lab's.
func (a *Adopted) Faults() []fault.PathCounts { return nil }

// Close stops the lab's processes and removes its folder. The hosts stay.
func (a *Adopted) Close() error { return a.lab.Close() }
