package xdp

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/tests/require"
)

// TestPitfall32 shows every program of every object to the kernel's verifier: loops over 256 lanes, 512 bytes of stack, a
// lock under which no function may be called. xdp/qemu runs it on the oldest kernel that is supported.
func TestPitfall32(t *testing.T) {
	require.Have(t, require.XDP)
	var uname unix.Utsname
	if err := unix.Uname(&uname); err != nil {
		t.Fatal(err)
	}
	for name, spec := range map[string]func() (*ebpf.CollectionSpec, error){"xagg": loadXagg, "bench": loadBench} {
		s, err := spec()
		if err != nil {
			t.Fatal(err)
		}
		objects, err := ebpf.NewCollection(s)
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			t.Errorf("%s: %+v", name, refused)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for program, p := range objects.Programs {
			info, err := p.Info()
			if err != nil {
				t.Fatal(err)
			}
			verified, _ := info.VerifiedInstructions()
			t.Logf("Linux %s: %s/%s: the verifier looked at %d instructions", unix.ByteSliceToString(uname.Release[:]), name, program, verified)
		}
		objects.Close()
	}
}

// TestPitfall33 asks for more memory than there is: of the kernel, and of the arena. Both are refused with what to do,
// and what was there goes on.
func TestPitfall33(t *testing.T) {
	require.Have(t, require.XDP)
	_, err := Load(4000 << 30)
	if err == nil || !strings.Contains(err.Error(), "start with less memory") || !strings.Contains(err.Error(), "4000GiB of memory") {
		t.Errorf("4000 GiB: %v", err)
	}
	if _, err = Load(1 << 60); err == nil || !strings.Contains(err.Error(), "is too big") {
		t.Errorf("1 EiB: %v", err)
	}

	server := load(t, 100)
	agent := NewAgent("s0", "", server)
	install := func(job, chunks uint32) error {
		_, err := agent.Install(t.Context(), planRequest(job, 1, chunks, 4))
		return err
	}
	if err := install(1, 20); err != nil {
		t.Fatal(err)
	}
	if err := install(2, 6); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "start the server with more --memory") {
		t.Errorf("a job too many: %v", err)
	}
	if err := install(3, 5); err != nil {
		t.Errorf("a job that fits after one that did not: %v", err)
	}
	if _, err := agent.Remove(t.Context(), &api.RemoveRequest{Job: 1, Epoch: 1}); err != nil {
		t.Fatal(err)
	}
	if err := install(2, 6); err != nil {
		t.Errorf("the job, when there is room: %v", err)
	}
}

// TestLoadWithoutPrivileges checks what a user without rights is told.
func TestLoadWithoutPrivileges(t *testing.T) {
	require.Have(t, require.XDP)
	runtime.LockOSThread() // the thread ends with the test and takes its lack of capabilities along
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		t.Fatal(err)
	}
	_, err := Load(1 << 20)
	if !errors.Is(err, ErrPrivileges) {
		t.Errorf("load: %v, want %v", err, ErrPrivileges)
	}
}
