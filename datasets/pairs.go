package datasets

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// pairs is the haystack of TaskUUID: lines of a JSON object whose keys are UUIDs.
type pairs struct {
	b      *builder
	value  Value
	digits int
	asked  string // the value that no other key may have, where there are enough
}

func (pairs) Name() string { return "pairs" }

func (p pairs) Stream(_ Purpose, r *rand.Rand) (Stream, error) { return &pairStream{p, r}, nil }

type pairStream struct {
	pairs
	r *rand.Rand
}

// Contiguous is false: the order of the pairs means nothing.
func (s *pairStream) Contiguous() bool { return false }

// Next yields a pair of a new key and a value, as one line.
func (s *pairStream) Next() Sentence {
	key := drawUUID(s.r, s.b.purpose)
	value := s.asked
	for value == s.asked {
		switch s.value {
		case ValueUUID:
			value = drawUUID(s.r, s.b.purpose)
		case ValueWord:
			pool := s.b.lex.passwords[s.b.purpose]
			value = pool[s.r.IntN(len(pool))]
		default:
			value = drawNumber(s.r, s.digits)
		}
	}
	return Sentence(pairLine(key, value) + "\n")
}

// fill makes a line of exactly n tokens, if it can: a checksum of as many
// hexadecimal digits as that takes.
func (s *pairStream) fill(n int, tokens func(string) int) string {
	const tries = 400
	best, most := "", 0
	for digits, try := 2*n, 0; try < tries; try++ {
		var hex strings.Builder
		for range digits {
			fmt.Fprintf(&hex, "%x", s.r.IntN(16))
		}
		line := pairLine("checksum", hex.String()) + "\n"
		got := tokens(line)
		if got <= n && got > most {
			best, most = line, got
		}
		switch {
		case got == n:
			return line
		case got < n:
			digits++
		case digits > 1:
			// By halves while it is far too long.
			digits -= max(1, (got-n)/2)
			digits = max(digits, 1)
		}
	}
	return best
}

// pairLine is an entry of the object, without the line's end.
func pairLine(key, value string) string { return `"` + key + `": "` + value + `",` }

// drawUUID draws a UUID of version 4 (RFC 9562). The variant has two bits to
// spare; they are the purpose's, so that no two purposes share a UUID.
func drawUUID(r *rand.Rand, p Purpose) string {
	hi, lo := r.Uint64(), r.Uint64()
	variant := map[Purpose]uint64{Calibration: 0x8, Search: 0x9, Certification: 0xa}[p]
	hi = hi&^0xf000 | 0x4000
	lo = lo&^(0xf<<60) | variant<<60
	return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", hi>>32, hi>>16&0xffff, hi&0xffff, lo>>48, lo&(1<<48-1))
}
