package tokenizer

import "container/heap"

// pair is two neighbouring tokens.
type pair struct{ left, right int32 }

// rule says that a pair becomes one token; lower ranks are applied first.
type rule struct{ rank, id int32 }

// candidate is a possible merge of the symbols at left and right, valid while both are as they were (gen).
type candidate struct {
	rank             int32
	left, right      int
	leftGen, rightGn int32
}

// queue orders candidates by rank, then by position: the order in which the reference applies merges.
type queue []candidate

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].rank < q[j].rank || q[i].rank == q[j].rank && q[i].left < q[j].left
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(candidate)) }
func (q *queue) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

// merge applies byte-pair encoding (Sennrich et al. 2016) to the ids of a word, in place.
func merge(ids []int32, rules map[pair]rule) []int32 {
	n := len(ids)
	if n < 2 {
		return ids
	}
	prev, next, gen := make([]int, n), make([]int, n), make([]int32, n)
	for i := range ids {
		prev[i], next[i] = i-1, i+1
	}
	var q queue
	add := func(l, r int) {
		if l < 0 || r >= n {
			return
		}
		if m, ok := rules[pair{ids[l], ids[r]}]; ok {
			heap.Push(&q, candidate{m.rank, l, r, gen[l], gen[r]})
		}
	}
	for i := range n - 1 {
		add(i, i+1)
	}
	for q.Len() > 0 {
		c := heap.Pop(&q).(candidate)
		if gen[c.left] != c.leftGen || gen[c.right] != c.rightGn || next[c.left] != c.right {
			continue
		}
		ids[c.left] = rules[pair{ids[c.left], ids[c.right]}].id
		gen[c.left]++
		gen[c.right] = -1
		next[c.left] = next[c.right]
		if next[c.left] < n {
			prev[next[c.left]] = c.left
		}
		add(prev[c.left], c.left)
		add(c.left, next[c.left])
	}
	out := ids[:0]
	for i := 0; i < n; i = next[i] {
		out = append(out, ids[i])
	}
	return out
}
