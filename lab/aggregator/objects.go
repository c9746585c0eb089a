package aggregator

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"xagg/xdp"
)

// loadTraffic loads the programs of the load for a traffic with these questions, whose
// sender n runs on cpus[n].
func loadTraffic(t traffic, questions []loadQuestion, cpus []int) (*loadObjects, error) {
	answers := t.answers()
	spec, err := loadLoad()
	if err != nil {
		return nil, err
	}
	spec.Maps[loadMapQuestions].MaxEntries = uint32(len(questions))
	spec.Maps[loadMapAnswers].MaxEntries = uint32(len(answers))
	spec.Maps[loadMapRounds].MaxEntries = uint32(len(answers))
	spec.Maps[loadMapSenders].MaxEntries = uint32(slices.Max(cpus) + 1)
	for variable, value := range map[string]int{
		loadVarFrameLen: t.frameLen(), loadVarRanks: t.ranks, loadVarChunks: t.chunks, loadVarGroup: t.group,
	} {
		if err := spec.Variables[variable].Set(uint32(value)); err != nil {
			return nil, err
		}
	}
	o, err := loadObjectsOf(spec)
	if err != nil {
		return nil, err
	}
	put := func(m *ebpf.Map, key int, value any) {
		err = errors.Join(err, m.Put(uint32(key), value))
	}
	for i := range questions {
		put(o.Questions, i, &questions[i])
	}
	for i := range answers {
		put(o.Answers, i, &answers[i])
		put(o.Rounds, i, uint32(i/t.chunks))
	}
	for i := range t.senders {
		put(o.Senders, cpus[i], &loadSender{First: uint32(i), Rank: uint32(i), Step: uint32(t.senders)})
	}
	if err != nil {
		o.Close()
		return nil, fmt.Errorf("load traffic: %w", err)
	}
	return o, nil
}

// loadObjectsOf loads a collection and says what it lacks where it cannot.
func loadObjectsOf(spec *ebpf.CollectionSpec) (*loadObjects, error) {
	o := new(loadObjects)
	err := spec.LoadAndAssign(o, nil)
	switch {
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("load BPF programs of the load: %w (%w)", xdp.ErrPrivileges, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, ebpf.ErrNotSupported):
		return nil, &UnsupportedError{"BPF programs that send live frames", "5.18", err}
	case err != nil:
		return nil, fmt.Errorf("load BPF programs of the load: %w", err)
	}
	return o, nil
}
