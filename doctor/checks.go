package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"xagg/lab/netns"
	"xagg/xdp"
)

// The oldest kernel with all that the XDP program and the labs use, and the one that it is tested on.
const (
	leastMajor = 6
	leastMinor = 1
)

func kernel(_ context.Context, m Machine) Check {
	cure := fmt.Sprintf("boot a kernel of version %d.%d or newer; Debian 12 has one", leastMajor, leastMinor)
	release, err := m.Uname()
	if err != nil {
		return fail(cure, "uname: %v", err)
	}
	major, minor, err := parseRelease(release)
	switch {
	case err != nil:
		return warn(cure, "%v", err)
	case major < leastMajor || major == leastMajor && minor < leastMinor:
		return fail(cure, "%s is older than %d.%d", release, leastMajor, leastMinor)
	}
	return ok("%s", release)
}

var releasePattern = regexp.MustCompile(`^(\d+)\.(\d+)`)

// parseRelease returns the first two numbers of a kernel's release.
func parseRelease(release string) (major, minor int, err error) {
	m := releasePattern.FindStringSubmatch(release)
	if m == nil {
		return 0, 0, fmt.Errorf("parse kernel release %q: it does not begin with two numbers", release)
	}
	major, err = strconv.Atoi(m[1])
	if err == nil {
		minor, err = strconv.Atoi(m[2])
	}
	return major, minor, err
}

// capabilities are what namespaces, links and XDP programs need.
var capabilities = []struct {
	bit  uint
	name string
}{
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"},
	{unix.CAP_NET_RAW, "CAP_NET_RAW"},
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"},
	{unix.CAP_BPF, "CAP_BPF"},
}

// asRoot is the cure of everything that fails for want of privileges.
const asRoot = "run as root: sudo xagg ..."

// rootOr returns the cure of a check that failed with err: asRoot where only privileges were missing.
func rootOr(err error, cure string) string {
	if errors.Is(err, netns.ErrNotPermitted) {
		return asRoot
	}
	return cure
}

func privileges(_ context.Context, m Machine) Check {
	const cure = asRoot
	status, err := m.ReadFile("/proc/self/status")
	if err != nil {
		return fail(cure, "read capabilities: %v", err)
	}
	effective, err := strconv.ParseUint(field(status, "CapEff"), 16, 64)
	if err != nil {
		return fail(cure, "read capabilities: %v", err)
	}
	var missing []string
	for _, c := range capabilities {
		if effective>>c.bit&1 == 0 {
			missing = append(missing, c.name)
		}
	}
	if missing != nil {
		return fail(cure, "this process lacks %s", strings.Join(missing, ", "))
	}
	return ok("network, raw sockets, BPF and namespaces are permitted")
}

// field returns the value of a line "key: value" of a file in /proc, empty if there is none.
func field(file []byte, key string) string {
	for line := range strings.Lines(string(file)) {
		if k, v, found := strings.Cut(line, ":"); found && k == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func namespaces(_ context.Context, m Machine) Check {
	if err := m.Namespaces(); err != nil {
		return fail(rootOr(err, "run a kernel with CONFIG_NET_NS; in a container, one that may make namespaces"), "%v", err)
	}
	return ok("network namespaces can be made")
}

func xdpNative(ctx context.Context, m Machine) Check {
	if err := m.Bounce(ctx, xdp.Native); err != nil {
		return fail(rootOr(err, "servers can still run in generic mode, if that works: slower, for function only"), "%v", err)
	}
	return ok("a frame went out and came back over a veth")
}

func xdpGeneric(ctx context.Context, m Machine) Check {
	if err := m.Bounce(ctx, xdp.Generic); err != nil {
		return warn(rootOr(err, "needed only on interfaces whose driver has no native XDP"), "%v", err)
	}
	return ok("a frame went out and came back over a veth")
}

func btf(_ context.Context, m Machine) Check {
	if _, err := m.FSType("/sys/kernel/btf/vmlinux"); err != nil {
		return warn("boot a kernel with CONFIG_DEBUG_INFO_BTF; bpftool then shows maps and programs with their types",
			"the kernel's types: %v", err)
	}
	return ok("the kernel has its types in /sys/kernel/btf/vmlinux")
}

func bpffs(_ context.Context, m Machine) Check {
	const path = "/sys/fs/bpf"
	kind, err := m.FSType(path)
	if err == nil && kind != unix.BPF_FS_MAGIC {
		err = fmt.Errorf("nothing is mounted at %s", path)
	}
	if err != nil {
		return warn("mount -t bpf bpf "+path+"\nwithout it what 'xagg server' sums ends with its process, if that is killed (it mounts one itself where it may)", "%v", err)
	}
	return ok("mounted at %s", path)
}

func tbf(ctx context.Context, m Machine) Check {
	if err := m.Rate(ctx); err != nil {
		return warn(rootOr(err, "needed only for links with a rate: modprobe sch_tbf, or a kernel with CONFIG_NET_SCH_TBF"), "%v", err)
	}
	return ok("the rate of a link can be limited")
}

// leastMemory is what a demo of four workers with all its processes fits in, in bytes.
const leastMemory = 1 << 30

func memory(_ context.Context, m Machine) Check {
	info, err := m.ReadFile("/proc/meminfo")
	if err != nil {
		return warn("", "read free memory: %v", err)
	}
	kib, err := strconv.ParseUint(strings.TrimSuffix(field(info, "MemAvailable"), " kB"), 10, 64)
	if err != nil {
		return warn("", "read free memory: %v", err)
	}
	// Since kernel 5.11 BPF maps count as the process's ordinary memory and RLIMIT_MEMLOCK does not matter.
	if kib<<10 < leastMemory {
		return warn("end other programs, or give 'xagg server' a smaller --memory",
			"%d MiB free: a server's arena may not fit", kib>>10)
	}
	return ok("%d MiB free", kib>>10)
}

func leftovers(_ context.Context, m Machine) Check {
	const cure = "xagg doctor --fix removes them; so does the next xagg demo"
	records, err := m.Records()
	if err != nil {
		return warn("", "%v", err)
	}
	var dead []string
	for _, r := range records {
		if !r.Alive {
			dead = append(dead, fmt.Sprintf("%s (%d namespaces, %d processes, %d folders)",
				r.ID, len(r.Namespaces), len(r.Processes), len(r.Paths)))
		}
	}
	switch alive := len(records) - len(dead); {
	case dead != nil:
		return warn(cure, "of labs that have died: %s", strings.Join(dead, ", "))
	case alive > 0:
		return ok("none; labs that run now: %d", alive)
	}
	return ok("none")
}

// pinned looks at the servers that are pinned. One whose agent is gone is no fault in itself: its program runs on.
func pinned(_ context.Context, m Machine) Check {
	servers, err := m.Pinned()
	if err != nil {
		return warn("", "%v", err)
	}
	var running, waiting, stale []string
	for _, s := range servers {
		text := fmt.Sprintf("%s in %s", s.Interface, s.Dir)
		switch {
		case s.Agent:
			running = append(running, text)
		case s.Attached:
			waiting = append(waiting, text)
		default:
			stale = append(stale, text)
		}
	}
	var details, cures []string
	if stale != nil {
		details = append(details, "of interfaces that are gone: "+strings.Join(stale, ", "))
		cures = append(cures, "xagg doctor --fix removes what is pinned for interfaces that are gone")
	}
	if waiting != nil {
		details = append(details, "without an agent: "+strings.Join(waiting, ", "))
		cures = append(cures, "xagg server --interface NAME takes over what has no agent, and removes it when it is interrupted")
	}
	switch {
	case details != nil:
		return warn(strings.Join(cures, "\n"), "%s", strings.Join(details, "; "))
	case running != nil:
		return ok("none left; servers that run now: %s", strings.Join(running, ", "))
	}
	return ok("none")
}

// version runs a program and returns the first match of pattern's group in what it says.
func version(ctx context.Context, m Machine, pattern, name string, args ...string) (string, error) {
	out, err := m.Output(ctx, name, args...)
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return "", errors.New("not installed")
	}
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	found := regexp.MustCompile(pattern).FindStringSubmatch(out)
	if found == nil {
		return "", fmt.Errorf("%s %s: no version in %q", name, strings.Join(args, " "), out)
	}
	return found[1], nil
}

// The versions that the committed BPF objects and the committed switch program were made with: others may make other
// bytes.
const (
	clangMajor  = "16"
	p4cExpected = "1.2.5"
)

func clang(ctx context.Context, m Machine) Check {
	const cure = "needed only to compile xdp/xagg.bpf.c: apt-get install clang-16 llvm-16 libbpf-dev"
	v, err := version(ctx, m, `clang version (\d\S*)`, "clang-"+clangMajor, "--version")
	if err != nil {
		return warn(cure, "clang-%s: %v", clangMajor, err)
	}
	if _, err := version(ctx, m, `(\d+\.\d+)`, "llvm-strip-"+clangMajor, "--version"); err != nil {
		return warn(cure, "llvm-strip-%s: %v", clangMajor, err)
	}
	return ok("%s", v)
}

func p4c(ctx context.Context, m Machine) Check {
	const cure = "needed only to compile p4/xagg.p4: build github.com/p4lang/p4c " + p4cExpected + " and put p4c-bm2-ss on PATH"
	v, err := version(ctx, m, `Version (\d\S*)`, "p4c-bm2-ss", "--version")
	if err != nil {
		return warn(cure, "p4c-bm2-ss: %v", err)
	}
	if v != p4cExpected && !strings.HasPrefix(v, p4cExpected+".") {
		return warn(cure, "p4c-bm2-ss %s: the committed program was compiled by %s", v, p4cExpected)
	}
	return ok("p4c-bm2-ss %s", v)
}

// switchOptions are the options that a simple_switch_grpc is started with.
var switchOptions = []string{"--no-p4", "--device-id", "--interface", "--grpc-server-addr", "--cpu-port"}

func simpleSwitch(ctx context.Context, m Machine) Check {
	const cure = "needed only for --switch simple_switch_grpc: build github.com/p4lang/behavioral-model with P4Runtime\n" +
		"and put simple_switch_grpc on PATH; the embedded engine needs nothing"
	v, err := version(ctx, m, `(\d+\.\d+\S*)`, "simple_switch_grpc", "--version")
	if err != nil {
		return warn(cure, "%v", err)
	}
	help, err := m.Output(ctx, "simple_switch_grpc", "--help")
	if err != nil {
		return warn(cure, "%s: --help: %v", v, err)
	}
	if missing := missingOptions(help, switchOptions); missing != nil {
		return warn(cure, "%s has no option %s", v, strings.Join(missing, ", "))
	}
	return ok("%s, with %s", v, strings.Join(switchOptions, " "))
}

// missingOptions returns those options that a help text does not name.
func missingOptions(help string, options []string) []string {
	named := map[string]bool{}
	for _, word := range regexp.MustCompile(`--[a-z0-9-]+`).FindAllString(help, -1) {
		named[word] = true
	}
	var missing []string
	for _, o := range options {
		if !named[o] {
			missing = append(missing, o)
		}
	}
	return missing
}

func mininet(ctx context.Context, m Machine) Check {
	const cure = "needed only for make demo-mininet and bench-mininet: apt-get install mininet"
	// The distribution's package serves the distribution's Python, which need not be the first on PATH.
	v, err := version(ctx, m, `(\d+\.\d+\S*)`, "/usr/bin/python3", "-c", "import mininet.net; print(mininet.net.VERSION)")
	if err != nil {
		return warn(cure, "module for /usr/bin/python3: %v", err)
	}
	if _, err := version(ctx, m, `(\d+\.\d+\S*)`, "mn", "--version"); err != nil {
		return warn(cure, "mn: %v", err)
	}
	return ok("%s", v)
}

// metadata asks for the version of a module of the distribution's Python without loading it, which takes long for some.
func metadata(ctx context.Context, m Machine, module string) (string, error) {
	return version(ctx, m, `(\d+\.\d+\S*)`, "/usr/bin/python3", "-c", "import importlib.metadata as m; print(m.version('"+module+"'))")
}

func gloo(ctx context.Context, m Machine) Check {
	const cure = "needed only to compare with Gloo: apt-get install python3-torch"
	v, err := metadata(ctx, m, "torch")
	if err != nil {
		return warn(cure, "module torch for /usr/bin/python3: %v", err)
	}
	return ok("in torch %s", v)
}

func mpi(ctx context.Context, m Machine) Check {
	const cure = "needed only to compare with Open MPI: apt-get install openmpi-bin python3-mpi4py"
	v, err := version(ctx, m, `\((?:OpenRTE|Open MPI)\) (\d+\.\d+\S*)`, "mpirun.openmpi", "--version")
	if err != nil {
		return warn(cure, "mpirun.openmpi: %v", err)
	}
	if _, err := metadata(ctx, m, "mpi4py"); err != nil {
		return warn(cure, "module mpi4py for /usr/bin/python3: %v", err)
	}
	return ok("%s", v)
}

func qemu(ctx context.Context, m Machine) Check {
	const cure = "needed only to test on other kernels than the one that runs: apt-get install qemu-system-x86"
	v, err := version(ctx, m, `version (\d+\.\d+\S*)`, "qemu-system-x86_64", "--version")
	if err != nil {
		return warn(cure, "qemu-system-x86_64: %v", err)
	}
	return ok("%s", v)
}
