package engine

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

func readTestdata(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func load(t testing.TB, name string) *Program {
	t.Helper()
	p, err := Load(readTestdata(t, name), Options{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

type object = map[string]any

// at walks into decoded JSON by keys, indices and names of objects in a list.
func at(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			if m, ok := v.(object); ok {
				v = m[p]
				continue
			}
			for _, x := range v.([]any) {
				if x.(object)["name"] == p {
					v = x
				}
			}
		case int:
			v = v.([]any)[p]
		}
	}
	return v
}

// TestLoadRefusesByName changes one thing in a program and expects an error that names it.
func TestLoadRefusesByName(t *testing.T) {
	list := func(root object, key string, item any) { root[key] = append(root[key].([]any), item) }
	table := func(root object, name string) object {
		return at(root, "pipelines", "ingress", "tables", name).(object)
	}
	action := func(root object, name string) object { return at(root, "actions", name).(object) }
	primitive := func(root object, op string, params ...any) {
		action(root, "I.exact_hit")["primitives"] = []any{object{"op": op, "parameters": params}}
	}
	field := func(h, f string) object { return object{"type": "field", "value": []any{h, f}} }
	expression := func(op string, l, r any) object {
		return object{"type": "expression", "value": object{"op": op, "left": l, "right": r}}
	}
	hex := func(s string) object { return object{"type": "hexstr", "value": s} }
	shl := expression("<<", field("ask", "addr"), field("ask", "addr"))

	for _, c := range []struct {
		name   string
		change func(root object)
		want   []string
	}{
		{"attribute", func(r object) { r["parser_hints"] = 1 }, []string{`"parser_hints"`}},
		{"attribute of a table", func(r object) { table(r, "I.lpm_t")["cache"] = true }, []string{`"cache"`}},
		{"version", func(r object) { at(r, "__meta__").(object)["version"] = []any{3, 0} }, []string{"version", "3"}},
		{"header stack", func(r object) { list(r, "header_stacks", object{"name": "vlans"}) }, []string{"header stack vlans"}},
		{"header union", func(r object) { list(r, "header_unions", object{"name": "u"}) }, []string{"header union u"}},
		{"value set", func(r object) { list(r, "parse_vsets", object{"name": "vs"}) }, []string{"value set vs"}},
		{"meter", func(r object) { list(r, "meter_arrays", object{"name": "I.m"}) }, []string{"meter I.m"}},
		{"digest", func(r object) { list(r, "learn_lists", object{"name": "d"}) }, []string{"digest d"}},
		{"extern", func(r object) { list(r, "extern_instances", object{"name": "e"}) }, []string{"extern e"}},
		{"variable length", func(r object) { at(r, "header_types", "tlv_h", "fields", 1).([]any)[1] = "*" },
			[]string{"tlv_h", "variable-length", "value"}},
		{"field width", func(r object) { at(r, "header_types", "tlv_h", "fields", 1).([]any)[1] = 0 }, []string{"tlv_h", "value", "width 0"}},
		{"bits", func(r object) { at(r, "header_types", "tlv_h", "fields", 1).([]any)[1] = 23 }, []string{"tlv", "31 bits"}},
		{"header type", func(r object) { at(r, "headers", "tlv").(object)["header_type"] = "x_h" }, []string{"tlv", "x_h"}},
		{"primitive", func(r object) { primitive(r, "clone_ingress_pkt_to_egress") }, []string{"I.exact_hit", "clone_ingress_pkt_to_egress"}},
		{"recirculate", func(r object) { primitive(r, "recirculate", hex("0x1")) }, []string{"recirculate", "not supported"}},
		{"parameters", func(r object) { primitive(r, "exit", hex("0x1")) }, []string{"exit", "1 parameters, want 0"}},
		{"missing parameter", func(r object) { primitive(r, "assign", field("ask", "key")) }, []string{"assign", "missing"}},
		{"field", func(r object) { primitive(r, "assign", field("ask", "colour"), hex("0x1")) }, []string{"ask", "colour"}},
		{"header", func(r object) { primitive(r, "add_header", object{"type": "header", "value": "vlan"}) }, []string{"vlan"}},
		{"valid bit", func(r object) { primitive(r, "assign", field("ask", "$valid$"), hex("0x1")) }, []string{"ask.$valid$"}},
		{"operator", func(r object) {
			primitive(r, "assign", field("ask", "key"), expression("**", hex("0x1"), hex("0x2")))
		}, []string{`"**"`}},
		{"stack access", func(r object) {
			primitive(r, "assign", field("ask", "key"), object{"type": "stack_field", "value": []any{"vlans", "id"}})
		}, []string{"stack_field"}},
		{"shift without bound", func(r object) {
			primitive(r, "assign", field("ask", "key"), expression("b2d", nil, expression("==", shl, shl)))
		}, []string{"<<", "more than"}},
		{"bool as number", func(r object) {
			primitive(r, "assign", field("ask", "key"), expression("==", hex("0x1"), hex("0x1")))
		}, []string{"bool", "number"}},
		{"parameter of the action", func(r object) {
			primitive(r, "assign", field("ask", "key"), object{"type": "runtime_data", "value": 1})
		}, []string{"runtime_data 1", "1 parameters"}},
		{"jump", func(r object) { primitive(r, "_jump", hex("0x7")) }, []string{"_jump", "between 0 and 1"}},
		{"register", func(r object) {
			primitive(r, "register_read", field("ask", "key"), object{"type": "register_array", "value": "I.r"}, hex("0x0"))
		}, []string{"I.r"}},
		{"register size", func(r object) {
			list(r, "register_arrays", object{"name": "I.big", "id": 0, "size": 1 << 30, "bitwidth": 2048})
		}, []string{"I.big", "MiB"}},
		{"calculation", func(r object) { at(r, "calculations", 0).(object)["algo"] = "md5" }, []string{"calc", `"md5"`}},
		{"checksum", func(r object) { at(r, "checksums", 0).(object)["type"] = "ipv4" }, []string{"cksum", `"ipv4"`}},
		{"parser operation", func(r object) {
			at(r, "parsers", "parser", "parse_states", "ask", "parser_ops", 0).(object)["op"] = "extract_VL"
		}, []string{"ask", "extract_VL"}},
		{"parser state", func(r object) {
			at(r, "parsers", "parser", "parse_states", "ask", "transitions", 0).(object)["next_state"] = "nirvana"
		}, []string{"ask", "nirvana"}},
		{"transition value", func(r object) {
			at(r, "parsers", "parser", "parse_states", "ask", "transitions", 0).(object)["value"] = "0x0102030405"
		}, []string{"ask", "0x0102030405"}},
		{"transition", func(r object) {
			at(r, "parsers", "parser", "parse_states", "ask", "transitions", 0).(object)["type"] = "parse_vset"
		}, []string{"ask", "parse_vset"}},
		{"table type", func(r object) { table(r, "I.lpm_t")["type"] = "indirect" }, []string{"I.lpm_t", `"indirect"`}},
		{"match type", func(r object) { table(r, "I.lpm_t")["match_type"] = "exact" }, []string{"I.lpm_t", "lpm", "exact"}},
		{"timeout", func(r object) { table(r, "I.lpm_t")["support_timeout"] = true }, []string{"I.lpm_t", "support_timeout"}},
		{"direct meter", func(r object) { table(r, "I.lpm_t")["direct_meters"] = "I.m" }, []string{"I.lpm_t", "I.m"}},
		{"next table", func(r object) { table(r, "I.lpm_t")["next_tables"].(object)["NoAction"] = "I.exact_u" },
			[]string{"I.lpm_t", "I.exact_u"}},
		{"loop", func(r object) { table(r, "I.lpm_t")["next_tables"].(object)["NoAction"] = "I.exact_t" }, []string{"ingress", "loop"}},
		{"constant entry", func(r object) {
			at(table(r, "I.fixed_t"), "entries", 0, "match_key", 0).(object)["key"] = "0xff"
		}, []string{"I.fixed_t", "entry 0", "0xff"}},
		{"standard metadata", func(r object) {
			for _, f := range at(r, "header_types", "standard_metadata", "fields").([]any) {
				if f.([]any)[0] == "packet_length" {
					f.([]any)[0] = "length_of_packet"
				}
			}
			action(r, "I.exact_hit")["primitives"] = []any{}
		}, []string{"packet_length"}},
		{"pipeline", func(r object) { at(r, "pipelines", "ingress").(object)["name"] = "main" }, []string{"main"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var root object
			if err := json.Unmarshal(readTestdata(t, "switch.json"), &root); err != nil {
				t.Fatal(err)
			}
			c.change(root)
			b, err := json.Marshal(root)
			if err != nil {
				t.Fatal(err)
			}
			_, err = Load(b, Options{})
			if err == nil {
				t.Fatal("loaded")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error does not name %s: %v", w, err)
				}
			}
		})
	}
}

func TestLoadRefusesOtherFiles(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "list": "[]", "text": "hello", "cut": string(readTestdata(t, "switch.json")[:5000]),
		"two": string(readTestdata(t, "switch.json")) + "{}", "nothing": "{}",
	} {
		if _, err := Load([]byte(text), Options{}); err == nil {
			t.Errorf("%s: loaded", name)
		}
	}
}

// FuzzLoad looks for files that make the loader, or the program it has loaded, panic.
func FuzzLoad(f *testing.F) {
	var small bytes.Buffer
	if err := json.Compact(&small, readTestdata(f, "small.json")); err != nil {
		f.Fatal(err)
	}
	f.Add(small.Bytes())
	frame := make([]byte, 200)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Load(b, Options{})
		if err != nil {
			return
		}
		p.Process(1, frame, 0, func(uint16, []byte) {})
	})
}

// FuzzProcess looks for frames that make a program panic.
func FuzzProcess(f *testing.F) {
	sw := load(f, "switch.json")
	sums, flushes := loadXAgg(f), loadXAgg(f)
	programXAgg(f, sums, xaggPlan{})
	programXAgg(f, flushes, xaggPlan{true, 1, 0})
	if err := sw.AddGroup(1, []Replica{{1, 1}, {2, 1}}); err != nil {
		f.Fatal(err)
	}
	f.Add(uint16(1), gradFrame(0, 1, 5))
	f.Add(uint16(510), append([]byte{0, 5}, gradFrame(0, 1, 5)...))
	f.Add(uint16(2), append(make([]byte, 12), 0x12, 0x34, 0x31, 0x23, 0, 1, 10, 1, 2, 3, 0x23, 0, 1))
	f.Add(uint16(2), []byte{})
	f.Fuzz(func(t *testing.T, port uint16, frame []byte) {
		if len(frame) > 9000 {
			return
		}
		for _, p := range []*Program{sw, sums, flushes} {
			p.Process(port, frame, 7, func(_ uint16, out []byte) {
				if len(out) > len(frame)+maxGrowth {
					t.Errorf("%d bytes became %d", len(frame), len(out))
				}
			})
		}
	})
}
