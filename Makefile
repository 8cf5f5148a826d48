PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint gpu-check clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/semkv-bench sweep experiment=demo out=results/runs/demo
	$(BIN)/semkv-bench cliff-report run=results/runs/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest tests

lint: $(INSTALLED)
	$(BIN)/ruff check semkv_bench tests scripts benchmarks
	$(BIN)/ruff format --check semkv_bench tests scripts benchmarks

clean:
	rm -rf $(VENV) build dist results/runs
