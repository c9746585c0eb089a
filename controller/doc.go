// Package controller is the daemon that sets up jobs: it programs the switch over P4Runtime and the aggregation
// servers over their agents, and it is the place where workers meet.
//
// The data flows one way: what is wanted (configuration, jobs, plans) is the intent; a pure function turns the intent
// into table entries, multicast groups and server plans; another one compares them with what is installed and orders
// the difference so that nothing refers to what is not there yet. The intent is the only truth: a switch that comes
// (back) is wiped and programmed anew.
package controller
