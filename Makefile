# Makefile: one verb per line of the README, each doing its own set-up on Debian or Ubuntu with Python 3.11+, a C++20
# compiler and apt. The environment is .venv, so `.venv/bin/asyncfabric` is the command after any verb.
# Stamps under build/ make a repeated call quick. Options: PYTHON, PYTEST_FLAGS, WORKERS, DEMO_FLAGS, SOAK_FLAGS, BENCH_FLAGS, JOBS.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell nproc)
PYTEST_FLAGS ?=
WORKERS ?= 2
BY_FILE = $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist loadfile --no-loadscope-reorder --basetemp=/tmp/af-tests-$$$$)  # to as many processes
DEMO_FLAGS ?=
BENCH_FLAGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip
STAMPS := build/stamps
export ASYNCFABRIC_JOBS := $(JOBS)
export ASYNCFABRIC_WERROR := ON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# With ccache, the wheel, built from the unpacked sdist in a folder of ours, takes the objects that `make build` made.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test test-native test-python soak doors launchers coverage check format build asan tsan fuzz rxe browser gpu ptx bench docs docs-site wheel wheels first-answer clean

help:  ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# ---- set-up ---------------------------------------------------------------------------------------------------------

# Installs $$missing, the end of a recipe that collected it. $(1): what to do where apt cannot.
define apt_install
if [ -n "$$missing" ]; then \
  echo "installing:$$missing"; \
  sudo=""; [ "$$(id -u)" = 0 ] || sudo=sudo; \
  { $$sudo apt-get update -q && $$sudo apt-get install -y -q --no-install-recommends $$missing; } || $(1); \
fi
endef

# What must be there, and the Debian package that brings it. What cannot be installed is named, and the build then leaves
# the libfabric or verbs provider or the native tests out and prints that itself.
$(STAMPS)/apt: Makefile
	@mkdir -p $(STAMPS)
	@need() { missing="$$missing $$1"; }; missing=""; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'asyncfabric needs Python 3.11 or newer: make PYTHON=/path/to/python3'; exit 1; }; \
	"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv; \
	"$(PYTHON)" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' \
	  || need python3-dev; \
	command -v c++ >/dev/null || need g++; \
	command -v ccache >/dev/null || need ccache; \
	[ -e /usr/include/rdma/fabric.h ] || need libfabric-dev; \
	/sbin/ldconfig -p | grep -q 'libfabric\.so\.1' || need libfabric1; \
	[ -e /usr/include/infiniband/verbs.h ] || need libibverbs-dev; \
	/sbin/ldconfig -p | grep -q 'libibverbs\.so\.1' || need libibverbs1; \
	[ -e /usr/include/gtest/gtest.h ] || need libgtest-dev; \
	$(call apt_install,echo "apt could not install:$$missing; going on without")
	@touch $@

$(STAMPS)/venv: $(STAMPS)/apt constraints.txt
	[ -x $(BIN)/python ] || "$(PYTHON)" -m venv .venv
	$(PIP) install -q -c constraints.txt pip setuptools wheel cython cmake ninja
	@touch $@

# Everything that any verb needs, so that there is one environment to reason about.
$(STAMPS)/packages: $(STAMPS)/venv constraints.txt pyproject.toml setup.py
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

build: $(STAMPS)/packages  ## compile the engine and install asyncfabric into .venv, editable
	$(BIN)/python setup.py -q build_ext --inplace

# ---- verbs ----------------------------------------------------------------------------------------------------------

demo: build  ## KvCache moves from prefill to decode; a cluster serves, scales, loses a node; a training feeds rollouts
	$(BIN)/asyncfabric demo $(DEMO_FLAGS)
	$(BIN)/asyncfabric demo kv
	$(BIN)/asyncfabric demo weights

# Foreign servers that tests run: a test whose server is absent skips, loudly.
$(STAMPS)/test-apt: tests/packages.txt $(STAMPS)/apt
	@missing=""; \
	for package in $$(grep -v '^\#' tests/packages.txt); do \
	  dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; \
	done; \
	$(call apt_install,echo "apt could not install:$$missing; going on without")
	@touch $@

test: test-native test-python  ## rings 0 to 5: architecture, unit, property, native, conformance, integration

# Files are shared out to WORKERS processes: most tests wait for others. tests/conftest.py orders them, the long ones first;
# xdist's own order, by the number of tests, would begin the long ones last. Sockets in the folder for temporary files want
# a short name.
test-python: build $(STAMPS)/test-apt
	$(BIN)/python -P -m pytest $(BY_FILE) $(PYTEST_FLAGS)

MINUTES ?= 60
soak: build  ## all systems for MINUTES=60 while parts are killed and come back: answers compared, growth judged and drawn in build/soak
	$(BIN)/python tests/soak/system_soak.py --minutes $(MINUTES) $(SOAK_FLAGS)

# Foreign packages have an environment of their own, that .venv stays what our users install. It lies over .venv: a file of
# paths makes the packages there importable, torch for the CPU among them. --no-deps: their own pins want CUDA wheels.
DOORS := build/doors/venv
$(STAMPS)/doors: $(STAMPS)/packages tests/doors/requirements.txt
	rm -rf $(DOORS)
	$(BIN)/python -m venv --without-pip $(DOORS)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >"$$($(DOORS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beneath.pth"
	$(PIP) --python $(DOORS)/bin/python install -q --no-deps -r tests/doors/requirements.txt
	@touch $@

# Of vLLM its Python alone, out of its wheels: scheduler and connectors run without what is compiled, which is nine tenths.
VLLM ?= 0.26.0 0.33.0
VLLM_PYTHON := build/doors/vllm-python
$(STAMPS)/doors-vllm: $(STAMPS)/packages Makefile
	rm -rf $(VLLM_PYTHON)
	for version in $(VLLM); do \
	  folder=$(VLLM_PYTHON)/$$version; \
	  $(PIP) download -q --no-deps --only-binary :all: --dest $$folder vllm==$$version; \
	  $(BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
	    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])' $$folder/*.whl $$folder; \
	  rm $$folder/*.whl; \
	done
	@touch $@

# Of SGLang the one file that calls DeepEP, which is read and not run: importing it wants what is compiled for GPUs.
SGLANG ?= 0.5.23
SGLANG_CALLS := build/doors/sglang/sglang/srt/layers/moe/token_dispatcher/deepep.py
$(STAMPS)/doors-sglang: $(STAMPS)/packages Makefile
	rm -rf build/doors/sglang
	$(PIP) download -q --no-deps --only-binary :all: --dest build/doors/sglang sglang==$(SGLANG)
	$(BIN)/python -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract(sys.argv[2], sys.argv[3])' \
	  build/doors/sglang/*.whl $(SGLANG_CALLS:build/doors/sglang/%=%) build/doors/sglang
	rm build/doors/sglang/*.whl
	@touch $@

# Jobs of Ray want its dashboard, and that some dozens of packages that change what the others above do: a third layer.
RAY_JOBS := build/doors/ray-jobs
$(STAMPS)/doors-ray-jobs: $(STAMPS)/doors tests/doors/ray_jobs/requirements.txt
	rm -rf $(RAY_JOBS)
	$(BIN)/python -m venv --without-pip $(RAY_JOBS)
	$(DOORS)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >"$$($(RAY_JOBS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beneath.pth"
	$(PIP) --python $(RAY_JOBS)/bin/python install -q --no-deps -r tests/doors/ray_jobs/requirements.txt
	@touch $@

doors: build $(STAMPS)/doors $(STAMPS)/doors-vllm $(STAMPS)/doors-sglang $(STAMPS)/doors-ray-jobs  ## ring 5 against foreign packages: the real NIXL, Ray, LMCache, vLLM, in an environment of their own
	$(DOORS)/bin/python -P -m pytest $(BY_FILE) $(PYTEST_FLAGS) tests/doors --ignore tests/doors/vllm_engines --ignore tests/doors/vllm_models --ignore tests/doors/vllm_experts --ignore tests/doors/ray_jobs
	$(RAY_JOBS)/bin/python -P -m pytest $(PYTEST_FLAGS) tests/doors/ray_jobs
	for version in $(VLLM); do \
	  PYTHONPATH=$(VLLM_PYTHON)/$$version $(DOORS)/bin/python -P -m pytest $(BY_FILE) $(PYTEST_FLAGS) tests/doors/vllm_models tests/doors/vllm_engines tests/doors/vllm_experts; \
	done

launchers: $(STAMPS)/launch-apt build  ## ring 5: clusters from one file, started by this machine, Slurm, torchrun; nodes killed under load
	$(BIN)/python -P -m pytest $(PYTEST_FLAGS) tests/launch

coverage: build  ## the Python tests once more, and which lines and branches of asyncfabric they ran; half as long again
	@mkdir -p build/coverage && rm -f build/coverage/data*
	$(BIN)/python -P -m pytest $(PYTEST_FLAGS) --cov --cov-report=term:skip-covered --cov-fail-under=88

test-native: $(STAMPS)/venv
	$(call native_tests,release)

# $(1): a preset of native/CMakePresets.json; $(2): a prefix of the ctest command
define native_tests
@if [ -e /usr/include/gtest/gtest.h ]; then set -x; \
  cd native && cmake --preset $(1) -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" >/dev/null && cmake --build --preset $(1) -j $(JOBS) && $(2) ctest --preset $(1); \
else echo 'NATIVE TESTS LEFT OUT: googletest is not installed (libgtest-dev)'; fi
endef

asan: $(STAMPS)/packages  ## native tests and the conformance suite through Python, under ASan and UBSan
	$(call native_tests,asan)
	$(call sanitized_suite,asan,address$(comma)undefined,libasan.so libubsan.so)

# The address space is not randomised: older runtimes of gcc refuse the layouts of newer kernels.
tsan: $(STAMPS)/packages  ## the same under TSan
	$(call native_tests,tsan,setarch -R)
	$(call sanitized_suite,tsan,thread,libtsan.so)

comma := ,
# $(1): name, $(2): what to build with, $(3): runtimes to preload, since Python itself is not instrumented.
# pytest swallows what a dying process prints, so the runtimes write reports to files. Run from the build folder, so that the checkout's own asyncfabric is not on the path.
define sanitized_suite
ASYNCFABRIC_SANITIZE=$(2) $(BIN)/python setup.py -q build --build-base build/$(1)/base --build-lib build/$(1)/lib
rm -f build/$(1)/report.*
cd build/$(1) && \
  PYTHONPATH=$(CURDIR)/build/$(1)/lib PYTHONSAFEPATH=1 PYTHONMALLOC=malloc \
  LD_PRELOAD="$(foreach runtime,$(3),$$(c++ -print-file-name=$(runtime)))" \
  ASAN_OPTIONS=log_path=$(CURDIR)/build/$(1)/report:detect_leaks=0:handle_segv=0:detect_stack_use_after_return=0:quarantine_size_mb=32 \
  UBSAN_OPTIONS=log_path=$(CURDIR)/build/$(1)/report:print_stacktrace=1:halt_on_error=1 \
  TSAN_OPTIONS=log_path=$(CURDIR)/build/$(1)/report:halt_on_error=1:second_deadlock_stack=1:report_signal_unsafe=0:ignore_noninstrumented_modules=1 \
  ASYNCFABRIC_EXPECT_SANITIZE=$(2) \
  setarch -R $(CURDIR)/$(BIN)/python -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -q \
    $(addprefix $(CURDIR)/,$(SANITIZED_TESTS)) $(SANITIZED_FLAGS) \
  || { status=$$?; cat $(CURDIR)/build/$(1)/report.* 2>/dev/null; exit $$status; }
endef
# A small quarantine: checks of growing memory would see a large one fill up.
# The border's own lifetimes are here too: a use after close() is quiet without a sanitizer.
SANITIZED_TESTS ?= tests/conformance tests/integration/test_border_engine.py
# Rings that between them have every provider, one and several rails, order and none: all of the suite over one, what lives and ends beside
# threads over the others; SANITIZED_FLAGS= runs all that are native.
SANITIZED_CHECKS := integrity or counts_of or generations or batches or bidirectional or drained or under_fire or in_flight or revoked or answers or reads or one_failure
SANITIZED_FLAGS ?= -o timeout=900 -o faulthandler_timeout=600 \
  -k 'border or local-2to3 or (tcp-1 or local-copiers or shuffled-3to2) and ($(SANITIZED_CHECKS))'

# The decoders alone, built by the compiler of everything else: no other is installed for this. SECONDS are those of all.
FUZZ_SECONDS = $(if $(findstring command line,$(origin SECONDS)),$(SECONDS),60)
fuzz: build  ## decoders of bytes from outside, native (ASan, UBSan) and Python, under random changes; SECONDS=60; findings in build/fuzz
	@cd native && cmake --preset fuzz -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" >/dev/null && cmake --build --preset fuzz -j $(JOBS)
	$(BIN)/python tests/fuzz/run.py build/native-fuzz/decoders $(FUZZ_SECONDS)

# Set-up of its own: a list of packages, and a kernel that apt downloads and nobody installs. RXE_FLAGS go to tests/rxe/ring.py.
RXE_FLAGS ?=

# Lists of Debian packages of single verbs; without one that apt does not have, its verb cannot run.
$(STAMPS)/%-apt: tests/%/packages.txt
	@mkdir -p $(STAMPS)
	@missing=""; \
	for package in $$(grep -v '^#' $<); do \
	  dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; \
	done; \
	$(call apt_install,{ echo "$*: cannot run here: apt could not install:$$missing"; exit 3; })
	@touch $@

rxe: $(STAMPS)/rxe-apt build  ## ring 6: soft-RoCE in an emulated machine: native tests, conformance and failures over verbs
	cd native && cmake --preset release -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" >/dev/null && cmake --build --preset release -j $(JOBS) --target rxe_tests
	$(BIN)/python tests/rxe/ring.py $(RXE_FLAGS)

browser: $(STAMPS)/browser-apt build  ## ring 5 in a real browser: the dashboard of a cluster, and of 200 simulated nodes
	$(BIN)/python -P -m pytest --basetemp=/tmp/af-browser-$$$$ $(PYTEST_FLAGS) tests/browser

bench: build  ## limits of this machine, then our transfers beside them
	for what in limits write pages notify messages scatter; do $(BIN)/asyncfabric bench $$what $(BENCH_FLAGS); done

# Needs no network: the Python of GPU_PYTHON has torch with CUDA, cupy and our dependencies, and builds in place.
# GPU_PARTS=vllm runs two engines of vLLM 0.26; GPU_PARTS="sanitized planted" runs the kernels under compute-sanitizer and with planted faults, which takes longer.
GPU_PYTHON ?= python3
GPU_PARTS ?= figures tests conformance
gpu:  ## on a machine with a GPU: build, figures, tests, conformance over cuda; report in build/gpu-report; see GPU_PARTS
	ASYNCFABRIC_GPU_PARTS="$(GPU_PARTS)" $(GPU_PYTHON) tests/gpu/run.py build/gpu-report

ptx:  ## the kernels of native/cuda as the texts that the library and the package carry; needs nvcc
	$(GPU_PYTHON) native/cuda/embed.py

check: $(STAMPS)/packages  ## ruff, mypy strict, import contracts, cython-lint, clang-format, verifytypes, the house test
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format -q --check .
	@mkdir -p build/typing && ln -sfn ../../services build/typing/asyncfabric_services
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typing
	$(BIN)/mypy tests/gpu
	$(BIN)/lint-imports
	$(BIN)/cython-lint cython_ext
	$(BIN)/clang-format --style=file:native/.clang-format --dry-run -Werror $(CXX_FILES)
	PYTHONPATH=$(CURDIR) $(BIN)/pyright --verifytypes asyncfabric --ignoreexternal
	$(BIN)/python -P -m pytest -q tests/architecture

CXX_FILES = $$(find native -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

format:  ## rewrite Python and C++ files in the house's format
	$(BIN)/ruff check --fix --select I -q .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format --style=file:native/.clang-format -i $(CXX_FILES)

docs: $(STAMPS)/packages  ## the reference from docstrings, the Grafana dashboard from the metrics, and a check of every link of the pages
	$(BIN)/python -P docs/reference/generate.py
	$(BIN)/python -P docs/grafana/generate.py
	$(BIN)/python -P -m pytest -q tests/architecture/test_docs.py

SITE := build/site-venv
$(STAMPS)/site: $(STAMPS)/apt docs/site/requirements.txt
	rm -rf $(SITE)
	"$(PYTHON)" -m venv $(SITE)
	$(SITE)/bin/python -m pip install -q -r docs/site/requirements.txt
	@touch $@

docs-site: $(STAMPS)/site  ## the pages as a site in build/site: works from the disk, asks no other host; dead links are errors
	rm -rf build/site
	$(SITE)/bin/python -m sphinx -q -n -W --keep-going -d build/site-doctrees -c docs/site . build/site
	! grep -rE '(<script[^>]* src|<img[^>]* src|<link[^>]* href)="(https?:)?//|@import|url\(.?https?:' build/site --include='*.html' --include='*.css'

wheel: $(STAMPS)/packages  ## sdist and wheel in dist/, then the wheel installed in a fresh environment and tried
	rm -rf dist build/wheel-from && mkdir -p build/wheel-from
	TMPDIR=$(CURDIR)/build/wheel-from $(BIN)/python -m build --no-isolation --outdir dist . >build/wheel.log || { tail -50 build/wheel.log; exit 1; }
	rm -rf build/wheel-check && $(BIN)/python -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install -q --no-deps --force-reinstall dist/*.whl
	cd build/wheel-check && PYTHONPATH=$$($(CURDIR)/$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  bin/python -P $(CURDIR)/tests/integration/programs/wheel_trial.py

# Of a checkout; the builds of wheels start from an sdist, which has no history.
wheel wheels: export ASYNCFABRIC_COMMIT := $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null)
$(STAMPS)/wheels: $(STAMPS)/packages release/requirements.txt
	rm -rf build/wheels/tools
	$(BIN)/python -m venv build/wheels/tools
	build/wheels/tools/bin/python -m pip install -q -r release/requirements.txt
	@[ "$$(id -u)" != 0 ] || command -v debootstrap >/dev/null || apt-get install -y -q --no-install-recommends debootstrap || true
	@touch $@

VERSIONS ?=
wheels: $(STAMPS)/wheels  ## dist/: sdist, and a manylinux wheel for each CPython, for an old glibc, each tried without a compiler; VERSIONS="3.13"
	rm -rf dist && mkdir -p build/wheels
	$(BIN)/python -m build --sdist --no-isolation --outdir dist . >build/wheels/sdist.log
	build/wheels/tools/bin/python release/wheels.py $(VERSIONS)

first-answer: $(STAMPS)/apt  ## pip install of a wheel of dist/ and `asyncfabric demo kv` in a fresh environment without a compiler: seconds to the first answer
	"$(PYTHON)" release/first_answer.py

clean:  ## remove what builds made; the environment stays
	rm -rf build dist *.egg-info asyncfabric/_native/*.so asyncfabric/integrations/nixl/*.so
