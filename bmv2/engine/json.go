package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/big"
	"slices"
	"strings"
)

// The JSON format is bmv2's, described in its docs/JSON_format.md. These types name every attribute that p4c writes
// for a program of the subset, so that the decoder refuses any other by its name.

type sourceInfo = json.RawMessage // where in the P4 source; not used

type jsonProgram struct {
	Program           string            `json:"program"`
	Meta              jsonMeta          `json:"__meta__"`
	HeaderTypes       []jsonHeaderType  `json:"header_types"`
	Headers           []jsonHeader      `json:"headers"`
	HeaderStacks      []jsonNamed       `json:"header_stacks"`
	HeaderUnionTypes  []jsonNamed       `json:"header_union_types"`
	HeaderUnions      []jsonNamed       `json:"header_unions"`
	HeaderUnionStacks []jsonNamed       `json:"header_union_stacks"`
	FieldLists        []json.RawMessage `json:"field_lists"`
	Errors            [][2]any          `json:"errors"`
	Enums             []json.RawMessage `json:"enums"`
	Parsers           []jsonParser      `json:"parsers"`
	ParseVSets        []jsonNamed       `json:"parse_vsets"`
	Deparsers         []jsonDeparser    `json:"deparsers"`
	MeterArrays       []jsonNamed       `json:"meter_arrays"`
	CounterArrays     []jsonCounter     `json:"counter_arrays"`
	RegisterArrays    []jsonRegister    `json:"register_arrays"`
	Calculations      []jsonCalculation `json:"calculations"`
	LearnLists        []jsonNamed       `json:"learn_lists"`
	Actions           []jsonAction      `json:"actions"`
	Pipelines         []jsonPipeline    `json:"pipelines"`
	Checksums         []jsonChecksum    `json:"checksums"`
	ForceArith        []json.RawMessage `json:"force_arith"` // bmv2's own optimization; no meaning here
	Externs           []jsonNamed       `json:"extern_instances"`
	FieldAliases      [][2]any          `json:"field_aliases"`
}

type jsonMeta struct {
	Version  []int  `json:"version"`
	Compiler string `json:"compiler"`
}

// jsonNamed is an object of a kind that is refused: only its name is of interest.
type jsonNamed struct{ Name string }

func (n *jsonNamed) UnmarshalJSON(b []byte) error {
	var v struct {
		Name string `json:"name"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	n.Name = v.Name
	return nil
}

type jsonHeaderType struct {
	Name      string              `json:"name"`
	ID        int                 `json:"id"`
	Fields    [][]json.RawMessage `json:"fields"`
	MaxLength *int                `json:"max_length"`
}

type jsonHeader struct {
	Name       string `json:"name"`
	ID         int    `json:"id"`
	HeaderType string `json:"header_type"`
	Metadata   bool   `json:"metadata"`
	PIOmit     bool   `json:"pi_omit"`
}

type jsonParser struct {
	Name   string           `json:"name"`
	ID     int              `json:"id"`
	Init   string           `json:"init_state"`
	States []jsonParseState `json:"parse_states"`
}

type jsonParseState struct {
	Name        string           `json:"name"`
	ID          int              `json:"id"`
	Ops         []jsonParserOp   `json:"parser_ops"`
	Transitions []jsonTransition `json:"transitions"`
	Key         []jsonValue      `json:"transition_key"`
	SourceInfo  sourceInfo       `json:"source_info"`
}

type jsonParserOp struct {
	Op         string     `json:"op"`
	Parameters []any      `json:"parameters"`
	SourceInfo sourceInfo `json:"source_info"`
}

type jsonTransition struct {
	Type  string  `json:"type"`
	Value *string `json:"value"`
	Mask  *string `json:"mask"`
	Next  *string `json:"next_state"`
}

type jsonDeparser struct {
	Name       string            `json:"name"`
	ID         int               `json:"id"`
	Order      []string          `json:"order"`
	Primitives []json.RawMessage `json:"primitives"`
	SourceInfo sourceInfo        `json:"source_info"`
}

type jsonCounter struct {
	Name       string     `json:"name"`
	ID         int        `json:"id"`
	Size       int        `json:"size"`
	Direct     bool       `json:"is_direct"`
	Binding    string     `json:"binding"`
	SourceInfo sourceInfo `json:"source_info"`
}

type jsonRegister struct {
	Name       string     `json:"name"`
	ID         int        `json:"id"`
	Size       int        `json:"size"`
	Bitwidth   int        `json:"bitwidth"`
	SourceInfo sourceInfo `json:"source_info"`
}

type jsonCalculation struct {
	Name       string      `json:"name"`
	ID         int         `json:"id"`
	Algo       string      `json:"algo"`
	Input      []jsonValue `json:"input"`
	SourceInfo sourceInfo  `json:"source_info"`
}

type jsonAction struct {
	Name       string          `json:"name"`
	ID         int             `json:"id"`
	Params     []jsonParam     `json:"runtime_data"`
	Primitives []jsonPrimitive `json:"primitives"`
	SourceInfo sourceInfo      `json:"source_info"`
}

type jsonParam struct {
	Name     string `json:"name"`
	Bitwidth int    `json:"bitwidth"`
}

type jsonPrimitive struct {
	Op         string      `json:"op"`
	Parameters []jsonValue `json:"parameters"`
	SourceInfo sourceInfo  `json:"source_info"`
}

// jsonValue is bmv2's "type value object". Its value may be another one, many levels deep; it is decoded without a
// type, so that the decoder passes over every level once.
type jsonValue struct {
	Type       string     `json:"type"`
	Value      any        `json:"value"`
	Bitwidth   int        `json:"bitwidth"`
	SourceInfo sourceInfo `json:"source_info"`
}

type jsonPipeline struct {
	Name         string            `json:"name"`
	ID           int               `json:"id"`
	Init         *string           `json:"init_table"`
	Tables       []jsonTable       `json:"tables"`
	Profiles     []jsonNamed       `json:"action_profiles"`
	Conditionals []jsonConditional `json:"conditionals"`
	ActionCalls  []jsonNamed       `json:"action_calls"`
	SourceInfo   sourceInfo        `json:"source_info"`
}

type jsonTable struct {
	Name         string             `json:"name"`
	ID           int                `json:"id"`
	Key          []jsonKey          `json:"key"`
	MatchType    string             `json:"match_type"`
	Type         string             `json:"type"`
	MaxSize      *int               `json:"max_size"`
	WithCounters bool               `json:"with_counters"`
	Timeout      bool               `json:"support_timeout"`
	DirectMeters *string            `json:"direct_meters"`
	ActionIDs    []int              `json:"action_ids"`
	Actions      []string           `json:"actions"`
	BaseNext     *string            `json:"base_default_next"`
	Next         map[string]*string `json:"next_tables"`
	Default      *jsonDefault       `json:"default_entry"`
	Entries      []jsonEntry        `json:"entries"`
	Profile      string             `json:"action_profile"`
	SourceInfo   sourceInfo         `json:"source_info"`
}

type jsonKey struct {
	MatchType  string     `json:"match_type"`
	Name       string     `json:"name"`
	Target     any        `json:"target"`
	Mask       *string    `json:"mask"`
	SourceInfo sourceInfo `json:"source_info"`
}

type jsonDefault struct {
	ActionID    int      `json:"action_id"`
	ActionConst bool     `json:"action_const"`
	Data        []string `json:"action_data"`
	EntryConst  bool     `json:"action_entry_const"`
}

type jsonEntry struct {
	MatchKey []jsonMatch `json:"match_key"`
	Action   struct {
		ID   int      `json:"action_id"`
		Data []string `json:"action_data"`
	} `json:"action_entry"`
	Priority   int        `json:"priority"`
	SourceInfo sourceInfo `json:"source_info"`
}

type jsonMatch struct {
	MatchType string `json:"match_type"`
	Key       any    `json:"key"`
	Mask      string `json:"mask"`
	Prefix    int    `json:"prefix_length"`
	Start     string `json:"start"`
	End       string `json:"end"`
}

type jsonConditional struct {
	Name       string     `json:"name"`
	ID         int        `json:"id"`
	Expression jsonValue  `json:"expression"`
	True       *string    `json:"true_next"`
	False      *string    `json:"false_next"`
	SourceInfo sourceInfo `json:"source_info"`
}

type jsonChecksum struct {
	Name        string     `json:"name"`
	ID          int        `json:"id"`
	Target      [2]string  `json:"target"`
	Type        string     `json:"type"`
	Calculation string     `json:"calculation"`
	Update      *bool      `json:"update"`
	Verify      *bool      `json:"verify"`
	Cond        *jsonValue `json:"if_cond"`
	SourceInfo  sourceInfo `json:"source_info"`
}

// decode is json.Unmarshal that refuses attributes the target does not name, and anything behind the value.
func decode(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if d.More() {
		return fmt.Errorf("data after the JSON value")
	}
	return nil
}

// The functions below read what was decoded without a type.

// asObject returns an object's attributes and refuses those that are not known.
func asObject(v any, known ...string) (map[string]any, error) {
	m, ok := v.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%v is not an object", v)
	}
	for k := range m {
		if !slices.Contains(known, k) && k != "source_info" {
			return nil, fmt.Errorf("unknown attribute %q", k)
		}
	}
	return m, nil
}

func asString(v any) (string, error) {
	s, ok := v.(string)
	if !ok {
		return "", fmt.Errorf("%v is not a string", v)
	}
	return s, nil
}

func asInt(v any) (int, error) {
	f, ok := v.(float64)
	if !ok || f != float64(int32(f)) {
		return 0, fmt.Errorf("%v is not a whole number of 32 bits", v)
	}
	return int(f), nil
}

func asBool(v any) (bool, error) {
	b, ok := v.(bool)
	if !ok {
		return false, fmt.Errorf("%v is not a bool", v)
	}
	return b, nil
}

// asPair returns the elements of a list of two.
func asPair(v any) (a, b any, err error) {
	l, ok := v.([]any)
	if !ok || len(l) != 2 {
		return nil, nil, fmt.Errorf("%v is not a list of two", v)
	}
	return l[0], l[1], nil
}

func asValue(v any) (*jsonValue, error) {
	m, err := asObject(v, "type", "value", "bitwidth")
	if err != nil {
		return nil, err
	}
	j := &jsonValue{Value: m["value"]}
	if j.Type, err = asString(m["type"]); err != nil {
		return nil, fmt.Errorf("type: %w", err)
	}
	if w, ok := m["bitwidth"]; ok {
		if j.Bitwidth, err = asInt(w); err != nil {
			return nil, fmt.Errorf("bitwidth: %w", err)
		}
	}
	return j, nil
}

func asPrimitive(v any) (*jsonPrimitive, error) {
	m, err := asObject(v, "op", "parameters")
	if err != nil {
		return nil, err
	}
	p := new(jsonPrimitive)
	if p.Op, err = asString(m["op"]); err != nil {
		return nil, fmt.Errorf("op: %w", err)
	}
	list, _ := m["parameters"].([]any)
	for _, x := range list {
		j, err := asValue(x)
		if err != nil {
			return nil, fmt.Errorf("primitive %q: %w", p.Op, err)
		}
		p.Parameters = append(p.Parameters, *j)
	}
	return p, nil
}

// parseHex reads bmv2's hexstr: hexadecimal, with an optional minus sign and an optional 0x.
func parseHex(s string) (*big.Int, error) {
	t, neg := strings.CutPrefix(s, "-")
	t = strings.TrimPrefix(t, "0x")
	v, ok := new(big.Int).SetString(t, 16)
	if !ok || strings.HasPrefix(t, "-") || strings.HasPrefix(t, "+") {
		return nil, fmt.Errorf("hexstr %q: not a hexadecimal number", s)
	}
	if neg {
		v.Neg(v)
	}
	return v, nil
}
