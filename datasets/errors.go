package datasets

import "fmt"

// OptionError says which option is wrong, and why.
type OptionError struct {
	Option string
	Reason string
}

func (e *OptionError) Error() string { return fmt.Sprintf("dataset option %s: %s", e.Option, e.Reason) }

// LengthError says that a sample of the wanted length cannot hold its needles,
// questions and answers, and which length could.
type LengthError struct {
	// Sample is the sample's index.
	Sample int
	// Length is the wanted number of tokens, Minimum the smallest possible for this sample.
	Length, Minimum int
}

func (e *LengthError) Error() string {
	return fmt.Sprintf("sample %d: %d tokens do not hold its needles, questions and answers; use a length of at least %d",
		e.Sample, e.Length, e.Minimum)
}
