# Two commands do everything: `make demo` and `make test`. Both first create .venv with the pinned packages.
PYTHON ?= python3
BIN := .venv/bin
CHECKED := src tests

.PHONY: demo test lint types unit docs setup clean

demo: setup
	$(BIN)/varifocal check

test: setup lint types unit

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "varifocal needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -n 2

# The README's table and picture, from a fresh measurement.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plots]'
	$(BIN)/varifocal check --json results/conformance.json
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
