# From a fresh clone, `make demo` and `make test` do everything. `make help` lists all targets.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev
# Tests start hundreds of processes. Without stored bytecode each would compile our sources again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# Two more workers than cores, because a test that waits for Slurm or for a process leaves its core idle.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))

.DEFAULT_GOAL := help
.PHONY: help install demo clean-demo test test-exhaustive quick lint types format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED_DEV) ## make .venv and install selectron in it, with the tools of the tests

# Two steps: the demo needs only the first, and does not wait for the test tools of the second.
$(INSTALLED): pyproject.toml constraints.txt constraints-py312.txt tools/install.sh
	@PYTHON="$(PYTHON)" tools/install.sh

$(INSTALLED_DEV): $(INSTALLED)
	@PYTHON="$(PYTHON)" tools/install.sh dev

demo: $(INSTALLED) ## prepare text, train three architectures, compare them: runs/quickstart
	@examples/quickstart.sh

clean-demo: ## remove what the demo made
	rm -rf runs/quickstart

# A recursive make keeps the order even under -j: the fastest checks run first.
test: $(INSTALLED_DEV) ## lint, types and all tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	$(PYTEST) --durations=15 --numprocesses $(WORKERS) --dist worksteal

test-exhaustive: $(INSTALLED_DEV) ## all tests with all their cases: every mixer by itself under every layout, ...
	SELECTRON_TEST_EXHAUSTIVE=1 $(PYTEST) --durations=15 --numprocesses $(WORKERS) --dist worksteal

quick: $(INSTALLED_DEV) ## the tests without the slow ones
	$(PYTEST) -m "not slow" --durations=5

lint: $(INSTALLED_DEV) ## ruff: rules and form; shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck slurm/*.sbatch examples/*.sh tools/*.sh .ci/run

# On a busy machine a worker may not start within the three seconds that mypy gives it. mypy then ends with code 2.
types: $(INSTALLED_DEV) ## mypy
	$(BIN)/mypy --num-workers 2 || { [ $$? = 2 ] && $(BIN)/mypy; }

format: $(INSTALLED_DEV) ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build folders; runs stay
	rm -rf .venv build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find data_prep kernels megatron_ext tests -name __pycache__ -type d -prune -exec rm -rf {} +
