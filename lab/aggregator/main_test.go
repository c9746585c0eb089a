package aggregator

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// serveTCP is the variable in the environment of this test binary that makes it the TCP aggregator.
const serveTCP = "XAGG_TEST_SERVE_TCP"

func TestMain(m *testing.M) {
	spec, ok := os.LookupEnv(serveTCP)
	if !ok {
		os.Exit(m.Run())
	}
	var (
		addr          string
		ranks, values int
		cpus          []int
	)
	_, err := fmt.Sscan(spec, &addr, &ranks, &values)
	for _, field := range strings.Fields(spec)[3:] {
		var cpu int
		if _, e := fmt.Sscan(field, &cpu); e != nil {
			err = e
		}
		cpus = append(cpus, cpu)
	}
	if err == nil {
		err = ServeTCP(os.Stdout, addr, ranks, values, cpus)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// testServer is [Options.TCPServer] of tests.
func testServer(addr string, ranks, values int, cpus []int) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d %s", serveTCP, addr, ranks, values, strings.Trim(fmt.Sprint(cpus), "[]")))
	return cmd
}
