package agg

import "time"

const (
	rtoInitial = 100 * time.Millisecond
	rtoMin     = 10 * time.Millisecond
	rtoMax     = 250 * time.Millisecond
)

// rtt estimates the retransmission timeout of RFC 6298 from samples of the round-trip time.
type rtt struct {
	srtt, variance time.Duration
	rto            time.Duration // the time after which a packet counts as lost
	sampled        bool
}

func newRTT() rtt { return rtt{rto: rtoInitial} }

// sample takes the round-trip time of a packet of which only one transmission can have been answered.
func (e *rtt) sample(r time.Duration) {
	if !e.sampled {
		e.sampled = true
		e.srtt, e.variance = r, r/2
	} else {
		e.variance += ((e.srtt - r).Abs() - e.variance) / 4
		e.srtt += (r - e.srtt) / 8
	}
	e.rto = min(max(e.srtt+4*e.variance, rtoMin), rtoMax)
}
