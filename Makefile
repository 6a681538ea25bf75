# Everything that a person or CI runs. Each target makes what it needs, so that any of them works on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
ARGS ?=
WORKERS ?= 2
# a file's tests stay together, for what they share; ranks that wait for one another leave time to those of a second file
DISTRIBUTED := -n $(WORKERS) --dist loadfile

.PHONY: help demo test test-all lint docs bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## train a small GPT on four processes, 3 to 4 minutes
	$(BIN)/lightning-hybrid demo $(ARGS)

test: $(VENV)/.installed-test ## run the tests; ARGS="-k name" chooses, WORKERS=0 is for debuggers
	$(BIN)/python -m pytest $(DISTRIBUTED) $(ARGS)

test-all: $(VENV)/.installed-test ## run the tests with the full product of every parity table
	$(BIN)/python -m pytest $(DISTRIBUTED) -m "full or not full" $(ARGS)

lint: $(VENV)/.installed-test ## check style, format, spelling and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

docs: $(VENV)/.installed-docs ## build the documentation into docs/_build, warnings are errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs docs/_build/html

bench: $(VENV)/.installed-test ## run every benchmark, one JSON line a row
	@for file in benchmarks/*.py; do $(BIN)/python "$$file" || exit; done

clean: ## remove the venv, caches and builds
	rm -rf $(VENV) build dist *.egg-info docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools comes first and builds without isolation, so that the constraints hold for the build too
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip setuptools

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing the package and what it needs into $(VENV): some minutes, once"
	@$(PIP) --no-build-isolation --editable .
	@touch $@

# DeepSpeed comes after torch: it asks for any torch, and is built from source, which compiles nothing
$(VENV)/.installed-test: EXTRAS = ,deepspeed

$(VENV)/.installed-%: $(VENV)/.installed
	@echo "installing what $* needs"
	@$(PIP) --no-build-isolation --editable ".[$*$(EXTRAS)]"
	@touch $@
