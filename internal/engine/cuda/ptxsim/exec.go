package ptxsim

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync/atomic"
	"unsafe"
)

// vreg is a register of all lanes.
type vreg [32]uint64

// group is the lanes of a warp that stand at one instruction. A parked group waits for the others at an instruction that needs
// all lanes.
type group struct {
	pc     int
	mask   uint32
	parked bool
}

type warp struct {
	r        []vreg
	p        []uint32 // predicates, a bit per lane
	blk      *block
	id       int
	groups   []group
	live     uint32 // lanes that have not returned
	pc       int    // of the instruction at work, for messages
	atBar    bool
	done     bool
	steps    uint64
	stat     Stats
	cpOpen   []func()   // asynchronous copies that are not in a group yet
	cpGroups [][]func() // and those that are, oldest first
}

type block struct {
	dev    *Device
	k      *Kernel
	shared []byte
	lastW  []uint32 // per 4-byte word: epoch<<8 | warp+1 of the last writer
	lastR  []uint32 // and of the last reader
	epoch  uint32
	params []byte
	ctaid  [3]uint32
}

// Stats counts what the memory system would see.
type Stats struct {
	GlobalRequests, GlobalSectors, GlobalBytes uint64 // warp-wide requests, 32-byte sectors touched, bytes asked for
	SharedRequests, SharedWavefronts           uint64 // more wavefronts than needed are bank conflicts
}

func (s *Stats) add(o Stats) {
	s.GlobalRequests += o.GlobalRequests
	s.GlobalSectors += o.GlobalSectors
	s.GlobalBytes += o.GlobalBytes
	s.SharedRequests += o.SharedRequests
	s.SharedWavefronts += o.SharedWavefronts
}

// global counts one request of the lanes in m at addresses ad+off, n bytes each.
func (s *Stats) global(ad *vreg, off int64, m uint32, n int) {
	s.GlobalRequests++
	var seen [64]uint64
	k := 0
	for ; m != 0; m &= m - 1 {
		a := ad[bits.TrailingZeros32(m)] + uint64(off)
		s.GlobalBytes += uint64(n)
		for q := a >> 5; q <= (a+uint64(n)-1)>>5; q++ {
			dup := false
			for i := k - 1; i >= 0; i-- {
				if seen[i] == q {
					dup = true
					break
				}
			}
			if !dup && k < len(seen) {
				seen[k] = q
				k++
			}
		}
	}
	s.GlobalSectors += uint64(k)
}

// shared counts wavefronts: rows of n bytes, 128 bytes a phase, a bank serving one word a wavefront.
func (s *Stats) shared(ads []uint64, n int) {
	s.SharedRequests++
	per := max(1, 128/n)
	for st := 0; st < len(ads); st += per {
		var words [32][]uint64
		most := 1
		for _, a := range ads[st:min(st+per, len(ads))] {
			for w := a >> 2; w <= (a+uint64(n)-1)>>2; w++ {
				b := w & 31
				dup := false
				for _, x := range words[b] {
					dup = dup || x == w
				}
				if !dup {
					words[b] = append(words[b], w)
					most = max(most, len(words[b]))
				}
			}
		}
		s.SharedWavefronts += uint64(most)
	}
}

// simError is what a kernel did wrong; it is a panic within this package and an error outside.
type simError struct{ msg string }

func fail(f string, a ...any) { panic(simError{fmt.Sprintf(f, a...)}) }

// Registers hold values as their bits, zero-extended to 64.
func f32(x uint64) float32  { return math.Float32frombits(uint32(x)) }
func u32f(x float32) uint64 { return uint64(math.Float32bits(x)) }
func bf(x uint16) float32   { return math.Float32frombits(uint32(x) << 16) }
func toBF(f float32) uint16 {
	u := math.Float32bits(f)
	if u&0x7fffffff > 0x7f800000 {
		return 0x7fff
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

const full = 0xffffffff

// bin, un and tern apply a function of two, one and three values to every lane.
func bin(d, x, y int, f func(a, b uint64) uint64) step {
	return func(w *warp, m uint32) {
		D, A, B := &w.r[d], &w.r[x], &w.r[y]
		for ; m != 0; m &= m - 1 {
			i := bits.TrailingZeros32(m)
			D[i] = f(A[i], B[i])
		}
	}
}
func un(d, x int, f func(a uint64) uint64) step {
	return func(w *warp, m uint32) {
		D, A := &w.r[d], &w.r[x]
		for ; m != 0; m &= m - 1 {
			i := bits.TrailingZeros32(m)
			D[i] = f(A[i])
		}
	}
}
func tern(d, x, y, z int, f func(a, b, c uint64) uint64) step {
	return func(w *warp, m uint32) {
		D, A, B, C := &w.r[d], &w.r[x], &w.r[y], &w.r[z]
		for ; m != 0; m &= m - 1 {
			i := bits.TrailingZeros32(m)
			D[i] = f(A[i], B[i], C[i])
		}
	}
}

// width sign- or zero-extends values of one type.
type width struct {
	mask uint64
	sh   uint
}

func wd(t string) width {
	n := uint(sizeOf(t) * 8)
	if n == 0 || n > 64 {
		n = 64
	}
	return width{^uint64(0) >> (64 - n), 64 - n}
}
func (w width) s(v uint64) int64  { return int64(v<<w.sh) >> w.sh }
func (w width) z(v uint64) uint64 { return v & w.mask }

func (b *builder) inst(text string, line int) error {
	in := inst{pred: -1}
	if strings.HasPrefix(text, "@") {
		sp := strings.IndexAny(text, " \t")
		if sp < 0 {
			return fmt.Errorf("a predicate without an instruction")
		}
		p := text[1:sp]
		if strings.HasPrefix(p, "!") {
			in.neg = true
			p = p[1:]
		}
		pi, ok := b.preds[p]
		if !ok {
			return fmt.Errorf("predicate %s", p)
		}
		in.pred = pi
		text = strings.TrimSpace(text[sp:])
	}
	opc, rest := text, ""
	if sp := strings.IndexAny(text, " \t"); sp >= 0 {
		opc, rest = text[:sp], strings.TrimSpace(text[sp:])
	}
	a := splitArgs(rest)
	mods := strings.Split(opc, ".")
	if err := b.compile(&in, mods, a); err != nil {
		return err
	}
	b.k.code = append(b.k.code, in)
	b.k.lines = append(b.k.lines, line)
	return nil
}

func (b *builder) compile(in *inst, mods, a []string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			if e, ok := r.(error); ok {
				err = e
				return
			}
			panic(r)
		}
	}()
	R := func(i int) int {
		r, e := b.reg(a[i])
		if e != nil {
			panic(e)
		}
		return r
	}
	P := func(s string) int {
		p, ok := b.preds[strings.TrimSpace(s)]
		if !ok {
			panic(fmt.Errorf("predicate %q", s))
		}
		return p
	}
	has := func(m string) bool { return slices.Contains(mods, m) }
	t := mods[len(mods)-1]
	isF := t == "f32"
	W := wd(t)
	unsup := fmt.Errorf("unsupported opcode %s", strings.Join(mods, "."))
	switch mods[0] {
	case "ret", "exit":
		in.kind = kRet
	case "bra":
		tg, ok := b.labels[a[0]]
		if !ok {
			return fmt.Errorf("label %s", a[0])
		}
		in.kind, in.tgt = kBra, tg
	case "bar", "barrier":
		in.kind = kBar
	case "ld":
		return b.load(in, mods, a, t)
	case "st":
		return b.store(in, mods, a, t)
	case "mov":
		if t == "pred" {
			d := P(a[0])
			v := uint32(0)
			if a[1] == "-1" || a[1] == "1" {
				v = full
			} else if p, ok := b.preds[a[1]]; ok {
				in.run = func(w *warp, m uint32) { w.p[d] = w.p[d]&^m | w.p[p]&m }
				return nil
			}
			in.run = func(w *warp, m uint32) { w.p[d] = w.p[d]&^m | v&m }
			return nil
		}
		if strings.HasPrefix(a[0], "{") {
			ds, e := b.regsOf(a[0])
			if e != nil {
				return e
			}
			x, sz := R(1), uint(sizeOf(t)*8/len(ds))
			in.run = func(w *warp, m uint32) {
				for ; m != 0; m &= m - 1 {
					i := bits.TrailingZeros32(m)
					v := w.r[x][i]
					for j, d := range ds {
						w.r[d][i] = v >> (uint(j) * sz) & (1<<sz - 1)
					}
				}
			}
			return nil
		}
		if strings.HasPrefix(a[1], "{") {
			xs, e := b.regsOf(a[1])
			if e != nil {
				return e
			}
			d, sz := R(0), uint(sizeOf(t)*8/len(xs))
			in.run = func(w *warp, m uint32) {
				for ; m != 0; m &= m - 1 {
					i := bits.TrailingZeros32(m)
					v := uint64(0)
					for j, x := range xs {
						v |= w.r[x][i] & (1<<sz - 1) << (uint(j) * sz)
					}
					w.r[d][i] = v
				}
			}
			return nil
		}
		d, x := R(0), R(1)
		in.run = func(w *warp, m uint32) {
			if m == full {
				w.r[d] = w.r[x]
				return
			}
			D, A := &w.r[d], &w.r[x]
			for ; m != 0; m &= m - 1 {
				i := bits.TrailingZeros32(m)
				D[i] = A[i]
			}
		}
	case "cvta":
		in.run = un(R(0), R(1), func(a uint64) uint64 { return a })
	case "add", "sub", "mul", "max", "min", "div", "rem", "and", "or", "xor", "shl", "shr":
		if t == "pred" {
			d, x, y := P(a[0]), P(a[1]), P(a[2])
			f := map[string]func(a, b uint32) uint32{"and": func(a, b uint32) uint32 { return a & b }, "or": func(a, b uint32) uint32 { return a | b }, "xor": func(a, b uint32) uint32 { return a ^ b }}[mods[0]]
			in.run = func(w *warp, m uint32) { w.p[d] = w.p[d]&^m | f(w.p[x], w.p[y])&m }
			return nil
		}
		d, x, y := R(0), R(1), R(2)
		if isF {
			switch mods[0] {
			case "add":
				in.run = func(w *warp, m uint32) {
					D, A, B := &w.r[d], &w.r[x], &w.r[y]
					for ; m != 0; m &= m - 1 {
						i := bits.TrailingZeros32(m)
						D[i] = u32f(f32(A[i]) + f32(B[i]))
					}
				}
			case "sub":
				in.run = bin(d, x, y, func(a, b uint64) uint64 { return u32f(f32(a) - f32(b)) })
			case "mul":
				in.run = func(w *warp, m uint32) {
					D, A, B := &w.r[d], &w.r[x], &w.r[y]
					for ; m != 0; m &= m - 1 {
						i := bits.TrailingZeros32(m)
						D[i] = u32f(f32(A[i]) * f32(B[i]))
					}
				}
			case "div":
				in.run = bin(d, x, y, func(a, b uint64) uint64 { return u32f(f32(a) / f32(b)) })
			case "max":
				in.run = bin(d, x, y, func(a, b uint64) uint64 {
					p, q := f32(a), f32(b)
					if p != p || q > p {
						return b
					}
					return a
				})
			case "min":
				in.run = bin(d, x, y, func(a, b uint64) uint64 {
					p, q := f32(a), f32(b)
					if p != p || q < p {
						return b
					}
					return a
				})
			default:
				return unsup
			}
			return nil
		}
		sg := strings.HasPrefix(t, "s")
		bitw := uint64(sizeOf(t) * 8)
		var f func(a, b uint64) uint64
		switch mods[0] {
		case "add":
			if sizeOf(t) == 8 {
				in.run = func(w *warp, m uint32) {
					D, A, B := &w.r[d], &w.r[x], &w.r[y]
					for ; m != 0; m &= m - 1 {
						i := bits.TrailingZeros32(m)
						D[i] = A[i] + B[i]
					}
				}
				return nil
			}
			in.run = func(w *warp, m uint32) {
				D, A, B := &w.r[d], &w.r[x], &w.r[y]
				for ; m != 0; m &= m - 1 {
					i := bits.TrailingZeros32(m)
					D[i] = uint64(uint32(A[i] + B[i]))
				}
			}
			return nil
		case "sub":
			f = func(a, b uint64) uint64 { return a - b }
		case "mul":
			switch {
			case has("wide") && sg:
				in.run = bin(d, x, y, func(a, b uint64) uint64 { return uint64(W.s(a) * W.s(b)) })
				return nil
			case has("wide"):
				in.run = bin(d, x, y, func(a, b uint64) uint64 { return W.z(a) * W.z(b) })
				return nil
			case has("lo"):
				f = func(a, b uint64) uint64 { return a * b }
			case has("hi") && sizeOf(t) == 4 && sg:
				f = func(a, b uint64) uint64 { return uint64(W.s(a)*W.s(b)) >> 32 }
			case has("hi") && sizeOf(t) == 4:
				f = func(a, b uint64) uint64 { return W.z(a) * W.z(b) >> 32 }
			default:
				return unsup
			}
		case "div", "rem":
			div := mods[0] == "div"
			f = func(a, b uint64) uint64 {
				if W.z(b) == 0 {
					fail("integer division by zero")
				}
				switch {
				case sg && div:
					return uint64(W.s(a) / W.s(b))
				case sg:
					return uint64(W.s(a) % W.s(b))
				case div:
					return W.z(a) / W.z(b)
				}
				return W.z(a) % W.z(b)
			}
		case "max":
			f = func(a, b uint64) uint64 {
				if sg && W.s(a) > W.s(b) || !sg && W.z(a) > W.z(b) {
					return a
				}
				return b
			}
		case "min":
			f = func(a, b uint64) uint64 {
				if sg && W.s(a) < W.s(b) || !sg && W.z(a) < W.z(b) {
					return a
				}
				return b
			}
		case "and":
			f = func(a, b uint64) uint64 { return a & b }
		case "or":
			f = func(a, b uint64) uint64 { return a | b }
		case "xor":
			f = func(a, b uint64) uint64 { return a ^ b }
		case "shl":
			f = func(a, b uint64) uint64 {
				if uint64(uint32(b)) >= bitw {
					return 0
				}
				return a << uint32(b)
			}
		case "shr":
			f = func(a, b uint64) uint64 {
				n := uint64(uint32(b))
				if sg {
					return uint64(W.s(a) >> min(n, bitw-1))
				}
				if n >= bitw {
					return 0
				}
				return W.z(a) >> n
			}
		}
		in.run = bin(d, x, y, func(a, b uint64) uint64 { return W.z(f(a, b)) })
	case "not", "neg":
		if t == "pred" {
			d, x := P(a[0]), P(a[1])
			in.run = func(w *warp, m uint32) { w.p[d] = w.p[d]&^m | ^w.p[x]&m }
			return nil
		}
		d, x := R(0), R(1)
		switch {
		case isF:
			in.run = un(d, x, func(a uint64) uint64 { return a ^ 1<<31 })
		case mods[0] == "neg":
			in.run = un(d, x, func(a uint64) uint64 { return W.z(-a) })
		default:
			in.run = un(d, x, func(a uint64) uint64 { return W.z(^a) })
		}
	case "bfe":
		in.run = tern(R(0), R(1), R(2), R(3), func(a, p, l uint64) uint64 { return W.z(a) >> (p & 255) & (1<<(l&255) - 1) })
	case "fma":
		in.run = tern(R(0), R(1), R(2), R(3), func(a, b, c uint64) uint64 {
			return u32f(float32(math.FMA(float64(f32(a)), float64(f32(b)), float64(f32(c)))))
		})
	case "mad":
		wide := has("wide")
		in.run = tern(R(0), R(1), R(2), R(3), func(a, b, c uint64) uint64 {
			if wide && t[0] == 's' {
				return uint64(W.s(a)*W.s(b)) + c
			}
			if wide {
				return W.z(a)*W.z(b) + c
			}
			return W.z(a*b + c)
		})
	case "ex2":
		in.run = un(R(0), R(1), func(a uint64) uint64 { return u32f(float32(math.Exp2(float64(f32(a))))) })
	case "lg2":
		in.run = un(R(0), R(1), func(a uint64) uint64 { return u32f(float32(math.Log2(float64(f32(a))))) })
	case "rsqrt":
		in.run = un(R(0), R(1), func(a uint64) uint64 { return u32f(float32(1 / math.Sqrt(float64(f32(a))))) })
	case "rcp":
		in.run = un(R(0), R(1), func(a uint64) uint64 { return u32f(1 / f32(a)) })
	case "sqrt":
		in.run = un(R(0), R(1), func(a uint64) uint64 { return u32f(float32(math.Sqrt(float64(f32(a))))) })
	case "selp":
		d, x, y, p := R(0), R(1), R(2), P(a[3])
		in.run = func(w *warp, m uint32) {
			D, A, B, pr := &w.r[d], &w.r[x], &w.r[y], w.p[p]
			for ; m != 0; m &= m - 1 {
				i := bits.TrailingZeros32(m)
				if pr>>i&1 == 1 {
					D[i] = A[i]
				} else {
					D[i] = B[i]
				}
			}
		}
	case "setp":
		return b.setp(in, mods, P(a[0]), R(1), R(2), t)
	case "cvt":
		return b.cvt(in, mods, a)
	case "shfl":
		in.kind = kWarp
		ds := strings.Split(a[0], "|")
		r0, e := b.reg(ds[0])
		if e != nil {
			return e
		}
		x, y, mode := R(1), R(2), mods[2]
		in.run = func(w *warp, m uint32) {
			src := w.r[x]
			for mm := m; mm != 0; mm &= mm - 1 {
				i := bits.TrailingZeros32(mm)
				j, l := i, int(w.r[y][i]&31)
				switch mode {
				case "bfly":
					j = i ^ l
				case "down":
					if i+l < 32 {
						j = i + l
					}
				case "up":
					if i >= l {
						j = i - l
					}
				case "idx":
					j = l
				}
				if m>>j&1 == 0 {
					fail("shfl.sync reads lane %d, which is not active (mask %#x)", j, m)
				}
				w.r[r0][i] = src[j]
			}
		}
	case "atom", "red":
		return b.atom(in, mods, a, t)
	case "cp":
		switch {
		case has("commit_group"):
			in.run = func(w *warp, m uint32) { w.cpGroups = append(w.cpGroups, w.cpOpen); w.cpOpen = nil }
		case has("wait_group"):
			var keep int
			if _, err := fmt.Sscan(a[0], &keep); err != nil {
				return err
			}
			in.run = func(w *warp, m uint32) {
				for len(w.cpGroups) > keep {
					for _, f := range w.cpGroups[0] {
						f()
					}
					w.cpGroups = w.cpGroups[1:]
				}
			}
		default:
			s, so, e := b.addr(a[0])
			if e != nil {
				return e
			}
			g, goff, e := b.addr(a[1])
			if e != nil {
				return e
			}
			n := R(2)
			src := n
			if len(a) > 3 {
				src = R(3)
			}
			in.run = func(w *warp, m uint32) {
				if w.blk.dev.Profile {
					w.stat.global(&w.r[g], goff, m, 16)
				}
				for ; m != 0; m &= m - 1 {
					i := bits.TrailingZeros32(m)
					sz, cnt := int(w.r[n][i]), int(uint32(w.r[src][i]))
					da, ga := w.r[s][i]+uint64(so), w.r[g][i]+uint64(goff)
					w.smem(da, sz, true)                 // the copy may write from now on: check for races already here
					w.cpOpen = append(w.cpOpen, func() { // the copy lands when it is waited for, not before
						dst := w.smem(da, sz, true)
						clear(dst)
						if cnt > 0 {
							copy(dst, w.blk.dev.mem(ga, cnt))
						}
					})
				}
			}
		}
	case "ldmatrix":
		in.kind = kWarp
		ds, e := b.regsOf(a[0])
		if e != nil {
			return e
		}
		s, so, e := b.addr(a[1])
		if e != nil {
			return e
		}
		trans := has("trans")
		in.run = func(w *warp, _ uint32) {
			var row [32][]byte
			if w.blk.dev.Profile {
				w.stat.shared(w.r[s][:8*len(ds)], 16)
			}
			for i := 0; i < 8*len(ds); i++ {
				ad := w.r[s][i] + uint64(so)
				if ad&15 != 0 {
					fail("ldmatrix: row address %#x is not 16-byte aligned", ad)
				}
				row[i] = w.smem(ad, 16, false)
			}
			for j, d := range ds {
				for l := 0; l < 32; l++ {
					if trans {
						x := binary.LittleEndian.Uint16(row[j*8+l&3*2][l>>2*2:])
						y := binary.LittleEndian.Uint16(row[j*8+l&3*2+1][l>>2*2:])
						w.r[d][l] = uint64(x) | uint64(y)<<16
					} else {
						w.r[d][l] = uint64(binary.LittleEndian.Uint32(row[j*8+l>>2][l&3*4:]))
					}
				}
			}
		}
	case "mma":
		if !has("m16n8k16") || !has("bf16") {
			return unsup
		}
		in.kind = kWarp
		var v [4][]int
		for i := range v {
			if v[i], err = b.regsOf(a[i]); err != nil {
				return err
			}
		}
		in.run = func(w *warp, _ uint32) {
			var A [16][16]float32
			var B [8][16]float32
			for l := 0; l < 32; l++ {
				g, tg := l>>2, l&3*2
				for x := 0; x < 4; x++ {
					u := w.r[v[1][x]][l]
					r, k := g+x&1*8, tg+x>>1*8
					A[r][k], A[r][k+1] = bf(uint16(u)), bf(uint16(u>>16))
				}
				for x := 0; x < 2; x++ {
					u := w.r[v[2][x]][l]
					B[g][tg+x*8], B[g][tg+x*8+1] = bf(uint16(u)), bf(uint16(u>>16))
				}
			}
			var out [4]vreg
			for l := 0; l < 32; l++ {
				for x := 0; x < 4; x++ {
					ar, br := &A[l>>2+x>>1*8], &B[l&3*2+x&1]
					var s0, s1 float32
					for k := 0; k < 16; k += 2 {
						s0 += ar[k] * br[k]
						s1 += ar[k+1] * br[k+1]
					}
					out[x][l] = u32f(f32(w.r[v[3][x]][l]) + (s0 + s1))
				}
			}
			for x := 0; x < 4; x++ {
				w.r[v[0][x]] = out[x]
			}
		}
	default:
		return unsup
	}
	return nil
}

func (b *builder) setp(in *inst, mods []string, d, x, y int, t string) error {
	cmp := mods[1]
	W := wd(t)
	var f func(a, b uint64) bool
	if t == "f32" {
		u := len(cmp) == 3 && cmp[2] == 'u'
		if u {
			cmp = cmp[:2]
		}
		f = func(a, b uint64) bool {
			p, q := f32(a), f32(b)
			if p != p || q != q {
				return u
			}
			switch cmp {
			case "eq":
				return p == q
			case "ne":
				return p != q
			case "lt":
				return p < q
			case "le":
				return p <= q
			case "gt":
				return p > q
			}
			return p >= q
		}
	} else {
		sg := t[0] == 's'
		f = func(a, b uint64) bool {
			c := 0
			if sg {
				p, q := W.s(a), W.s(b)
				if p < q {
					c = -1
				} else if p > q {
					c = 1
				}
			} else {
				p, q := W.z(a), W.z(b)
				if p < q {
					c = -1
				} else if p > q {
					c = 1
				}
			}
			switch cmp {
			case "eq":
				return c == 0
			case "ne":
				return c != 0
			case "lt", "lo":
				return c < 0
			case "le", "ls":
				return c <= 0
			case "gt", "hi":
				return c > 0
			}
			return c >= 0
		}
	}
	in.run = func(w *warp, m uint32) {
		A, B, out := &w.r[x], &w.r[y], uint32(0)
		for mm := m; mm != 0; mm &= mm - 1 {
			i := bits.TrailingZeros32(mm)
			if f(A[i], B[i]) {
				out |= 1 << i
			}
		}
		w.p[d] = w.p[d]&^m | out
	}
	return nil
}

func (b *builder) cvt(in *inst, mods, a []string) error {
	n := len(mods)
	dt, st := mods[n-2], mods[n-1]
	WD, WS, sgn := wd(dt), wd(st), st[0] == 's'
	d, e := b.reg(a[0])
	if e != nil {
		return e
	}
	x, e := b.reg(a[1])
	if e != nil {
		return e
	}
	switch {
	case dt == "bf16" && st == "f32":
		in.run = un(d, x, func(a uint64) uint64 { return uint64(toBF(f32(a))) })
	case dt == "bf16x2" && st == "f32":
		y, e := b.reg(a[2])
		if e != nil {
			return e
		}
		in.run = bin(d, x, y, func(hi, lo uint64) uint64 { return uint64(toBF(f32(lo))) | uint64(toBF(f32(hi)))<<16 })
	case dt == "s32" && st == "f32" && slices.Contains(mods, "rzi"):
		in.run = un(d, x, func(a uint64) uint64 {
			v := math.Trunc(float64(f32(a)))
			switch {
			case v != v:
				return 0
			case v >= math.MaxInt32:
				return math.MaxInt32
			case v <= math.MinInt32:
				return 1 << 31
			}
			return uint64(uint32(int32(v)))
		})
	case dt == "f32" && st[0] == 's':
		in.run = un(d, x, func(a uint64) uint64 { return u32f(float32(WS.s(a))) })
	case dt == "f32" && st[0] == 'u':
		in.run = un(d, x, func(a uint64) uint64 { return u32f(float32(WS.z(a))) })
	case dt[0] != 'f' && st[0] != 'f' && dt[0] != 'b':
		in.run = un(d, x, func(a uint64) uint64 {
			if sgn {
				return WD.z(uint64(WS.s(a)))
			}
			return WD.z(WS.z(a))
		})
	default:
		return fmt.Errorf("unsupported %s", strings.Join(mods, "."))
	}
	return nil
}

func (b *builder) load(in *inst, mods, a []string, t string) error {
	ds, e := b.regsOf(a[0])
	if e != nil {
		return e
	}
	sz := sizeOf(t)
	// A signed value is extended to the width of its register.
	extend := func(v uint64) uint64 { return v }
	if W := wd(t); t[0] == 's' && len(ds) == 1 && b.wide[ds[0]] {
		extend = func(v uint64) uint64 { return uint64(W.s(v)) }
	}
	space := mods[1]
	if space == "param" {
		name, off := strings.Trim(a[1], "[]"), 0
		if i := strings.Index(name, "+"); i > 0 {
			fmt.Sscan(name[i+1:], &off)
			name = name[:i]
		}
		po, ok := b.params[name]
		if !ok {
			return fmt.Errorf("parameter %s", name)
		}
		d := ds[0]
		in.run = func(w *warp, m uint32) {
			v := extend(get(w.blk.params[po+off:], sz))
			for ; m != 0; m &= m - 1 {
				w.r[d][bits.TrailingZeros32(m)] = v
			}
		}
		return nil
	}
	s, so, e := b.addr(a[1])
	if e != nil {
		return e
	}
	n := sz * len(ds)
	in.run = func(w *warp, m uint32) {
		var al *alloc
		if w.blk.dev.Profile {
			w.profile(space, s, so, m, n)
		}
		for ; m != 0; m &= m - 1 {
			i := bits.TrailingZeros32(m)
			ad := w.r[s][i] + uint64(so)
			if ad&uint64(n-1) != 0 {
				fail("misaligned %d-byte load at %#x", n, ad)
			}
			var p []byte
			if space == "shared" {
				p = w.smem(ad, n, false)
			} else {
				if al == nil || ad < al.base || ad+uint64(n) > al.base+uint64(len(al.data)) {
					al = w.blk.dev.find(ad, n)
				}
				p = al.data[ad-al.base:]
			}
			for j, d := range ds {
				w.r[d][i] = extend(get(p[j*sz:], sz))
			}
		}
	}
	return nil
}

// profile counts an access of n bytes by the lanes m at the addresses in register s plus so.
func (w *warp) profile(space string, s int, so int64, m uint32, n int) {
	if space != "shared" {
		w.stat.global(&w.r[s], so, m, n)
		return
	}
	var ads []uint64
	for ; m != 0; m &= m - 1 {
		ads = append(ads, w.r[s][bits.TrailingZeros32(m)]+uint64(so))
	}
	w.stat.shared(ads, n)
}

func (b *builder) store(in *inst, mods, a []string, t string) error {
	ss, e := b.regsOf(a[1])
	if e != nil {
		return e
	}
	sz := sizeOf(t)
	space := mods[1]
	s, so, e := b.addr(a[0])
	if e != nil {
		return e
	}
	n := sz * len(ss)
	in.run = func(w *warp, m uint32) {
		var al *alloc
		if w.blk.dev.Profile {
			w.profile(space, s, so, m, n)
		}
		for ; m != 0; m &= m - 1 {
			i := bits.TrailingZeros32(m)
			ad := w.r[s][i] + uint64(so)
			if ad&uint64(n-1) != 0 {
				fail("misaligned %d-byte store at %#x", n, ad)
			}
			var p []byte
			if space == "shared" {
				p = w.smem(ad, n, true)
			} else {
				if al == nil || ad < al.base || ad+uint64(n) > al.base+uint64(len(al.data)) {
					al = w.blk.dev.find(ad, n)
				}
				p = al.data[ad-al.base:]
			}
			for j, d := range ss {
				put(p[j*sz:], sz, w.r[d][i])
			}
		}
	}
	return nil
}

func (b *builder) atom(in *inst, mods, a []string, t string) error {
	if mods[1] != "global" {
		return fmt.Errorf("unsupported %s", strings.Join(mods, "."))
	}
	var combine func(old, v uint32) uint32
	switch op := mods[len(mods)-2]; {
	case t == "f32" && op == "add":
		combine = func(old, v uint32) uint32 {
			return math.Float32bits(math.Float32frombits(old) + math.Float32frombits(v))
		}
	case t == "s32" && op == "min":
		combine = func(old, v uint32) uint32 { return uint32(min(int32(old), int32(v))) }
	default:
		return fmt.Errorf("unsupported %s", strings.Join(mods, "."))
	}
	d := -1
	if mods[0] == "atom" {
		var e error
		if d, e = b.reg(a[0]); e != nil {
			return e
		}
		a = a[1:]
	}
	s, so, e := b.addr(a[0])
	if e != nil {
		return e
	}
	x, e := b.reg(a[1])
	if e != nil {
		return e
	}
	in.run = func(w *warp, m uint32) {
		for ; m != 0; m &= m - 1 {
			i := bits.TrailingZeros32(m)
			p := (*uint32)(unsafe.Pointer(&w.blk.dev.mem(w.r[s][i]+uint64(so), 4)[0]))
			for {
				o := atomic.LoadUint32(p)
				if atomic.CompareAndSwapUint32(p, o, combine(o, uint32(w.r[x][i]))) {
					if d >= 0 {
						w.r[d][i] = uint64(o)
					}
					break
				}
			}
		}
	}
	return nil
}

func get(p []byte, n int) uint64 {
	switch n {
	case 1:
		return uint64(p[0])
	case 2:
		return uint64(binary.LittleEndian.Uint16(p))
	case 4:
		return uint64(binary.LittleEndian.Uint32(p))
	}
	return binary.LittleEndian.Uint64(p)
}
func put(p []byte, n int, v uint64) {
	switch n {
	case 1:
		p[0] = byte(v)
	case 2:
		binary.LittleEndian.PutUint16(p, uint16(v))
	case 4:
		binary.LittleEndian.PutUint32(p, uint32(v))
	default:
		binary.LittleEndian.PutUint64(p, v)
	}
}

// smem checks bounds and shared-memory races between warps: two accesses to a word, at least one a write,
// by different warps with no barrier between them.
func (w *warp) smem(ad uint64, n int, write bool) []byte {
	b := w.blk
	if ad+uint64(n) > uint64(len(b.shared)) {
		fail("shared memory access of %d bytes at %d, size %d", n, ad, len(b.shared))
	}
	me := b.epoch<<8 | uint32(w.id+1)
	for q := ad >> 2; q < (ad+uint64(n)+3)>>2; q++ {
		if lw := b.lastW[q]; lw>>8 == b.epoch && lw != me && lw != 0 {
			fail("shared memory race at byte %d: warp %d and warp %d with no barrier between", q*4, lw&255-1, w.id)
		}
		if write {
			if lr := b.lastR[q]; lr>>8 == b.epoch && lr != me && lr != 0 {
				fail("shared memory race at byte %d: read by warp %d, written by warp %d with no barrier between", q*4, lr&255-1, w.id)
			}
			b.lastW[q] = me
		} else {
			b.lastR[q] = me
		}
	}
	return b.shared[ad : ad+uint64(n)]
}

// run executes until every lane has exited or the warp stands at a block barrier.
func (w *warp) run() {
	code := w.blk.k.code
	for {
		gi := -1
		for i := range w.groups {
			if g := &w.groups[i]; !g.parked && (gi < 0 || g.pc < w.groups[gi].pc) {
				gi = i
			}
		}
		if gi < 0 {
			if len(w.groups) == 0 {
				w.done = true
				return
			}
			fail("deadlock: lanes of warp %d wait at different warp-wide instructions", w.id)
		}
		g := w.groups[gi]
		w.groups[gi] = w.groups[len(w.groups)-1]
		w.groups = w.groups[:len(w.groups)-1]
		pc, mask := g.pc, g.mask
		next := 1 << 30
		for i := range w.groups {
			if w.groups[i].pc >= pc && w.groups[i].pc < next {
				next = w.groups[i].pc
			}
		}
	inner:
		for {
			if pc >= next { // merge or hand over
				for i := 0; i < len(w.groups); i++ {
					if w.groups[i].pc == pc {
						mask |= w.groups[i].mask
						w.groups[i] = w.groups[len(w.groups)-1]
						w.groups = w.groups[:len(w.groups)-1]
						i--
					}
				}
				if pc > next {
					w.groups = append(w.groups, group{pc, mask, false})
					break inner
				}
				next = 1 << 30
				for i := range w.groups {
					if w.groups[i].pc > pc && w.groups[i].pc < next {
						next = w.groups[i].pc
					}
				}
			}
			in := &code[pc]
			w.pc = pc
			w.steps++
			act := mask
			if in.pred >= 0 {
				p := w.p[in.pred]
				if in.neg {
					p = ^p
				}
				act &= p
			}
			switch in.kind {
			case kPlain:
				if act != 0 {
					in.run(w, act)
				}
				pc++
			case kBra:
				switch {
				case act == 0:
					pc++
				case act == mask:
					if in.tgt <= pc { // backward: let others catch up
						w.groups = append(w.groups, group{in.tgt, mask, false})
						break inner
					}
					pc = in.tgt
				default:
					w.groups = append(w.groups, group{in.tgt, act, false}, group{pc + 1, mask &^ act, false})
					break inner
				}
			case kRet:
				w.live &^= act
				if mask &^= act; mask == 0 {
					for i := range w.groups { // a parked group may now be complete
						w.groups[i].parked = false
					}
					break inner
				}
				pc++
			case kBar, kWarp:
				if mask != w.live {
					w.groups = append(w.groups, group{pc, mask, true})
					break inner
				}
				if in.kind == kBar {
					w.groups = append(w.groups[:0], group{pc + 1, mask, false})
					w.atBar = true
					return
				}
				in.run(w, act)
				pc++
			}
		}
	}
}
