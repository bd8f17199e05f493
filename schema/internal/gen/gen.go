// Package gen makes the JSON Schema of the cache plan from the Go types of package plan, so that the two cannot part.
package gen

import (
	"encoding/json"
	"fmt"
	"path"
	"reflect"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
	"github.com/kvprofile/kvprofile/plan"
)

const module = "github.com/kvprofile/kvprofile"

// ID is the schema's identifier. It names, and is no address.
const ID = "urn:kvprofile:cache-plan:v1"

// maxTokenID is the highest token id that the schema allows.
const maxTokenID = 1<<31 - 1

// enums are the values of the types that are strings with a closed set of values.
func enums() map[reflect.Type][]any {
	return map[reflect.Type][]any{
		reflect.TypeFor[plan.ScalingKind](): {plan.ScalingLinear, plan.ScalingLlama3, plan.ScalingYaRN},
		reflect.TypeFor[plan.Dtype]():       {plan.F32, plan.F16, plan.BF16, plan.FP8E4M3, plan.FP8E5M2, plan.Int8},
		reflect.TypeFor[plan.Granularity](): {plan.PerKVHead, plan.PerLayer},
		reflect.TypeFor[plan.GroupRule]():   {plan.GroupMin, plan.GroupMean},
		reflect.TypeFor[plan.Prefill]():     {plan.PrefillDense, plan.PrefillChunked},
		reflect.TypeFor[plan.HeadTies]():    {plan.LowerLayerThenKVHead},
		reflect.TypeFor[plan.TokenTies]():   {plan.LowerPosition},
		reflect.TypeFor[plan.Overflow]():    {plan.DropOldest, plan.DropLowest, plan.Refuse},
		reflect.TypeFor[plan.Evict]():       {plan.EvictAlways, plan.EvictPrefillEnd},
		reflect.TypeFor[plan.Decode]():      {plan.DecodeStatic, plan.DecodeRolling},
		reflect.TypeFor[plan.Positions]():   {plan.PositionsOriginal, plan.PositionsCacheSlot},
		reflect.TypeFor[plan.Class]():       {plan.ClassSpecial, plan.ClassPunctuation},
		reflect.TypeFor[plan.PoolKind]():    {plan.PoolNone, plan.PoolMax, plan.PoolAvg},
		reflect.TypeFor[plan.Aggregate]():   {plan.AggregateMean, plan.AggregateMax, plan.AggregateUnion},
	}
}

// narrower are members that allow only some of their type's values.
func narrower() map[string][]any {
	return map[string][]any{
		"Pin.overflow":     {plan.DropOldest, plan.Refuse},
		"Streaming.decode": {plan.DecodeRolling},
		"H2O.decode":       {plan.DecodeRolling},
		"FastGen.evict":    {plan.EvictPrefillEnd},
		"TopK.evict":       {plan.EvictPrefillEnd},
	}
}

// lenient are the types under "evidence": what a reader does not know in them it ignores.
func lenient() []string {
	return []string{"Evidence", "Recipe", "HeadRef", "Calibration", "DatasetRef", "Agreement", "Evaluation", "Divergence"}
}

// Schema makes the JSON Schema of version 1. planDir is the folder of package plan, relative to the working directory:
// the descriptions are its comments.
func Schema(planDir string) (schema []byte, err error) {
	r := &jsonschema.Reflector{}
	// The library joins the path that it is given to the import path of the working directory.
	base := module + strings.Repeat("/x", strings.Count(planDir, ".."))
	if path.Join(base, planDir) != module+"/plan" {
		return nil, fmt.Errorf("%s is not a relative path to the folder plan", planDir)
	}
	if err := r.AddGoComments(base, planDir, jsonschema.WithFullComment()); err != nil {
		return nil, fmt.Errorf("read the comments of package plan: %w", err)
	}
	r.LookupComment = func(t reflect.Type, field string) string { return describe(r.CommentMap, t, field) }
	values := enums()
	policy := reflect.TypeFor[plan.Policy]()
	r.Mapper = func(t reflect.Type) *jsonschema.Schema {
		if t == policy {
			return &jsonschema.Schema{Ref: "#/$defs/Policy"}
		}
		if v, ok := values[t]; ok {
			return &jsonschema.Schema{Type: "string", Enum: v}
		}
		return nil
	}
	s := r.Reflect(&plan.Plan{})
	s.ID = ID
	s.Title = "cache plan, version 1"
	e := editor{defs: s.Definitions}
	union := &jsonschema.Schema{Type: "object", Required: []string{"kind"}, Properties: jsonschema.NewProperties(),
		Description: describe(r.CommentMap, policy, "")}
	var kinds []any
	for _, q := range []plan.Policy{plan.Full{}, plan.Streaming{}, plan.FastGen{}, plan.TopK{}, plan.H2O{}} {
		for name, d := range r.Reflect(q).Definitions {
			s.Definitions[name] = d
		}
		name := reflect.TypeOf(q).Name()
		e.kind(name, q.Kind())
		kinds = append(kinds, q.Kind())
		is := jsonschema.NewProperties()
		is.Set("kind", &jsonschema.Schema{Const: q.Kind()})
		union.AllOf = append(union.AllOf, &jsonschema.Schema{If: &jsonschema.Schema{Properties: is, Required: []string{"kind"}},
			Then: &jsonschema.Schema{Ref: "#/$defs/" + name}})
	}
	union.Properties.Set("kind", &jsonschema.Schema{Type: "string", Enum: kinds, Description: "Kind of policy."})
	s.Definitions["Policy"] = union
	e.constant("Plan.format", plan.Format)
	e.constant("Plan.version", plan.Version)
	for member, v := range narrower() {
		e.member(member).Enum = v
	}
	for _, name := range lenient() {
		e.def(name).AdditionalProperties = nil
	}
	least := uint64(1)
	policies := e.member("Plan.policies")
	policies.MinProperties = &least
	policies.PatternProperties = map[string]*jsonschema.Schema{"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": {Ref: "#/$defs/Policy"}}
	policies.AdditionalProperties = jsonschema.FalseSchema
	mostHeads, two := uint64(512), uint64(2)
	row := e.member("Plan.layers").Items
	row.MinItems, row.MaxItems = &least, &mostHeads
	for _, class := range []string{"TokenClasses.special", "TokenClasses.punctuation"} {
		ids := e.member(class)
		ids.UniqueItems = true
		ids.Items.Minimum, ids.Items.Maximum = "0", number(maxTokenID)
	}
	classes := e.member("FastGen.classes")
	classes.MinItems, classes.MaxItems, classes.UniqueItems = &least, &two, true
	windows := e.member("Model.sliding_window").Items
	windows.Minimum, windows.Maximum = "0", number(1<<27)
	e.member("RoPEScaling.divisors").Items.ExclusiveMinimum = "0"
	// One branch decides, so that an error in the object is not reported beside "must be null".
	e.replace("RoPE.scaling", &jsonschema.Schema{If: &jsonschema.Schema{Type: "null"}, Else: &jsonschema.Schema{Ref: "#/$defs/RoPEScaling"},
		Description: e.member("RoPE.scaling").Description})
	if e.err != nil {
		return nil, e.err
	}
	out, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(out, '\n'), nil
}

func number(n int64) json.Number { return json.Number(strconv.FormatInt(n, 10)) }

// describe is the comment of a type or a field, in the words of the document: the member's name for the field's, and
// no brackets around names.
func describe(comments map[string]string, t reflect.Type, field string) string {
	name := t.PkgPath() + "." + t.Name()
	if field == "" {
		return words(comments[name])
	}
	text := words(comments[name+"."+field])
	if f, ok := t.FieldByName(field); ok {
		member, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if rest, ok := strings.CutPrefix(text, field+" "); ok && field != strings.ToUpper(member[:1])+member[1:] {
			return member + " " + rest
		}
	}
	return text
}

func words(comment string) string {
	return strings.NewReplacer("\n", " ", "[Plan.Digest]", "digest", "[Full]", "full", "[Streaming]", "streaming",
		"[FastGen]", "fastgen", "[TopK]", "topk", "[H2O]", "h2o").Replace(comment)
}

// editor changes definitions, and remembers the first name that there is not.
type editor struct {
	defs jsonschema.Definitions
	err  error
}

func (e *editor) def(name string) *jsonschema.Schema {
	if d, ok := e.defs[name]; ok {
		return d
	}
	if e.err == nil {
		e.err = fmt.Errorf("the schema has no definition %s", name)
	}
	return &jsonschema.Schema{Properties: jsonschema.NewProperties()}
}

// member is the schema of "Definition.member".
func (e *editor) member(name string) *jsonschema.Schema {
	def, member, _ := strings.Cut(name, ".")
	if m, ok := e.def(def).Properties.Get(member); ok {
		return m
	}
	if e.err == nil {
		e.err = fmt.Errorf("the schema has no member %s", name)
	}
	return &jsonschema.Schema{Items: &jsonschema.Schema{}}
}

func (e *editor) replace(name string, s *jsonschema.Schema) {
	def, member, _ := strings.Cut(name, ".")
	e.def(def).Properties.Set(member, s)
}

// constant fixes a member's value: the library's tag for it is without effect.
func (e *editor) constant(name string, v any) { e.member(name).Const = v }

// kind adds the member that a policy's Go type has no field for, as the first.
func (e *editor) kind(name string, k plan.Kind) {
	d := e.def(name)
	old := d.Properties
	d.Properties = jsonschema.NewProperties()
	d.Properties.Set("kind", &jsonschema.Schema{Type: "string", Const: k})
	for p := old.Oldest(); p != nil; p = p.Next() {
		d.Properties.Set(p.Key, p.Value)
	}
	d.Required = append([]string{"kind"}, d.Required...)
	d.AdditionalProperties = jsonschema.FalseSchema
}
