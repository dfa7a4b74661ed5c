# Two commands set everything up on a machine with Python 3.11 or newer: `make reproduce` and `make test`.
# The environment is made once, in .venv, and again only when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: reproduce test lint lab bench clean
.DEFAULT_GOAL := reproduce

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "GLANCE needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V); try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[decode,notebooks,dev]'
	@touch $@

reproduce: $(READY)  ## decode, audit, fit, plots on the pocket target: every table and figure
	$(BIN)/glance reproduce $(ARGS)

test: $(READY)  ## lint, then the whole suite
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lab: $(READY)  ## open the notebooks
	$(BIN)/jupyter lab notebooks/00-tour.ipynb

bench: $(READY)  ## speed as ratios, side by side in one process
	$(BIN)/python -m glance bench $(ARGS)

clean:
	rm -rf build $(VENV)
