package aggregator

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// TestObjectBelongsToSources fails when a source or the object changed without the other: 'go generate ./lab/aggregator'
// mends it.
func TestObjectBelongsToSources(t *testing.T) {
	f, err := os.Open("objects.sum")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := 0
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "# ") {
			continue
		}
		want, name, ok := strings.Cut(lines.Text(), "  ")
		if !ok {
			t.Fatalf("objects.sum: %q", lines.Text())
		}
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != want {
			t.Errorf("%s is not what objects.sum says: run 'go generate ./lab/aggregator'", name)
		}
		files++
	}
	if files != 4 {
		t.Errorf("%d files in objects.sum, want two sources, a header and the object", files)
	}
}
