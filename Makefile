# Everything a fresh machine needs: `make demo` and `make test` set up what they use.
# Needs python >= 3.11 with venv, and a package index that pip reaches.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
  $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
WHEEL_VENV := build/wheel-venv
WHEEL_TESTS := build/wheel-tests
# One process per core, each with one torch thread.
PYTEST_ARGS ?= --numprocesses auto --dist worksteal

# The tests against the real SGLang on a CPU, in an environment of their own: its pins would move ours.
SGLANG_VENV ?= .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/installed.stamp

.PHONY: demo test test-sglang lint format typecheck wheel wheel-test bench-survey clean setup

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "memreclaim needs python >= 3.11; none was found" >&2; exit 1; }
	@echo "setting up $(VENV), once; this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev,server,completion]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/memreclaim demo --dir .demo

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

$(SGLANG_INSTALLED): pyproject.toml tests/sglang/requirements-cpu.txt
	@echo "setting up $(SGLANG_VENV), once: 2.1 GB"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install -qq torch==2.13.0
	$(SGLANG_VENV)/bin/python -m pip install -qq --no-deps -r tests/sglang/requirements-cpu.txt
	$(SGLANG_VENV)/bin/python -m pip install -qq --no-deps structlog prometheus_client rich markdown-it-py mdurl \
	  pytest iniconfig pluggy
	$(SGLANG_VENV)/bin/python -m pip install -qq --no-deps --editable .
	touch $@

test-sglang: $(SGLANG_INSTALLED)
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

typecheck: $(INSTALLED)
	$(BIN)/mypy

wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation

# The tests against the wheel as a user would install it. They run in a folder that holds the tests but not the sources, so
# that nothing but the installed packages can be imported.
wheel-test: wheel
	rm -rf $(WHEEL_VENV) $(WHEEL_TESTS)
	$(PYTHON) -m venv $(WHEEL_VENV)
	wheel=$$(echo dist/*.whl) && $(WHEEL_VENV)/bin/python -m pip install -qq --constraint constraints.txt \
	  "$$wheel[dev,server,completion]"
	mkdir -p $(WHEEL_TESTS)
	tar -cf - --exclude=./memreclaim --exclude=./kernels/memreclaim_kernels --exclude=./build --exclude=./dist \
	  --exclude=./.git --exclude=./.venv --exclude=./.demo --exclude=./.hypothesis --exclude='__pycache__' . | tar -xf - -C $(WHEEL_TESTS)
	cd $(WHEEL_TESTS) && env -u PYTHONPATH ../wheel-venv/bin/pytest $(PYTEST_ARGS)

bench-survey: $(INSTALLED)
	$(BIN)/python benchmarks/survey.py

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
