// Package controller is the daemon that sets up jobs: it programs the switch over P4Runtime and the aggregation
// servers over their agents, and it is the place where workers meet.
//
// The data flows one way: what is wanted (configuration, jobs, plans) is the intent; a pure function turns the intent
// into table entries, multicast groups and server plans; another one compares them with what is installed and orders
// the difference so that nothing refers to what is not there yet. The intent is the only truth, and a file has it before any
// device: a controller that is restarted goes on where it was. Devices that come back are asked what they have; a switch
// with another pipeline than the one that was programmed is wiped.
package controller
