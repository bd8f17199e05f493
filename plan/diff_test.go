package plan

import (
	"reflect"
	"slices"
	"testing"
)

var diffAt = []Request{{PromptTokens: 4096}, {PromptTokens: 4096, GeneratedTokens: 256}}

func TestEqualPlansHaveNoDiff(t *testing.T) {
	a, b := sample(), sample()
	// Other names, another tool, other totals, evidence and warnings mean the same.
	b.Tool, b.Warnings, b.Evidence = Tool{Name: "other", Version: "2"}, nil, nil
	b.Totals = []Totals{b.ComputeTotals(1000, 0)}
	b.Policies["everything"], b.Policies["more"] = Full{}, b.Policies["stream"]
	b.Layers = [][]string{{"everything", "stream", "more"}, {"full", "topk", "stream"}, {"fastgen", "topk", "h2o"}, {"full", "full", "stream"}}
	b.Model.Name, b.Model.MaxPosition = "renamed", 99
	if v := b.Validate(); len(v) > 0 {
		t.Fatal(v)
	}
	if d := Compare(a, b, diffAt); !d.Equal() || d.KVHeads != 12 || d.Totals[1].BytesA != a.Totals[0].KeptBytes || d.Totals[1].BytesB != a.Totals[0].KeptBytes {
		t.Errorf("%+v", d)
	}
}

func TestDiffFindsEveryDifference(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(p *Plan)
		want   []string
	}{
		{"dtype", func(p *Plan) { p.Cache.Dtype = F32 }, []string{"/cache/dtype"}},
		{"blocks", func(p *Plan) { p.Cache.BlockSize = 32 }, []string{"/cache/block_size"}},
		{"granularity", func(p *Plan) { p.Cache.Granularity = PerLayer }, []string{"/cache/granularity"}},
		{"group rule", func(p *Plan) { p.Cache.GroupRule = GroupMean }, []string{"/cache/group_rule"}},
		{"prefill", func(p *Plan) { p.Cache.Prefill, p.Cache.ChunkTokens = PrefillChunked, 512 }, []string{"/cache/prefill", "/cache/chunk_tokens"}},
		{"ties", func(p *Plan) { p.Ties.Tokens = "other" }, []string{"/ties/tokens"}},
		{"classes", func(p *Plan) { p.TokenClasses.Special = []int{1} }, []string{"/token_classes/special"}},
		{"no classes", func(p *Plan) { p.TokenClasses = nil }, []string{"/token_classes/special", "/token_classes/punctuation"}},
		{"pins", func(p *Plan) { p.Pins[0].MaxTokens = 5 }, []string{"/pins"}},
		{"no pins", func(p *Plan) { p.Pins = nil }, []string{"/pins"}},
		{"model", func(p *Plan) { p.Model.SHA256.Weights = hashA }, []string{"/model/sha256/weights"}},
	} {
		b := sample()
		c.change(b)
		for _, d := range []*Diff{Compare(sample(), b, nil), Compare(b, sample(), nil)} {
			var got []string
			for _, m := range d.Members {
				got = append(got, m.Pointer)
				if m.A == m.B || m.A == "" || m.B == "" {
					t.Errorf("%s: shown as %+v", c.name, m)
				}
			}
			if !slices.Equal(got, c.want) || len(d.Heads) != 0 || d.Equal() {
				t.Errorf("%s: members %v, heads %v; want %v and none", c.name, got, d.Heads, c.want)
			}
		}
	}
	// Every change of a policy is found at its heads, and only there.
	a := sample()
	for name, other := range map[string]Policy{
		"stream":  Streaming{SinkTokens: 64, RecentTokens: 240, Evict: EvictAlways, Decode: DecodeRolling, Positions: PositionsOriginal},
		"fastgen": FastGen{Classes: []Class{ClassSpecial}, FrequentRatio: 0.3, MaxTokens: 2048, Overflow: DropOldest, Evict: EvictPrefillEnd, Decode: DecodeStatic, Positions: PositionsOriginal},
		"h2o":     H2O{SinkTokens: 4, HeavyTokens: 108, RecentTokens: 128, Evict: EvictPrefillEnd, Decode: DecodeRolling, Positions: PositionsOriginal},
		"full":    a.Policies["topk"],
	} {
		b := sample()
		b.Policies[name] = other
		d := Compare(a, b, diffAt)
		var want []HeadDiff
		for l, row := range a.Layers {
			for k, n := range row {
				if n != name {
					continue
				}
				h := HeadDiff{Layer: l, KVHead: k, A: n, B: n, PolicyA: a.Policies[n], PolicyB: other}
				for _, r := range diffAt {
					ua, err := a.HeadUsage(l, k, r)
					if err != nil {
						t.Fatal(err)
					}
					ub, err := b.HeadUsage(l, k, r)
					if err != nil {
						t.Fatal(err)
					}
					h.BytesA, h.BytesB = append(h.BytesA, ua.Bytes), append(h.BytesB, ub.Bytes)
				}
				want = append(want, h)
			}
		}
		if !reflect.DeepEqual(d.Heads, want) || d.Equal() {
			t.Errorf("%s: %+v\nwant %+v", name, d.Heads, want)
		}
		var heads, total int64
		for _, h := range d.Heads {
			heads += h.BytesB[1] - h.BytesA[1]
		}
		if total = d.Totals[1].BytesB - d.Totals[1].BytesA; heads != total {
			t.Errorf("%s: heads differ by %d bytes, totals by %d", name, heads, total)
		}
	}
}

// Plans of other shapes are compared as far as they go.
func TestDiffOfOtherShapes(t *testing.T) {
	a, b := sample(), sample()
	b.Layers = [][]string{{"full", "stream"}}
	b.Model.NLayers, b.Model.NKVHeads = 1, 2
	d := Compare(a, b, diffAt)
	if d.KVHeads != 12 || len(d.Heads) != 10 || d.Equal() {
		t.Fatalf("%d heads, %d of them differ", d.KVHeads, len(d.Heads))
	}
	if h := d.Heads[0]; h.Layer != 0 || h.KVHead != 2 || h.A != "stream" || h.B != "" || h.PolicyB != nil || h.BytesA[0] == 0 || h.BytesB[0] != 0 {
		t.Errorf("%+v", h)
	}
	if back := Compare(b, a, diffAt); len(back.Heads) != 10 || back.Heads[0].B != "stream" || back.Heads[0].PolicyA != nil {
		t.Errorf("%+v", back.Heads)
	}
}
