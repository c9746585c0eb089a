package p4

import (
	_ "embed" // the compiled program
	"fmt"

	p4config "github.com/p4lang/p4runtime/go/p4/config/v1"
	"google.golang.org/protobuf/encoding/prototext"
)

//go:generate ./generate.sh

// JSON is xagg.p4 as p4c compiles it for bmv2.
//
//go:embed xagg.json
var JSON []byte

// P4InfoText is the program's P4Info in protobuf text form.
//
//go:embed xagg.p4info.txtpb
var P4InfoText []byte

// P4Info returns the program's P4Info.
func P4Info() (*p4config.P4Info, error) {
	info := new(p4config.P4Info)
	if err := prototext.Unmarshal(P4InfoText, info); err != nil {
		return nil, fmt.Errorf("parse the embedded P4Info: %w", err)
	}
	return info, nil
}
