package cpu

import (
	"sync"
	"sync/atomic"
)

// parallel calls f for every task in [0, tasks), on up to b.threads goroutines, and returns when all are done. Which
// worker runs a task is left to chance: f may use it to find its workspace and for nothing else.
func (b *Backend) parallel(tasks int, f func(w *workspace, task int)) {
	n := min(b.threads, tasks)
	if n <= 1 {
		for t := range tasks {
			f(b.work[0], t)
		}
		return
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	run := func(w *workspace) {
		for {
			t := int(next.Add(1)) - 1
			if t >= tasks {
				return
			}
			f(w, t)
		}
	}
	for i := 1; i < n; i++ {
		wg.Go(func() { run(b.work[i]) })
	}
	run(b.work[0])
	wg.Wait()
}

// ranges divides [0, n) into contiguous parts and calls f for each; cost is the work of one item in floats touched.
// Small jobs stay on one goroutine.
func (b *Backend) ranges(n, cost int, f func(lo, hi int)) {
	// 16 Ki floats take a few microseconds, about what waking a goroutine costs.
	parts := min(4*b.threads, n, n*cost>>14+1)
	if b.threads == 1 || parts <= 1 {
		if n > 0 {
			f(0, n)
		}
		return
	}
	b.parallel(parts, func(_ *workspace, t int) { f(n*t/parts, n*(t+1)/parts) })
}
