package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strings"
)

//go:embed report.html
var page string

var pageTemplate = template.Must(template.New("report").Parse(page))

// WriteHTML writes the document as one file that needs nothing else: no scripts, no fonts, no pictures from elsewhere.
func (d *Document) WriteHTML(w io.Writer) error {
	if err := pageTemplate.Execute(w, d); err != nil {
		return fmt.Errorf("write HTML: %w", err)
	}
	return nil
}

// TickY and AxisY are where the axis' texts stand.
func (f *Figure) TickY() int { return f.Floor + 15 }

// AxisY is where the axis' title stands.
func (f *Figure) AxisY() int { return f.Floor + 32 }

// HasHead reports whether the table has headings above its columns.
func (t *Table) HasHead() bool { return strings.Join(t.Head, "") != "" }

// Words reports whether a column, from 0 behind the rows' headings, holds words, which stand at the left.
func (t *Table) Words(column int) bool {
	words := !t.HasHead()
	for _, r := range t.Rows {
		if c := r.Cells[column]; c.Mark != Absent && c.Text != "" {
			if first := c.Text[0]; first == '-' || first == '+' || first >= '0' && first <= '9' || strings.HasPrefix(c.Text, "≥") || c.Mark == Unresolved {
				return false
			}
			words = true
		}
	}
	return words
}

// HeadWords is Words of the columns from 0, the rows' headings.
func (t *Table) HeadWords(column int) bool { return column == 0 || t.Words(column-1) }

// Class is that of the element of a cell in a column.
func (t *Table) Class(column int, c Cell) string {
	var names []string
	switch c.Mark {
	case Best, AsGood:
		names = append(names, "best")
	case Unresolved, Absent:
		names = append(names, string(c.Mark))
	case Limited:
		names = append(names, "limited")
	}
	if c.Heat != 0 {
		names = append(names, fmt.Sprintf("heat%d", c.Heat))
	}
	if t.Words(column) {
		names = append(names, "words")
	}
	if len(c.Text) > 30 {
		names = append(names, "long")
	}
	return strings.Join(names, " ")
}

// Tag reports whether the cell says what its mark is.
func (c Cell) Tag() bool { return c.Mark == Best || c.Mark == AsGood }
