package require

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestVerdict(t *testing.T) {
	missing := fmt.Errorf("start lab: %w", &NotSupportedError{Netns, errors.New("operation not permitted")})
	for _, c := range []struct {
		name string
		err  error
		list string
		skip bool
		why  string
	}{
		{"not required", missing, "", true, "operation not permitted"},
		{"another is required", missing, "xdp, p4c", true, "netns is not supported here"},
		{"required", missing, "xdp,netns", false, "XAGG_REQUIRE=xdp,netns"},
		{"required with spaces", missing, " netns , xdp", false, "operation not permitted"},
		{"a misspelt requirement", missing, "netsn", false, `no such feature: "netsn"`},
		{"another error", errors.New("sum is wrong"), "", false, "sum is wrong"},
	} {
		t.Run(c.name, func(t *testing.T) {
			skip, why := verdict(c.err, c.list)
			if skip != c.skip || !strings.Contains(why, c.why) {
				t.Errorf("verdict: skip %v %q, want skip %v with %q", skip, why, c.skip, c.why)
			}
		})
	}
}

func TestProbe(t *testing.T) {
	for f := range probes {
		err := Probe(f)
		var missing *NotSupportedError
		if err != nil && (!errors.As(err, &missing) || missing.Feature != f) {
			t.Errorf("probe %s: %v, want nil or a NotSupportedError of %s", f, err, f)
		}
		t.Logf("%s: %v", f, err)
	}
	if err := Probe("teleport"); err == nil {
		t.Error("probe of an unknown feature succeeded")
	}
}
