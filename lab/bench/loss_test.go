package bench

import (
	"strings"
	"testing"
)

func TestWriteLossTable(t *testing.T) {
	var b strings.Builder
	err := WriteLossTable(&b, []LossRow{
		{Rate: 0.0001, Mode: "switch", Median: 0.0101, P90: 0.02, Max: 0.03, Goodput: 5e7, OfTCP: 0.5, Packets: 200, Resends: 3},
		{Rate: 0.0001, Mode: "tcp", Median: 0.0202, P90: 0.04, Max: 0.05, Goodput: 2.5e7, OfTCP: 1},
	})
	want := "" +
		"    LOSS    MODE   MEDIAN      P90      MAX    GOODPUT  OF TCP  RESENDS\n" +
		"  0.01 %  switch  10.1 ms  20.0 ms  30.0 ms  50 Mbit/s    0.50   1.50 %\n" +
		"  0.01 %     tcp  20.2 ms  40.0 ms  50.0 ms  25 Mbit/s    1.00         \n"
	if err != nil || b.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, b.String(), want)
	}
}
