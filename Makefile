# make setup | te | demo | quick | test | bank | long | weights | lint | types | docs | bench | dist | hashes
#
# Everything lives in .venv. Needs Python 3.12 or newer and a C++ compiler (DeepSpeed compiles operators where a run asks for one).

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# ninja, which DeepSpeed calls by name, lies in the environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Compiled once here: every process of every run imports torch, DeepSpeed and Megatron.
INSTALL := $(BIN)/uv pip install --python $(BIN)/python --compile-bytecode -c constraints.txt

.PHONY: setup te demo quick quick-long quick-rest test test-1 test-2 bank long weights lint types docs bench dist hashes

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v "$${CXX:-c++}" >/dev/null || { echo "make setup: no C++ compiler found (c++ or CXX); on Debian or Ubuntu: apt-get install g++" >&2; exit 1; }
	@test -x $(BIN)/python || { \
	  for python in python3.12 python3.13 python3.14 python3 python; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  test -n "$$found" || { echo "make setup: Python 3.12 or newer is needed; none of python3.12, python3.13, python3.14, python3 is one" >&2; exit 1; }; \
	  "$$found" -m venv $(VENV) || { echo "make setup: $$found could not make $(VENV); on Debian or Ubuntu install its -venv package" >&2; exit 1; }; \
	}
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(INSTALL) -e ".[dev]"
	@touch $(STAMP)

demo: setup
	$(BIN)/megaaccum train configs/tiny_cpu.yaml

# Transformer Engine's Python, without its kernels, for the tests of FP8: beside the environment, because where it can be
# imported Megatron takes its layers. Without a network those tests are skipped, and say so.
TE := .te

te: $(TE)/transformer_engine

$(TE)/transformer_engine: | setup
	-@$(INSTALL) --quiet --no-deps --target $(TE) transformer-engine

# The edit loop: every unit test, and one cell of the parity table per backend, in less than 90 seconds on two cores; in two
# processes of about the same length, each of which reports at its end and keeps to one thread.
LONG := tests/unit/lab/planner tests/unit/schedule tests/unit/pretrain/interop tests/unit/pretrain/metrics

quick-long quick-rest: export OMP_NUM_THREADS = 1

quick: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync quick-long quick-rest

quick-long: setup
	$(BIN)/python -m pytest -q $(LONG)

quick-rest: setup
	$(BIN)/python -m pytest -q tests/unit $(LONG:%=--ignore %) tests/multiproc/test_backend_table.py::test_one_cell_per_backend

# Every test, in two processes, each of which takes the file of tests that is next: one alone leaves a core idle wherever a
# rank waits or there is one rank only. Each reports at its end; files of many short tests come last.
# `python -m pytest` is the same in one process.
PROCESSES := test-1 test-2

$(PROCESSES): export OMP_NUM_THREADS = 1
# Dozens of processes import the package, each of which would compile it where a shell forbids it to keep that.
$(PROCESSES): export PYTHONDONTWRITEBYTECODE =

test: setup te
	@turns=$$(mktemp -d); TEST_TURNS=$$turns $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,--jobs 2) \
	  --keep-going --output-sync $(PROCESSES); code=$$?; rm -r $$turns; exit $$code

$(PROCESSES): setup
	$(BIN)/python -m pytest tests/multiproc tests/multihost tests/unit

# Every documented mistake, made on purpose: each is caught by a wrong number.
bank: setup
	$(BIN)/python -m pytest tests/bank --ignore tests/bank/test_weights.py

# Every family of Hugging Face's models in every layout, in and out and through 20 steps.
weights: setup
	$(BIN)/python -m pytest tests/bank/test_weights.py

# Tables that take minutes and of which `make test` runs one cell of each kind: Muon on every backend and layout, layouts to
# the bit, an engine's pairs of calls, Megatron's loop over our objects, cells of the fuzz, and every case of the GPU suite, dry.
long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/long

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/python -m benchmarks

# The wheel and the source archive, and the software bill of materials of this environment (CycloneDX).
dist: setup
	$(INSTALL) --quiet -e ".[dist]"
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
	  --output-file dist/megaaccum.cdx.json $(BIN)/python

# The hashes of every file of the versions in constraints.txt, after a change of those.
hashes: setup
	$(BIN)/uv pip compile --quiet --no-deps --no-header --no-annotate --generate-hashes constraints.txt -o constraints.hashes.txt
