package stats

import (
	"math"
	"slices"
	"testing"
)

func TestMeanDeviationMedian(t *testing.T) {
	for _, tt := range []struct {
		sample                  []float64
		mean, deviation, median float64
	}{
		{nil, 0, 0, 0},
		{[]float64{3}, 3, 0, 3},
		{[]float64{4, 1}, 2.5, math.Sqrt(4.5), 2.5},
		{[]float64{9, 2, 1}, 4, math.Sqrt(19), 2},
		{[]float64{4, 1, 3, 2}, 2.5, math.Sqrt(5. / 3), 2.5},
	} {
		was := slices.Clone(tt.sample)
		if m, d, middle := Mean(tt.sample), Deviation(tt.sample), Median(tt.sample); m != tt.mean || math.Abs(d-tt.deviation) > 1e-15 || middle != tt.median {
			t.Errorf("%v: mean %g, deviation %g, median %g, want %g, %g, %g", tt.sample, m, d, middle, tt.mean, tt.deviation, tt.median)
		}
		if !slices.Equal(tt.sample, was) {
			t.Errorf("%v has become %v", was, tt.sample)
		}
	}
}

func TestQuantile(t *testing.T) {
	for _, tt := range []struct {
		sample []float64
		q      float64
		want   float64
	}{
		{nil, 0.5, 0},
		{[]float64{1}, 0, 1}, {[]float64{1}, 1, 1}, {[]float64{1, 2}, 0.5, 1}, {[]float64{1, 2, 3}, 0.5, 2}, {[]float64{1, 2, 3}, 0.9, 3},
		{[]float64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0.9, 9},
	} {
		if got := Quantile(tt.sample, tt.q); got != tt.want {
			t.Errorf("quantile %g of %v is %g, want %g", tt.q, tt.sample, got, tt.want)
		}
	}
}
