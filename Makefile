# Every target sets up what it needs. The only requirement is Python 3.11 or newer.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check lint bench bench-grown walks chaos simulate constraints clean

BIN := .venv/bin
READY := .venv/.ready
# More than there are cores: many tests wait, for a lease to run out or a process to start.
WORKERS ?= 6
ENDED ?= 10000000
OTHERS ?= 1000000

# Compiled once, not by each of the hundreds of processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

# Folders that hold Python now: a checker refuses to be given an empty one.
CODE := $(foreach folder,src tests benchmarks examples,$(if $(shell find $(folder) -name '*.py' -print -quit 2>/dev/null),$(folder)))

# The first Python that runs, is new enough and can make an environment. Asking it
# is the only safe way: version managers put names on the path that do not start.
FIND_PYTHON = for python in python3.13 python3.12 python3.11 python3; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then echo $$python; exit; fi; \
	done

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## watch a flow survive a crash
	$(BIN)/python -m flowfabric.demo

test: lint ## run every check and every test, on SQLite and on a real Postgres
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

check: lint ## format, lint, types, imports and the shape of the code
	$(BIN)/pytest -q tests/test_tidy.py

lint: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

bench: $(READY) ## measure throughput and latency
	$(BIN)/python -m benchmarks

bench-grown: $(READY) ## drain with ten million ended executions behind, in 15 minutes and 30 GB; ENDED=1000000 for less
	$(BIN)/python -m benchmarks grown --ended $(ENDED) --others $(OTHERS)

walks: $(READY) ## count the functions and files that a job, a pause, a signal and a flow pass through
	$(BIN)/python -m benchmarks.walks

chaos: $(READY) ## kill workers and database connections under load, then audit the result
	$(BIN)/python -m benchmarks.chaos

simulate: $(READY) ## play whole systems under faults by a virtual clock; SEED=7 repeats one of them
	$(BIN)/python -m benchmarks.simulation $(if $(SEED),--seed $(SEED)) $(if $(OPERATIONS),--operations $(OPERATIONS))

constraints: ## choose dependency versions again and write constraints.txt
	@python=$$($(FIND_PYTHON)); \
	test -n "$$python" || { echo "make: needs Python 3.11 or newer, with the venv module" >&2; exit 1; }; \
	tool=$$(mktemp -d) && trap 'rm -rf "$$tool"' EXIT && set -e && \
	$$python -m venv "$$tool" && \
	"$$tool/bin/pip" install --quiet --disable-pip-version-check uv && \
	"$$tool/bin/uv" pip compile pyproject.toml --extra dev --upgrade \
	    --universal --python-version 3.11 --generate-hashes \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	    --quiet --output-file "$$tool/constraints.txt" && \
	{ echo "# Every package of the development environment, for every platform and Python we support."; \
	  echo "# Written by 'make constraints'; do not edit."; \
	  cat "$$tool/constraints.txt"; } > constraints.txt

clean: ## remove the environment, caches and build output
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: .venv
.venv: $(READY)

$(READY): constraints.txt pyproject.toml
	@echo "Setting up .venv: once, for about a minute"
	@python=$$($(FIND_PYTHON)); \
	test -n "$$python" || { echo "make: needs Python 3.11 or newer, with the venv module" >&2; exit 1; }; \
	test -x $(BIN)/python || $$python -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r constraints.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
