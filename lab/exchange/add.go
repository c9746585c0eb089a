package exchange

// Add adds y to x, of the same length, in vectors where the processor has them: the compiler makes none of a loop.
func Add(x, y []float32) {
	if addStep > 0 {
		if n := len(x) / addStep * addStep; n > 0 {
			_ = y[n-1]
			addVector(&x[0], &y[0], n)
			x, y = x[n:], y[n:]
		}
	}
	addScalar(x, y)
}

// addScalar is Add without vectors.
func addScalar(x, y []float32) {
	for len(x) >= 8 && len(y) >= 8 {
		a, b := (*[8]float32)(x), (*[8]float32)(y)
		a[0] += b[0]
		a[1] += b[1]
		a[2] += b[2]
		a[3] += b[3]
		a[4] += b[4]
		a[5] += b[5]
		a[6] += b[6]
		a[7] += b[7]
		x, y = x[8:], y[8:]
	}
	for i := range x {
		x[i] += y[i]
	}
}
