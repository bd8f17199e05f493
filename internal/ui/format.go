package ui

import (
	"fmt"
	"io"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// Duration shows a time to the second, or to the hundredth below ten seconds.
func Duration(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.2fs", d.Seconds())
	}
	return d.Round(time.Second).String()
}

// Bytes shows a number of bytes with a binary unit and three digits or more.
func Bytes(n int64) string {
	const units = "KMGTPE"
	if n < 1024 && n > -1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, u := float64(n), -1
	for (v >= 1024 || v <= -1024) && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	digits := 2
	switch {
	case v >= 100 || v <= -100:
		digits = 0
	case v >= 10 || v <= -10:
		digits = 1
	}
	return fmt.Sprintf("%.*f %ciB", digits, v, units[u])
}

// Tokens shows a length as people write context lengths: 4096 is 4k, 1000 is 1000.
func Tokens(n int) string {
	if n >= 1024 && n%1024 == 0 {
		return fmt.Sprintf("%dk", n/1024)
	}
	return fmt.Sprint(n)
}

// Table collects rows for people; the first column is left-aligned, the others right unless Left names them.
type Table struct {
	Header []string
	Rows   [][]string
	Left   []int // indices of further columns that are left-aligned
}

// Add appends a row of values printed with %v.
func (t *Table) Add(values ...any) {
	row := make([]string, len(values))
	for i, v := range values {
		row[i] = fmt.Sprint(v)
	}
	t.Rows = append(t.Rows, row)
}

// Render writes the table in plain text without lines.
func (t *Table) Render(w io.Writer) error {
	tw := table.NewWriter()
	style := table.StyleDefault
	style.Format.Header = text.FormatDefault
	style.Options = table.OptionsNoBordersAndSeparators
	style.Box.PaddingLeft, style.Box.PaddingRight = "", "  "
	tw.SetStyle(style)
	tw.SuppressTrailingSpaces()
	left := map[int]bool{0: true}
	for _, i := range t.Left {
		left[i] = true
	}
	row := func(values []string) table.Row {
		r := make(table.Row, len(values))
		for i, v := range values {
			r[i] = v
		}
		return r
	}
	columns := len(t.Header)
	for _, r := range t.Rows {
		columns = max(columns, len(r))
		tw.AppendRow(row(r))
	}
	configs := make([]table.ColumnConfig, columns)
	for i := range configs {
		align := text.AlignRight
		if left[i] {
			align = text.AlignLeft
		}
		configs[i] = table.ColumnConfig{Number: i + 1, Align: align, AlignHeader: align}
	}
	tw.SetColumnConfigs(configs)
	if len(t.Header) > 0 {
		tw.AppendHeader(row(t.Header))
	}
	_, err := fmt.Fprintln(w, tw.Render())
	return err
}
