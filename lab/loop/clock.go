package loop

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time of the machine's monotonic clock, which is the same in all processes.
func Now() time.Duration { return At(time.Now()) }

// At returns the time of the monotonic clock at t, which was taken by time.Now in this process.
func At(t time.Time) time.Duration {
	o := origin()
	return o.clock + t.Sub(o.time)
}

// moment is a time of both clocks.
type moment struct {
	time  time.Time
	clock time.Duration
}

// origin is a moment that is known well: what time.Now takes from the monotonic clock counts from somewhere else. The
// closest of several pairs of readings has the least between them.
var origin = sync.OnceValue(func() (best moment) {
	closest := time.Hour
	for range 100 {
		before := time.Now()
		var t unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
			panic(fmt.Sprintf("loop: CLOCK_MONOTONIC: %v", err)) // Linux has it
		}
		if between := time.Since(before); between < closest {
			closest, best = between, moment{before.Add(between / 2), time.Duration(t.Nano())}
		}
	}
	return best
})

// coarse is by how much the runtime's timers may come late.
const coarse = 2 * time.Millisecond

// sleep waits until t of the monotonic clock, or until ctx is done.
func sleep(ctx context.Context, t time.Duration) error {
	if d := t - Now() - coarse; d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil && Now() < t {
		at := unix.NsecToTimespec(int64(t))
		if err := unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &at, nil); err != nil && err != unix.EINTR {
			return fmt.Errorf("sleep: %w", err)
		}
	}
	return context.Cause(ctx)
}
