package bmv2_test

import (
	"fmt"
	"strings"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// details spells out a write's error.
func details(err error) string {
	var b strings.Builder
	fmt.Fprint(&b, err)
	for i, d := range status.Convert(err).Details() {
		if e, ok := d.(*p4v1.Error); ok && e.CanonicalCode != 0 {
			fmt.Fprintf(&b, "\n  update %d: %v: %s", i, codes.Code(e.CanonicalCode), e.Message)
		}
	}
	return b.String()
}
