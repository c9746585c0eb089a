package aggregator

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"xagg/lab/exchange"
	"xagg/lab/netns"
	"xagg/lab/tcp"
)

// tcpPort is where the TCP aggregator listens.
const tcpPort = 19861

// piece is how many bytes the load writes and reads at a time.
const piece = 64 << 10

// ServeTCP is the process of the TCP aggregator: it serves one job on the processors that it is given, and returns when
// all workers have closed their connections. It says "ready" in a line of its own on w when it listens at addr. Unless it
// has these processors and priority there it takes them and starts itself again with the same command line, so that all
// its threads have them and its runtime knows how many they are.
func ServeTCP(w io.Writer, addr string, ranks, values int, cpus []int) error {
	have, err := allowed()
	if err != nil {
		return err
	}
	nice, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return err
	}
	if !slices.Equal(have, cpus) || nice != 20-priority { // as the system call spells it
		runtime.LockOSThread()
		if err := takeOver(cpus); err != nil {
			return err
		}
		return fmt.Errorf("start again on processors %v: %w", cpus, unix.Exec("/proc/self/exe", os.Args, os.Environ()))
	}
	server, err := tcp.NewServer(planOf(ranks, values), 0, 1)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp4", addr)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(w, "ready"); err != nil {
		return errors.Join(err, listener.Close())
	}
	return server.Serve(listener)
}

// planOf is the job: one server sums vectors of one length.
func planOf(ranks, values int) exchange.Plan {
	return exchange.Plan{Ranks: ranks, Buckets: []int{values}}
}

// tcpRun is one TCP aggregator with its load, ready to be measured.
type tcpRun struct {
	link    *link
	ranks   int
	child   *netns.Child
	stderr  *bytes.Buffer
	workers []*tcpWorker
	objects *loadObjects // that watch softirqs, or nil
	stop    func() error // watching
}

// newTCPRun starts a server and connects the workers.
func newTCPRun(ctx context.Context, l *link, opts Options) (r *tcpRun, err error) {
	ranks, values := opts.Workers, opts.Values
	r = &tcpRun{link: l, ranks: ranks, stderr: new(bytes.Buffer)}
	defer func() {
		if err != nil {
			if r.stderr.Len() > 0 {
				err = fmt.Errorf("%w: %s", err, strings.TrimSpace(r.stderr.String()))
			}
			r.close()
		}
	}()
	spec, err := loadLoad()
	if err == nil {
		r.objects, err = loadObjectsOf(spec)
	}
	if err != nil {
		return r, err
	}
	if r.stop, err = watchSoftirqs(r.objects); err != nil {
		return r, err
	}
	server := l.server()
	addr := net.JoinHostPort(net.IP(server.IP[:]).String(), fmt.Sprint(tcpPort))
	cmd := opts.TCPServer(addr, ranks, values, l.cores.Aggregator)
	cmd.Stderr = r.stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	if r.child, err = l.lab.Start(l.host.Name, cmd); err != nil {
		return r, err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		return r, fmt.Errorf("start TCP aggregator: it said %q: %w", line, errors.Join(err, r.child.Wait()))
	}
	space, err := os.Stat(l.lab.Path(l.host.Name))
	if err != nil {
		return r, err
	}
	if err := errors.Join(
		r.objects.Process.Set(uint32(r.child.PID())),
		r.objects.Space.Set(uint32(space.Sys().(*syscall.Stat_t).Ino)),
	); err != nil {
		return r, err
	}
	of, sum := vectors(ranks, values)
	return r, l.lab.Do(netns.Switch, func() error {
		for rank := range ranks {
			w, err := dial(ctx, addr, rank, ranks, of[rank], sum)
			if err != nil {
				return err
			}
			r.workers = append(r.workers, w)
		}
		return nil
	})
}

func (r *tcpRun) close() error {
	var errs []error
	for _, w := range r.workers {
		w.file.Close()
	}
	if r.child != nil {
		if len(r.workers) < r.ranks {
			r.child.Stop()
		} else if err := r.child.Wait(); err != nil {
			errs = append(errs, fmt.Errorf("TCP aggregator: %w: %s", err, r.stderr))
		}
	}
	if r.stop != nil {
		errs = append(errs, r.stop())
	}
	if r.objects != nil {
		errs = append(errs, r.objects.Close())
	}
	return errors.Join(errs...)
}

func (r *tcpRun) meter() meter {
	return meter{cores: r.link.cores.Aggregator, process: r.child.PID(), soft: r.objects}
}

// send sends so many rounds and returns when all workers have received their sums. A wrong one is an error.
func (r *tcpRun) send(ctx context.Context, rounds int) error {
	defer context.AfterFunc(ctx, func() {
		for _, w := range r.workers {
			unix.Shutdown(w.fd, unix.SHUT_RDWR)
		}
	})()
	var group errgroup.Group
	for rank, w := range r.workers {
		cpu := r.link.cores.Load[rank%len(r.link.cores.Load)]
		received := make(chan struct{}, w.pieces())
		for range w.pieces() {
			received <- struct{}{}
		}
		group.Go(func() error { return on([]int{cpu}, func() error { return w.send(rounds, received) }) })
		group.Go(func() error { return on([]int{cpu}, func() error { return w.receive(rounds, received) }) })
	}
	err := group.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func (r *tcpRun) check() error { return nil } // every sum was compared when it came

// tcpWorker is a worker that sends the same vector round after round. A piece of the next round follows as soon as the
// sum of the same piece of this one is there, which the server's two rounds of memory allow.
type tcpWorker struct {
	file    *os.File
	fd      int
	rank    int
	vector  []byte
	sum     []byte
	receipt []byte
}

// dial connects a worker. Its socket blocks: each direction has a thread of its own.
func dial(ctx context.Context, addr string, rank, ranks int, vector, sum []float32) (*tcpWorker, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp4", addr)
	if err != nil {
		return nil, fmt.Errorf("connect worker %d: %w", rank, err)
	}
	hello := exchange.NewHello(planOf(ranks, len(vector)), rank, 0, 1)
	if _, err := conn.Write(exchange.Bytes([]exchange.Hello{hello})); err != nil {
		conn.Close()
		return nil, fmt.Errorf("introduce worker %d: %w", rank, err)
	}
	file, err := conn.(*net.TCPConn).File()
	if err = errors.Join(err, conn.Close()); err != nil {
		return nil, fmt.Errorf("connect worker %d: %w", rank, err)
	}
	return &tcpWorker{
		file: file, fd: int(file.Fd()), rank: rank, vector: exchange.Bytes(vector), sum: exchange.Bytes(sum), receipt: make([]byte, piece),
	}, nil
}

func (w *tcpWorker) pieces() int { return (len(w.vector) + piece - 1) / piece }

func (w *tcpWorker) send(rounds int, received <-chan struct{}) error {
	for range rounds {
		for part := range slices.Chunk(w.vector, piece) {
			if _, ok := <-received; !ok {
				return nil // the receiver says why
			}
			for len(part) > 0 {
				n, err := unix.Write(w.fd, part)
				if err != nil && !errors.Is(err, unix.EINTR) {
					return fmt.Errorf("worker %d: send: %w", w.rank, err)
				}
				part = part[max(n, 0):]
			}
		}
	}
	return nil
}

func (w *tcpWorker) receive(rounds int, received chan<- struct{}) error {
	defer close(received)
	for round := range rounds {
		for want := range slices.Chunk(w.sum, piece) {
			got := w.receipt[:len(want)]
			for have := 0; have < len(got); {
				n, _, err := unix.Recvfrom(w.fd, got[have:], unix.MSG_WAITALL)
				switch {
				case errors.Is(err, unix.EINTR):
				case err != nil:
					return fmt.Errorf("worker %d: receive: %w", w.rank, err)
				case n == 0:
					return fmt.Errorf("worker %d: receive: %w", w.rank, io.ErrUnexpectedEOF)
				}
				have += max(n, 0)
			}
			if !bytes.Equal(got, want) {
				return fmt.Errorf("worker %d: a sum of round %d over TCP is wrong", w.rank, round)
			}
			received <- struct{}{}
		}
	}
	return nil
}
