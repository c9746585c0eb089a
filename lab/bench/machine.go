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
