# Two commands do everything: `make demo` installs and runs the main job, `make test` installs and runs the tests.
# Both work on a fresh machine with Python 3.11 or newer; everything goes into .venv here.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := 2.13.0

.PHONY: demo test lint statecharts bench clean

demo: $(STAMP)
	$(BIN)/kvpush demo $(DEMO)

test: $(STAMP) lint
	$(BIN)/python -m pytest $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m kvpush.statecharts --check

statecharts: $(STAMP)
	$(BIN)/python -m kvpush.statecharts --write

bench: $(STAMP)
	$(BIN)/kvpush bench push

# torch first, and the CPU build: a plain `torch` pulls gigabytes of CUDA. A torch that is there already is kept.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
