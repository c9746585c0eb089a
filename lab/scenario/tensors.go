package scenario

import "slices"

// models are the sizes of the parameters' tensors of models, the first layer first.
var models = map[string]func() []int{"resnet50": resnet50, "transformer": transformer}

// resnet50 returns the tensors of ResNet-50 (He et al., CVPR 2016, table 1; 1000 classes, the projections of stages with
// batch normalization, no biases in convolutions): 25,557,032 values in 161 tensors.
func resnet50() (sizes []int) {
	conv := func(in, out, kernel int) {
		sizes = append(sizes, in*out*kernel*kernel)
		sizes = append(sizes, out, out) // scale and shift of its batch normalization
	}
	conv(3, 64, 7)
	in := 64
	for stage, blocks := range []int{3, 4, 6, 3} {
		width := 64 << stage
		for block := range blocks {
			conv(in, width, 1)
			conv(width, width, 3)
			conv(width, 4*width, 1)
			if block == 0 {
				conv(in, 4*width, 1) // the shortcut
			}
			in = 4 * width
		}
	}
	return append(sizes, in*1000, 1000)
}

// The small transformer: a decoder in the shape of GPT-2 (Radford et al., 2019) with 4 layers of width 256, a vocabulary of
// 4,096 tokens that input and output share, and 256 positions.
const (
	transformerLayers     = 4
	transformerWidth      = 256
	transformerVocabulary = 4096
	transformerPositions  = 256
)

// transformer returns the tensors of the small transformer: 4,273,664 values in 52 tensors.
func transformer() []int {
	const d = transformerWidth
	sizes := []int{transformerVocabulary * d, transformerPositions * d}
	linear := func(in, out int) { sizes = append(sizes, in*out, out) }
	norm := func() { sizes = append(sizes, d, d) }
	for range transformerLayers {
		norm()
		linear(d, 3*d) // queries, keys, values
		linear(d, d)
		norm()
		linear(d, 4*d)
		linear(4*d, d)
	}
	norm()
	return sizes
}

// Buckets returns the number of values of each bucket, in the order in which the backward pass makes them. The tensors must
// be valid.
func (t Tensors) Buckets() []int {
	sizes := slices.Clone(t.Sizes)
	if t.Model != "" {
		sizes = models[t.Model]()
		slices.Reverse(sizes)
	}
	if t.Divide > 1 {
		for i := range sizes {
			sizes[i] = (sizes[i] + t.Divide - 1) / t.Divide
		}
	}
	if t.Bucket == 0 {
		return sizes
	}
	var buckets []int
	open := 0 // values of the bucket that is not full
	for _, n := range sizes {
		if open += n; open >= t.Bucket {
			buckets = append(buckets, open)
			open = 0
		}
	}
	if open > 0 {
		buckets = append(buckets, open)
	}
	return buckets
}

// Values returns the number of values of all buckets.
func (t Tensors) Values() (sum int) {
	for _, n := range t.Buckets() {
		sum += n
	}
	return sum
}
