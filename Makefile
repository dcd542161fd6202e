# Every target sets itself up: a virtual environment in the checkout, made by the first that needs it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The peers of the benchmarks stay out of the way of development: they have an environment of their own.
BENCH := .venv-bench
BENCH_READY := $(BENCH)/ready

.PHONY: help test lint types check demo bench clean

help:
	@echo "make demo    train a small model on 4 local processes, and see what everyrank leaves"
	@echo "make test    all tests"
	@echo "make check   what CI runs: lint, types, tests"
	@echo "make bench   measure everyrank beside its peers and floors"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	@touch $@

test: $(READY)
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/pyright

check: lint types test

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train.py

$(BENCH_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BENCH)/bin/python -m pip install --quiet --constraint constraints.txt --editable . --group bench
	@touch $@

bench: $(BENCH_READY)
	$(BENCH)/bin/python -m benchmarks

clean:
	rm -rf $(VENV) $(BENCH) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
