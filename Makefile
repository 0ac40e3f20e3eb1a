# Two commands do everything on a fresh machine:
#   make sweep    sets up, then runs a shape sweep (fused kernels on a GPU, the PyTorch reference backend without)
#   make test     sets up, then lints, checks types and runs the tests
# Both use a virtual environment in .venv with the versions of constraints.txt; nothing outside of it is touched.

PYTHON ?= python3
VENV ?= .venv
SWEEP ?= --quick
PYTEST ?=

READY := $(VENV)/.ready
RUN := $(VENV)/bin/python -m

.PHONY: sweep test lint clean

sweep: $(READY)
	$(RUN) shape_sweeps run $(SWEEP)

test: lint
	$(RUN) pytest $(PYTEST)

lint: $(READY)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# PIP_CONSTRAINT and not --constraint: it also holds for the environment that builds the package
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(RUN) pip install --quiet --editable '.[test]'
	touch $(READY)
