// Package p4rt is a P4Runtime client for bmv2's simple_switch_grpc and whatever answers like it.
//
// What is programmed is plain data with names ([Entry], [Group]); a [Program], made of a P4Info and the compiled
// program, translates names to numbers and back in one place and checks what it can before the switch sees it. [Run]
// holds one session: connection, arbitration and pipeline are good while its handler runs, and the handler's context
// ends when one of them does.
//
// Facts about bmv2 that shaped the package: a write is never atomic, and a failed one has a status for each of its
// updates; most of the target's own refusals arrive as UNKNOWN; reads ignore filters and answer in one message;
// registers cannot be read; multicast groups survive a new pipeline inside the switch while its P4Runtime server
// forgets them; VERIFY_AND_COMMIT is the one safe way to push a pipeline.
package p4rt
