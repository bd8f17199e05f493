package plan

import "slices"

// Clone returns a pool with the same blocks handed out.
func (p *BlockPool) Clone() *BlockPool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &BlockPool{size: p.size, made: p.made, free: slices.Clone(p.free), inUse: p.inUse, peak: p.peak}
}

// Clone returns a cache that holds the same tokens in the same slots and blocks, and goes its own way from here: for
// trying several continuations of one prompt. pool must be a [BlockPool.Clone] of the cache's pool of this moment; the
// server copies the blocks' contents.
func (c *KVCache) Clone(pool *BlockPool) *KVCache {
	n := *c
	n.options.Pool = pool
	n.classes = slices.Clone(c.classes)
	n.heads = make([][]HeadCache, len(c.heads))
	tables := map[*blockTable]*blockTable{}
	for l, row := range c.heads {
		n.heads[l] = make([]HeadCache, len(row))
		for k := range row {
			old, h := &row[k], &n.heads[l][k]
			*h = *old
			h.cache = &n
			t := tables[old.table]
			if t == nil {
				t = &blockTable{size: old.table.size, ids: slices.Clone(old.table.ids), refs: slices.Clone(old.table.refs), holes: old.table.holes}
				tables[old.table] = t
			}
			t.heads = append(t.heads, h)
			h.table = t
			for _, s := range []*[]int32{&h.positions, &h.prev, &h.next, &h.used, &h.ranks, &h.leaving, &h.stuck, &h.scratchSlot} {
				*s = slices.Clone(*s)
			}
			h.flags, h.score, h.scratch, h.spans = slices.Clone(h.flags), slices.Clone(h.score), slices.Clone(h.scratch), slices.Clone(h.spans)
		}
	}
	return &n
}
