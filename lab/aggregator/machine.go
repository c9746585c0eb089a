package aggregator

import "xagg/lab/bench"

// Machine is where measurements were made.
type Machine struct {
	CPU      string            `json:"cpu"`
	Cores    int               `json:"cores"`  // that the process may use
	Memory   uint64            `json:"memory"` // bytes
	Kernel   string            `json:"kernel"`
	Revision string            `json:"revision"` // of git, with "+dirty" where files were changed; "" = unknown
	Versions map[string]string `json:"versions"`
}

// thisMachine describes this one.
func thisMachine() Machine {
	h := bench.Machine()
	return Machine{CPU: h.CPU, Cores: h.Cores, Memory: h.Memory, Kernel: h.Kernel, Revision: h.Revision, Versions: h.Versions}
}
