# Every target sets up what it needs: a virtual environment in .venv, pinned packages, the native library.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := sassha_fast/_native.so
NATIVE := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu)
SOURCES := setup.py $(NATIVE)
SIM := build/native/_cuda_sim.so
FORMATTED := $(NATIVE) $(wildcard bench/*.cpp tests/*.cpp)

# One architecture keeps development quick; `make wheel` and setup.py by themselves build for all.
SASSHA_CUDA_ARCHS ?= 80
$(INSTALLED) $(BUILT) $(SIM): export SASSHA_CUDA_ARCHS := $(SASSHA_CUDA_ARCHS)

.DEFAULT_GOAL := help
.PHONY: help build sim test test-large mutants prove-gpu prove-triton demo label-noise bench scale lint format wheel report
.PHONY: clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(INSTALLED): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

$(BUILT): $(INSTALLED) $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

build: $(BUILT) ## set up .venv and build the native library, incrementally

$(SIM): $(BUILT) $(wildcard tests/*.cpp)
	$(BIN)/ninja -C build/native _cuda_sim.so cuda_sim_watched
	touch $@

sim: $(SIM) ## build the CUDA kernels for the CPU, on which the tests run them

test: $(BUILT) $(SIM) ## run the tests
	$(BIN)/python -m pytest tests

test-large: $(BUILT) $(SIM) ## run the tests that need 14 GB of memory
	$(BIN)/python -m pytest tests -m slow

mutants: $(BUILT) $(SIM) ## break the CUDA kernels in many ways and see that the tests notice each
	$(BIN)/python tests/mutants.py

prove-gpu: prove-triton ## read registers, accesses and occupancy from GPU machine code into docs/gpu.md; no GPU needed
	$(BIN)/python bench/prove_gpu.py

demo: $(BUILT) ## train digits with AdamW, SAM and SASSHA side by side
	$(BIN)/python -m examples.digits

label-noise: $(BUILT) ## compare eight optimizers on digits with wrong labels, half an hour, and write docs/methods.md
	$(BIN)/python -m examples.label_noise

bench: $(BUILT) ## run the benchmarks against the eager loop, AdamW and the machine's bandwidth
	$(BIN)/python -m pytest bench

scale: $(INSTALLED) ## compute the model of traffic between GPUs and write it into docs/scale.md
	$(BIN)/python bench/scale.py

prove-triton: $(BUILT) ## compile the Triton kernels for every GPU and write what they became into docs/gpu.md
	$(BIN)/python -m bench.prove_triton

report: $(BUILT) ## print which backends run here
	$(BIN)/python -m sassha_fast

lint: $(INSTALLED) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)

format: $(INSTALLED) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

wheel: $(INSTALLED) ## build dist/*.whl, one for every Python 3
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .

clean: ## remove everything that was built, and .venv
	rm -rf $(VENV) build dist *.egg-info sassha_fast/_native.so
