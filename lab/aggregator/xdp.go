package aggregator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	ebpflink "github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"xagg/lab/netns"
	"xagg/wire"
	"xagg/xdp"
)

// rounds of a server's lease: as the labs have it.
const leaseRounds = 2

// stalled is how long nothing may come back until a measurement is given up: something was lost.
const stalled = 5 * time.Second

// errStalled says that a measurement came to a halt. Nothing of it counts, it can be made again.
var errStalled = errors.New("frames were lost")

// xdpRun is one XDP server with its load, ready to be measured.
type xdpRun struct {
	link    *link
	traffic traffic
	frames  bool // live frames instead of sockets
	server  *xdp.Server
	program *ebpf.Program // the server's, for its run statistics
	objects *loadObjects
	sink    ebpflink.Link
	threads []int
	sockets []*sender
	rounds  uint64 // that were sent
}

// newXDPRun loads a server, attaches it, and gets everything ready.
func newXDPRun(l *link, c oneCase, opts Options) (r *xdpRun, err error) {
	t := newTraffic(opts.Workers, opts.Values, c.lanes, len(l.cores.Aggregator))
	r = &xdpRun{link: l, traffic: t, frames: c.subject == XDPFrames}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.server, err = xdp.Load(xdp.Size(leaseRounds*t.chunks) * xdp.SlotSize); err != nil {
		return r, err
	}
	if err := r.server.Install(planFor(l, t)); err != nil {
		return r, err
	}
	questions := t.questions(l.source, l.server())
	if r.objects, err = loadTraffic(t, questions, l.cores.Load); err != nil {
		return r, err
	}
	if _, err = l.napiThreads(netns.Switch, l.port(), l.network(), func() error {
		iface, err := netlink.LinkByName(l.port())
		if err != nil {
			return err
		}
		r.sink, err = ebpflink.AttachXDP(ebpflink.XDPOptions{
			Program: r.objects.TakeAnswers, Interface: iface.Attrs().Index, Flags: ebpflink.XDPDriverMode,
		})
		return err
	}); err != nil {
		return r, err
	}
	r.threads, err = l.napiThreads(l.host.Name, netns.HostInterface, l.cores.Aggregator, func() error {
		if err := r.server.Attach(netns.HostInterface, xdp.Native, opts.Log); err != nil {
			return err
		}
		iface, err := netlink.LinkByName(netns.HostInterface)
		if err != nil {
			return err
		}
		r.program, err = ebpf.NewProgramFromID(ebpf.ProgramID(iface.Attrs().Xdp.ProgId))
		return err
	})
	if err != nil || r.frames {
		return r, err
	}
	return r, l.lab.Do(netns.Switch, func() error {
		for n := range t.senders {
			s, err := newSender(r, n, questions)
			if err != nil {
				return err
			}
			r.sockets = append(r.sockets, s)
		}
		return nil
	})
}

// planFor is the job's plan on a server. RESULTs go to the load's end, as a switch would have them.
func planFor(l *link, t traffic) xdp.Plan {
	return xdp.Plan{
		Job: job, Epoch: epoch, Ranks: 1<<t.ranks - 1, Lease: xdp.Lease{Chunks: uint32(t.chunks), Rounds: leaseRounds},
		ServiceIP: netip.AddrFrom4(l.source(0).IP), ServiceMAC: l.source(0).MAC,
	}
}

func (r *xdpRun) close() error {
	var errs []error
	for _, s := range r.sockets {
		s.close()
	}
	if r.program != nil {
		errs = append(errs, r.program.Close())
	}
	if r.server != nil {
		errs = append(errs, r.server.Close())
	}
	if r.sink != nil {
		errs = append(errs, r.sink.Close())
	}
	if r.objects != nil {
		errs = append(errs, r.objects.Close())
	}
	return errors.Join(errs...)
}

func (r *xdpRun) meter() meter {
	return meter{cores: r.link.cores.Aggregator, threads: r.threads}
}

// seen is what came back, as load.bpf.c has it.
type seen struct {
	Results, Acks, Wrong uint64
	_                    [5]uint64
}

func (r *xdpRun) seen() (s seen, err error) {
	err = r.objects.Seen.Get(&s)
	return s, err
}

// send sends so many rounds and returns when they are all answered.
func (r *xdpRun) send(ctx context.Context, rounds int) error {
	r.rounds += uint64(rounds)
	if err := r.objects.Until.Set(r.rounds); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for n := range r.traffic.senders {
		group.Go(func() error {
			if r.frames {
				return r.sendFrames(ctx, n)
			}
			return on([]int{r.processor(n)}, func() error { return r.sockets[n].send(ctx, uint32(r.rounds)) })
		})
	}
	group.Go(func() error {
		err := r.wait(ctx)
		if err != nil {
			r.objects.Until.Set(uint64(0)) // the senders stop
		}
		return err
	})
	return group.Wait()
}

// processor returns that of a sender.
func (r *xdpRun) processor(n int) int { return r.link.cores.Load[n] }

// wait waits until everything is answered.
func (r *xdpRun) wait(ctx context.Context) error {
	want := r.rounds * uint64(r.traffic.chunks)
	var last seen
	tick := time.NewTicker(500 * time.Microsecond)
	defer tick.Stop()
	for progress := time.Now(); ; {
		now, err := r.seen()
		switch {
		case err != nil:
			return err
		case now.Wrong != 0:
			return fmt.Errorf("%d of the answers are wrong, after %d right results: %w", now.Wrong, now.Results, r.counted())
		case now.Results == want:
			return nil
		case now != last:
			last, progress = now, time.Now()
		case time.Since(progress) > stalled:
			return fmt.Errorf("%w: %d results of %d for %v: %w", errStalled, now.Results, want, stalled, r.counted())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// counted says what the server has counted, as an error.
func (r *xdpRun) counted() error {
	counts, err := r.server.Reasons()
	if err != nil {
		return err
	}
	text := ""
	for reason, n := range counts {
		if n != 0 {
			text += fmt.Sprintf(" %d %v", n, wire.Reason(reason))
		}
	}
	return fmt.Errorf("the server counted%s", text)
}

// check reports whether the server has added every contribution once and nothing else, and whether it has answered as
// often. All results have been compared already.
func (r *xdpRun) check() error {
	counts, err := r.server.Reasons()
	if err != nil {
		return err
	}
	now, err := r.seen()
	if err != nil {
		return err
	}
	results := r.rounds * uint64(r.traffic.chunks)
	want := [wire.NumReasons]uint64{wire.ReasonNone: results * uint64(r.traffic.ranks)}
	if counts != want || now.Results != results || now.Acks != results*uint64(r.traffic.ranks-1) || now.Wrong != 0 {
		return fmt.Errorf("check sums: %d results and %d acknowledgements, %d wrong, of %d contributions to %d chunks: %w",
			now.Results, now.Acks, now.Wrong, want[wire.ReasonNone], results, r.counted())
	}
	return nil
}

// statistics sends so many rounds with the kernel's run statistics on, and returns the server's nanoseconds a packet.
// They take time themselves, for which reason nothing else is measured meanwhile.
func (r *xdpRun) statistics(ctx context.Context, rounds int) (float64, error) {
	on, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return 0, fmt.Errorf("turn on BPF run statistics: %w", err)
	}
	defer on.Close()
	before, err := r.program.Stats()
	if err != nil {
		return 0, err
	}
	if err := r.send(ctx, rounds); err != nil {
		return 0, err
	}
	after, err := r.program.Stats()
	if err != nil {
		return 0, err
	}
	return float64(after.Runtime-before.Runtime) / float64(after.RunCount-before.RunCount), nil
}

// xdpContext is struct xdp_md of linux/bpf.h.
type xdpContext struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

// testLiveFrames is BPF_F_TEST_XDP_LIVE_FRAMES.
const testLiveFrames = 1 << 1

// liveBatch is how many frames the kernel makes, and keeps for use again: as many as may be under way.
const liveBatch = queueLength

// sendFrames has the kernel send frames of a sender until all of them are sent, from the load's end of the link.
func (r *xdpRun) sendFrames(ctx context.Context, n int) error {
	length := uint32(r.traffic.frameLen() + 2)
	send := func() error {
		iface, err := netlink.LinkByName(r.link.port())
		if err != nil {
			return err
		}
		for ctx.Err() == nil {
			var s loadSender
			var until uint64
			if err := errors.Join(r.objects.Senders.Lookup(uint32(r.processor(n)), &s), r.objects.Until.Get(&until)); err != nil {
				return err
			}
			if uint64(s.Round) >= until {
				return nil
			}
			_, err := r.objects.SendQuestions.Run(&ebpf.RunOptions{
				Data: make([]byte, length), Repeat: 1 << 14, Flags: testLiveFrames, BatchSize: liveBatch,
				Context: xdpContext{DataEnd: length, IngressIfindex: uint32(iface.Attrs().Index)},
			})
			if errors.Is(err, unix.EINVAL) || errors.Is(err, ebpf.ErrNotSupported) {
				return &UnsupportedError{"XDP programs on live frames (BPF_F_TEST_XDP_LIVE_FRAMES)", "5.18", err}
			}
			if err != nil {
				return fmt.Errorf("send live frames: %w", err)
			}
		}
		return ctx.Err()
	}
	return r.link.lab.Do(netns.Switch, func() error { return on([]int{r.processor(n)}, send) })
}

// sender sends the contributions of some ranks from UDP sockets, many in a system call, as load.bpf.c's sends frames.
type sender struct {
	run     *xdpRun
	first   int
	sockets []int    // by rank; 0 where it is another's
	payload [][]byte // by (parity x ranks + rank) x chunks + chunk
	round   uint32   // the next
	group   uint64   // groups that were sent
	batch   []mmsghdr
}

// mmsghdr is struct mmsghdr of sendmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	length uint32
	_      [4]byte
}

// newSender opens the sockets in the namespace of the thread.
func newSender(r *xdpRun, n int, questions []loadQuestion) (*sender, error) {
	s := &sender{run: r, first: n, sockets: make([]int, r.traffic.ranks), batch: make([]mmsghdr, r.traffic.group)}
	length := r.traffic.frameLen()
	for i := range questions {
		s.payload = append(s.payload, questions[i].Frame[wire.FrameOverhead:length])
	}
	dst := r.link.server()
	for rank := n; rank < r.traffic.ranks; rank += r.traffic.senders {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open socket: %w", err)
		}
		s.sockets[rank] = fd
		src := r.link.source(rank)
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: src.IP, Port: int(src.Port)})
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrInet4{Addr: dst.IP, Port: int(dst.Port)})
		}
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 8<<20)
		}
		if err != nil {
			s.close()
			return nil, fmt.Errorf("open socket of rank %d: %w", rank, err)
		}
	}
	return s, nil
}

func (s *sender) close() {
	for _, fd := range s.sockets {
		if fd != 0 {
			unix.Close(fd)
		}
	}
}

// send sends all rounds before until.
func (s *sender) send(ctx context.Context, until uint32) error {
	t := s.run.traffic
	for ; s.round < until; s.round++ {
		for at := 0; at < t.chunks; at += t.group {
			if err := s.await(ctx); err != nil {
				return err
			}
			for rank := s.first; rank < t.ranks; rank += t.senders {
				if err := s.sendGroup(rank, at); err != nil {
					return fmt.Errorf("send contributions of rank %d: %w", rank, err)
				}
			}
			s.group++
		}
	}
	return nil
}

// await waits until the next group may be sent, as load.bpf.c has it.
func (s *sender) await(ctx context.Context) error {
	t := s.run.traffic
	each := uint64(0) // ranks
	for rank := s.first; rank < t.ranks; rank += t.senders {
		each++
	}
	size := uint64(t.group)
	for {
		var kernel loadSender
		now, err := s.run.seen()
		if err == nil {
			err = s.run.objects.Senders.Lookup(uint32(s.run.processor(s.first)), &kernel)
		}
		if err != nil {
			return err
		}
		if now.Results+size >= s.group*size && (s.group+1)*size*each-kernel.Answered <= queueLength {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		pause := unix.NsecToTimespec(int64(10 * time.Microsecond))
		unix.Nanosleep(&pause, nil)
	}
}

// sendGroup sends a rank's chunks from at on.
func (s *sender) sendGroup(rank, at int) error {
	t := s.run.traffic
	base := (int(s.round&1)*t.ranks+rank)*t.chunks + at
	iov := make([]unix.Iovec, t.group)
	for i := range s.batch {
		payload := s.payload[base+i]
		setRound(payload, s.round)
		iov[i].Base = &payload[0]
		iov[i].SetLen(len(payload))
		s.batch[i].header.Iov = &iov[i]
		s.batch[i].header.SetIovlen(1)
	}
	for rest := s.batch; len(rest) > 0; {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(s.sockets[rank]), uintptr(unsafe.Pointer(&rest[0])), uintptr(len(rest)), 0, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return errno
		}
		rest = rest[n:]
	}
	runtime.KeepAlive(iov)
	return nil
}
