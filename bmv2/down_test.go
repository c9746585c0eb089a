package bmv2_test

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"xagg/bmv2"
	"xagg/bmv2/internal/vethtest"
)

// lines is a log whose lines can be waited for.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

// A port whose interface is down is told in the log, by its number and name.
func TestInterfaceDown(t *testing.T) {
	s := vethtest.New(t, 1)
	log := make(lines, 10)
	if err := s.Do(func() error {
		link, err := netlink.LinkByName("s0")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetDown(link); err != nil {
			return err
		}
		e, err := bmv2.NewEngine(bmv2.Config{
			Ports: map[uint16]string{7: "s0"}, Log: slog.New(slog.NewTextHandler(log, nil)),
		})
		if err != nil {
			return err
		}
		t.Cleanup(func() { e.Close() })
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	select {
	case line := <-log:
		for _, want := range []string{"level=WARN", "down", "ip link set s0 up", "port=7", "interface=s0"} {
			if !strings.Contains(line, want) {
				t.Errorf("log %q, want %q in it", line, want)
			}
		}
	case <-time.After(patience):
		t.Fatal("nothing was logged")
	}
}
