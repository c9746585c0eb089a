// Package report says what experiments measured: as one HTML file, as Markdown, as text for a terminal, and in the format of Go's
// benchmarks. The first three are forms of one [Document], so that they say the same.
package report

// Document is a report.
type Document struct {
	Title    string
	Sections []Section
}

// Section is a part of a document with a heading.
type Section struct {
	ID     string // of the heading, unique in the document
	Title  string
	Level  int // 2, or 3 below one of 2
	Blocks []Block
}

// Block is one of its fields, the others are empty.
type Block struct {
	Paragraph string
	List      []string
	Table     *Table
	Figure    *Figure
	Listing   *Listing
}

// Listing is text as it is, such as a file, to be looked at on demand.
type Listing struct {
	Title, Text string
}

// Table has a heading above every column; the first column are the rows' headings.
type Table struct {
	Caption string
	Head    []string
	Rows    []Row
}

// Row is a row of a table.
type Row struct {
	Head  string
	Cells []Cell
}

// Cell is a field of a table.
type Cell struct {
	Text string
	Note string // in smaller type, such as an interval
	Mark Mark
	Heat int // -4 (much less than what it is compared with) to 4 (much more); 0 = about the same, or nothing to compare
}

// Mark says what is special about a cell.
type Mark string

// The marks. All of them are explained where they are used.
const (
	Best       Mark = "best"
	AsGood     Mark = "as good" // as the best: nothing shows it to be worse
	Unresolved Mark = "unresolved"
	Limited    Mark = "limited by CPU"
	Absent     Mark = "absent"
)

// Figure is a picture; what can be read off it is in a table beside it. It has rows, or groups of rows, one above the other, on a
// common horizontal axis. Positions are percent of the picture's width.
type Figure struct {
	ID     string // unique in the document
	Title  string
	About  string // what is to be seen, for those who do not see it as well
	Key    []Key
	Groups []Group
	Ticks  []Tick
	Lines  []Tick // at values to compare with
	Levels []Level
	Axis   string // what the axis is of, with its unit
	Height int    // pixels, as Y and the like
	Floor  int    // of the area that rows are in
}

// Key explains a colour.
type Key struct {
	Colour, Text string
	Line         bool // of a line, else of an area
	Dash         int  // of the line: 0 to 2
}

// Tick is a place on the axis.
type Tick struct {
	X    string
	Text string
}

// Level is a place on a vertical axis.
type Level struct {
	Y    int
	Text string
}

// Group is rows under a title.
type Group struct {
	Title string // "" = none
	Y     int
	Marks []Marks
}

// Marks is what a row shows.
type Marks struct {
	Name   string // before the label, in bold type
	Label  string // above the row, or at its end
	LabelX string
	LabelY int
	Anchor string // of the label: start or end
	Bars   []Bar
	Dots   []Dot
	Curves []Curve
	Title  string // a sentence with the numbers
}

// Bar is a rectangle.
type Bar struct {
	X, Width  string
	Y, Height int
	Colour    string
	Faint     int // 0 to 2: 2 is the faintest
}

// Dot is a disk.
type Dot struct {
	X      string
	Y      int
	Colour string
}

// Curve is a line of points in a box of its own.
type Curve struct {
	Y, Height int
	Points    string // of an SVG polyline, in a box of 1000 x 100
	Colour    string
	Dash      int // 0 to 2: solid, dashed, dotted
}
