package npy_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"xagg/worker/npy"
)

// file makes a file of a version with a dictionary and data.
func file(major, minor byte, dict string, data ...byte) []byte {
	b := append([]byte("\x93NUMPY"), major, minor)
	if major == 1 {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(dict)))
	} else {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(dict)))
	}
	return append(append(b, dict...), data...)
}

const oneValue = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n"

var one = []byte{0, 0, 0x80, 0x3f}

func TestRead(t *testing.T) {
	for name, b := range map[string][]byte{
		"version 1":          file(1, 0, oneValue, one...),
		"version 2":          file(2, 0, oneValue, one...),
		"Fortran order":      file(1, 0, "{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }\n", one...),
		"other order, style": file(1, 0, `{"shape":( 1, ),"fortran_order":False,"descr":"<f4"}`, one...),
	} {
		got, err := npy.Read(iotest.OneByteReader(bytes.NewReader(b)))
		if err != nil || !cmp.Equal(got, []float32{1}) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// TestAppend spells one file out; TestReal compares with NumPy's own.
func TestAppend(t *testing.T) {
	want := "\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" +
		strings.Repeat(" ", 60) + "\n\x00\x00\x80\x3f\x00\x00\x20\xc0"
	if got := npy.Append(nil, []float32{1, -2.5}); string(got) != want {
		t.Errorf("got\n%q, want\n%q", got, want)
	}
	for _, v := range [][]float32{{}, {1}, {float32(math.Inf(1)), math.SmallestNonzeroFloat32, -0x1p100}, make([]float32, 100_000)} {
		got, err := npy.Read(bytes.NewReader(npy.Append(nil, v)))
		if err != nil || !cmp.Equal(got, v) {
			t.Errorf("%d values came back as %d, %v", len(v), len(got), err)
		}
	}
}

// TestReal reads a file that NumPy has written.
func TestReal(t *testing.T) {
	names, err := filepath.Glob("../../lab/data/*.npy")
	if err != nil || len(names) == 0 {
		t.Fatalf("no gradients: %v", err)
	}
	b, err := os.ReadFile(names[0])
	if err != nil {
		t.Fatal(err)
	}
	v, err := npy.Read(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(npy.Append(nil, v), b) {
		t.Error("the file does not come back byte for byte")
	}
}

func TestReadErrors(t *testing.T) {
	dict := func(s string) []byte { return file(1, 0, s, one...) }
	for _, c := range []struct {
		name string
		b    []byte
		is   error
		text string
	}{
		{"empty", nil, npy.ErrTruncated, "ends inside its header"},
		{"other file", []byte("PK\x03\x04 something"), npy.ErrFormat, "begins with"},
		{"in the magic", []byte("\x93NUM"), npy.ErrTruncated, "header"},
		{"in the length", []byte("\x93NUMPY\x02\x00\x10\x00"), npy.ErrTruncated, "header"},
		{"in the dictionary", file(1, 0, oneValue)[:30], npy.ErrTruncated, "header"},
		{"no data", file(1, 0, oneValue), npy.ErrTruncated, "68 bytes, its header promises 72"},
		{"half a value", file(1, 0, oneValue, 0, 0), npy.ErrTruncated, "promises"},
		{"more data", file(1, 0, oneValue, 0, 0, 0, 0, 7), npy.ErrTrailing, "promises 1 values"},
		{"much more data", file(1, 0, oneValue, make([]byte, 100)...), npy.ErrTrailing, "promises 1 values"},
		{"version 3", file(3, 0, oneValue, one...), npy.ErrFormat, "version 3.0"},
		{"version 1.1", file(1, 1, oneValue, one...), npy.ErrFormat, "version 1.1"},
		{"long header", file(2, 0, oneValue+strings.Repeat(" ", 1<<16), one...), npy.ErrFormat, "at most"},
		{"big-endian", dict(strings.Replace(oneValue, "<f4", ">f4", 1)), npy.ErrDtype, `">f4"`},
		{"float64", dict(strings.Replace(oneValue, "<f4", "<f8", 1)), npy.ErrDtype, `"<f8"`},
		{"float16", dict(strings.Replace(oneValue, "<f4", "<f2", 1)), npy.ErrDtype, `"<f2"`},
		{"int32", dict(strings.Replace(oneValue, "<f4", "<i4", 1)), npy.ErrDtype, `"<i4"`},
		{"record", dict(strings.Replace(oneValue, "'<f4'", "[('x', '<f4')]", 1)), npy.ErrDtype, "record"},
		{"scalar", dict(strings.Replace(oneValue, "(1,)", "()", 1)), npy.ErrShape, "0 dimensions"},
		{"matrix", dict(strings.Replace(oneValue, "(1,)", "(1, 1)", 1)), npy.ErrShape, "(1, 1) has 2 dimensions"},
		{"no tuple", dict(strings.Replace(oneValue, "(1,)", "(1)", 1)), npy.ErrFormat, "want"},
		{"negative", dict(strings.Replace(oneValue, "(1,)", "(-1,)", 1)), npy.ErrFormat, "length"},
		{"endless", dict(strings.Replace(oneValue, "(1,)", "(99999999999999999999,)", 1)), npy.ErrFormat, "length"},
		{"claims terabytes", dict(strings.Replace(oneValue, "(1,)", "(99999999999999,)", 1)), npy.ErrTruncated, "promises"},
		{"no dictionary", dict("what?"), npy.ErrFormat, `want "{"`},
		{"no shape", dict("{'descr': '<f4', 'fortran_order': False}"), npy.ErrFormat, `no key "shape"`},
		{"twice", dict("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"), npy.ErrFormat, "twice"},
		{"other key", dict("{'colour': '<f4'}"), npy.ErrFormat, `unknown key "colour"`},
		{"order", dict(strings.Replace(oneValue, "False", "Maybe", 1)), npy.ErrFormat, "fortran_order"},
		{"after", dict(strings.TrimSpace(oneValue) + "x"), npy.ErrFormat, "after the dictionary"},
		{"open string", dict("{'descr': '<f4"), npy.ErrFormat, "plain string"},
		{"escape", dict(`{'descr': '\x3cf4'}`), npy.ErrFormat, "plain string"},
		{"no comma", dict("{'descr': '<f4' 'fortran_order': False}"), npy.ErrFormat, `want "}"`},
	} {
		v, err := npy.Read(bytes.NewReader(c.b))
		if v != nil || !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %v with %q", c.name, err, c.is, c.text)
		}
	}
	broken := errors.New("disk on fire")
	if _, err := npy.Read(iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Errorf("%v, want %v", err, broken)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(file(1, 0, oneValue, one...))
	f.Add(file(2, 0, oneValue, one...))
	f.Add(npy.Append(nil, make([]float32, 3)))
	f.Add(file(1, 0, `{"shape":( 1, ),"fortran_order":False,"descr":"<f4"}`, one...))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := npy.Read(bytes.NewReader(b))
		if err != nil {
			return
		}
		h, err := npy.ReadHeader(bytes.NewReader(b))
		if err != nil || h.Len != len(v) || h.CheckSize(int64(len(b))) != nil {
			t.Fatalf("header %+v, %v, but %d values", h, err, len(v))
		}
		// The values are the file's last bytes.
		for i, x := range v {
			if got := binary.LittleEndian.Uint32(b[h.Offset+4*int64(i):]); got != math.Float32bits(x) {
				t.Fatalf("value %d is %#x, want %#x", i, math.Float32bits(x), got)
			}
		}
	})
}
