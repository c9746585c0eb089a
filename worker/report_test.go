package worker_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/worker"
)

// reported is a report that has reached the controller, which answers what the test sends.
type reported struct {
	req    *api.ReportRequest
	answer chan error
}

// reportController passes reports to the test.
type reportController struct {
	*testController
	reports chan reported
}

func (c *reportController) Report(ctx context.Context, req *api.ReportRequest) (*api.ReportReply, error) {
	if req.Epoch == 0 {
		return &api.ReportReply{}, nil // only how far the worker is
	}
	r := reported{req, make(chan error, 1)}
	select {
	case c.reports <- r:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case err := <-r.answer:
		return &api.ReportReply{}, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// TestReports: a worker tells under which plan its rounds run, again if the controller does not hear it, and no
// all-reduce waits for that.
func TestReports(t *testing.T) {
	n := newTestnet(t, netConfig{ranks: 1})
	ctl := &reportController{newTestController(&api.Ready{
		Job: testJob, Epoch: testEpoch, Ranks: 1, Pool: n.pool, MaxChunks: n.chunks,
		ServiceIp: "10.77.255.254", ServiceMac: "02:78:61:00:ff:fe",
	}), make(chan reported)}
	client := serve(t, ctl)
	w, err := worker.Join(t.Context(), client, worker.Config{Job: "train", Link: n.links[0]})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	reduce := func(epoch uint16) {
		t.Helper()
		data := []int32{5}
		info, err := w.AllReduceInt32(t.Context(), "x", data)
		if err != nil || info.Epoch != epoch || data[0] != 5 {
			t.Fatalf("epoch %d, sum %d, %v; want epoch %d and 5", info.Epoch, data[0], err, epoch)
		}
	}
	next := func(epoch uint32) reported {
		t.Helper()
		select {
		case r := <-ctl.reports:
			if r.req.Job != "train" || r.req.Rank != 0 || r.req.Id != testJob || r.req.Epoch != epoch {
				t.Errorf("report is %v, want epoch %d", r.req, epoch)
			}
			return r
		case <-time.After(10 * time.Second):
			t.Fatalf("epoch %d is not reported", epoch)
			panic("not reached")
		}
	}
	change := func(from uint16) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.install(from + 1)
		n.sw.Arm(testJob, from, from+1)
	}

	reduce(testEpoch)
	change(testEpoch)
	reduce(testEpoch) // announces
	reduce(testEpoch + 1)
	next(testEpoch + 1).answer <- status.Error(codes.Unavailable, "not now")
	first := next(testEpoch + 1) // stays without an answer
	reduce(testEpoch + 1)
	change(testEpoch + 1)
	reduce(testEpoch + 1)
	reduce(testEpoch + 2)
	first.answer <- status.Error(codes.Unavailable, "not now")
	next(testEpoch + 2).answer <- status.Error(codes.FailedPrecondition, "no more") // for good
	change(testEpoch + 2)
	reduce(testEpoch + 2)
	reduce(testEpoch + 3)
	next(testEpoch + 3).answer <- nil
	if err := w.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case r := <-ctl.reports:
		t.Error(fmt.Sprint("reported again: ", r.req))
	default:
	}
}
