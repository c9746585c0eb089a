package bench

import (
	"context"

	"xagg/lab/peers"
	"xagg/lab/scenario"
)

// libraries are those that modes need which not every machine has.
var libraries = map[scenario.Reducer]peers.Library{scenario.Gloo: peers.Gloo, scenario.MPI: peers.MPI}

// Libraries looks for what some of the modes need and not every machine has. It returns the versions of what is there, and for each mode
// that cannot run why not, with what to install.
func Libraries(ctx context.Context, modes []scenario.Mode) (versions map[string]string, missing map[scenario.Mode]string) {
	versions, missing = map[string]string{}, map[scenario.Mode]string{}
	for _, m := range modes {
		library, ok := libraries[m.Reducer()]
		if !ok {
			continue
		}
		version, err := library.Available(ctx)
		if err != nil {
			missing[m] = err.Error()
			continue
		}
		versions[string(library)] = version
	}
	return versions, missing
}

// Emulated says what of an experiment in the lab is emulated, and what that means for its numbers.
var Emulated = []string{
	"Hosts are network namespaces of one machine and links are veth pairs whose rates are token buckets (tbf): latencies are those of a " +
		"kernel, not of a wire, and a burst of a millisecond passes at once.",
	"The switch is software and shares the machine's cores with everything else. Rates are chosen so that no core is busy for more than " +
		"80 % of the time; times then are those of the links, and ratios of times are what to compare, not times with a real network's.",
	"Computation is a sleep, as if on an accelerator: workers have the cores for communication alone.",
	"Packet rates are low, so that fixed costs per packet weigh more in CPU seconds per GB than with a network card's batches.",
	"The CPU time of servers is that of their processes, and of the kernel threads that poll their interfaces and run their XDP programs (threaded NAPI). The " +
		"stacks of hosts without XDP run in whatever context sends to them: the kernel's part has what cannot be told apart.",
}
