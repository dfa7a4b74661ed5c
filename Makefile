# Two commands set everything up on a machine with Python 3.11 or newer: `make reproduce` and `make test`.
# The environment is made once, in .venv, and again only when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# A processor with AVX2 alone, as most laptops have: no AVX-512 and no bfloat16 instructions.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
  NPY_DISABLE_CPU_FEATURES="$$($(BIN)/python -c 'from numpy._core._multiarray_umath import __cpu_dispatch__ as a, __cpu_features__ as f; print(*[x for x in a if f.get(x) and (x.startswith("AVX512") or x == "X86_V4")])')"

.PHONY: reproduce test test-avx2 lint lab lock bench clean
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
	$(BIN)/python -m pytest -n auto $(ARGS)

test-avx2: $(READY)  ## the suite as on a processor with AVX2 alone
	$(AVX2) $(BIN)/python -m pytest -n auto $(ARGS)

lint: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lab: $(READY)  ## open the notebooks
	$(BIN)/jupyter lab notebooks/00-tour.ipynb

lock: $(READY)  ## write every version of this environment to environment.lock.txt
	@{ echo "# Every version of the default run's environment (Python 3.11). Made by 'make lock'; install with pip install -r."; \
	  $(BIN)/python -m pip list --disable-pip-version-check --format freeze --exclude-editable \
	  | grep -v -E '^(pip|setuptools|wheel)==' | sed 's/+cpu$$//'; } > environment.lock.txt

bench: $(READY)  ## speed as ratios, side by side in one process
	$(BIN)/python -m glance bench $(ARGS)

clean:
	rm -rf build $(VENV)
