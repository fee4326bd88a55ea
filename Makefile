# The verbs of this project; `make` alone lists them. Each does its own set-up on a fresh machine:
# missing system packages (as root), a virtual environment in .venv, the build.
#
#   make test ARGS='-k signal'      more arguments for pytest, the benchmark or the example
#   make PYTHON=python3.12 test     another interpreter (3.11 or newer)
#   make JOBS=1 test                tests in so many processes; default: two more than there are cores
#   make WERROR=ON test-cpp         warnings are errors, as in CI
#   make TORCH=2.14.0 test-torch    another torch than the second one of CI
#   make SEED=7 mutants             the faults of this seed; ARGS='--only 5' repeats one of them
#   make SEED=7 TRIALS=200 test-hostile     these trials; SEED=7 TRIAL=31 repeats one of them

PYTHON ?= python3
# The second torch, beside that of constraints.txt; docs/internals/placement.md names the minors of both.
TORCH ?= 2.14.1
WERROR ?= OFF
RUNS ?= 10000000
# Tests wait now and then: more processes than cores keep the cores busy meanwhile.
JOBS ?= $(shell expr $$(nproc) + 2)
SEED ?=
TRIALS ?= 20
TRIAL ?=
ARGS ?=

VENV := .venv
PARALLEL = $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile)
export PYTHON
# Tests start a thousand processes; without their bytecode each would compile this package again.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

NEED := tools/need.sh
CPP_ALL := $(wildcard cpp/*/*.cc cpp/*/*.h)
CPP := $(filter-out cpp/tests/% cpp/fuzz/%,$(CPP_ALL))
FUZZERS := $(patsubst cpp/fuzz/%_fuzz.cc,%,$(wildcard cpp/fuzz/*_fuzz.cc))
# Several files in one compilation: half of the time goes into headers.
# MAKEFLAGS= before a build: ninja looks for the job server of a make that runs recipes side by side.
CMAKE := cmake -S . -G Ninja -DTENSORWIRE_PYTHON=OFF -DTENSORWIRE_WERROR=$(WERROR) \
  -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=8
# ThreadSanitizer of older compilers fails where the kernel randomizes many address bits.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help deps build train test test-rest test-all test-torch test-engines test-integrations test-rdma test-hostile mutants bench-rdma rig-shell test-cpp fuzz model bench lint format types stubs docs wheel test-wheel clean

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 13

deps: $(VENV)/.with-dev $(VENV)/.with-torch $(VENV)/.with-examples ## install everything that building and testing needs
	@$(NEED) cxx headers clang clang-rt doctest cc spin ?ucx-headers ?ssl-headers ?ip ?tc rig

build: $(VENV)/.built ## build the extension and install the package, editable, into .venv

train: build $(VENV)/.with-torch $(VENV)/.with-examples ## train a network on digits: two workers, one server
	@mkdir -p build
	tensorwire run --workers 2 --servers 1 examples/digits_cnn.py \
	  --report build/report.json --checkpoint build/digits.pt $(ARGS)

test: test-needs ## run the everyday tests: the first case of each, except slow ones
	pytest --part everyday $(PARALLEL) $(ARGS)

test-rest: test-needs ## run the Python tests that `make test` leaves out
	pytest --part rest $(PARALLEL) $(ARGS)

test-all: test-needs ## run all Python tests that need no emulated machine and no engine
	pytest $(PARALLEL) $(ARGS)

.PHONY: test-needs
test-needs: build $(VENV)/.with-torch $(VENV)/.with-examples $(VENV)/.with-bench
	@$(NEED) ?ip ?tc ?fio ?rsync ?passthrough

test-torch: build $(VENV)/torch-$(TORCH)/.installed ## test gradients in place with torch TORCH; downloads gigabytes from PyPI
	PYTHONPATH=$(CURDIR)/$(VENV)/torch-$(TORCH) pytest \
	  $(addprefix tests/torch/test_,allocator.py gradient_slots.py pool.py gradients.py) $(PARALLEL) $(ARGS)

test-engines: build $(VENV)/.with-torch $(VENV)/.with-engines ## test jobs that Slurm, MPI, Ray and other engines start
	@$(NEED) ?slurm ?openmpi ?mpich
	pytest -o cache_dir=.pytest_cache/engines tests/engines $(ARGS)

test-integrations: build $(VENV)/.with-torch $(VENV)/.with-integrations ## test training through Lightning, Accelerate and transformers
	pytest -o cache_dir=.pytest_cache/integrations tests/integrations $(ARGS)

test-rdma: build $(VENV)/.with-torch $(VENV)/.with-examples ## run the tests between two emulated machines with soft-RoCE
	@$(NEED) rig
	pytest tests/rdma $(ARGS)

test-hostile: build $(VENV)/.with-torch ## TRIALS random attacks from SEED; honest processes must not be harmed
	@$(NEED) ?ip
	python tests/hostile/run.py --trials $(TRIALS) $(if $(SEED),--seed $(SEED)) $(if $(TRIAL),--trial $(TRIAL)) $(ARGS)

mutants: test-needs ## draw 24 faults from SEED, one line each, and see which the tests find; hours
	@$(NEED) doctest
	python tests/mutants/run.py --jobs $(JOBS) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench-rdma: build ## measure rdma beside perftest, between two such machines
	@$(NEED) rig
	PYTHONPATH=tests/peers python tests/rdma/measure.py --json build/rdma.json $(ARGS)

rig-shell: $(VENV)/bin/python ## a prompt for two such machines
	@$(NEED) rig
	@python tests/rdma/shell.py

test-cpp: test-cpp-address test-cpp-thread ## run the C++ tests under ASan with UBSan and under TSan

.PHONY: test-cpp-needs
test-cpp-needs:
	@$(NEED) clang clang-rt doctest ?ucx-headers ?ssl-headers

test-cpp-%: $(VENV)/.with-dev test-cpp-needs FORCE
	$(CMAKE) -B build/cpp-$* -DTENSORWIRE_TESTS=ON -DTENSORWIRE_SANITIZE=$* >/dev/null
	MAKEFLAGS= cmake --build build/cpp-$* -- --quiet
	TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(NO_ASLR) build/cpp-$*/core_test

fuzz: $(FUZZERS:%=fuzz-%) ## fuzz every parser RUNS times; KEEP=1 adds new finds to tests/corpus

# A run that drives a whole peer takes much longer than one that parses: it gets a share of RUNS.
SLOWER_frame := 1
SLOWER_handshake := 1
SLOWER_rpc_line := 1
SLOWER_service := 50
SLOWER_answers := 50
SLOWER_tls := 1000
SLOWER_fuse := 20

# New finds go to build/corpus; a crash leaves its input in build/fuzz. Kept is what reaches a new
# edge, without how often: some hundred small files.
fuzz-%: fuzz-build FORCE
	@mkdir -p build/corpus/$* tests/corpus/$*
	build/fuzz/$*_fuzz -runs=$$(($(RUNS) / $(SLOWER_$*))) -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
	  -max_len=4000 -print_final_stats=1 -artifact_prefix=build/fuzz/ build/corpus/$* tests/corpus/$*
	$(if $(KEEP),build/fuzz/$*_fuzz -merge=1 -use_counters=0 -max_len=4000 -verbosity=0 \
	  tests/corpus/$* build/corpus/$*)

.PHONY: fuzz-build
fuzz-build: $(VENV)/.with-dev
	@$(NEED) clang clang-rt
	$(CMAKE) -B build/fuzz -DTENSORWIRE_FUZZ=ON >/dev/null
	MAKEFLAGS= cmake --build build/fuzz --target $(FUZZERS:%=%_fuzz) -- --quiet

model: $(VENV)/.with-dev ## check the models of our protocols exhaustively, with spin and by an explorer
	@$(NEED) cc spin
	python models/takeover.py
	python models/slices.py
	python models/changes.py
	python models/own_pace.py
	models/check.sh

bench: build $(VENV)/.with-bench ## measure the memory API beside its limits and rivals
	@mkdir -p build
	tensorwire bench memory --json build/memory.json $(ARGS)

lint: $(VENV)/.with-dev ## check style: ruff, docstrings, clang-format
	ruff check
	ruff format --check
	python tools/check_docstrings.py
	$(if $(CPP_ALL),clang-format --dry-run -Werror $(CPP_ALL))

format: $(VENV)/.with-dev ## put everything into that style
	ruff check --fix
	ruff format
	$(if $(CPP_ALL),clang-format -i $(CPP_ALL))

types: $(VENV)/.with-dev ## mypy, strict
	mypy

stubs: build ## regenerate the stubs of the extension
	rm -rf src/tensorwire/_core src/tensorwire/_core.pyi
	python -m nanobind.stubgen -q -r -m tensorwire._core -O src/tensorwire

docs: $(VENV)/.with-dev ## check that every link of the documents resolves
	python tools/check_links.py

# With the headers of the second torch; auditwheel names the wheel after the oldest systems that it
# runs on, and fails where it cannot. The core is the one that `build` has compiled.
wheel: build $(VENV)/.with-torch $(VENV)/.with-wheel ## build a portable wheel into dist/, for both torches; prints its tag and size
	rm -rf build/wheelhouse
	torches=$$(python tools/torches.py $(VENV) $(TORCH)) && \
	MAKEFLAGS= pip wheel -qq --no-build-isolation --no-deps --config-settings=build-dir=build/python \
	  --config-settings=cmake.define.TENSORWIRE_TORCHES="$$torches" -w build/wheelhouse .
	auditwheel repair -w build/wheelhouse/portable build/wheelhouse/*.whl 2>build/wheelhouse/log || \
	  { cat build/wheelhouse/log; exit 1; }
	@mkdir -p dist && rm -f dist/tensorwire-*.whl && mv build/wheelhouse/portable/*manylinux*.whl dist
	@auditwheel show dist/tensorwire-*.whl | grep 'platform tag: "manylinux'
	@du -k dist/tensorwire-*.whl | sed 's/\t/ KB  /'

test-wheel: wheel $(VENV)/.with-examples ## train with that wheel, without a compiler, with both torches where they are installed
	python tools/test_wheel.py $(VENV) $(TORCH)

clean: ## remove everything built, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Set-up ------------------------------------------------------------------------------------------

$(VENV)/bin/python:
	@$(NEED) python venv
	$(PYTHON) -m venv $(VENV)

# One pip at a time, also where make runs recipes side by side.
$(VENV)/.with-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@mkdir -p build
	python tools/requirements.py $(if $(filter dev,$*),build run) $* >build/requirements-$*.txt
	flock build/pip.lock pip install -qq -c constraints.txt -r build/requirements-$*.txt
	@touch $@

# A second torch lies in a folder of its own, which PYTHONPATH puts in front of everything else in
# the environment. tensorwire, which does not link torch, and the tools are the same ones.
$(VENV)/torch-%/.installed: | $(VENV)/bin/python
	rm -rf $(@D)
	@mkdir -p $(@D)
	TMPDIR=$(CURDIR)/$(@D) pip install -qq --no-cache-dir --no-compile --target $(@D) torch==$*
	@touch $@

# The install is editable: Python sources need a step only when there are others than before. The
# build folder makes C++ incremental.
build/python-files: FORCE
	@mkdir -p $(@D)
	@find src -name '*.py' | sort >$@.now
	@cmp -s $@.now $@ || cp $@.now $@

$(VENV)/.built: $(CPP) CMakeLists.txt pyproject.toml build/python-files $(VENV)/.with-dev
	@$(NEED) cxx headers
	MAKEFLAGS= pip install -qq --no-build-isolation --no-deps --config-settings=build-dir=build/python \
	  --config-settings=cmake.define.TENSORWIRE_WERROR=$(WERROR) \
	  --config-settings=cmake.define.TENSORWIRE_TORCHES= -e .
	@touch $@

.PRECIOUS: $(VENV)/.with-%
FORCE:
