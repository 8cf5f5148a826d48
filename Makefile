PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
INSTALLED := $(VENV)/.installed

# Threads that spin at barriers slow everything tenfold as soon as anything else wants a core.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-all test-part check regress lint docs gpu-check clean

$(PACKAGE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $(PACKAGE)

# With what the tests need besides.
$(INSTALLED): $(PACKAGE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $(INSTALLED)

demo: $(PACKAGE)
	$(BIN)/semkv-bench sweep experiment=demo out=results/runs/demo
	$(BIN)/semkv-bench cliff-report run=results/runs/demo

# One process a core, one thread each; the exhaustive cases that are marked slow are left to test-all.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadscope
test: $(INSTALLED)
	$(PYTEST) tests

test-all: $(INSTALLED)
	$(PYTEST) -m "" tests

# All quick tests and one of twelve parts of the exhaustive ones: what CI runs.
PART ?= 1
test-part: $(INSTALLED)
	$(PYTEST) -m "" --slow-part $(PART)/12 tests

# For a change at hand: style, the order of the rooms, and the tests of the rooms that differ from main.
BASE ?= main
check: lint
	$(PYTEST) $$($(BIN)/python scripts/changed_tests.py $(BASE))

# Red when the code, the storage or the cliff differs from results/baselines; `make regress QUANTIZER=turboquant`.
QUANTIZER ?= affine
regress: $(INSTALLED)
	$(BIN)/semkv-bench regress quantizer=$(QUANTIZER)

# On a machine with a GPU: the kernels against their references, and their bandwidth.
gpu-check: $(INSTALLED)
	$(BIN)/python -m pytest -m "" tests/kernels
	$(BIN)/python benchmarks/kernel_bandwidth.py

# The documentation as a site, build/html; its configuration and Python pages come from the code.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt ".[docs]"
	$(BIN)/python scripts/site_pages.py
	$(BIN)/mkdocs build --quiet

lint: $(INSTALLED)
	$(BIN)/ruff check semkv_bench tests scripts benchmarks
	$(BIN)/ruff format --check semkv_bench tests scripts benchmarks

clean:
	rm -rf $(VENV) build dist results/runs
