package tcp

import "xagg/lab/exchange"

// least is the number of values from which on a bucket is shared by servers: less would be more headers than values.
const least = 1024

// share returns from which value of each bucket to which a server sums.
func share(p exchange.Plan, server, servers int) [][2]int {
	shares := make([][2]int, len(p.Buckets))
	for b, n := range p.Buckets {
		switch {
		case n >= least*servers:
			shares[b] = [2]int{n * server / servers, n * (server + 1) / servers}
		case b%servers == server:
			shares[b] = [2]int{0, n}
		}
	}
	return shares
}
