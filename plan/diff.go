package plan

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
)

// Diff says how two plans differ in meaning: what a server would do otherwise. Names of policies, the tool, the lengths of
// the totals, evidence and warnings have no part in it.
type Diff struct {
	// Members that differ outside the layers, by JSON pointer. For plans of different models these are the differences
	// of the models, too.
	Members []MemberDiff `json:"members"`
	// Heads that keep otherwise, in order of layer and KV head.
	Heads []HeadDiff `json:"heads"`
	// KVHeads is the number of KV heads compared.
	KVHeads int `json:"kv_heads"`
	// Totals at the lengths asked for.
	Totals []TotalDiff `json:"totals"`
}

// MemberDiff is a member of a plan that differs, as JSON; "none" where it is missing.
type MemberDiff struct {
	Pointer string `json:"pointer"`
	A       string `json:"a"`
	B       string `json:"b"`
}

// HeadDiff is a KV head that keeps otherwise.
type HeadDiff struct {
	Layer  int `json:"layer"`
	KVHead int `json:"kv_head"`
	// A and B are the names of its policies, "" where a plan has no such head.
	A string `json:"a"`
	B string `json:"b"`
	// PolicyA and PolicyB are the policies, nil where a plan has no such head.
	PolicyA Policy `json:"policy_a"`
	PolicyB Policy `json:"policy_b"`
	// Bytes of its cache at the lengths asked for.
	BytesA []int64 `json:"bytes_a"`
	BytesB []int64 `json:"bytes_b"`
}

// TotalDiff compares the caches at one length.
type TotalDiff struct {
	PromptTokens    int   `json:"prompt_tokens"`
	GeneratedTokens int   `json:"generated_tokens"`
	BytesA          int64 `json:"bytes_a"`
	BytesB          int64 `json:"bytes_b"`
	FullBytesA      int64 `json:"full_bytes_a"`
	FullBytesB      int64 `json:"full_bytes_b"`
}

// Equal reports whether the plans mean the same.
func (d *Diff) Equal() bool { return len(d.Members) == 0 && len(d.Heads) == 0 }

// Compare finds out how two valid plans differ, and what their heads hold at some lengths. Each plan counts in its own
// blocks and type of elements unless the request names a type.
func Compare(a, b *Plan, at []Request) *Diff {
	d := &Diff{Members: []MemberDiff{}, Heads: []HeadDiff{}, Totals: []TotalDiff{}}
	var other *ModelError
	if errors.As(a.Matches(Want{Model: b.Model}), &other) {
		for _, m := range other.Mismatches {
			d.Members = append(d.Members, MemberDiff{m.Pointer, m.Plan, m.Want})
		}
	}
	d.members(a, b)
	for l := range max(len(a.Layers), len(b.Layers)) {
		rowA, rowB := rowOf(a, l), rowOf(b, l)
		for k := range max(len(rowA), len(rowB)) {
			d.KVHeads++
			h := HeadDiff{Layer: l, KVHead: k, BytesA: []int64{}, BytesB: []int64{}}
			if k < len(rowA) {
				h.A, h.PolicyA = rowA[k], a.Policies[rowA[k]]
			}
			if k < len(rowB) {
				h.B, h.PolicyB = rowB[k], b.Policies[rowB[k]]
			}
			if reflect.DeepEqual(h.PolicyA, h.PolicyB) {
				continue
			}
			for _, r := range at {
				// The error is for a head that the plan does not have, whose cache holds nothing.
				ua, _ := a.HeadUsage(l, k, r)
				ub, _ := b.HeadUsage(l, k, r)
				h.BytesA, h.BytesB = append(h.BytesA, ua.Bytes), append(h.BytesB, ub.Bytes)
			}
			d.Heads = append(d.Heads, h)
		}
	}
	for _, r := range at {
		ua, ub := a.Usage(r), b.Usage(r)
		d.Totals = append(d.Totals, TotalDiff{r.PromptTokens, r.GeneratedTokens, ua.Bytes, ub.Bytes, ua.FullBytes, ub.FullBytes})
	}
	return d
}

func rowOf(p *Plan, layer int) []string {
	if layer < len(p.Layers) {
		return p.Layers[layer]
	}
	return nil
}

// members compares what stands outside the layers.
func (d *Diff) members(a, b *Plan) {
	add := func(pointer string, x, y any) {
		if !reflect.DeepEqual(x, y) {
			d.Members = append(d.Members, MemberDiff{pointer, show(x), show(y)})
		}
	}
	// number shows a member that is left out at 0.
	number := func(n int) any {
		if n == 0 {
			return ""
		}
		return n
	}
	add("/cache/dtype", string(a.Cache.Dtype), string(b.Cache.Dtype))
	add("/cache/granularity", string(a.Cache.Granularity), string(b.Cache.Granularity))
	add("/cache/block_size", a.Cache.BlockSize, b.Cache.BlockSize)
	add("/cache/group_rule", string(a.Cache.GroupRule), string(b.Cache.GroupRule))
	add("/cache/prefill", string(a.Cache.Prefill), string(b.Cache.Prefill))
	add("/cache/chunk_tokens", number(a.Cache.ChunkTokens), number(b.Cache.ChunkTokens))
	add("/ties/heads", string(a.Ties.Heads), string(b.Ties.Heads))
	add("/ties/tokens", string(a.Ties.Tokens), string(b.Ties.Tokens))
	var x, y TokenClasses
	if a.TokenClasses != nil {
		x = *a.TokenClasses
	}
	if b.TokenClasses != nil {
		y = *b.TokenClasses
	}
	list := func(pointer string, p, q []int) {
		if !slices.Equal(p, q) {
			d.Members = append(d.Members, MemberDiff{pointer, showList(p), showList(q)})
		}
	}
	list("/token_classes/special", x.Special, y.Special)
	list("/token_classes/punctuation", x.Punctuation, y.Punctuation)
	if !slices.Equal(a.Pins, b.Pins) {
		d.Members = append(d.Members, MemberDiff{"/pins", showList(a.Pins), showList(b.Pins)})
	}
}

// showList writes a list that is left out when it is empty, in full: long lists may differ at their ends.
func showList[T any](list []T) string {
	if len(list) == 0 {
		return "none"
	}
	b, err := json.Marshal(list)
	if err != nil {
		return fmt.Sprint(list)
	}
	return string(b)
}
