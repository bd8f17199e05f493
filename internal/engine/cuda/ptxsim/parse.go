// Package ptxsim runs PTX on the CPU, so that the kernels that ship can be tested where there is no GPU. It executes the
// warps of a block one after the other from barrier to barrier, all lanes of a warp in lock step, and reports what hardware would
// let pass or punish elsewhere: accesses outside of allocations or misaligned, shared memory that two warps touch with no barrier
// between, lanes that wait for one another at different instructions, shuffles from lanes that are not there. Memory starts as NaN.
// Instructions that the kernels of this module do not use are refused by Parse.
package ptxsim

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Module is parsed PTX text.
type Module struct {
	Version, Target string
	Kernels         map[string]*Kernel
	externShared    map[string]bool
}

// Param is one parameter: its place in the packed buffer.
type Param struct{ Off, Size int }

// Kernel is one entry point, compiled to closures.
type Kernel struct {
	Name        string
	Params      []Param
	ParamBytes  int
	Shared      int // static bytes
	MaxThreads  int
	nreg, npred int
	consts      []constant // preloaded registers
	specials    map[int]string
	code        []inst
	lines       []int // line in the PTX, per instruction
}
type constant struct {
	reg int
	val uint64
}

// step executes an instruction for the lanes in mask.
type step func(w *warp, mask uint32)

type inst struct {
	run  step
	pred int // -1: none
	neg  bool
	kind uint8
	tgt  int // of a branch
}

const (
	kPlain uint8 = iota
	kBra
	kRet
	kBar
	kWarp // needs every live lane of the warp
)

// builder compiles one kernel.
type builder struct {
	k      *Kernel
	regs   map[string]int
	preds  map[string]int
	shared map[string]int
	labels map[string]int
	params map[string]int
	cmap   map[uint64]int
	spec   map[string]int
	wide   map[int]bool // registers of 64 bits
	ext    map[string]bool
}

var (
	reEntry = regexp.MustCompile(`\.entry\s+([\w$]+)`)
	reParam = regexp.MustCompile(`\.param\s+\.(\w+)\s+(?:\.ptr\s+)?(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?([\w$]+)`)
	reReg   = regexp.MustCompile(`\.reg\s+\.(\w+)\s+(%\w+?)<(\d+)>`)
	reShr   = regexp.MustCompile(`\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]`)
)

// sizeOf is the size in bytes of a type, 0 for what is none.
func sizeOf(t string) int {
	n, err := strconv.Atoi(strings.TrimLeft(t, "busf"))
	if err != nil {
		return 0
	}
	return n / 8
}

// Parse reads PTX text and compiles every kernel to closures.
func Parse(src string) (m *Module, err error) {
	number := 0
	defer func() { // an operand that is missing shows as an index out of range
		if r := recover(); r != nil {
			m, err = nil, fmt.Errorf("line %d is not understood: %v", number, r)
		}
	}()
	m = &Module{Kernels: map[string]*Kernel{}, externShared: map[string]bool{}}
	var b *builder
	depth, inHead := 0, false
	type raw struct {
		text string
		line int
	}
	var body []raw
	for ln, line := range strings.Split(src, "\n") {
		number = ln + 1
		if i := strings.Index(line, "//"); i >= 0 {
			line = line[:i]
		}
		line = strings.TrimSpace(line)
		switch {
		case line == "":
			continue
		case strings.HasPrefix(line, ".version"):
			m.Version = strings.TrimSpace(strings.TrimPrefix(line, ".version"))
			continue
		case strings.HasPrefix(line, ".target"):
			m.Target = strings.TrimSpace(strings.TrimPrefix(line, ".target"))
			continue
		case depth == 0 && strings.HasPrefix(line, ".extern .shared"):
			sub := reShr.FindStringSubmatch(line)
			if sub == nil {
				return nil, fmt.Errorf("line %d: %q is not understood", ln+1, line)
			}
			m.externShared[sub[2]] = true
			continue
		case reEntry.MatchString(line):
			k := &Kernel{Name: reEntry.FindStringSubmatch(line)[1], specials: map[int]string{}}
			b = &builder{k: k, regs: map[string]int{}, preds: map[string]int{}, shared: map[string]int{}, labels: map[string]int{}, params: map[string]int{}, cmap: map[uint64]int{}, spec: map[string]int{}, wide: map[int]bool{}, ext: m.externShared}
			inHead, body = true, nil
		}
		if b == nil {
			continue
		}
		if inHead {
			if p := reParam.FindStringSubmatch(line); p != nil {
				sz := sizeOf(p[1])
				if sz == 0 {
					return nil, fmt.Errorf("line %d: parameter of type %s", ln+1, p[1])
				}
				off := (b.k.ParamBytes + sz - 1) / sz * sz
				b.k.Params = append(b.k.Params, Param{off, sz})
				b.params[p[2]] = off
				b.k.ParamBytes = off + sz
			}
			if strings.HasPrefix(line, ".maxntid") {
				fields := strings.Fields(strings.ReplaceAll(line, ",", " "))
				if len(fields) > 1 {
					b.k.MaxThreads, _ = strconv.Atoi(fields[1])
				}
			}
			if line == "{" {
				inHead, depth = false, 1
			}
			continue
		}
		switch {
		case line == "{":
			depth++
		case line == "}":
			depth--
			if depth == 0 {
				for _, r := range body {
					if err := b.inst(r.text, r.line); err != nil {
						return nil, fmt.Errorf("%s: line %d: %q: %w", b.k.Name, r.line, r.text, err)
					}
				}
				m.Kernels[b.k.Name] = b.k
				b = nil
			}
		case strings.HasPrefix(line, ".reg"):
			r := reReg.FindStringSubmatch(line)
			if r == nil {
				return nil, fmt.Errorf("line %d: %q is not understood", ln+1, line)
			}
			n, _ := strconv.Atoi(r[3])
			if n > 1<<16 {
				return nil, fmt.Errorf("line %d: %d registers", ln+1, n)
			}
			for i := 0; i < n; i++ {
				name := r[2] + strconv.Itoa(i)
				if r[1] == "pred" {
					b.preds[name] = b.k.npred
					b.k.npred++
				} else {
					b.regs[name] = b.k.nreg
					b.wide[b.k.nreg] = sizeOf(r[1]) == 8
					b.k.nreg++
				}
			}
		case strings.HasPrefix(line, ".shared"):
			s := reShr.FindStringSubmatch(line)
			if s == nil {
				return nil, fmt.Errorf("line %d: %q is not understood", ln+1, line)
			}
			al, _ := strconv.Atoi(s[1])
			sz, _ := strconv.Atoi(s[3])
			if al < 1 || al > 128 || sz < 1 || sz > 48<<10 {
				return nil, fmt.Errorf("line %d: %d bytes of shared memory in steps of %d", ln+1, sz, al)
			}
			off := (b.k.Shared + al - 1) / al * al
			b.shared[s[2]] = off
			b.k.Shared = off + sz
		case strings.HasPrefix(line, ".pragma"): // advice to the compiler
		case strings.HasPrefix(line, "."):
			return nil, fmt.Errorf("line %d: directive %q", ln+1, line)
		case strings.HasSuffix(line, ":"):
			b.labels[strings.TrimSuffix(line, ":")] = len(body)
		default:
			body = append(body, raw{strings.TrimSuffix(line, ";"), ln + 1})
		}
	}
	return m, nil
}

// constReg is the register that holds a constant.
func (b *builder) constReg(v uint64) int {
	if r, ok := b.cmap[v]; ok {
		return r
	}
	r := b.k.nreg
	b.k.nreg++
	b.cmap[v] = r
	b.k.consts = append(b.k.consts, constant{r, v})
	return r
}

// reg resolves an operand to a register number; constants and special registers get their own.
func (b *builder) reg(s string) (int, error) {
	s = strings.TrimSpace(s)
	if r, ok := b.regs[s]; ok {
		return r, nil
	}
	if strings.HasPrefix(s, "%") {
		if r, ok := b.spec[s]; ok {
			return r, nil
		}
		switch s {
		case "%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%laneid":
			r := b.k.nreg
			b.k.nreg++
			b.spec[s] = r
			b.k.specials[r] = s
			return r, nil
		}
		return 0, fmt.Errorf("unknown register %s", s)
	}
	if strings.HasPrefix(s, "0f") {
		v, err := strconv.ParseUint(s[2:], 16, 32)
		return b.constReg(v), err
	}
	if strings.HasPrefix(s, "0d") {
		v, err := strconv.ParseUint(s[2:], 16, 64)
		return b.constReg(v), err
	}
	if off, ok := b.shared[s]; ok {
		return b.constReg(uint64(off)), nil
	}
	if b.ext[s] {
		return b.constReg(uint64((b.k.Shared + 15) / 16 * 16)), nil
	}
	v, err := strconv.ParseInt(s, 0, 64)
	if err != nil {
		u, e2 := strconv.ParseUint(s, 0, 64)
		if e2 != nil {
			return 0, err
		}
		v = int64(u)
	}
	return b.constReg(uint64(v)), nil
}

// regsOf resolves {a, b, c} or a single operand.
func (b *builder) regsOf(s string) ([]int, error) {
	s = strings.Trim(strings.TrimSpace(s), "{}")
	var out []int
	for _, p := range strings.Split(s, ",") {
		r, err := b.reg(p)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// addr parses [base+off] to a register and an offset.
func (b *builder) addr(s string) (int, int64, error) {
	s = strings.Trim(strings.TrimSpace(s), "[]")
	base, off := s, int64(0)
	if i := strings.Index(s, "+"); i > 0 {
		base = s[:i]
		v, err := strconv.ParseInt(s[i+1:], 0, 64)
		if err != nil {
			return 0, 0, err
		}
		off = v
	}
	r, err := b.reg(base)
	return r, off, err
}

// splitArgs splits at commas outside of brackets.
func splitArgs(s string) []string {
	var out []string
	d, st := 0, 0
	for i, c := range s {
		switch c {
		case '{', '[':
			d++
		case '}', ']':
			d--
		case ',':
			if d == 0 {
				out = append(out, strings.TrimSpace(s[st:i]))
				st = i + 1
			}
		}
	}
	if t := strings.TrimSpace(s[st:]); t != "" {
		out = append(out, t)
	}
	return out
}
