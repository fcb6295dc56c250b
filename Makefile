# Everything a newcomer needs: `make demo` and `make test`. Both set up a virtual environment in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NAME ?= 01-hello
BASE ?= python:3.12-slim
# Of two cores, two workers leave half: most tests wait for other processes.
WORKERS ?= 3
SOAK_SECONDS ?= 600
SOAK_EPISODES ?= 5000
SOAK_SEEDS ?= 3
PODS ?= 10000

.DEFAULT_GOAL := help
.PHONY: help install components base-image platform-image demo mini-program test lint bench bench-check simulation docs serve soak clean

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 16

$(VENV)/pip.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/package.stamp: pyproject.toml $(VENV)/pip.stamp
	@echo "installing the package"
	@$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/package.stamp
	@echo "installing the tools for development"
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

install: $(VENV)/dev.stamp  ## the package and the tools for development, in .venv

components: $(VENV)/dev.stamp  ## what more tests need: Node tools, an S3 server, packages of others, benchmarks, a root file system, Kubernetes
	@scripts/node-tools
	@$(BIN)/python -m tests.peers $(if $(CHANGED),--changed)
	@$(BIN)/python -m tests.envs
	@$(BIN)/python -m tests.daemons
	@$(BIN)/python -m tests.cluster

base-image: $(VENV)/package.stamp  ## the image that the Docker engine runs projects in, built on BASE
	@$(BIN)/python scripts/base_image.py --base $(BASE)

platform-image: $(VENV)/package.stamp  ## the image of 'aenv serve', built on the base image
	@$(BIN)/python scripts/base_image.py platform

demo: $(VENV)/package.stamp  ## examples/01-hello: two episodes, from tools to reward
	@cd examples/$(NAME) && $(abspath $(BIN))/python episode.py

mini-program: $(VENV)/dev.stamp  ## examples/09-mini-program: a page where an agent builds a web app (MODEL names one of OPENAI_BASE_URL)
	@$(BIN)/python examples/09-mini-program/app.py $(if $(MODEL),--model $(MODEL))

test: $(VENV)/dev.stamp  ## all tests that this machine can run
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests

lint: $(VENV)/dev.stamp  ## ruff, mypy, import-linter, and the generated references
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/cli_reference.py --check
	@$(BIN)/python scripts/reference.py --check

bench: $(VENV)/dev.stamp  ## measure everything against its peers
	@$(BIN)/python -m benchmarks

bench-check: $(VENV)/dev.stamp  ## measure again, and fail where a ratio got worse
	@$(BIN)/python -m benchmarks --check

simulation: $(VENV)/dev.stamp  ## one engine with PODS pods, on a real API server and a scripted node (RECORD=1 writes docs)
	@$(BIN)/python -m benchmarks.simulation --pods $(PODS) $(if $(RECORD),--record)

docs: $(VENV)/dev.stamp  ## write the generated parts of docs/reference
	@$(BIN)/python scripts/cli_reference.py
	@$(BIN)/python scripts/reference.py

serve: $(VENV)/package.stamp  ## serve the example on port 8081
	@$(BIN)/aenv run --work-dir examples/$(NAME) --quiet

soak: $(VENV)/dev.stamp  ## ten minutes each of everything: processes, Docker, Kubernetes (SOAK_SECONDS); rollouts under kills (SOAK_EPISODES), trainings (SOAK_SEEDS)
	@$(BIN)/python -m benchmarks.soak platform --seconds $(SOAK_SECONDS)
	@$(BIN)/python -m benchmarks.soak docker --seconds $(SOAK_SECONDS)
	@$(BIN)/python -m benchmarks.soak kubernetes --seconds $(SOAK_SECONDS)
	@$(BIN)/python -m benchmarks.soak rollouts --episodes $(SOAK_EPISODES)
	@test $(SOAK_SEEDS) = 0 || $(BIN)/python -m benchmarks.soak trainings --seeds $(SOAK_SEEDS)

clean:  ## forget the virtual environment and the caches
	@rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache
