# `make demo` shows everything; `make test` proves it. Both make their own environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
STEPS ?=
# Processes for the tests; each starts servers of its own.
WORKERS ?= 2
# A file at a time, in the order of tests/conftest.py: those that take longest begin first.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Python keeps what it compiles, even where the environment says not to: each process would compile its imports anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test docker-test test-all lint check lock clean

help:
	@echo "make demo [KEEP=1]   train a tiny model and publish its checkpoints; KEEP=1 leaves the servers up"
	@echo "make test            what a change must pass"
	@echo "make test-all        those, and the longest: training loops whose checkpoints are published, clusters"
	@echo "make docker-test     build the image and run its services (root, buildah, podman); KEEP=1 keeps the images"
	@echo "make lint            format, ruff, mypy, imports across the layers"
	@echo "make check           lint and test"
	@echo "make venv            .venv with the pinned packages (the targets above make it themselves)"
	@echo "make lock            pin the versions that are in .venv now"
	@echo "make clean           remove caches and what the demo and the benchmarks left"

venv: $(INSTALLED)

# Of the packages' modules, 17,000, most are never imported; those that are get compiled then.
$(INSTALLED): requirements/base.txt requirements/dev.txt pyproject.toml
	@echo "Installing the packages of requirements/dev.txt into .venv. It takes minutes and says only what fails."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install --no-compile -r requirements/dev.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q src tasks flows
	@touch $@

demo: $(INSTALLED)
	$(BIN)/ckptflow demo $(if $(filter-out 0,$(KEEP)),--keep) $(if $(STEPS),--steps $(STEPS))

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED)
	$(PYTEST)

docker-test: $(INSTALLED)
	$(BIN)/python docker/check $(if $(filter-out 0,$(KEEP)),--keep)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/pytest -q tests/test_boundaries.py

check: lint test

lock:
	$(BIN)/python requirements/lock.py

clean:
	rm -rf demo-output bench-output build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
