package aggregator

import (
	"errors"
	"fmt"
	"time"

	ebpflink "github.com/cilium/ebpf/link"
)

// meter says whose processor time is an aggregator's.
type meter struct {
	cores   []int
	process int          // of the aggregator; 0: it is in the kernel alone
	threads []int        // of the kernel, that receive for it
	soft    *loadObjects // softirqs receive for it; nil: threads do
}

// reading is what a meter shows, since some time in the past.
type reading struct {
	at                             time.Time
	process, threads, idle, stolen time.Duration
	softirq, foreign, tasklet      time.Duration
	looks                          uint64
}

func (m meter) read() (r reading, err error) {
	var errs [4]error
	if m.process != 0 {
		r.process, errs[0] = cpuTime(m.process)
	}
	r.threads, errs[1] = cpuTimes(m.threads)
	r.idle, r.stolen, errs[2] = idle(m.cores)
	if m.soft != nil {
		var all []loadSoftirq
		errs[3] = m.soft.Softirqs.Lookup(uint32(0), &all)
		for _, s := range all {
			r.softirq += time.Duration(s.Beside[1])
			r.foreign += time.Duration(s.Within[0])
			r.tasklet += time.Duration(s.Tasklet)
			r.looks += s.Runs
		}
	}
	r.at = time.Now()
	return r, errors.Join(errs[:]...)
}

// between returns what was used from one reading to another.
func (m meter) between(a, b reading) Usage {
	wall := b.at.Sub(a.at)
	return Usage{
		Seconds: wall.Seconds(),
		CPU:     (b.process - a.process + b.threads - a.threads + b.softirq - a.softirq - (b.foreign - a.foreign)).Seconds(),
		Process: (b.process - a.process).Seconds(),
		Threads: (b.threads - a.threads).Seconds(),
		Softirq: (b.softirq - a.softirq).Seconds(),
		Foreign: (b.foreign - a.foreign).Seconds(),
		Looks:   b.looks - a.looks,
		Tasklet: (b.tasklet - a.tasklet).Seconds(),
		Stolen:  (b.stolen - a.stolen).Seconds(),
		Busy:    (time.Duration(len(m.cores))*wall - (b.idle - a.idle)).Seconds(),
	}
}

// watchSoftirqs has the kernel add up the time that softirqs take to receive packets, and whose they are, from now on
// until what is returned is called.
func watchSoftirqs(o *loadObjects) (stop func() error, err error) {
	var links []ebpflink.Link
	stop = func() error {
		var errs []error
		for _, l := range links {
			errs = append(errs, l.Close())
		}
		return errors.Join(errs...)
	}
	for _, attach := range []func() (ebpflink.Link, error){
		func() (ebpflink.Link, error) {
			return ebpflink.AttachTracing(ebpflink.TracingOptions{Program: o.Receive})
		},
		func() (ebpflink.Link, error) {
			return ebpflink.AttachRawTracepoint(ebpflink.RawTracepointOptions{Name: "softirq_exit", Program: o.SoftirqExit})
		},
		func() (ebpflink.Link, error) {
			return ebpflink.AttachRawTracepoint(ebpflink.RawTracepointOptions{Name: "softirq_entry", Program: o.SoftirqEntry})
		},
	} {
		l, err := attach()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("watch softirqs: %w", err), stop())
		}
		links = append(links, l)
	}
	return stop, nil
}
