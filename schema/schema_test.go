package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvprofile/kvprofile/plan"
	"github.com/kvprofile/kvprofile/schema/internal/gen"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

func TestEmbeddedSchemaIsTheGeneratedOne(t *testing.T) {
	want, err := gen.Schema("../plan")
	if err != nil {
		t.Fatal(err)
	}
	got, err := JSON(1)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("cache-plan-v1.schema.json is out of date: run go generate in the folder schema")
	}
	if !strings.Contains(string(got), ID) || gen.ID != ID {
		t.Errorf("the schema's identifier is not %s", ID)
	}
}

func TestUnknownVersion(t *testing.T) {
	if _, err := JSON(2); !errors.Is(err, plan.ErrVersion) {
		t.Errorf("JSON(2): %v", err)
	}
	for doc, want := range map[string]error{
		`{"format":"kvprofile.cache-plan","version":2}`: plan.ErrVersion,
		`{"format":"other","version":1}`:                plan.ErrFormat,
		`{"format":"kvprofile.cache-plan","version":1`:  plan.ErrFormat,
		`[]`: plan.ErrFormat,
	} {
		if _, err := Validate([]byte(doc)); !errors.Is(err, want) {
			t.Errorf("Validate(%s): %v, want %v", doc, err, want)
		}
		if _, err := Check([]byte(doc)); !errors.Is(err, want) {
			t.Errorf("Check(%s): %v, want %v", doc, err, want)
		}
	}
}

func read(t testing.TB, pattern string) map[string][]byte {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("..", "plan", "testdata", pattern))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no files %s (%v)", pattern, err)
	}
	docs := map[string][]byte{}
	for _, p := range paths {
		if docs[filepath.Base(p)], err = os.ReadFile(p); err != nil {
			t.Fatal(err)
		}
	}
	return docs
}

func TestValidPlans(t *testing.T) {
	for name, doc := range read(t, "valid/*.json") {
		vs, err := Check(doc)
		if err != nil || len(vs) > 0 {
			t.Errorf("%s: %v %v", name, vs, err)
		}
	}
}

var update = flag.Bool("update", false, "write the files in plan/testdata/invalid anew")

// A fault is put into a valid plan by replacing text that it has once.
type fault struct {
	name, old, new string
}

var faults = []fault{
	{"layers-short", `    ["full", "stream", "stream"],` + "\n", ""},
	{"layers-short-row", `["fastgen", "topk", "h2o"]`, `["fastgen", "topk"]`},
	{"unknown-policy", `["fastgen", "topk", "h2o"]`, `["fastgen", "topk", "h20"]`},
	{"unused-policy", `["fastgen", "topk", "h2o"]`, `["fastgen", "topk", "full"]`},
	{"unknown-kind", `{"kind": "full"}`, `{"kind": "quest"}`},
	{"no-kind", `{"kind": "full"}`, `{}`},
	{"kind-no-string", `{"kind": "full"}`, `{"kind": 7}`},
	{"policy-no-object", `{"kind": "full"}`, `"full"`},
	{"surplus-in-policy", `{"kind": "full"}`, `{"kind": "full", "sink_tokens": 4}`},
	{"surplus-at-root", `"version": 1,`, `"version": 1, "comment": "hello",`},
	{"surplus-in-model", `"n_layers": 4,`, `"n_layers": 4, "n/a~b": 1,`},
	{"wrong-case", `"block_size": 16`, `"Block_Size": 16`},
	{"missing-many", `"n_layers": 4,` + "\n", ""},
	{"wrong-types", `"n_layers": 4,`, `"n_layers": "4",`},
	{"fraction", `"n_layers": 4,`, `"n_layers": 4.5,`},
	{"layers-mismatch", `"n_layers": 4,`, `"n_layers": 30,`},
	{"heads-indivisible", `"n_heads": 6,`, `"n_heads": 7,`},
	{"odd-head-dim", `"head_dim": 64,`, `"head_dim": 63,`},
	{"bad-hash", `"config": "3e9c1f0a`, `"config": "3E9C1F0A`},
	{"short-hash", `"config": "3e9c1f0a`, `"config": "3e9c1f0`},
	{"null-member", `"max_position": 8192,`, `"max_position": null,`},
	{"bad-scaling", `"scaling": null`, `"scaling": {"kind": "ntk", "factor": 0.5}`},
	{"llama3-incomplete", `"scaling": null`, `"scaling": {"kind": "llama3", "factor": 8}`},
	{"unknown-dtype", `"dtype": "bf16"`, `"dtype": "bf17"`},
	{"zero-block", `"block_size": 16`, `"block_size": 0`},
	{"chunk-without-chunks", `"prefill": "dense"`, `"prefill": "dense", "chunk_tokens": 512`},
	{"chunked-without-chunk", `"prefill": "dense"`, `"prefill": "chunked"`},
	{"layer-granularity", `"granularity": "kv_head"`, `"granularity": "layer"`},
	{"ids-fall", `[11, 13, 25]`, `[11, 25, 13]`},
	{"ids-twice", `[11, 13, 25]`, `[11, 13, 13]`},
	{"no-ids", `, "punctuation": [11, 13, 25]`, ``},
	{"no-recent", `"sink_tokens": 64, "recent_tokens": 256`, `"sink_tokens": 64, "recent_tokens": 0`},
	{"static-streaming", `"evict": "always", "decode": "rolling"`, `"evict": "always", "decode": "static"`},
	{"budget-under-window", `"budget_tokens": 512`, `"budget_tokens": 32`},
	{"two-budgets", `"budget_tokens": 512`, `"budget_tokens": 512, "budget_ratio": 0.5`},
	{"no-budget", `"budget_tokens": 512, `, ``},
	{"zero-budget", `"budget_tokens": 512, `, `"budget_tokens": 0, `},
	{"even-kernel", `"kernel": 7`, `"kernel": 8`},
	{"classes-reversed", `["special", "punctuation"]`, `["punctuation", "special"]`},
	{"ratio-over-one", `"frequent_ratio": 0.3`, `"frequent_ratio": 1.3`},
	{"no-overflow", `"max_tokens": 2048, "overflow": "drop_oldest"`, `"max_tokens": 2048`},
	{"bad-pattern", `(?i)api[_ ]key`, `(?i)api[_ key`},
	{"pin-everywhere", `(?i)api[_ ]key`, `x*`},
	{"pin-overflow", `"max_tokens": 512, "overflow": "drop_oldest"`, `"max_tokens": 512, "overflow": "drop_lowest"`},
	{"wrong-total", `"kept_tokens": 26880`, `"kept_tokens": 26881`},
	{"total-twice", `"prompt_tokens": 32768`, `"prompt_tokens": 4096`},
	{"no-totals", `"totals": [`, `"totals_were": [`},
	{"other-evidence", `"pattern": "(?i)api[_ ]key"`, `"pattern": "(?i)api[_ ]keys"`},
	{"wrong-retention", `"retention": 0.95`, `"retention": 0.96`},
	{"more-right-than-asked", `"m": 20`, `"m": 26`},
	{"evidence-type", `"seed": 7`, `"seed": -7`},
	{"name-of-policy", `"h2o": {"kind"`, `"h 2o": {"kind"`},
	{"duplicate-key", `"version": 1,`, `"version": 1, "version": 1,`},
	{"other-version", `"version": 1,`, `"version": 2,`},
	{"other-format", `"kvprofile.cache-plan"`, `"kvprofile.gates"`},
	{"cut-off", "\n}\n", "\n"},
	{"huge-number", `"theta": 100000`, `"theta": 1e999999999`},
}

func TestInvalidPlans(t *testing.T) {
	base := string(read(t, "valid/every-kind.json")["every-kind.json"])
	for _, f := range faults {
		if strings.Count(base, f.old) != 1 {
			t.Errorf("%s: %q stands %d times in the valid plan", f.name, f.old, strings.Count(base, f.old))
			continue
		}
		doc := []byte(strings.Replace(base, f.old, f.new, 1))
		var b strings.Builder
		form, err := Validate(doc)
		if err != nil {
			fmt.Fprintln(&b, "error /:", err)
		}
		all, _ := Check(doc)
		for _, v := range all {
			source := "meaning"
			if slices.Contains(form, v) {
				source = "schema"
			}
			fmt.Fprintln(&b, source, v)
		}
		if _, parseErr := plan.Parse(doc); parseErr == nil || b.Len() == 0 {
			t.Errorf("%s: accepted (%v)", f.name, parseErr)
		}
		path := filepath.Join("..", "plan", "testdata", "invalid", f.name)
		if *update {
			for ext, data := range map[string][]byte{".json": doc, ".want": []byte(b.String())} {
				if err := os.WriteFile(path+ext, data, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		if have, err := os.ReadFile(path + ".json"); err != nil || !bytes.Equal(have, doc) {
			t.Errorf("%s.json is not what the fault makes of the valid plan (%v)", path, err)
		}
		if want, err := os.ReadFile(path + ".want"); err != nil || string(want) != b.String() {
			t.Errorf("%s: got\n%swant\n%s(%v)", f.name, b.String(), want, err)
		}
	}
	if files := read(t, "invalid/*.json"); len(files) != len(faults) {
		t.Errorf("%d files in testdata/invalid, %d faults", len(files), len(faults))
	}
}

// mutate changes one value somewhere in a document.
func mutate(r *rand.Rand, v any) any {
	switch x := v.(type) {
	case map[string]any:
		keys := slices.Sorted(maps.Keys(x))
		switch n := r.IntN(12); {
		case len(keys) == 0 || n == 0:
			x[[]string{"kind", "factor", "max_ratio", "sink_tokens", "pins", "x"}[r.IntN(6)]] = scalar(r)
		case n == 1:
			delete(x, keys[r.IntN(len(keys))])
		default:
			k := keys[r.IntN(len(keys))]
			x[k] = mutate(r, x[k])
		}
		return x
	case []any:
		switch n := r.IntN(8); {
		case len(x) == 0 || n == 0:
			return append(x, scalar(r))
		case n == 1:
			return x[1:]
		default:
			i := r.IntN(len(x))
			x[i] = mutate(r, x[i])
		}
		return x
	}
	return scalar(r)
}

func scalar(r *rand.Rand) any {
	return []any{nil, true, "", "full", "static", "rolling", "mean", "drop_lowest", "always", "cache_slot", "f16", 0, 1, -1, 2, 16, 0.5, 1.5, 30.0, 1e9,
		json.Number("1e3"), json.Number("2.0"), json.Number("-0"), map[string]any{}, []any{}, map[string]any{"kind": "full"}}[r.IntN(26)]
}

// What package plan accepts the schema accepts too: two statements of one format, written apart.
func TestSchemaIsNoStricterThanParse(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	compiled, err := compile()
	if err != nil {
		t.Fatal(err)
	}
	accepted, refused, both := 0, 0, 0
	for name, doc := range read(t, "valid/*.json") {
		for range 600 {
			var v any
			if err := json.Unmarshal(doc, &v); err != nil {
				t.Fatal(err)
			}
			for range 1 + r.IntN(2) {
				v = mutate(r, v)
			}
			changed, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(changed))
			if err != nil {
				t.Fatal(err)
			}
			schemaErr := compiled.Validate(instance)
			_, parseErr := plan.Parse(changed)
			switch {
			case parseErr == nil && schemaErr != nil:
				t.Fatalf("%s: Parse accepts and the schema refuses\n%s\n%v", name, changed, schemaErr)
			case parseErr == nil:
				accepted++
			case schemaErr != nil:
				both++
			default:
				refused++
			}
		}
	}
	if accepted < 20 || refused < 50 || both < 500 {
		t.Errorf("%d accepted, %d refused by Parse alone, %d by both: the changes are too tame", accepted, refused, both)
	}
	t.Logf("%d accepted, %d refused by Parse alone, %d by both", accepted, refused, both)
}

func TestViolationsAreInAFixedOrder(t *testing.T) {
	doc := bytes.Replace(read(t, "valid/every-kind.json")["every-kind.json"], []byte(`"decode"`), []byte(`"Decode"`), -1)
	first, err := Check(doc)
	if err != nil || len(first) < 8 {
		t.Fatal(first, err)
	}
	for range 20 {
		if again, _ := Check(doc); !slices.Equal(again, first) {
			t.Fatalf("%v\nthen\n%v", first, again)
		}
	}
}

func FuzzCheck(f *testing.F) {
	for _, pattern := range []string{"valid/*.json", "invalid/*.json"} {
		for _, doc := range read(f, pattern) {
			f.Add(doc)
		}
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		vs, err := Check(doc)
		if _, parseErr := plan.Parse(doc); (parseErr == nil) != (err == nil && len(vs) == 0) {
			t.Errorf("Check: %v, %v; Parse: %v", vs, err, parseErr)
		}
	})
}

func BenchmarkCheck(b *testing.B) {
	doc := read(b, "valid/*.json")["llama-3.1-8b.json"]
	for b.Loop() {
		if vs, err := Check(doc); err != nil || len(vs) > 0 {
			b.Fatal(vs, err)
		}
	}
}
