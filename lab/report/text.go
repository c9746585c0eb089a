package report

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// textWidth is where text for terminals is wrapped; tables may be wider.
const textWidth = 100

// WriteText writes the document for a terminal, without figures and listings.
func (d *Document) WriteText(w io.Writer) error {
	var b strings.Builder
	b.WriteString(d.Title + "\n")
	for _, s := range d.Sections {
		rule := "="
		if s.Level == 3 {
			rule = "-"
		}
		fmt.Fprintf(&b, "\n%s\n%s\n", s.Title, strings.Repeat(rule, utf8.RuneCountInString(s.Title)))
		for _, block := range s.Blocks {
			switch {
			case block.Paragraph != "":
				wrap(&b, "", block.Paragraph)
			case block.Table != nil:
				block.Table.text(&b)
			}
			for _, item := range block.List {
				wrap(&b, "- ", item)
			}
		}
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write text: %w", err)
	}
	return nil
}

// wrap writes a paragraph, with bullet before its first line.
func wrap(b *strings.Builder, bullet, text string) {
	line := bullet
	indent := strings.Repeat(" ", len(bullet))
	for i, word := range strings.Fields(text) {
		if i > 0 && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > textWidth {
			b.WriteString(line + "\n")
			line = indent
		} else if i > 0 {
			line += " "
		}
		line += word
	}
	b.WriteString(line + "\n")
}

// plain spells a cell in one line of text.
func (c Cell) plain() string {
	text := c.Text
	if c.Note != "" {
		text += " (" + c.Note + ")"
	}
	switch c.Mark {
	case Best:
		text += " **"
	case AsGood:
		text += " *"
	}
	return text
}

// text writes a table with the columns' widths of its longest cells. Best is marked by **, as good by *.
func (t *Table) text(b *strings.Builder) {
	lines := [][]string{}
	if t.HasHead() {
		lines = append(lines, t.Head)
	}
	marked := false
	for _, r := range t.Rows {
		line := []string{r.Head}
		for _, c := range r.Cells {
			line = append(line, c.plain())
			marked = marked || c.Tag()
		}
		lines = append(lines, line)
	}
	widths := make([]int, len(t.Head))
	for _, line := range lines {
		for i, text := range line {
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	b.WriteString("\n" + t.Caption)
	if marked {
		b.WriteString("; ** best, * as good")
	}
	b.WriteString("\n")
	for _, line := range lines {
		var out strings.Builder
		for i, text := range line {
			if i > 0 {
				out.WriteString("  ")
			}
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(text))
			if t.HeadWords(i) {
				out.WriteString(text + pad)
			} else {
				out.WriteString(pad + text)
			}
		}
		b.WriteString(strings.TrimRight(out.String(), " ") + "\n")
	}
	b.WriteString("\n")
}

// WriteMarkdown writes the document as GitHub shows it, without figures.
func (d *Document) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n", escape(d.Title))
	for _, s := range d.Sections {
		fmt.Fprintf(&b, "\n%s %s\n", strings.Repeat("#", s.Level), escape(s.Title))
		for _, block := range s.Blocks {
			switch {
			case block.Paragraph != "":
				fmt.Fprintf(&b, "\n%s\n", escape(block.Paragraph))
			case block.Table != nil:
				block.Table.markdown(&b)
			case block.Listing != nil:
				fmt.Fprintf(&b, "\n<details><summary>%s</summary>\n\n````\n%s\n````\n\n</details>\n", escape(block.Listing.Title), strings.TrimRight(block.Listing.Text, "\n"))
			case len(block.List) > 0:
				b.WriteString("\n")
				for _, item := range block.List {
					fmt.Fprintf(&b, "- %s\n", escape(item))
				}
			}
		}
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write Markdown: %w", err)
	}
	return nil
}

func (t *Table) markdown(b *strings.Builder) {
	fmt.Fprintf(b, "\n%s:\n\n|", escape(t.Caption))
	for _, h := range t.Head {
		fmt.Fprintf(b, " %s |", escape(h))
	}
	b.WriteString("\n|")
	for i := range t.Head {
		if t.HeadWords(i) {
			b.WriteString(" --- |")
		} else {
			b.WriteString(" ---: |")
		}
	}
	b.WriteString("\n")
	for _, r := range t.Rows {
		fmt.Fprintf(b, "| %s |", escape(r.Head))
		for _, c := range r.Cells {
			text := escape(c.Text)
			switch c.Mark {
			case Best, AsGood:
				text = "**" + text + "**"
			case Unresolved:
				text = "*" + text + "*"
			}
			if c.Note != "" {
				text += " (" + escape(c.Note) + ")"
			}
			if c.Tag() {
				text += " " + string(c.Mark)
			}
			fmt.Fprintf(b, " %s |", text)
		}
		b.WriteString("\n")
	}
}

// escape has Markdown show text as it is.
var escape = strings.NewReplacer(`\`, `\\`, "|", `\|`, "*", `\*`, "_", `\_`, "<", "&lt;", "`", "\\`", "[", `\[`, "\n", " ").Replace
