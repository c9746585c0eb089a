package controller

import (
	"fmt"

	"xagg/controller/p4rt"
	"xagg/p4"
	"xagg/wire"
)

// Names of what xagg.p4 has for the controller; package p4 documents them.
const (
	tableJob       = "XaggIngress.job"
	tablePlan      = "XaggIngress.plan"
	tableMember    = "XaggIngress.member"
	tableServer    = "XaggIngress.server"
	tableReturning = "XaggIngress.returning"
	tableIPv4      = "XaggIngress.ipv4"
	tableARP       = "XaggIngress.arp"
	tableReplica   = "XaggEgress.replica"

	actionKnown      = "XaggIngress.known"
	actionSetPlan    = "XaggIngress.set_plan"
	actionSummed     = "XaggIngress.summed"
	actionSteered    = "XaggIngress.steered"
	actionToServer   = "XaggIngress.to_server"
	actionFromServer = "XaggIngress.from_server"
	actionForward    = "XaggIngress.forward"
	actionARPReply   = "XaggIngress.arp_reply"
	actionFlood      = "XaggIngress.flood"
	actionToRank     = "XaggEgress.to_rank"

	counterReasons = "XaggIngress.reasons"
	counterSent    = "XaggIngress.sent"

	fieldJob   = "hdr.x.job"
	fieldEpoch = "hdr.x.epoch"
	fieldRank  = "hdr.x.rank"
	fieldRID   = "standard_metadata.egress_rid"
)

// contract is what the controller needs of the switch program: a P4Info without it does not belong here.
var contract = p4rt.Contract{
	Tables: []p4rt.TableContract{
		{Name: tableJob, Match: widths{fieldJob: 16}, Actions: map[string]widths{actionKnown: {}}},
		{Name: tablePlan, Match: widths{fieldJob: 16, fieldEpoch: 16}, Actions: map[string]widths{
			actionSetPlan: {"expected": 64, "final": 8, "servers": 16, "group": 16, "next_epoch": 16, "quorum": 8, "wait_us": 32},
		}},
		{Name: tableMember, Match: widths{fieldJob: 16, fieldEpoch: 16, fieldRank: 8}, Actions: map[string]widths{
			actionSummed:  {"port": 16, "ip": 32, "bit_": 64, "base": 32, "mask": 32},
			actionSteered: {"port": 16, "ip": 32, "bit_": 64},
		}},
		{Name: tableServer, Match: widths{fieldJob: 16, fieldEpoch: 16, "meta.server": 16}, Actions: map[string]widths{
			actionToServer: {"port": 9, "mac": 48, "ip": 32},
		}},
		{Name: tableReturning, Match: widths{"standard_metadata.ingress_port": 9, fieldJob: 16, fieldEpoch: 16},
			Actions: map[string]widths{actionFromServer: {"mac": 48, "ip": 32, "all_": 16, "cohort": 16}}},
		{Name: tableIPv4, Match: widths{"hdr.ipv4.dst": 32}, Actions: map[string]widths{
			actionForward: {"port": 9, "mac": 48},
		}},
		{Name: tableARP, Match: widths{"hdr.arp.tpa": 32}, Actions: map[string]widths{
			actionARPReply: {"mac": 48},
			actionFlood:    {"group": 16},
		}},
		{Name: tableReplica, Match: widths{"standard_metadata.egress_rid": 16}, Actions: map[string]widths{
			actionToRank: {"mac": 48, "ip": 32, "port": 16},
		}},
	},
	Counters: map[string]int{counterReasons: wire.NumReasons, counterSent: int(wire.TypeCtrl) + 1},
	Direct:   []string{tableMember},
	In:       widths{"ingress_port": 16},
	Out:      widths{"egress_port": 16},
}

type widths = map[string]int

// wipeOrder begins a wipe with the entries that admit packets, so that none finds half a plan.
var wipeOrder = []string{tableJob, tablePlan, tableMember}

// loadProgram takes the embedded switch program, checks that it is the one this package knows how to program, and
// returns the number of slots that it has.
func loadProgram() (*p4rt.Program, int, error) {
	info, err := p4.P4Info()
	if err != nil {
		return nil, 0, fmt.Errorf("load switch program: %w", err)
	}
	program, err := p4rt.NewProgram(info, p4.JSON)
	if err != nil {
		return nil, 0, fmt.Errorf("load switch program: %w", err)
	}
	if err := program.Check(contract); err != nil {
		return nil, 0, fmt.Errorf("load switch program: %w", err)
	}
	// A slot is a cell of every register, so the smallest one counts.
	slots := 0
	for _, size := range program.Registers() {
		if slots == 0 || size < slots {
			slots = size
		}
	}
	if slots == 0 {
		return nil, 0, fmt.Errorf("load switch program: %w: it has no registers", p4rt.ErrProgramMismatch)
	}
	return program, slots, nil
}
