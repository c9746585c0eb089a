package conformance

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func freshSeed() uint64 { return rand.Uint64() >> 32 }

// TestReal runs fresh traces on the real switch and compares it with the model.
func TestReal(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			for _, seed := range seeds(1) {
				t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
					real := startReal(t)
					if err := real.program(sc.program()); err != nil {
						t.Fatal(err)
					}
					m, err := newModel(&sc)
					if err != nil {
						t.Fatal(err)
					}
					run(t, sc.trace(seed, *flagSteps), real, m)
				})
			}
		})
	}
}
