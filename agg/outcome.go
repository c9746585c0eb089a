package agg

import "xagg/wire"

// Dest says where a handled packet goes.
type Dest uint8

const (
	// Nowhere: the packet ends here.
	Nowhere Dest = iota
	// ToSender answers the packet's sender: source and destination swapped, out of the port it came in at.
	ToSender
	// ToService sends a server's answer to the service address, where the switch multicasts it.
	ToService
	// ToAll multicasts to every rank of the job.
	ToAll
	// ToCohort multicasts to the ranks that the switch sums.
	ToCohort
	// ToServer passes the packet to server Outcome.Server of the plan in the sender's name.
	ToServer
	// ToServerAsService sends the packet to server Outcome.Server of the plan with the service as its source.
	ToServerAsService
	// ToAddress routes the packet to the address that it carries.
	ToAddress
)

// Outcome is what became of a packet that a Handle method took. The packet itself was turned into the answer.
type Outcome struct {
	Reason wire.Reason // under which it is counted; wire.ReasonNone = summed
	Dest   Dest        // where the answer goes
	Server int         // for ToServer and ToServerAsService: the server's index in the plan
}
