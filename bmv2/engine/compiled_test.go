package engine

import (
	"os"
	"testing"
)

func TestLoadTestdata(t *testing.T) {
	for _, name := range []string{"expr", "switch"} {
		b, err := os.ReadFile("testdata/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Load(b, Options{}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
