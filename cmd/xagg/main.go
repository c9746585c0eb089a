// Command xagg aggregates gradients in the network: controller, switch, aggregation server, worker and the tools
// around them in one binary.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"xagg/bmv2"
	"xagg/internal/endpoint"
	"xagg/lab/aggregator"
	"xagg/lab/netns"
	"xagg/xdp"
)

// Exit codes of every command.
const (
	exitOK          = 0
	exitFailure     = 1
	exitDifferences = 2   // differences, incomplete input, lint findings
	exitEnvironment = 3   // the machine lacks something
	exitUsage       = 64  // the command line is wrong
	exitInterrupted = 130 // what shells expect of a program that an interrupt ended before it was done
)

// errInterrupted is what a command says that an interrupt ended before it was done.
var errInterrupted = &exitError{exitInterrupted, errors.New("interrupted; everything that was started is removed")}

// env is what a command may touch of the world, so that tests call commands in-process.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	log            *slog.Logger
	// hangup is what SIGHUP does, without waiting for anything; nil = it ends the command, as SIGTERM does.
	hangup atomic.Pointer[func()]
}

// exitError carries an exit code other than exitFailure out of a command.
type exitError struct {
	code int
	err  error // nil when the command has said everything already
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usagef returns an error of a wrong command line.
func usagef(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	e := &env{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	go func() {
		for range hangups {
			if f := e.hangup.Load(); f != nil {
				(*f)()
			} else {
				stop()
			}
		}
	}()
	code := run(ctx, e, os.Args[1:])
	stop()
	os.Exit(code)
}

// run executes one command line and returns its exit code.
func run(ctx context.Context, env *env, args []string) int {
	err := newRoot(env, args).ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	var exit *exitError
	switch {
	case errors.As(err, &exit):
	case lacking(err):
		exit = &exitError{exitEnvironment, err}
	default:
		exit = &exitError{exitFailure, err}
	}
	if exit.err != nil {
		fmt.Fprintf(env.stderr, "xagg: %v\n", exit.err)
	}
	return exit.code
}

// lacking reports whether an error is that of the machine, which lacks an interface, a free address, a privilege or a
// program.
func lacking(err error) bool {
	var (
		address *endpoint.ListenError
		machine *bmv2.EnvironmentError
		device  *xdp.NoInterfaceError
		kernel  *aggregator.UnsupportedError
	)
	return errors.As(err, &address) || errors.As(err, &machine) || errors.As(err, &device) || errors.As(err, &kernel) ||
		errors.Is(err, xdp.ErrPrivileges) || errors.Is(err, netns.ErrNotPermitted)
}

// daemon marks the commands that run until they are stopped: their logs are for machines unless a person looks on.
var daemon = map[string]string{"daemon": ""}

func newRoot(env *env, args []string) *cobra.Command {
	var level, format string
	root := &cobra.Command{
		Use:           "xagg",
		Short:         "Aggregate gradients in the network: in a P4 switch and on XDP servers",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if format == "auto" { // what it stands for is the flag's value from now on
				format = "text"
				if _, ok := cmd.Annotations["daemon"]; ok && !isTerminal(env.stderr) {
					format = "json"
				}
			}
			log, err := newLogger(env.stderr, level, format)
			if err != nil {
				return err
			}
			env.log = log
			return nil
		},
	}
	root.SetIn(env.stdin)
	root.SetOut(env.stdout)
	root.SetErr(env.stderr)
	root.SetArgs(args)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w; see '%s --help'", err, cmd.CommandPath())
	})
	root.PersistentFlags().StringVar(&level, "log-level", "info", "least level that is logged: debug, info, warn, error")
	root.PersistentFlags().StringVar(&format, "log-format", "auto",
		"form of the log on stderr: text, json; auto is json for a daemon without a terminal, else text")
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(
		newDemoCommand(env),
		newBenchCommand(env),
		newControllerCommand(env),
		newSwitchCommand(env),
		newServerCommand(env),
		newWorkerCommand(env),
		newConfigCommand(env),
		newStatusCommand(env),
		newWhyCommand(env),
		newJobCommand(env),
		newRecordCommand(env),
		newPolicyCommand(env),
		newSchemaCommand(env),
		newSimCommand(env),
		newPcapCommand(env),
		newDoctorCommand(env),
	)
	usageErrors(root)
	return root
}

// usageErrors gives errors in the number of arguments, everywhere below cmd, the exit code of a wrong command line.
func usageErrors(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			switch err := check(cmd, args); {
			case err == nil:
				return nil
			case len(args) == 0:
				return usagef("arguments are missing: want '%s'; see '%s --help'", cmd.UseLine(), cmd.CommandPath())
			default:
				return usagef("%w; see '%s --help'", err, cmd.CommandPath())
			}
		}
	}
	for _, sub := range cmd.Commands() {
		usageErrors(sub)
	}
}

func newLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usagef("--log-level %q: want debug, info, warn or error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	switch strings.ToLower(format) {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, usagef("--log-format %q: want auto, text or json", format)
}

// isTerminal reports whether what is written to w appears on a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
