//go:build nocuda

package cuda

import "errors"

// With the tag nocuda the program is linked statically, and opens no libraries.
var errStatic = errors.New("this program was built with the tag nocuda")

func (proc) call(...uintptr) int32 { return -1 }

func open(string) (uintptr, error) { return 0, errStatic }

func symbol(uintptr, string) (uintptr, error) { return 0, errStatic }
