package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"xagg/lab/results"
)

// three spells a number with three digits, which is more than measurements are good for.
func three(v float64) string {
	switch {
	case v == 0:
		return "0"
	case math.IsInf(v, 0) || math.IsNaN(v):
		return "–"
	case math.Abs(v) >= 999.5:
		return grouped(int64(math.Round(v)))
	case math.Abs(v) < 1e-3:
		return fmt.Sprintf("%.2e", v)
	}
	_, exponent, _ := strings.Cut(strconv.FormatFloat(v, 'e', 2, 64), "e")
	digits, _ := strconv.Atoi(exponent) // of the number as it is rounded
	return strconv.FormatFloat(v, 'f', max(2-digits, 0), 64)
}

// grouped spells a whole number with a no-break space between thousands.
func grouped[T int | int64 | uint64](n T) string {
	text := strconv.FormatInt(int64(n), 10)
	var b strings.Builder
	for i, r := range text {
		if left := len(text) - i; i > 0 && left%3 == 0 && text[i-1] != '-' {
			b.WriteRune('\u00a0')
		}
		b.WriteRune(r)
	}
	return b.String()
}

func milliseconds(seconds float64) string { return three(1e3 * seconds) }

// percent spells a share.
func percent(share float64) string {
	if share == 0 {
		return "0"
	}
	return fmt.Sprintf("%.2f", 100*share)
}

// ratio spells how many times something is something else.
func ratio(r float64) string {
	switch {
	case r < 0.0995:
		return fmt.Sprintf("%.3f", r)
	case r < 9.995:
		return fmt.Sprintf("%.2f", r)
	}
	return three(r)
}

// interval spells the interval of an estimate.
func interval(e results.Estimate) string {
	if e.Pairs < 2 {
		return "one pair"
	}
	return ratio(e.Low) + " to " + ratio(e.High)
}

// less spells a ratio as a difference.
func less(r float64) string {
	switch change := math.Round(100 * (r - 1)); {
	case change == 0:
		return "as much"
	case change > 0:
		return fmt.Sprintf("%.0f %% more", change)
	default:
		return fmt.Sprintf("%.0f %% less", -change)
	}
}

// span spells a range of values with a common unit.
func span(low, high float64, spell func(float64) string) string {
	if spell(low) == spell(high) {
		return spell(low)
	}
	return spell(low) + " to " + spell(high)
}

// memory spells a size.
func memory(n uint64) string {
	for _, u := range []struct {
		name string
		of   float64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if float64(n) >= u.of {
			return three(float64(n)/u.of) + " " + u.name
		}
	}
	return strconv.FormatUint(n, 10) + " B"
}

// heat is how a ratio looks in a table.
func heat(r float64) int {
	if r <= 0 {
		return 0
	}
	steps := []float64{1.03, 1.3, 2, 4}
	h := 0
	for _, s := range steps {
		if max(r, 1/r) > s {
			h++
		}
	}
	if r < 1 {
		return -h
	}
	return h
}

// list spells a list.
func list(items []string) string {
	switch n := len(items); n {
	case 0:
		return "none"
	case 1:
		return items[0]
	default:
		return strings.Join(items[:n-1], ", ") + " and " + items[n-1]
	}
}

// count spells a number of things. The plural of the noun has an s.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return grouped(n) + " " + noun + "s"
}

// numbers spells numbers, those that follow each other as a range.
func numbers(all []uint64) string {
	all = slices.Sorted(slices.Values(all))
	var parts []string
	for i := 0; i < len(all); {
		j := i
		for j+1 < len(all) && all[j+1] == all[j]+1 {
			j++
		}
		switch {
		case j > i+1:
			parts = append(parts, fmt.Sprintf("%d to %d", all[i], all[j]))
		default:
			for k := i; k <= j; k++ {
				parts = append(parts, strconv.FormatUint(all[k], 10))
			}
		}
		i = j + 1
	}
	return strings.Join(parts, ", ")
}
