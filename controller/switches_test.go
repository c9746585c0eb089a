package controller

import (
	"context"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"xagg/api"
	"xagg/bmv2"
	"xagg/controller/p4rt"
	"xagg/internal/endpoint"
	"xagg/tests/require"
	"xagg/wire"
)

// socket returns the address of a unix socket, whose path has to be short.
func socket(t *testing.T) (address string) {
	dir, err := os.MkdirTemp("", "xagg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return "unix:" + filepath.Join(dir, "p4rt")
}

// TestSimpleSwitch programs the real switch.
func TestSimpleSwitch(t *testing.T) {
	require.Have(t, require.BMv2)
	address := socket(t)
	cmd := exec.Command("simple_switch_grpc", "--no-p4", "--device-id", "3", "--",
		"--grpc-server-addr", address, "--cpu-port", "510")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	testSwitch(t, address)
}

// TestEngine programs the embedded switch.
func TestEngine(t *testing.T) {
	address := socket(t)
	engine, err := bmv2.StartEngine(bmv2.Config{DeviceID: 3, CPUPort: 510, GRPCAddr: address})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	testSwitch(t, address)
}

// testSwitch programs a switch without ports twice: the second controller finds what the first one left.
func testSwitch(t *testing.T, address string) {
	agents := map[string]*fakeAgent{"s0:1": newFakeAgent(t, "s0", 100), "s1:1": newFakeAgent(t, "s1", 100)}
	for _, wantPushed := range []bool{true, false} {
		cfg := testConfig()
		cfg.Switch.Address, cfg.Switch.DeviceID = address, 3
		c, err := New(cfg, WithDialer(func(ctx context.Context, address string) (net.Conn, error) {
			if a := agents[address]; a != nil {
				return a.dial(ctx)
			}
			return endpoint.Connect(ctx, address)
		}))
		if err != nil {
			t.Fatal(err)
		}
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx, lis) }()
		if err := c.Ready(ctx); err != nil {
			t.Fatal(err)
		}
		session, err := c.links.session()
		if err != nil {
			t.Fatal(err)
		}
		if session.Pushed() != wantPushed {
			t.Errorf("pipeline pushed: %v, want %v", session.Pushed(), wantPushed)
		}

		if _, err := c.createJob(ctx, JobSpec{Name: "a", Ranks: 4, MaxElems: 1000, Policy: &hybrid}); err != nil {
			t.Fatal(err)
		}
		for rank := range uint32(4) {
			if _, err := c.join(ctx, &api.JoinRequest{Job: "a", Rank: rank, Ip: cfg.Hosts[rank].IP.String(), UdpPort: 19860}); err != nil {
				t.Fatal(err)
			}
		}
		meet := c.meets["a"]
		select {
		case <-meet.ready:
		case <-meet.over:
			t.Fatalf("job is over: %v", meet.err)
		case <-ctx.Done():
			t.Fatal("job was not installed")
		}
		j := c.intent.jobs["a"]
		want := desiredJob(&c.intent, j)
		maps.Copy(want.entities, c.base.entities)
		checkInstalled(t, ctx, session, want)

		slot, err := c.ReadSlot(ctx, 5, 4)
		if err != nil {
			t.Fatal(err)
		}
		if slot.Type != wire.TypeCtrl || slot.Blocks != 4 || slot.Job != 0 || slot.Contributors != 0 {
			t.Errorf("slot 5 of a fresh switch is %+v", slot.Header)
		}
		if st := c.status(ctx); st.Switch.Reasons["summed"] != 0 || len(st.Switch.Reasons) != wire.NumReasons {
			t.Errorf("reasons: %v", st.Switch.Reasons)
		}
		counts, err := session.Counts(ctx, nil, []string{tableMember})
		if err != nil || len(counts.Direct[tableMember]) != 4 {
			t.Errorf("direct counter: %v, %v", counts, err)
		}
		// Installing again changes nothing and is no error: the updates become modifications.
		var entities []p4rt.Entity
		for _, e := range desiredJob(&c.intent, j).entities {
			entities = append(entities, e.entity)
		}
		if err := session.Upsert(ctx, entities...); err != nil {
			t.Errorf("upsert of what is there: %v", err)
		}

		// The plan changes twice, through every mode. At the end nothing of a plan that was left is there.
		for _, name := range []string{"switch", "one server"} {
			got, err := c.steer(ctx, "a", steered[name])
			if err != nil || got.Change == nil {
				t.Fatalf("steer to %s: %v, %v", name, got, err)
			}
			c.mu.Lock()
			want := desiredJob(&c.intent, j)
			c.mu.Unlock()
			maps.Copy(want.entities, c.base.entities)
			checkInstalled(t, ctx, session, want)
			for rank := range uint32(4) {
				if _, err := c.report(t.Context(), &api.ReportRequest{Job: "a", Rank: rank, Id: uint32(j.id), Epoch: got.Change.Epoch}); err != nil {
					t.Fatal(err)
				}
			}
			for changing := true; changing; {
				changed := c.links.changed()
				c.mu.Lock()
				changing = j.change != nil
				c.mu.Unlock()
				if !changing {
					break
				}
				select {
				case <-changed:
				case <-ctx.Done():
					t.Fatalf("the change to %s does not end", name)
				}
			}
			want = desiredJob(&c.intent, j)
			if n := len(want.entities); name == "switch" && n != 1+1+4+4+1 { // job, plan, members, replicas, the group of all
				t.Errorf("%d entities in mode switch, want 11", n)
			}
			maps.Copy(want.entities, c.base.entities)
			checkInstalled(t, ctx, session, want)
		}
		checkReadBack(t, ctx, c, session)
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

// checkReadBack has a controller read the switch as after a restart: it finds that nothing is left to do.
func checkReadBack(t *testing.T, ctx context.Context, c *Controller, session *p4rt.Session) {
	t.Helper()
	found, err := session.Entities(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pipeline != session.Cookie() {
		t.Errorf("the pipeline's cookie is %#x, and the controller would look for %#x", session.Cookie(), c.pipeline)
	}
	have, foreign := c.sortOut(found)
	for _, e := range foreign {
		t.Errorf("foreign: %v", e)
	}
	wants := map[uint16]objects{baseOwner: c.base}
	for _, j := range c.intent.jobs {
		wants[j.id] = desiredJob(&c.intent, j)
	}
	for owner, want := range wants {
		want.plans = nil // on no switch
		for _, s := range diff(have[owner], want) {
			t.Errorf("owner %d: there would be a write: %v %v", owner, s, s.entities)
		}
	}
}

// checkInstalled reads the switch: it has exactly what is wanted, default actions aside, which cannot be told from the
// program's own.
func checkInstalled(t *testing.T, ctx context.Context, session *p4rt.Session, want objects) {
	t.Helper()
	got := make(map[string]p4rt.Entity)
	for name := range session.Program().TableSizes() {
		entries, err := session.Entries(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			got[e.Key()] = e
		}
	}
	groups, err := session.Groups(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range groups {
		got[g.Key()] = g
	}
	for key, w := range want.entities {
		if isDefault(w.entity) {
			continue
		}
		if !p4rt.Equal(got[key], w.entity) {
			t.Errorf("the switch has %v, want %v", got[key], w.entity)
		}
		delete(got, key)
	}
	for _, e := range got {
		t.Errorf("the switch still has %v", e)
	}
}
