// Package boot is what the tests of package kernel and the first process of the machine that they boot have to agree
// on.
package boot

import (
	"bytes"
	"fmt"
)

// Where the guest finds things, in the root file system.
const (
	ModuleDir   = "/modules"       // kernel modules, loaded in the order of their names
	CommandFile = "/commands.json" // a list of command lines, each a list of strings
)

// Marker begins the line of the guest's console that holds its [Result] as JSON.
const Marker = "xagg-guest: "

// Result is how the guest's commands ended.
type Result struct {
	Release string // of the kernel
	Error   string // empty when all went well
}

// File is a file of an [Archive].
type File struct {
	Name string // without a leading slash; its folder must come before it
	Mode uint32 // as in stat(2), with its type
	Data []byte
}

// Archive encodes a root file system as the kernel's initramfs takes it: cpio in the format "newc"
// (Documentation/driver-api/early-userspace/buffer-format.rst).
func Archive(files []File) []byte {
	var b bytes.Buffer
	for i, f := range append(files, File{Name: "TRAILER!!!"}) {
		fmt.Fprintf(&b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
			i+1, f.Mode, 0, 0, 1, 0, len(f.Data), 0, 0, 0, 0, len(f.Name)+1, 0)
		b.WriteString(f.Name)
		b.WriteByte(0)
		pad(&b)
		b.Write(f.Data)
		pad(&b)
	}
	return b.Bytes()
}

func pad(b *bytes.Buffer) {
	for b.Len()%4 != 0 {
		b.WriteByte(0)
	}
}
