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
