package tokenizer

// pair is two neighbouring tokens.
type pair struct{ left, right int32 }

// rule says that a pair becomes one token; lower ranks are applied first.
type rule struct{ rank, id int32 }

// candidate is a merge that was possible when it was queued: the symbol at left with its neighbour, into id.
type candidate struct{ rank, id, left int32 }

// queue is a heap of candidates by rank, then by position: the order in which the reference applies merges.
type queue []candidate

func (q queue) less(i, j int) bool {
	return q[i].rank < q[j].rank || q[i].rank == q[j].rank && q[i].left < q[j].left
}

func (q *queue) push(c candidate) {
	h := append(*q, c)
	for i := len(h) - 1; i > 0; {
		parent := (i - 1) / 2
		if !h.less(i, parent) {
			break
		}
		h[i], h[parent] = h[parent], h[i]
		i = parent
	}
	*q = h
}

func (q *queue) pop() candidate {
	h := *q
	top, last := h[0], len(h)-1
	h[0] = h[last]
	h = h[:last]
	for i := 0; ; {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && h.less(child+1, child) {
			child++
		}
		if !h.less(child, i) {
			break
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
	*q = h
	return top
}

// merge applies byte-pair encoding (Sennrich et al. 2016, section 3.2) to the symbols of a word, in place, in
// O(n log n) for n of them.
func merge(ids []int32, rules map[pair]rule) []int32 {
	n := int32(len(ids))
	if n < 2 {
		return ids
	}
	links := make([]int32, 2*n)
	prev, next := links[:n], links[n:]
	for i := range n {
		prev[i], next[i] = i-1, i+1
	}
	q := make(queue, 0, n)
	add := func(l, r int32) {
		if l < 0 || r >= n {
			return
		}
		if m, ok := rules[pair{ids[l], ids[r]}]; ok {
			q.push(candidate{m.rank, m.id, l})
		}
	}
	for i := range n - 1 {
		add(i, i+1)
	}
	const gone = -1
	for len(q) > 0 {
		c := q.pop()
		// The pair may have changed since. It may also have become another that makes the same token, which is then
		// made at once: the reference does so too.
		right := next[c.left]
		if ids[c.left] == gone || right >= n {
			continue
		}
		if m, ok := rules[pair{ids[c.left], ids[right]}]; !ok || m.id != c.id {
			continue
		}
		ids[c.left], ids[right] = c.id, gone
		next[c.left] = next[right]
		if next[c.left] < n {
			prev[next[c.left]] = c.left
		}
		add(prev[c.left], c.left)
		add(c.left, next[c.left])
	}
	out := ids[:0]
	for i := int32(0); i < n; i = next[i] {
		out = append(out, ids[i])
	}
	return out
}
