# make install | demo | test | test-sglang | lint | types | layers | bench | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG := .venv-sglang

.PHONY: install demo test sglang test-sglang lint types layers bench clean
.DEFAULT_GOAL := install

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[data,dev,math,postgres,megatron]'
	touch $(STAMP)

demo: install
	$(BIN)/gyre demo $(ARGS)

# Three workers, also on two cores: the tests that kill processes mostly wait for them to come back.
# Compiled first, for where Python may not write bytecode each of their processes would compile Gyre again.
test: install
	$(BIN)/python -m compileall -q gyre
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder $(ARGS)

# SGLang has an environment of its own (2.6 GB), for it wants other versions than Gyre.
sglang: $(SGLANG)/.installed

$(SGLANG)/.installed: constraints-sglang.txt
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r constraints-sglang.txt
	touch $@

# One worker has the job, the other what needs an engine alone: an engine takes half a minute of a core to start.
test-sglang: install sglang
	$(BIN)/python -m pytest -m sglang -n 2 --dist loadfile tests/sglang $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

bench: install
	for script in $(filter-out %_gpu.py,$(wildcard bench/*.py)); do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) $(SGLANG) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
