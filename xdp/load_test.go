package xdp

import (
	"errors"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"xagg/tests/require"
)

// TestLoadsEveryObject shows every program of every object to the kernel's verifier.
func TestLoadsEveryObject(t *testing.T) {
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
