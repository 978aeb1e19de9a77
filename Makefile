# The commands CI runs are the ones people type. PYTHON picks the interpreter (3.11, 3.12 or 3.13).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help train test test-slow test-soak check format lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# A marker that is written last: an interrupted install is started over, never used half.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Shoal needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Try: make PYTHON=python3.12 train" % v)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

train: $(STAMP)  ## train the default job on this machine
	$(BIN)/shoal train examples/quickstart.yaml

test: check  ## everything that fits into ten minutes
	$(BIN)/python -m pytest -q -m "not slow and not soak" --ignore tests/packaging  # `check` has run those

test-slow: $(STAMP)  ## the long fault scenarios
	$(BIN)/python -m pytest -q -m "slow and not soak"

test-soak: $(STAMP)  ## kill matrix, long outages and schedules, about two hours
	$(BIN)/python -m pytest -q -m soak

check: $(STAMP)  ## ruff, mypy, import-linter, packaging
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/packaging

format: $(STAMP)  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## renew requirements.lock (needs uv)
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-annotate --upgrade -o requirements.lock

clean:  ## remove what make created
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
