package exchange

import "golang.org/x/sys/cpu"

// addVector adds n numbers at y to those at x, with AVX; n is a positive multiple of addStep.
//
//go:noescape
func addVector(x, y *float32, n int)

// addStep is how many numbers addVector adds at a time; 0: it is not to be had.
var addStep = func() int {
	if cpu.X86.HasAVX {
		return 32
	}
	return 0
}()
