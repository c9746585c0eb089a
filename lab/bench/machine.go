package bench

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"

	"xagg/lab/results"
)

// revision is that of git, put in by the Makefile where the tool chain does not know it.
var revision string

// Machine returns a header with what is known of this machine and this program.
func Machine() results.Header {
	h := results.Header{Cores: runtime.NumCPU(), CPU: cpuModel(), Versions: map[string]string{"go": runtime.Version()}}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		h.Memory = uint64(info.Totalram) * uint64(info.Unit)
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		h.Kernel = fmt.Sprintf("%s %s %s", unix.ByteSliceToString(name.Sysname[:]), unix.ByteSliceToString(name.Release[:]),
			unix.ByteSliceToString(name.Machine[:]))
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		h.Versions["xagg"] = build.Main.Version
		for _, s := range build.Settings {
			switch {
			case s.Key == "vcs.revision":
				h.Revision = s.Value + h.Revision
			case s.Key == "vcs.modified" && s.Value == "true":
				h.Revision += "+dirty"
			}
		}
		if h.Revision == "+dirty" {
			h.Revision = ""
		}
	}
	if h.Revision == "" {
		h.Revision = revision
	}
	return h
}

// cpuModel returns what /proc/cpuinfo calls the first core; "" if nothing.
func cpuModel() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Emulated says what of an experiment in the lab is emulated, and what that means for its numbers.
var Emulated = []string{
	"Hosts are network namespaces of one machine and links are veth pairs whose rates are token buckets (tbf): latencies are those of a " +
		"kernel, not of a wire, and a burst of a millisecond passes at once.",
	"The switch is software and shares the machine's cores with everything else. Rates are chosen so that no core is busy for more than " +
		"80 % of the time; times then are those of the links, and ratios of times are what to compare, not times with a real network's.",
	"Computation is a sleep, as if on an accelerator: workers have the cores for communication alone.",
	"Packet rates are low, so that fixed costs per packet weigh more in CPU seconds per GB than with a network card's batches.",
	"The CPU time of servers is that of their processes, and of the kernel threads that poll their interfaces and run their XDP programs (threaded NAPI). The " +
		"stacks of hosts without XDP run in whatever context sends to them: the kernel's part has what cannot be told apart.",
}
