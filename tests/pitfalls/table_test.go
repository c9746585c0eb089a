package pitfalls

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestTable: the tests that docs/pitfalls.md names exist, each row has one or a sentence, and each test that is named
// after a row is in it.
func TestTable(t *testing.T) {
	const root = "../.."
	exists := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == ".git":
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil {
				exists[f.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(root + "/docs/pitfalls.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile(`(?m)^\| (\d+) \| .* \| (.*) \|$`).FindAllStringSubmatch(string(text), -1)
	if len(rows) != 42 {
		t.Errorf("%d rows, want 42", len(rows))
	}
	named := map[string][]string{} // rows by test
	for _, row := range rows {
		tests := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(row[2], -1)
		if len(tests) == 0 && len(row[2]) < 40 {
			t.Errorf("row %s: neither a test nor a reason", row[1])
		}
		for _, test := range tests {
			named[test[1]] = append(named[test[1]], row[1])
			if !exists[test[1]] {
				t.Errorf("row %s: there is no %s", row[1], test[1])
			}
		}
	}
	after := regexp.MustCompile(`^TestPitfall0?(\d+)`)
	for name := range exists {
		if m := after.FindStringSubmatch(name); m != nil && !slices.Contains(named[name], m[1]) {
			t.Errorf("%s is not in row %s", name, m[1])
		}
	}
}
