SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build the xagg binary into ./build
	go build -o build/xagg ./cmd/xagg

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

.PHONY: bench
bench: ## run all benchmarks
	go test -run '^$$' -bench . ./...

.PHONY: ci
ci: ## everything that a submission has to pass (installs packages; needs root)
	bash .ci/run
