package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"xagg/wire/check"
)

func newPcapCommand(env *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pcap",
		Short: "Look into captures of the protocol",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	cmd.AddCommand(newPcapCheckCommand(env))
	return cmd
}

func newPcapCheckCommand(env *env) *cobra.Command {
	var (
		output string
		opts   check.Options
	)
	cmd := &cobra.Command{
		Use:   "check FILE...",
		Short: "Check that every result in a capture is the sum of exactly its contributions",
		Long: `Check reads captures (pcap or pcapng, also compressed by gzip; Ethernet, LINUX_SLL or LINUX_SLL2), merges them by
time, and checks every packet of the protocol by itself and all of them together:

  - lengths, version, checksums, masks, fields that must be zero, and the integrity tag;
  - every RESULT and PARTIAL is the sum of exactly the contributions in its mask: lanes, tag, amax, flags;
  - no rank counts twice for a chunk, across the switch and all servers.

The same packet may be captured any number of times: at several ports, sent again, multicast. "-" is standard input.

A GRAD or PARTIAL that was damaged on its way is a counted loss for the aggregators. Here it is a violation, reason
checksum, since a check cannot know whether they noticed: capture where the packets are whole, with checksum offload
switched off. A packet that the capture cut is a violation too, reason short: capture with a larger snap length.
Packets of other protocols are skipped and counted. A file that ends in the midst of a packet is read up to there.

Packets that disagree on a chunk's shape are told as one violation at the later one, which also names the earlier: a
capture does not show which of the two was altered.

Reasons:
  short, length, version, type, checksum, rank, mask, tag, shape
            as in NACKs and counters: see docs/protocol.md
  field     a field or flag that must be zero in a packet of this type is not, or the other way round
  sum       a PARTIAL or RESULT is not the sum of the contributions in its mask
  twice     a rank is counted twice
  conflict  a second packet for the same contribution, PARTIAL or RESULT says something else

Exit codes:
  0   everything is in order
  1   a packet breaks the protocol: its number, the reason and a hexdump are shown; or a file cannot be read
  2   incomplete: the capture lacks contributions that a mask names, or has no packet of the protocol
  64  the command line is wrong`,
		Example: `  tcpdump -i any -B 65536 -w demo.pcap udp port 19860
  xagg pcap check demo.pcap
  xagg pcap check -o json switch.pcapng server0.pcapng`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if output != "text" && output != "json" {
				return usagef("-o %q: want text or json", output)
			}
			return checkCaptures(env, args, output, opts)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "form of the report: text, json")
	cmd.Flags().IntVar(&opts.Findings, "max", 20, "violations and incomplete chunks told in detail, at most; all are counted")
	return cmd
}

func checkCaptures(env *env, names []string, output string, opts check.Options) error {
	inputs := make([]check.Input, len(names))
	for i, name := range names {
		inputs[i] = check.Input{Name: name, Reader: env.stdin}
		if name == "-" {
			continue
		}
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		inputs[i].Reader = f
	}
	report, err := check.Files(inputs, opts)
	if err != nil {
		return err
	}
	write := report.WriteText
	if output == "json" {
		write = report.WriteJSON
	}
	if err := write(env.stdout); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	switch report.Verdict {
	case check.Violated:
		return &exitError{code: exitFailure}
	case check.Lacking:
		return &exitError{code: exitDifferences}
	}
	return nil
}
