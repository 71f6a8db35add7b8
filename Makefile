# Every target does its own set-up in .venv, with plain python3 and pip; a second call starts at once.
# Another interpreter:      make test PYTHON=python3.12
# CPU wheels of torch only: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --prefer-binary -c constraints.txt
SOURCES := src tests examples benchmarks tools
# The networks of the tests are tiny: one thread for each test process. Compiled modules are kept: tests start programs.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS := -n auto --dist worksteal
EVERYTHING := -m "not gpu"

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-slow test-deepspeed test-gpu lint style types mutants clean

help: ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: .venv/.runtime ## Teach a tiny inpainting model to write, on a CPU
	$(BIN)/python examples/demo.py

test: .venv/.installed style ## Format, lint, types, import contracts, and every fast test
	@$(call beside_types,$(TEST) $(WORKERS))

test-all: .venv/.installed style ## Everything without a GPU, hours: before a release, after `make test-deepspeed`
	@$(call beside_types,$(TEST) $(WORKERS) $(EVERYTHING))

# A command while the types are checked; fails if either does.
beside_types = $(MAKE) --no-print-directory types > .venv/types.log 2>&1 & types=$$!; \
	$(1); tests=$$?; wait $$types; types=$$?; cat .venv/types.log; exit $$((tests + types))

test-slow: .venv/.installed ## The tests that take minutes
	$(TEST) -m slow

test-deepspeed: .venv/.deepspeed ## The tests of DeepSpeed, which it installs first
	$(TEST) -m "not gpu" -k "zero or deepspeed" tests/distributed

test-gpu: .venv/.installed ## The tests that need a GPU
	$(TEST) -m gpu tests/cuda

lint: style types ## Format, lint, types, import contracts

style: .venv/.installed
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/lint-imports

types: .venv/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

mutants: .venv/.installed ## Break the code on purpose: every named fault must be caught by its test
	$(BIN)/python tools/mutants.py

clean: ## Remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	find src tests examples benchmarks tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# what the demo needs
.venv/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "retouch needs Python 3.11 or newer, and '$(PYTHON)' is not; name one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv .venv || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu its package is python3-venv" >&2; exit 2; }
	@echo "installing into .venv ..."
	$(PIP) -e ".[train,serve,ocr]"
	@touch $@

# what tests need besides
.venv/.installed: .venv/.runtime
	$(PIP) -e ".[train,serve,ocr,vlm,mmmg,wandb,dev]"
	@touch $@

# its set-up imports torch, so that it must be there; operators are compiled when they are first used
.venv/.deepspeed: .venv/.installed
	$(PIP) setuptools wheel
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	@touch $@
