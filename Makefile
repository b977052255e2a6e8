# Two commands on a fresh machine do everything: `make demo` and `make test`.
# Both make their own environment in .venv; nothing needs to be installed by hand but
# Python 3.11+ and a C++ compiler.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MINUTES ?= 20
RIG    ?= cluster
# An environment may forbid it; then every process of a test compiles all our modules anew.
export PYTHONDONTWRITEBYTECODE :=
SOURCES := pyproject.toml constraints.txt $(wildcard native/*.* native/rows/*)

.PHONY: help demo test test-thorough test-chaos soak test-cluster up down test-tsan test-asan quick check fmt bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train fp32, DirectQ and AC-SGD over emulated 100 Mbps links (about 90 s)"
	@echo "make test    the test suite, three parts at a time (some 14 minutes on two cores);"
	@echo "             the heavier ones have targets of their own:"
	@echo "make test-thorough  every property with four times the examples (about two minutes)"
	@echo "make test-chaos     kill, stop and corrupt: every action of every stage (about 10 minutes)"
	@echo "make soak           20 minutes of random faults; does anything leak? (MINUTES=n)"
	@echo "make test-cluster   several hosts with real slow links on this machine (root, 10 minutes)"
	@echo "make up      your machines as a Ray cluster, as cluster.yaml says; make down ends it"
	@echo "make quick   unit and contract tests only (about a minute)"
	@echo "make test-tsan, make test-asan   the row store under threads, sanitised (2 minutes each)"
	@echo "make check   format, lint and types"
	@echo "make fmt     format the code"
	@echo "make bench   every benchmark that the README quotes (about an hour)"

$(READY): $(SOURCES)
	@echo "$(VENV): installing torch, ray and the rest, building the native core (minutes, the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m ray_pipe.run --bandwidth 100Mbps

# Three parts at a time until none is left; status and closing line of each part at the end.
test: $(READY)
	$(BIN)/python tests/run_parts.py

test-thorough: $(READY)
	$(BIN)/python -m pytest -n 2 --hypothesis-profile thorough -m "hypothesis and not ray"

quick: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow and not ray and not cluster and not chaos" tests/unit tests/contract

# Times recoveries, so new stages are new processes of Ray's own.
test-chaos: $(READY)
	RAY_PIPE_RECOVERY_RESULTS=benchmarks/results/recovery.json \
	  $(BIN)/python -m pytest --cold-workers -m "chaos or not chaos" tests/chaos

soak: $(READY)
	$(BIN)/python tests/chaos/soak.py --minutes $(MINUTES)

test-cluster: $(READY)
	$(BIN)/python -m pytest -m "$(RIG)" tests/cluster

up: $(READY)
	$(BIN)/ray get-auth-token --generate >/dev/null
	$(BIN)/ray up -y cluster.yaml

down: $(READY)
	$(BIN)/ray down -y cluster.yaml

# The row store's stress program under a sanitiser; needs a C++ compiler and nothing else.
STRESS := $(CXX) -std=c++20 -O1 -g -pthread -DRAY_PIPE_ROWS_TESTING native/rows/stress.cpp

test-tsan:
	mkdir -p build
	$(STRESS) -fsanitize=thread -o build/stress_tsan
	build/stress_tsan --seconds 5 --limit 300

test-asan:
	mkdir -p build
	$(STRESS) -fsanitize=address,undefined -fno-sanitize-recover=undefined -o build/stress_asan
	build/stress_asan --seconds 5 --limit 300

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --no-cache --fix .

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
