package netns

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// recordSuffix ends the name of every record.
const recordSuffix = ".lab"

// Process is a process and when it started, which together name it once and for all.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, as in /proc/PID/stat
}

// entry is one line of a record; one field is set.
type entry struct {
	Owner   *Process `json:"owner,omitempty"`
	Netns   string   `json:"netns,omitempty"`
	Path    string   `json:"path,omitempty"`
	Process *Process `json:"process,omitempty"`
}

// Record is what a lab has made, or was about to make, as its file says.
type Record struct {
	ID         string
	Alive      bool // the owner still holds it
	Owner      Process
	Namespaces []string
	Processes  []Process
	Paths      []string
}

// journal is a lab's open record. The owner holds a lock on the file, which the kernel releases when the owner dies,
// however it dies.
type journal struct {
	file *os.File
	path string
}

// newJournal makes the record of a lab. Without an id it picks one; a name that is in use is an error that wraps
// [fs.ErrExist].
func newJournal(dir, id string) (*journal, string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, "", err
	}
	for {
		name := id
		if name == "" {
			var b [3]byte
			rand.Read(b[:])
			name = hex.EncodeToString(b[:])
		}
		path := filepath.Join(dir, name+recordSuffix)
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o644)
		if errors.Is(err, fs.ErrExist) && id == "" {
			continue
		}
		if err != nil {
			return nil, "", err
		}
		j := &journal{file, path}
		// Between the two calls a sweep may have seen a record that nobody held, and removed it: then once more.
		if held, err := j.lock(); err != nil {
			file.Close()
			return nil, "", err
		} else if !held {
			file.Close()
			continue
		}
		self, err := startOf(os.Getpid())
		if err == nil {
			err = j.add(entry{Owner: &self})
		}
		if err != nil {
			j.remove()
			return nil, "", err
		}
		return j, name, nil
	}
}

// openJournal opens a record that may have lost its owner; it returns nil where the owner lives or the record is gone.
func openJournal(path string) (*journal, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	j := &journal{file, path}
	held, err := j.lock()
	if err != nil || !held {
		file.Close()
		return nil, err
	}
	return j, nil
}

// lock takes the record without waiting. It reports false where somebody else has it, or has removed it.
func (j *journal) lock() (bool, error) {
	switch err := unix.Flock(int(j.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
	case nil:
	case unix.EWOULDBLOCK:
		return false, nil
	default:
		return false, fmt.Errorf("lock %s: %w", j.path, err)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(j.file.Fd()), &stat); err != nil {
		return false, fmt.Errorf("look at %s: %w", j.path, err)
	}
	return stat.Nlink > 0, nil
}

// add appends a line.
func (j *journal) add(e entry) error {
	line, err := json.Marshal(e)
	if err == nil {
		_, err = j.file.Write(append(line, '\n'))
	}
	if err != nil {
		return fmt.Errorf("record in %s: %w", j.path, err)
	}
	return nil
}

// remove removes the record and lets go of it, in this order, so that nobody finds it without an owner.
func (j *journal) remove() error {
	err := os.Remove(j.path)
	return errors.Join(err, j.file.Close())
}

// undo removes everything that the record lists, and the record if all of it is gone.
func (j *journal) undo() error {
	r, err := readRecord(j.path)
	if err != nil {
		j.file.Close()
		return err
	}
	var errs []error
	for _, p := range r.Processes {
		errs = append(errs, p.kill())
	}
	for _, name := range r.Namespaces {
		errs = append(errs, removeSpace(name))
	}
	for _, path := range r.Paths {
		errs = append(errs, os.RemoveAll(path))
	}
	if err := errors.Join(errs...); err != nil {
		j.file.Close()
		return fmt.Errorf("remove lab %s: %w", r.ID, err)
	}
	return j.remove()
}

// readRecord reads a record.
func readRecord(path string) (Record, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Record{}, err
	}
	r, err := parseRecord(data)
	if err != nil {
		return r, fmt.Errorf("read %s: %w (remove by hand what it lists, then the file)", path, err)
	}
	r.ID = strings.TrimSuffix(filepath.Base(path), recordSuffix)
	return r, nil
}

// parseRecord reads the lines of a record. A last one that was not written completely stands for something that was
// not made.
func parseRecord(data []byte) (Record, error) {
	var r Record
	for n := 1; ; n++ {
		line, rest, complete := bytes.Cut(data, []byte("\n"))
		if !complete {
			return r, nil
		}
		data = rest
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return r, fmt.Errorf("line %d: %w", n, err)
		}
		switch {
		case e.Owner != nil:
			r.Owner = *e.Owner
		case e.Netns != "":
			r.Namespaces = append(r.Namespaces, e.Netns)
		case e.Path != "":
			r.Paths = append(r.Paths, e.Path)
		case e.Process != nil:
			r.Processes = append(r.Processes, *e.Process)
		}
	}
}

// Records returns the records in a folder, those of living labs and those that dead ones left. dir is [RunDir] if
// empty; one that does not exist has no records.
func Records(dir string) ([]Record, error) {
	paths, err := recordPaths(dir)
	if err != nil {
		return nil, err
	}
	var records []Record
	var errs []error
	for _, path := range paths {
		r, err := readRecord(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // its owner was faster
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		r.Alive = r.Owner.alive()
		records = append(records, r)
	}
	return records, errors.Join(errs...)
}

// Sweep removes what labs left whose owner died without closing them, and returns their ids. dir is [RunDir] if empty.
func Sweep(dir string) ([]string, error) {
	paths, err := recordPaths(dir)
	if err != nil {
		return nil, err
	}
	var swept []string
	var errs []error
	for _, path := range paths {
		j, err := openJournal(path)
		if err == nil && j == nil {
			continue
		}
		if err == nil {
			err = j.undo()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", path, err))
			continue
		}
		swept = append(swept, strings.TrimSuffix(filepath.Base(path), recordSuffix))
	}
	return swept, errors.Join(errs...)
}

func recordPaths(dir string) ([]string, error) {
	if dir == "" {
		dir = RunDir
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), recordSuffix) {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, nil
}
