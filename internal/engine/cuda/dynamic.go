//go:build !nocuda

package cuda

import "github.com/ebitengine/purego"

// call calls the function; a result other than 0 is an error code. Pointers that are converted to uintptr in the call
// stay valid during it.
//
//go:uintptrescapes
func (p proc) call(args ...uintptr) int32 {
	r, _, _ := purego.SyscallN(uintptr(p), args...)
	return int32(r)
}

// open opens a shared library.
func open(file string) (uintptr, error) {
	return purego.Dlopen(file, purego.RTLD_NOW|purego.RTLD_GLOBAL)
}

// symbol finds a function of a library.
func symbol(library uintptr, name string) (uintptr, error) { return purego.Dlsym(library, name) }
