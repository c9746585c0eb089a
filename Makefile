SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build the xagg binary into ./build
	go build -ldflags "-X xagg/lab/bench.revision=$$(git describe --always --abbrev=40 --dirty=+dirty --match=- 2>/dev/null)" -o build/xagg ./cmd/xagg

.PHONY: demo
demo: build ## all-reduce real gradients in all three modes
	./build/xagg demo

.PHONY: test
test: ## run all tests
	go test -timeout 30m ./...

.PHONY: chaos
chaos: ## run jobs on faulty links for an hour (XAGG_CHAOS=10m for less)
	XAGG_CHAOS=$${XAGG_CHAOS:-1h} go test -count 1 -timeout 0 -run TestChaos ./tests/chaos

SCHEDULES ?= 100000

.PHONY: sim
sim: ## simulate random schedules of faults: make sim SCHEDULES=1000000
	go test ./sim -run TestSchedules -v -timeout 0 -schedules $(SCHEDULES)

.PHONY: generate
generate: ## regenerate what is generated (needs clang, protoc; p4c where installed)
	go generate ./...

.PHONY: demo-mininet
demo-mininet: build ## run the demo in Mininet (needs root and Debian's mininet)
	/usr/bin/python3 bmv2/mininet/demo.py

.PHONY: doctor
doctor: build ## say what this machine has and how to get the rest
	./build/xagg doctor

# compare runs scenarios in modes and makes the report, also when a run has failed or was interrupted.
compare = mkdir -p build/bench; status=0; \
	./build/xagg bench run $(1) --force --out build/bench/$(2).jsonl || status=$$?; \
	./build/xagg bench report build/bench/$(2).jsonl -o html --out build/bench/$(2).html; \
	./build/xagg bench report build/bench/$(2).jsonl -o markdown --out build/bench/$(2).md; \
	echo "the report is build/bench/$(2).html, and build/bench/$(2).md"; exit $$status

SCENARIOS ?= $(addprefix scenarios/,$(addsuffix .yaml,homogeneous slow-2 slow-4 link-25 jitter))
REPEAT ?= 5

.PHONY: bench
bench: build ## compare ways of aggregating: five scenarios, eight modes, ten minutes (needs root)
	$(call compare,$(SCENARIOS) --repeat $(REPEAT),bench)

.PHONY: bench-full
bench-full: build ## compare all ways of aggregating in all scenarios (needs root)
	$(call compare,scenarios/*.yaml --modes all --repeat $(REPEAT),bench-full)

REGRET ?= $(addprefix scenarios/,$(addsuffix .yaml,homogeneous slow-4 link-25))
REGRET_MODES := switch,server,hybrid,auto,server/quorum,hybrid/quorum,auto/quorum
PAIRS ?= 10

.PHONY: bench-regret
bench-regret: build ## hold plans that follow what is measured against every static choice (needs root)
	$(call compare,$(REGRET) --modes $(REGRET_MODES) --rounds 30 --repeat $(PAIRS),bench-regret)

.PHONY: bench-mininet
bench-mininet: build ## the same five in Mininet, with each switch that is there (needs root and Debian's mininet)
	/usr/bin/python3 bmv2/mininet/bench.py $(SCENARIOS) -- --repeat $(REPEAT)

.PHONY: microbench
microbench: ## run all benchmarks of the code
	go test -run '^$$' -bench . ./...

.PHONY: ci
ci: ## everything that a submission has to pass (installs packages; needs root)
	bash .ci/run
