# `make demo` and `make test` set themselves up: a virtual environment, the locked dependencies, then the work.
PYTHON ?= python3
VENV ?= .venv
STORE ?= .puna
export PYTHONPATH := .pkg
export HF_HUB_DISABLE_TELEMETRY := 1
# Children of the tests start in half the time when their modules are compiled once.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin

.PHONY: setup demo test lint types docs wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock deploy/setup.sh pyproject.toml
	PYTHON=$(PYTHON) VENV=$(VENV) sh deploy/setup.sh
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@echo "compiling the loops of curation, once (a few minutes)"
	$(BIN)/python deploy/compile.py
	touch $@

demo: setup
	$(BIN)/python -m puna.flows.cli.main demo-pages $(STORE)/sample
	$(BIN)/python -m puna.flows.cli.main run pipeline --recipe demo --store $(STORE) $(ARGS)

# One process a core: threads of torch that wait for each other's core cost a small model three times its time.
test: export OMP_NUM_THREADS := 1
test: setup lint types
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict --site-dir build/site

# With the loops of curation compiled for the common processors of this machine's kind.
wheel: setup
	$(BIN)/python deploy/compile.py --ship
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) .loops kernels/cpu/compiled .mypy_cache .ruff_cache .pytest_cache .hypothesis
