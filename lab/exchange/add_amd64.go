//go:build !race

package exchange

// block is how many values addBlocks adds at a time.
const block = 16

// addBlocks adds so many blocks at y to those at x.
//
//go:noescape
func addBlocks(x, y *float32, blocks int)

// Add adds y to x, of the same length. SSE, which every such processor has, adds four values at a time.
func Add(x, y []float32) {
	y = y[:len(x)]
	n := len(x) / block * block
	if n > 0 {
		addBlocks(&x[0], &y[0], n/block)
	}
	for i := n; i < len(x); i++ {
		x[i] += y[i]
	}
}
