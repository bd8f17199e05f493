package cpu

import "golang.org/x/sys/unix"

// requestTiles asks the kernel for the state of the tiles, once per process as often as it likes
// (arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA); Linux 5.16 and later).
func requestTiles() error {
	const request, tileData = 0x1023, 18
	if _, _, errno := unix.RawSyscall(unix.SYS_ARCH_PRCTL, request, tileData, 0); errno != 0 {
		return errno
	}
	return nil
}
