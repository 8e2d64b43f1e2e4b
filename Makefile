# Everything a contributor runs, from a clean clone, with Python >= 3.10 and make alone.
# make test ARGS="-k conv" · make test DEVICE=cuda · make demo PYTHON=python3.12

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
DEVICE  ?= cpu
ARGS    ?=

BIN     := $(VENV)/bin
# Every install honours the same pins, so that two environments never differ.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test lint format types docs zoo bench check clean
# The targets share one environment; two installs at once would break it.
.NOTPARALLEL:

help:
	@echo "make demo    train on scikit-learn's digits and look at per-sample gradients (under a minute)"
	@echo "make test    the whole test suite, doctests included"
	@echo "make lint    ruff: lint and format check      make format   apply both"
	@echo "make types   mypy, strict, on the package"
	@echo "make docs    build the documentation into docs/_build/html"
	@echo "make zoo     333 models of torchvision, timm, transformers and peft (ten minutes; ARGS=--third)"
	@echo "make bench   time and memory against a plain step and against other packages (half an hour; ARGS=--quick)"
	@echo "make check   test, lint, types and docs"
	@echo "make clean   remove the environment and everything built"

# An empty file in the environment says that a step is done, so that a second `make` installs nothing.
$(VENV)/.pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gradbatch needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'  # reads dependency groups
	@touch $@

$(VENV)/.package: $(VENV)/.pip pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cli,analysis,demo]'
	@touch $@

$(VENV)/.test $(VENV)/.loops $(VENV)/.lint $(VENV)/.docs $(VENV)/.zoo $(VENV)/.bench: $(VENV)/.%: $(VENV)/.package
	$(INSTALL) --group $*
	@touch $@

demo: $(VENV)/.package
	$(BIN)/python examples/digits.py $(ARGS)

# One thread a worker: the workers share the cores, and tensors in tests are small.
test: $(VENV)/.test $(VENV)/.loops
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --device $(DEVICE) $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.lint
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html docs docs/_build/html

# Whole models of other packages; a third of them with ARGS=--third, one with ARGS='--only timm/vit'.
zoo: $(VENV)/.test $(VENV)/.zoo
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.run $(ARGS)

# Everything, on one thread (half an hour): ARGS=--quick, or ARGS='--models cnn gpt --threads 1 2', or
# ARGS='--profile --models cnn --quantities BatchGrad'; DEVICE=cuda.
bench: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.run --device $(DEVICE) $(ARGS)

check: test lint types docs

clean:
	rm -rf $(VENV) docs/_build docs/supported-layers.md .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
