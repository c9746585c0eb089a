package scenario

import (
	"slices"
	"testing"
)

func sum(sizes []int) (n int) {
	for _, s := range sizes {
		n += s
	}
	return n
}

// TestModels compares the models with what is known of them.
func TestModels(t *testing.T) {
	const layers, d, vocabulary, positions = transformerLayers, transformerWidth, transformerVocabulary, transformerPositions
	for _, c := range []struct {
		model           string
		tensors, values int
		first, last     int
	}{
		// torchvision's resnet50: sum(p.numel() for p in model.parameters()).
		{"resnet50", 161, 25_557_032, 64 * 3 * 7 * 7, 1000},
		// The usual count of a decoder's parameters: 12 d^2 + 13 d a layer, embeddings and the last normalization.
		{"transformer", 12*layers + 4, layers*(12*d*d+13*d) + (vocabulary+positions)*d + 2*d, vocabulary * d, d},
	} {
		sizes := models[c.model]()
		if len(sizes) != c.tensors || sum(sizes) != c.values || sizes[0] != c.first || sizes[len(sizes)-1] != c.last {
			t.Errorf("%s has %d tensors of %d values, the first %d, the last %d; want %+v", c.model, len(sizes), sum(sizes), sizes[0],
				sizes[len(sizes)-1], c)
		}
		// The backward pass begins with the last layer.
		if buckets := (Tensors{Model: c.model}).Buckets(); buckets[0] != c.last || buckets[len(buckets)-1] != c.first {
			t.Errorf("%s: the first bucket has %d values, the last %d; want %d and %d", c.model, buckets[0], buckets[len(buckets)-1], c.last,
				c.first)
		}
	}
	if n := sum(transformer()); n != 4_273_664 {
		t.Errorf("the transformer has %d values, want what its documentation says", n)
	}
}

func TestBuckets(t *testing.T) {
	for _, c := range []struct {
		tensors Tensors
		want    []int
	}{
		{Tensors{Sizes: []int{5, 6, 7}}, []int{5, 6, 7}},
		{Tensors{Sizes: []int{5, 6, 7}, Divide: 1}, []int{5, 6, 7}},
		{Tensors{Sizes: []int{5, 6, 7, 1}, Divide: 3}, []int{2, 2, 3, 1}},
		{Tensors{Sizes: []int{5, 6, 7}, Bucket: 5}, []int{5, 6, 7}},
		{Tensors{Sizes: []int{5, 6, 7}, Bucket: 6}, []int{11, 7}},
		{Tensors{Sizes: []int{5, 6, 7}, Bucket: 18}, []int{18}},
		{Tensors{Sizes: []int{5, 6, 7}, Bucket: 12}, []int{18}},
		{Tensors{Sizes: []int{5, 6, 7, 8}, Bucket: 12}, []int{18, 8}},
		{Tensors{Sizes: []int{50, 60, 70}, Divide: 10, Bucket: 11}, []int{11, 7}},
	} {
		if got := c.tensors.Buckets(); !slices.Equal(got, c.want) {
			t.Errorf("%+v are buckets of %v, want %v", c.tensors, got, c.want)
		}
		if got := c.tensors.Values(); got != sum(c.want) {
			t.Errorf("%+v are %d values, want %d", c.tensors, got, sum(c.want))
		}
	}
}
