package controller

import (
	"context"
	_ "embed" // the example
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/goccy/go-yaml"

	"xagg/internal/endpoint"
	"xagg/internal/strictyaml"
	"xagg/policy"
	"xagg/policy/adapt"
	"xagg/xdp"
)

// Example is a complete configuration file with comments.
//
//go:embed example.yaml
var Example string

// DefaultListen is where a controller listens when nothing else is asked for, and where its clients look for it: the
// protocol's UDP port number, on TCP.
const DefaultListen = "127.0.0.1:19860"

// MaxPort is the highest port of a switch that carries a link: bmv2 drops at 511 and has its CPU port below.
const MaxPort = 510

// Config is everything a controller is told before it starts. Start from [DefaultConfig], or [Load] a file.
type Config struct {
	Listen  string        `yaml:"listen"`  // where the API is served: host:port, or unix:PATH
	Switch  Switch        `yaml:"switch"`  // the one switch
	Service Service       `yaml:"service"` // the address that workers send to
	Hosts   []Host        `yaml:"hosts"`   // where workers run
	Servers []Server      `yaml:"servers"` // aggregation servers
	Policy  policy.Static `yaml:"policy"`  // for jobs that come without one
	// Adapt is what policies by which plans follow what is measured leave out; a job without one keeps its plan.
	Adapt adapt.Config `yaml:"adapt"`
	Jobs  []JobSpec    `yaml:"jobs"` // created at start
	// Reserve is the share of the switch's slots, and of each server's memory, that is kept for jobs to come: at least 0 and
	// below 1.
	Reserve float64 `yaml:"reserve"`
	// State is the file that keeps what a restarted controller has to know; see docs/hosts.md. Empty, or NoState: nothing is
	// kept, and a restarted controller begins from nothing.
	State string `yaml:"state"`
}

// Switch is a P4Runtime switch.
type Switch struct {
	Name     string `yaml:"name"`
	Address  string `yaml:"address"`   // of its P4Runtime server: host:port, or unix:PATH
	DeviceID uint64 `yaml:"device_id"` // must be the switch's own --device-id
	CPUPort  uint16 `yaml:"cpu_port"`  // port of packet-in and packet-out; no link may have it
}

// Service is the address that workers send to; the switch answers for it.
type Service struct {
	IP  netip.Addr `yaml:"ip"`
	MAC MAC        `yaml:"mac"`
}

// Host is a machine that workers run on.
type Host struct {
	Name string     `yaml:"name"`
	IP   netip.Addr `yaml:"ip"`
	MAC  MAC        `yaml:"mac"`
	Port uint16     `yaml:"port"` // switch port, 1..510
}

// Server is an aggregation server.
type Server struct {
	Name  string     `yaml:"name"`
	Agent string     `yaml:"agent"` // address of its agent: host:port, or unix:PATH
	IP    netip.Addr `yaml:"ip"`
	MAC   MAC        `yaml:"mac"`
	Port  uint16     `yaml:"port"` // switch port, 1..510
	// Memory is how much its agent has, for jobs that are placed before it has said so itself; 0 = not known.
	Memory xdp.Size `yaml:"memory"`
}

// JobSpec asks for a job.
type JobSpec struct {
	Name     string         `yaml:"name"`
	Ranks    int            `yaml:"ranks"`     // number of workers, 1..64
	MaxElems uint32         `yaml:"max_elems"` // lanes of the largest vector, at least 1
	Policy   *policy.Static `yaml:"policy"`    // nil = the configuration's
	// Consistency says what results are; sync unless it says otherwise.
	Consistency Consistency `yaml:"consistency"`
	// Depth is how many rounds may be under way, 1..16; 0 = 1. Of an async job it counts all-reduces of different tensors.
	Depth int `yaml:"depth"`
	// Adapt has the plan follow what is measured: ranks begin where Policy has them and move from there. nil = they stay. What
	// it leaves out is as in the configuration's.
	Adapt *adapt.Config `yaml:"adapt,omitempty"`
	// Weight is the job's share of switch slots beside other jobs, 1..MaxWeight; 0 = 1.
	Weight int `yaml:"weight"`
}

// MAC is an Ethernet address, as comparable data.
type MAC [6]byte

// UnmarshalText reads six hexadecimal bytes with colons or hyphens.
func (m *MAC) UnmarshalText(text []byte) error {
	hw, err := net.ParseMAC(string(text))
	if err != nil || len(hw) != len(m) {
		return fmt.Errorf("%q is not an Ethernet address of six bytes", text)
	}
	copy(m[:], hw)
	return nil
}

// MarshalText writes the address with colons.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// String writes the address with colons.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// DefaultConfig returns what a configuration file need not say: the listen address, a switch on this machine as
// `xagg switch` serves it, and a policy that has the switch sum all ranks.
func DefaultConfig() Config {
	return Config{
		Listen: DefaultListen,
		Switch: Switch{Name: "sw", Address: "127.0.0.1:9559", CPUPort: MaxPort},
		Policy: policy.Static{Rule: policy.RuleStatic, Mode: policy.ModeSwitch}, Adapt: adapt.DefaultConfig(), Reserve: DefaultReserve,
	}
}

// Load reads a configuration file on top of [DefaultConfig].
func Load(path string) (Config, error) {
	src, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("read configuration: %w", err)
	}
	return Parse(path, src)
}

// Parse reads a configuration from YAML on top of [DefaultConfig]; name is the file's, for errors. An unknown field, a
// wrong type and a wrong value are errors that begin with name, line and column.
func Parse(name string, src []byte) (Config, error) {
	cfg := DefaultConfig()
	ctx := context.Background()
	// First what jobs' policies leave out, wherever in the file it is. What is wrong with it, or missing, is said below.
	var base struct{ Adapt *adapt.Config }
	if yaml.UnmarshalWithOptions(src, &base, strictyaml.Durations()) == nil && base.Adapt != nil {
		ctx = adapt.WithBase(ctx, *base.Adapt)
	}
	opts := []yaml.DecodeOption{strictyaml.Text[netip.Addr](), strictyaml.Text[MAC](), strictyaml.Text[xdp.Size](), strictyaml.Durations()}
	if err := strictyaml.DecodeContext(ctx, name, src, &cfg, opts...); err != nil {
		return Config{}, err
	}
	if err := cfg.Validate(); err != nil {
		return Config{}, strictyaml.Locate(name, src, policy.FieldOf(err), err)
	}
	return cfg, nil
}

// Validate checks the whole configuration. Errors are of type [*policy.FieldError] and name the first field at fault.
func (c *Config) Validate() error {
	if err := endpoint.Check(c.Listen); err != nil {
		return field("listen", err)
	}
	if c.Switch.Name == "" {
		return fieldf("switch.name", "is missing")
	}
	if err := endpoint.Check(c.Switch.Address); err != nil {
		return field("switch.address", err)
	}
	if p := c.Switch.CPUPort; p < 1 || p > MaxPort {
		return fieldf("switch.cpu_port", "%d is outside 1..%d", p, MaxPort)
	}
	if err := c.validateLinks(); err != nil {
		return err
	}
	if err := c.validatePolicy(c.Policy); err != nil {
		return under("policy", err)
	}
	if _, err := c.Adapt.Compile(0); err != nil {
		return under("adapt", err)
	}
	if !(c.Reserve >= 0 && c.Reserve < 1) {
		return fieldf("reserve", "%v is not a share of at least 0 and below 1", c.Reserve)
	}
	names := make(map[string]string)
	for i, job := range c.Jobs {
		at := fmt.Sprintf("jobs[%d]", i)
		if err := job.Validate(); err != nil {
			return under(at, err)
		}
		if other, taken := names[job.Name]; taken {
			return fieldf(at+".name", "%q is the name of %s too", job.Name, other)
		}
		names[job.Name] = at
		if job.Policy != nil {
			if err := c.validatePolicy(*job.Policy); err != nil {
				return under(at+".policy", err)
			}
		}
	}
	return nil
}

// validatePolicy checks a rule, and that the servers it names are configured.
func (c *Config) validatePolicy(rule policy.Static) error {
	if err := rule.Validate(); err != nil {
		return err
	}
	for i, name := range rule.Servers {
		if !slices.ContainsFunc(c.Servers, func(s Server) bool { return s.Name == name }) {
			return fieldf(fmt.Sprintf("servers[%d]", i), "%q is no configured server", name)
		}
	}
	return nil
}

// validateLinks checks service, hosts and servers: what they share with nobody else, the switch neither, is a name, an
// address of either kind and a port.
func (c *Config) validateLinks() error {
	type owner struct{ at string }
	names, ips := map[string]owner{c.Switch.Name: {"switch"}}, map[netip.Addr]owner{}
	macs, ports := map[MAC]owner{}, map[uint16]owner{}

	address := func(at string, ip netip.Addr, mac MAC) error {
		switch {
		case !ip.IsValid():
			return fieldf(at+".ip", "is missing")
		case !ip.Is4():
			return fieldf(at+".ip", "%s is not an IPv4 address", ip)
		case ip.IsMulticast() || ip.IsUnspecified():
			return fieldf(at+".ip", "%s is not the address of one host", ip)
		case mac == MAC{}:
			return fieldf(at+".mac", "is missing")
		case mac[0]&1 != 0:
			return fieldf(at+".mac", "%s is a group address", mac)
		}
		if o, taken := ips[ip]; taken {
			return fieldf(at+".ip", "%s is the address of %s too", ip, o.at)
		}
		if o, taken := macs[mac]; taken {
			return fieldf(at+".mac", "%s is the address of %s too", mac, o.at)
		}
		ips[ip], macs[mac] = owner{at}, owner{at}
		return nil
	}
	link := func(at, name string, ip netip.Addr, mac MAC, port uint16) error {
		if name == "" {
			return fieldf(at+".name", "is missing")
		}
		if o, taken := names[name]; taken {
			return fieldf(at+".name", "%q is the name of %s too", name, o.at)
		}
		names[name] = owner{at}
		if err := address(at, ip, mac); err != nil {
			return err
		}
		if port < 1 || port > MaxPort {
			return fieldf(at+".port", "%d is outside 1..%d", port, MaxPort)
		}
		if port == c.Switch.CPUPort {
			return fieldf(at+".port", "%d is the switch's cpu_port", port)
		}
		if o, taken := ports[port]; taken {
			return fieldf(at+".port", "%d is the port of %s too", port, o.at)
		}
		ports[port] = owner{at}
		return nil
	}

	if err := address("service", c.Service.IP, c.Service.MAC); err != nil {
		return err
	}
	for i, h := range c.Hosts {
		if err := link(fmt.Sprintf("hosts[%d]", i), h.Name, h.IP, h.MAC, h.Port); err != nil {
			return err
		}
	}
	for i, s := range c.Servers {
		at := fmt.Sprintf("servers[%d]", i)
		if err := link(at, s.Name, s.IP, s.MAC, s.Port); err != nil {
			return err
		}
		if err := endpoint.Check(s.Agent); err != nil {
			return field(at+".agent", err)
		}
		if _, err := s.Memory.Slots(); err != nil && s.Memory != 0 {
			return field(at+".memory", err)
		}
	}
	return nil
}

// Validate checks what can be checked of a job without its controller. Errors are of type [*policy.FieldError].
func (j JobSpec) Validate() error {
	if j.Name == "" {
		return fieldf("name", "is missing")
	}
	if j.Ranks < 1 || j.Ranks > policy.MaxRanks {
		return fieldf("ranks", "%d is outside 1..%d", j.Ranks, policy.MaxRanks)
	}
	if j.MaxElems < 1 {
		return fieldf("max_elems", "is missing; it is the number of lanes of the largest vector")
	}
	if j.Weight < 0 || j.Weight > MaxWeight {
		return fieldf("weight", "%d is outside 1..%d", j.Weight, MaxWeight)
	}
	if j.Policy != nil {
		if err := j.Policy.Validate(); err != nil {
			return under("policy", err)
		}
	}
	if err := j.validateRounds(); err != nil {
		return err
	}
	return j.validateAdapt()
}

func field(name string, err error) error { return &policy.FieldError{Field: name, Err: err} }

func fieldf(name, format string, args ...any) error { return field(name, fmt.Errorf(format, args...)) }

// under puts a field error below another field.
func under(name string, err error) error {
	var ferr *policy.FieldError
	if !errors.As(err, &ferr) {
		return field(name, err)
	}
	return field(name+"."+ferr.Field, ferr.Err)
}
