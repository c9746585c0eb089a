package timing

import "time"

// Costs are how long things take beside what links' rates, queues and computation take.
type Costs struct {
	// Call is from when a gradient is ready to when the worker begins to send it: wake-ups, and the same of those who wait for the
	// result. It keeps nobody busy.
	Call time.Duration
	// WorkerSend and WorkerReceive keep a worker busy with a packet; it does one thing at a time.
	WorkerSend, WorkerReceive time.Duration
	// SwitchPacket keeps the switch busy with a packet that comes, SwitchCopy with each that leaves. It has one pipeline.
	SwitchPacket, SwitchCopy time.Duration
	// ServerPacket keeps a server busy with a packet and the answer to it.
	ServerPacket time.Duration
	// Hop is from one end of a link to the other, in addition to the rate: propagation, interfaces and wake-ups.
	Hop time.Duration
	// Step is between two steps of a change of plan: a write to the switch or to a server.
	Step time.Duration
}

// Lab returns the costs of the lab of network namespaces: switch, servers and workers are processes on one machine with two
// cores of an Intel Xeon. docs/simulator.md says how each was measured. None follows from a scenario that predictions are
// compared with.
func Lab() Costs {
	return Costs{
		Call:          580 * time.Microsecond,
		WorkerSend:    9 * time.Microsecond,
		WorkerReceive: 9 * time.Microsecond,
		SwitchPacket:  4700 * time.Nanosecond,
		SwitchCopy:    1 * time.Microsecond,
		ServerPacket:  2500 * time.Nanosecond,
		Hop:           140 * time.Microsecond,
		Step:          2 * time.Millisecond,
	}
}
