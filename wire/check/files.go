package check

import (
	"errors"
	"fmt"
	"io"

	"xagg/wire/capture"
)

// Input is a capture file.
type Input struct {
	Name string
	io.Reader
}

// Files checks capture files, merged by time, as one capture. An error means that a file could not be read; what is
// wrong with the packets is in the report.
func Files(inputs []Input, opts Options) (*Report, error) {
	return New(opts).files(inputs)
}

func (c *Checker) files(inputs []Input) (*Report, error) {
	readers := make([]*capture.Reader, len(inputs))
	for i, in := range inputs {
		r, err := capture.NewReader(in)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", in.Name, err)
		}
		readers[i] = r
	}
	m := capture.Merge(readers...)
	var p capture.Packet
	for {
		i, err := m.Next(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: after packet %d: %w", inputs[i].Name, readers[i].Number(), err)
		}
		c.Packet(Ref{i, readers[i].Number()}, &p)
	}
	report := c.Finish()
	for i, in := range inputs {
		report.Files = append(report.Files, File{in.Name, readers[i].Number(), m.Truncated(i)})
	}
	return report, nil
}
