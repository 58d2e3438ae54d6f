# The whole set-up is one virtual environment; every target but `gpu`, `clean` and `help` brings it up to date first.
PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
# The slowest tests are named, since the short tier must stay short.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 15
# jaxtyping compares shapes and dtypes with the signature at every call, which nearly doubles the time of the tests.
SHAPES = --jaxtyping-packages=lit_rlkv,beartype.beartype
SHAPED = experience kernels kvcache models modules objectives rollout stages test_crosses.py test_toolchain.py test_types.py

# Two workers with one thread each: more threads than cores make small tensors slower.
test test-slow test-shapes lint notebooks: export OMP_NUM_THREADS = 1

.PHONY: fit smollm2 test test-slow test-shapes test-all lint docs notebooks gpu audit clean help
.DEFAULT_GOAL := help
.NOTPARALLEL:

fit: $(STAMP) ## train: make fit ARGS="experiment=... seed=1"
	$(BIN)/python -m lit_rlkv.fit $(ARGS)

smollm2: $(STAMP) ## fetch a pretrained model of 135M parameters and train it, in about 25 minutes (ARGS as for fit)
	$(BIN)/python scripts/fetch_model.py
	$(BIN)/python -m lit_rlkv.fit recipe=smollm2 $(ARGS)

test: lint docs ## lint, the site and the short tier of the tests, about twenty minutes (PYTEST_ARGS=... for pytest)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP) ## the tests that the short tier leaves out
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-shapes: $(STAMP) ## the short tests of what computes, with the shapes and dtypes of signatures checked
	$(PYTEST) $(SHAPES) -m "not slow" $(addprefix tests/,$(SHAPED)) $(PYTEST_ARGS)

test-all: test test-slow test-shapes ## all of these, the short tier first

lint: $(STAMP) ## ruff, import layers, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

docs: $(STAMP) ## the site, into site/; a link or an anchor that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(STAMP) ## run the notebooks at full size and keep what they show (ARGS=notebooks/01_quickstart.ipynb for one)
	$(BIN)/python notebooks/execute.py $(ARGS)

# Without .venv: a machine with a GPU has a CUDA build of torch already, and this needs little beside it.
gpu: ## prove correctness and speed on a GPU with python3's own torch: make gpu ARGS="--out FOLDER"
	$(PYTHON) benchmarks/gpu.py $(ARGS)

# In an environment of its own, so that it changes nothing of what it looks at.
audit: $(STAMP) ## known vulnerabilities of what is installed; asks a service on the network
	test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/python -m pip install --quiet pip-audit; }
	.audit/bin/pip-audit --progress-spinner off --skip-editable \
		--path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

clean: ## remove the virtual environment and every cache
	rm -rf .venv .audit site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

# torch first and alone, so that a machine that keeps a CPU build of the pinned version takes that one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==$(shell sed -n 's/^torch==//p' constraints.txt) -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	touch $@
