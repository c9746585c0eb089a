// Package p4rt is the engine's P4Runtime server. It answers as simple_switch_grpc does: the same entities, the same
// status codes, a failed batch as UNKNOWN with one p4.v1.Error for every update. Where a message says more than the
// engine can do it is refused by name.
//
// It is stricter or saner than simple_switch_grpc in these points. A pipeline is loaded on VERIFY too, and a P4Info
// that does not belong to the JSON is INVALID_ARGUMENT with the name of the object that differs. A new pipeline
// begins without multicast groups. A device id other than the server's own is NOT_FOUND. A packet-out that is refused
// (from a backup, before a pipeline, with unknown metadata, without a CPU port) is answered by a StreamError.
package p4rt
