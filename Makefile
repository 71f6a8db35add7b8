# Every target installs what it needs into .venv, with python3 and pip; later calls skip the installation.
# Another interpreter:      make test PYTHON=python3.12
# CPU build of torch:       PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
BIN := .venv/bin
# Modules are compiled when they are first imported, since compiling all of them takes half of an installation: for the demo
# at its end, for tests by the server whose forks they are, while style and types are checked.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --prefer-binary -c constraints.txt
export PYTHONDONTWRITEBYTECODE=
SOURCES := src tests examples benchmarks tools
# The networks of the tests are tiny: one thread for each test process.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS := -n auto --dist worksteal
# With "=": before it loads conftest.py, pytest takes a value that is a file for a test to run.
# Processor seconds of each test, and the names of those that belong to another tier (tests/tiers.py).
RECORD = --record-durations=.venv/durations-$@.json
DAILY := not slow and not full and not gpu

.DEFAULT_GOAL := help
.PHONY: help demo test test-ci test-rest test-all repeat trust audit environments test-slow test-deepspeed test-gpu lint style types docs mutants clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: .venv/.runtime ## Train a tiny inpainting model to write words, on a CPU
	$(BIN)/python examples/demo.py

test: .venv/.installed ## Run make lint and every fast test (minutes)
	@$(call beside_lint,$(TEST) $(WORKERS) $(RECORD) -m "$(DAILY) and not ci")

test-ci: .venv/.installed ## Run make lint and what CI runs: every test that takes seconds
	@$(call beside_lint,$(TEST) $(WORKERS) $(RECORD))

test-rest: .venv/.installed ## Run what make test-ci runs and make test does not
	@$(FORGET); $(TEST) $(WORKERS) $(RECORD) -m "$(DAILY) and ci"; tests=$$?; echo $$tests > .venv/tests.code; exit $$tests

test-all: .venv/.installed ## Run every test that needs no GPU (hours), before a release
	@$(call beside_lint,$(TEST) $(WORKERS) -m "not gpu")

repeat: .venv/.installed ## Run the tests that failed once more, alone, until one fails again
	@test "$$(cat .venv/tests.code)" = 1 || { echo "repeat: not every test was run"; exit 1; }
	@test ! -e .venv/lint.code || test "$$(cat .venv/lint.code)" = 0 || { echo "repeat: make lint failed"; exit 1; }
	$(TEST) -vv --last-failed --last-failed-no-failures none --maxfail 1
	@echo "unsteady: the tests named above failed before, and pass alone"

# A command while make lint runs; fails if either does. Both exit codes are kept for make repeat, that of the tests last:
# a run that is killed leaves none, nor those of an earlier one.
FORGET = rm -f .venv/tests.code .venv/lint.code
beside_lint = $(FORGET); $(MAKE) --no-print-directory lint > .venv/lint.log 2>&1 & lint=$$!; \
	$(1); tests=$$?; wait $$lint; lint=$$?; echo $$lint > .venv/lint.code; echo $$tests > .venv/tests.code; \
	cat .venv/lint.log; exit $$((tests + lint))

trust: .venv/.installed ## Fuzz everything that is read: over 10,000 cases, minutes
	RETOUCH_FUZZ_CASES=1000 RETOUCH_FUZZ_OUT=benchmarks/results/fuzz.json $(TEST) -q -W ignore tests/fuzz

audit: .venv/.installed ## Compare packages with their pinned hashes, and look up known vulnerabilities
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps \
	  --only-binary :all: --require-hashes -r tools/hashes.txt
	$(PIP) pip-audit
	$(BIN)/pip-audit --strict --disable-pip --require-hashes -r tools/hashes.txt || \
	  { echo "audit: a vulnerability, or a package that could not be looked up (no network, or an index without its versions)"; exit 1; }

# Beside `make test-ci` in CI: it keeps no record of its own of what failed, which is that of `make repeat`.
environments: .venv/.installed ## Resolve the packages of every reward environment, without installing them
	$(TEST) -q -p no:cacheprovider -m full tests/rewards/test_environments.py

test-slow: .venv/.installed ## Run the tests that take minutes
	$(TEST) -m slow

test-deepspeed: .venv/.deepspeed ## Install DeepSpeed and run its tests
	$(TEST) -m "not gpu" -k "zero or deepspeed" tests/distributed

test-gpu: .venv/.installed ## Run the tests that need a GPU
	$(TEST) -m gpu tests/cuda

lint: style types ## Check format, style, types, import contracts and language

style: .venv/.installed
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/lint-imports
	$(BIN)/python tools/language.py --scope docs --scope help --scope source

types: .venv/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: .venv/docs/.installed ## Build the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict

mutants: .venv/.installed ## Break the code on purpose and check that a test catches each fault
	$(BIN)/python tools/mutants.py

clean: ## Remove .venv and caches, but not runs/
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	find src tests examples benchmarks tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# A virtual environment with the extras that are given, by one call of pip.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "retouch needs Python 3.11 or newer, and '$(PYTHON)' is older; set PYTHON: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv .venv || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu, install the package python3-venv" >&2; exit 2; }
	@echo "installing into .venv ..."
	$(subst --quiet,,$(PIP)) -e ".[$(1)]"
endef
OF_DEMO := train,serve,ocr
OF_TESTS := $(OF_DEMO),vlm,mmmg,quantize,wandb,dev

# the extras of the demo
.venv/.runtime: pyproject.toml constraints.txt
	$(call install,$(OF_DEMO))
	@echo "compiling ..."
	@$(BIN)/python -c "import retouch.cli, torch, diffusers.models, transformers, accelerate, peft, rapidocr"
	@touch $@

# those of the tests, too
.venv/.installed: pyproject.toml constraints.txt
	$(call install,$(OF_TESTS))
	@touch .venv/.runtime $@

# An environment of their own: the pages need neither torch nor this package
.venv/docs/.installed: constraints.txt
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt mkdocs-material
	@touch $@

# DeepSpeed's setup imports torch; its operators are compiled at their first use
.venv/.deepspeed: .venv/.installed
	$(PIP) setuptools wheel
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	@touch $@
