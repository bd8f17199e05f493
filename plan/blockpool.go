package plan

import (
	"fmt"
	"slices"
	"sync"
)

// BlockPool hands out the numbers of the blocks (pages) of a server's cache to the sequences in it. Numbers count from
// 0, and one that was given back is handed out again before a new one is. It may be used by many goroutines at once.
type BlockPool struct {
	mu    sync.Mutex
	size  int // 0 for no bound
	made  int32
	free  []int32
	inUse int
	peak  int
}

// NewBlockPool returns a pool of n blocks; 0 is for one without a bound.
func NewBlockPool(n int) *BlockPool { return &BlockPool{size: max(n, 0)} }

// InUse is the number of blocks that are handed out.
func (p *BlockPool) InUse() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.inUse
}

// Peak is the highest number of blocks that were handed out at a time.
func (p *BlockPool) Peak() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.peak
}

// Size is the number of blocks of the pool, 0 for one without a bound.
func (p *BlockPool) Size() int { return p.size }

// take appends n block numbers to ids, all or none. Where there are too few left the error is [ErrNoBlocks].
func (p *BlockPool) take(ids []int32, n int) ([]int32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.size > 0 && p.inUse+n > p.size {
		return ids, fmt.Errorf("%d of %d blocks are in use, %d more are needed: %w", p.inUse, p.size, n, ErrNoBlocks)
	}
	p.inUse += n
	p.peak = max(p.peak, p.inUse)
	ids = slices.Grow(ids, n)
	for ; n > 0; n-- {
		if last := len(p.free) - 1; last >= 0 {
			ids = append(ids, p.free[last])
			p.free = p.free[:last]
			continue
		}
		ids = append(ids, p.made)
		p.made++
	}
	return ids, nil
}

// give takes block numbers back.
func (p *BlockPool) give(ids ...int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inUse -= len(ids)
	p.free = append(p.free, ids...)
}
