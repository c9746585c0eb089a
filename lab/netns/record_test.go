package netns

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"xagg/tests/require"
)

// orphan writes a record and lets go of it as a dying owner does.
func orphan(t *testing.T, dir string, entries ...entry) string {
	t.Helper()
	j, id, err := newJournal(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := j.add(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.file.Close(); err != nil {
		t.Fatal(err)
	}
	return id
}

func TestSweepRemovesWhatIsRecorded(t *testing.T) {
	dir := t.TempDir()
	kept, lost := filepath.Join(dir, "kept"), filepath.Join(dir, "lost")
	for _, d := range []string{kept, lost} {
		if err := os.MkdirAll(filepath.Join(d, "sub"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sleep := exec.Command("sleep", "600")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := startOf(sleep.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	// The same number, another process: it must survive.
	self, err := startOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	self.Start++
	id := orphan(t, dir, entry{Path: lost}, entry{Process: &p}, entry{Process: &self},
		entry{Path: filepath.Join(dir, "never made")}, entry{Netns: "xagg-test-never-made"})

	swept, err := Sweep(dir)
	if err != nil || !slices.Equal(swept, []string{id}) {
		t.Errorf("sweep: %v, %v, want %s", swept, err, id)
	}
	if err := sleep.Wait(); err == nil || sleep.ProcessState.String() != "signal: killed" {
		t.Errorf("recorded process: %v, want it killed", err)
	}
	if _, err := os.Stat(lost); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("recorded folder: %v, want it gone", err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("folder that was not recorded: %v", err)
	}
	if records, err := Records(dir); err != nil || len(records) != 0 {
		t.Errorf("records after the sweep: %v, %v", records, err)
	}
}

// A lab removes what dead ones left, unless it is told to leave it.
func TestCreateSweeps(t *testing.T) {
	require.Have(t, require.Netns)
	dir := t.TempDir()
	dead := orphan(t, dir)
	for _, keep := range []bool{true, false} {
		spec := star(dir, 1, 0, 0)
		spec.KeepDead = keep
		lab, err := Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		records, err := Records(dir)
		found := slices.ContainsFunc(records, func(r Record) bool { return r.ID == dead })
		if err = errors.Join(err, lab.Close()); err != nil || found != keep {
			t.Errorf("KeepDead %v: a dead lab's record is there: %v; %v", keep, found, err)
		}
	}
}

func TestSweepLeavesTheLiving(t *testing.T) {
	dir := t.TempDir()
	j, id, err := newJournal(dir, "alive")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "file")
	if err := errors.Join(j.add(entry{Path: path}), os.WriteFile(path, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if swept, err := Sweep(dir); err != nil || len(swept) != 0 {
		t.Errorf("sweep: %v, %v, want nothing", swept, err)
	}
	self, err := startOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	records, err := Records(dir)
	want := []Record{{ID: id, Alive: true, Owner: self, Paths: []string{path}}}
	if err != nil || !cmp.Equal(records, want) {
		t.Errorf("records: %v\n%s", err, cmp.Diff(want, records))
	}
	if _, _, err := newJournal(dir, "alive"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second record of the same id: %v, want %v", err, fs.ErrExist)
	}
	if err := j.undo(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("recorded file: %v, want it gone", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
}

func TestParseRecord(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       Record
		err        string
	}{
		{name: "empty: the owner died before its first line"},
		{name: "torn line", text: `{"netns":"a"}` + "\n" + `{"netns":"b`, want: Record{Namespaces: []string{"a"}}},
		{name: "of a later version", text: `{"netns":"a","more":1}` + "\n", want: Record{Namespaces: []string{"a"}}},
		{name: "not a record", text: "{}\nhello\n", err: "line 2"},
		{name: "owner of another type", text: `{"owner":7}` + "\n", err: "line 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseRecord([]byte(c.text))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("parse: %v, want an error with %q", err, c.err)
				}
				return
			}
			if err != nil || !cmp.Equal(got, c.want) {
				t.Errorf("parse: %v\n%s", err, cmp.Diff(c.want, got))
			}
		})
	}
}

// A record that cannot be read is kept, and does not keep others from being swept.
func TestSweepKeepsWhatItCannotRead(t *testing.T) {
	dir := t.TempDir()
	odd := filepath.Join(dir, "0"+recordSuffix)
	if err := os.WriteFile(odd, []byte("hello\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	id := orphan(t, dir)
	swept, err := Sweep(dir)
	if err == nil || !strings.Contains(err.Error(), odd) || !slices.Equal(swept, []string{id}) {
		t.Errorf("sweep: %v, %v, want %s and an error that names %s", swept, err, id, odd)
	}
	if _, err := os.Stat(odd); err != nil {
		t.Error(err)
	}
}

// What is read is what was written, and nothing that a file may hold makes the reader panic.
func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"owner":{"pid":1,"start":2}}` + "\n" + `{"netns":"a"}` + "\n"))
	f.Add([]byte(`{"path":"/x"}` + "\n" + `{"process":{"pid":3,"start":4}}` + "\n"))
	f.Add([]byte("{}\n\x00\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRecord(data)
		if err != nil {
			return
		}
		var again []byte
		add := func(e entry) {
			line, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			again = append(append(again, line...), '\n')
		}
		add(entry{Owner: &r.Owner})
		for _, n := range r.Namespaces {
			add(entry{Netns: n})
		}
		for _, p := range r.Processes {
			add(entry{Process: &p})
		}
		for _, p := range r.Paths {
			add(entry{Path: p})
		}
		got, err := parseRecord(again)
		if err != nil || !cmp.Equal(got, r) {
			t.Errorf("written and read again: %v\n%s", err, cmp.Diff(r, got))
		}
	})
}

func TestRecordsWithoutFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "none")
	if records, err := Records(dir); err != nil || records != nil {
		t.Errorf("records: %v, %v", records, err)
	}
	if swept, err := Sweep(dir); err != nil || swept != nil {
		t.Errorf("sweep: %v, %v", swept, err)
	}
}
