// Command kvprofile measures which parts of a language model's KV cache a serving runtime has to keep, and writes a
// cache plan: for every layer and KV head what to keep, with its exact bytes and the evidence for it.
//
//	kvprofile run path/to/model
//
// Results go to standard output, everything else to standard error. Exit codes are listed in docs/cli.md.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal the default handling comes back, so that a second one ends the program at once.
	context.AfterFunc(ctx, stop)
	os.Exit(Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ()))
}
