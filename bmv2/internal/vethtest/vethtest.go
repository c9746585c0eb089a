// Package vethtest makes network namespaces with veth pairs for the tests of package bmv2 and those below.
package vethtest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"xagg/tests/require"
)

// Space is a network namespace without a name that lives as long as the test.
type Space struct {
	// Path names the namespace for those who enter it.
	Path string
	do   chan func()
}

// New makes a namespace with the given number of veth pairs, all up: s0 and h0, s1 and h1 and so on. The test is
// skipped where that is not permitted, unless XAGG_REQUIRE names netns.
func New(t testing.TB, pairs int) *Space {
	t.Helper()
	require.Have(t, require.Netns)
	s := &Space{do: make(chan func())}
	ready := make(chan error)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread, and with it the namespace, ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			s.Path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
			err = setup(pairs)
		}
		ready <- err
		for f := range s.do {
			f()
		}
	}()
	err := <-ready
	t.Cleanup(func() {
		close(s.do)
		<-ended
	})
	if err != nil {
		t.Fatalf("make network namespace: %v", err)
	}
	return s
}

func setup(pairs int) error {
	for i := range pairs {
		// No addresses, so that only what a test sends is on the links; IPv6 would bring its own.
		attrs := netlink.NewLinkAttrs()
		attrs.Name = fmt.Sprintf("s%d", i)
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: fmt.Sprintf("h%d", i)}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		for _, name := range []string{attrs.Name, veth.PeerName} {
			if err := writeSysctl(name); err != nil {
				return err
			}
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(link); err != nil {
				return err
			}
		}
	}
	for i := range pairs {
		for _, name := range []string{fmt.Sprintf("s%d", i), fmt.Sprintf("h%d", i)} {
			if err := waitUp(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// waitUp waits until the kernel has noticed that both ends of a link are up; it drops what is sent before.
func waitUp(name string) error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("link %s is %v", name, link.Attrs().OperState)
		}
		time.Sleep(time.Millisecond) // nothing tells: this is a poll
	}
}

// writeSysctl turns IPv6 off on an interface of the thread's namespace.
func writeSysctl(name string) error {
	err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil // a kernel without IPv6
	}
	return err
}

// Do runs f on the namespace's thread.
func (s *Space) Do(f func() error) error {
	result := make(chan error, 1)
	s.do <- func() { result <- f() }
	return <-result
}
