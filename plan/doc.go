// Package plan reads, checks and applies cache plans: files that say, for every layer and KV head of a language model,
// which entries of its KV cache are kept.
//
// A server calls [Load] once with the values of its own model, and then asks the plan what it needs to lay out its
// cache: [Plan.PolicyOf], [Plan.Keep], [Plan.Slot], [Plan.Usage]. [Plan.NewKVCache] carries the plan out: it keeps the
// books of a request's cache while tokens come and go. The package imports the standard library only.
//
// A plan is a JSON document. docs/plan.md specifies every member; the schema package holds its JSON Schema. Readers of
// version 1 refuse what they do not know: another version ([ErrVersion]), another kind of policy ([ErrKind]), and
// unknown members anywhere but under "evidence" ([ErrMember]). What a plan says is checked when it is read, and so is
// that it belongs to the server's model ([ErrModel]).
//
// Lengths are in tokens, sizes in bytes. n_heads counts query heads, n_kv_heads the KV heads, each shared by a group of
// n_heads / n_kv_heads query heads; policies are per KV head.
package plan
