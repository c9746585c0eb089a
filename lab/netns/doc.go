// Package netns makes a lab of network namespaces on one machine: a switch namespace in the middle, one namespace per
// host, and a veth pair as the link between the two. It needs root and no program but itself.
//
//	host w0            switch              server s0-br            host s0
//	┌──────┐  rate  ┌───────────┐  rate  ┌───────────────┐       ┌──────┐
//	│ eth0 ├────────┤ p1    p65 ├────────┤ up  br0  down ├───────┤ eth0 │
//	└──────┘        └───────────┘        └───────────────┘       └──────┘
//
// A [Spec] is plain data; [Create] makes it, and [Lab.Start] runs programs in its hosts. Rates are token buckets at
// both ends of a link. A host with [Host.Bridge] gets a namespace with a bridge in the middle of its link, for two
// reasons: an XDP program's XDP_TX passes no qdisc, so that the bucket for what the host sends must sit one hop away,
// and a veth delivers natively transmitted frames only where its peer has a native XDP program, so that the port
// named down carries one that passes everything.
//
// A link that a fault of [Spec.Faults] is about has the same namespace in its middle, and there instead of the bridge a
// relay of this process, which damages what it carries. So any switch can be tested on bad links.
//
// Hosts see ordinary Ethernet links: checksum and segmentation offloads are off, so that what crosses a link is what
// a wire would carry, unless a host asks for them, and IPv6 is off, so that nothing crosses it that no program has sent.
//
// # Clean-up
//
// Whatever a lab makes is written to its record, a file in [RunDir], before it is made. [Lab.Close] removes what the
// record lists. If the process dies before that, its lock on the record dies with it, and the next [Create], or
// [Sweep], removes what the record lists. Nothing is ever found by the pattern of a name.
package netns
