package main

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"xagg/tests/require"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"xagg": main})
}

// TestScripts runs the command lines in testdata/script. xagg is this program; flip FILE PATTERN OFFSET changes a bit of
// a file; exitcode CODE ARGS... runs xagg and compares its exit code. Each script has a folder of its own.
func TestScripts(t *testing.T) { runScripts(t, "script") }

// TestScriptsNetns runs those that need network namespaces and XDP.
func TestScriptsNetns(t *testing.T) {
	require.Have(t, require.Netns, require.XDP)
	runScripts(t, "netns")
}

// TestScriptsBMv2 runs those that need a real switch too.
func TestScriptsBMv2(t *testing.T) {
	require.Have(t, require.Netns, require.XDP, require.BMv2)
	runScripts(t, "bmv2")
}

// TestScriptsPeers runs those that need Gloo and Open MPI.
func TestScriptsPeers(t *testing.T) {
	require.Have(t, require.Netns, require.XDP, require.Gloo, require.MPI)
	runScripts(t, "peers")
}

func runScripts(t *testing.T, dir string) {
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", dir),
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"flip":     flip,
			"exitcode": exitCode,
		},
	})
}

// flip changes the lowest bit of the byte that is OFFSET bytes behind the first occurrence of a hexadecimal pattern.
func flip(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: flip FILE PATTERN OFFSET")
	}
	name := ts.MkAbs(args[0])
	data, err := os.ReadFile(name)
	ts.Check(err)
	pattern, err := hex.DecodeString(args[1])
	ts.Check(err)
	offset, err := strconv.Atoi(args[2])
	ts.Check(err)
	at := bytes.Index(data, pattern)
	if at < 0 {
		ts.Fatalf("%s has no %s", args[0], args[1])
	}
	data[at+offset] ^= 1
	ts.Check(os.WriteFile(name, data, 0o644))
}

// exitCode runs xagg with the arguments that follow the exit code that it must have.
func exitCode(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 1 {
		ts.Fatalf("usage: exitcode CODE ARGS...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec("xagg", args[1:]...)
	got := 0
	if err != nil {
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("run xagg: %v", err)
		}
		got = exit.ExitCode()
	}
	if got != want {
		ts.Fatalf("xagg %v: exit code %d, want %d", args[1:], got, want)
	}
}
