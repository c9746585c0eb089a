package engine

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// A packet's headers and metadata are one flat slice of words, the PHV (packet header vector, bmv2's term). Every
// field has words of its own, and so has every header's validity, which bmv2 shows as the hidden field $valid$.

const validName = "$valid$"

// field is a place in the PHV. Its words hold the value without sign, bits beyond width zero.
type field struct {
	name   string // header.field, for messages
	off    int    // first word
	words  int
	width  int // bits
	signed bool
	hidden bool // $valid$
	hdr    *header
	bitOff uint // offset in the header on the wire
}

// header is a header or metadata instance.
type header struct {
	name   string
	typ    string
	meta   bool // metadata is always valid
	valid  int  // word of $valid$
	first  int  // first word of the fields
	end    int  // word behind the last field ($valid$ is outside)
	nbytes int  // length on the wire
	fields []*field
	byName map[string]*field
}

func (h *header) isValid(phv []uint64) bool { return h.meta || phv[h.valid] != 0 }

const (
	maxFieldBits = 1 << 16 // far above p4c's limit of 2,048
	maxPHVWords  = 1 << 20
)

func (c *compiler) loadHeaders(j *jsonProgram) error {
	type fieldType struct {
		name   string
		width  int
		signed bool
	}
	types := map[string][]fieldType{}
	for _, t := range j.HeaderTypes {
		if _, dup := types[t.Name]; dup {
			return fmt.Errorf("header type %s: defined twice", t.Name)
		}
		fs := []fieldType{}
		for _, f := range t.Fields {
			var ft fieldType
			if len(f) < 2 || len(f) > 4 {
				return fmt.Errorf("header type %s: a field has %d attributes, want 2 to 4", t.Name, len(f))
			}
			if err := json.Unmarshal(f[0], &ft.name); err != nil {
				return fmt.Errorf("header type %s: field name: %w", t.Name, err)
			}
			if string(f[1]) == `"*"` {
				return fmt.Errorf("header type %s: variable-length field %s is not supported", t.Name, ft.name)
			}
			if err := json.Unmarshal(f[1], &ft.width); err != nil || ft.width < 1 || ft.width > maxFieldBits {
				return fmt.Errorf("header type %s: field %s: width %s is not between 1 and %d",
					t.Name, ft.name, f[1], maxFieldBits)
			}
			if len(f) > 2 {
				if err := json.Unmarshal(f[2], &ft.signed); err != nil {
					return fmt.Errorf("header type %s: field %s: sign: %w", t.Name, ft.name, err)
				}
			}
			if len(f) > 3 && string(f[3]) != "false" {
				return fmt.Errorf("header type %s: saturating field %s is not supported", t.Name, ft.name)
			}
			if ft.signed && ft.width < 2 {
				return fmt.Errorf("header type %s: signed field %s has one bit", t.Name, ft.name)
			}
			fs = append(fs, ft)
		}
		types[t.Name] = fs
	}
	for _, jh := range j.Headers {
		fs, ok := types[jh.HeaderType]
		if !ok {
			return fmt.Errorf("header %s: no header type %q", jh.Name, jh.HeaderType)
		}
		if _, dup := c.headers[jh.Name]; dup {
			return fmt.Errorf("header %s: defined twice", jh.Name)
		}
		h := &header{name: jh.Name, typ: jh.HeaderType, meta: jh.Metadata, byName: map[string]*field{}}
		h.valid = c.phvLen
		c.phvLen++
		h.first = c.phvLen
		bit := 0
		for _, ft := range fs {
			f := &field{name: jh.Name + "." + ft.name, off: c.phvLen, words: numWords(ft.width), width: ft.width,
				signed: ft.signed, hdr: h, bitOff: uint(bit)}
			bit += ft.width
			c.phvLen += f.words
			if c.phvLen > maxPHVWords {
				return fmt.Errorf("header %s: all headers together have more than %d bits", jh.Name, maxPHVWords*64)
			}
			h.fields = append(h.fields, f)
			if _, dup := h.byName[ft.name]; dup {
				return fmt.Errorf("header type %s: field %s: defined twice", jh.HeaderType, ft.name)
			}
			h.byName[ft.name] = f
		}
		if bit%8 != 0 {
			return fmt.Errorf("header %s: %d bits are not whole bytes", jh.Name, bit)
		}
		h.nbytes = bit / 8
		h.end = c.phvLen
		h.byName[validName] = &field{name: jh.Name + "." + validName, off: h.valid, words: 1, width: 1, hidden: true, hdr: h}
		c.headers[jh.Name] = h
		c.headerList = append(c.headerList, h)
	}
	for _, a := range j.FieldAliases {
		name, ok := a[0].(string)
		to, ok2 := a[1].([]any)
		if !ok || !ok2 || len(to) != 2 {
			return fmt.Errorf("field_aliases: %v: want [name, [header, field]]", a)
		}
		f, err := c.field(fmt.Sprint(to[0]), fmt.Sprint(to[1]))
		if err != nil {
			return fmt.Errorf("field_aliases: %s: %w", name, err)
		}
		c.aliases[name] = f
	}
	return nil
}

func (c *compiler) header(name string) (*header, error) {
	h, ok := c.headers[name]
	if !ok {
		return nil, fmt.Errorf("no header %q", name)
	}
	return h, nil
}

func (c *compiler) field(hdr, name string) (*field, error) {
	h, err := c.header(hdr)
	if err != nil {
		return nil, err
	}
	f, ok := h.byName[name]
	if !ok {
		return nil, fmt.Errorf("header %s has no field %q", hdr, name)
	}
	return f, nil
}

// fieldRef reads a ["header", "field"] reference.
func (c *compiler) fieldRef(v any) (*field, error) {
	a, b, err := asPair(v)
	if err != nil {
		return nil, fmt.Errorf("field reference: %w", err)
	}
	h, errH := asString(a)
	f, errF := asString(b)
	if errH != nil || errF != nil {
		return nil, fmt.Errorf("field reference: %v is not a header and a field", v)
	}
	return c.field(h, f)
}

func (c *compiler) headerRef(v any) (*header, error) {
	name, err := asString(v)
	if err != nil {
		return nil, fmt.Errorf("header reference: %w", err)
	}
	return c.header(name)
}

// known returns the field that simple_switch calls "header.name", through the aliases, or nil.
func (c *compiler) known(hdr, name string) *field {
	if f, ok := c.aliases[hdr+"."+name]; ok {
		return f
	}
	f, err := c.field(hdr, name)
	if err != nil {
		return nil
	}
	return f
}

// set stores v, cut to the field's width; a nil field is not there.
func (f *field) set(phv []uint64, v uint64) {
	if f == nil {
		return
	}
	phv[f.off] = v & lowMask(f.width)
	clear(phv[f.off+1 : f.off+f.words])
}

func (f *field) get(phv []uint64) uint64 {
	if f == nil {
		return 0
	}
	return phv[f.off]
}

// extract reads the header's fields from b, which holds its nbytes, and makes it valid.
func (h *header) extract(phv []uint64, b []byte) {
	for _, f := range h.fields {
		if f.words == 1 {
			phv[f.off] = loadBits(b, f.bitOff, uint(f.width))
		} else {
			loadWords(phv[f.off:f.off+f.words], b, f.bitOff, uint(f.width))
		}
	}
	phv[h.valid] = 1
}

// deparse writes the header's fields to b, which holds its nbytes.
func (h *header) deparse(phv []uint64, b []byte) {
	for _, f := range h.fields {
		f.store(phv, b, f.bitOff)
	}
}

func (f *field) store(phv []uint64, b []byte, off uint) {
	if f.words == 1 {
		storeBits(b, off, uint(f.width), phv[f.off])
	} else {
		storeWords(b, off, uint(f.width), phv[f.off:f.off+f.words])
	}
}

func (f *field) String() string { return f.name + ":" + strconv.Itoa(f.width) }
