# `make help` says what each target does.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo setup-local setup-dev test test-slurm nightly mutants chaos fate lifecycle check golden docs

PYTEST_ARGS ?=
MUTANTS_ARGS ?=
# ruff, shellcheck and shfmt come with --dev, pinned, so that every machine formats alike.
in_venv := PATH="$(CURDIR)/.venv/bin:$$PATH"

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup-local: # no help line: demo and the developers' targets start it
	@./setup.sh --local --quiet

setup-dev:
	@./setup.sh --local --dev --quiet

demo: setup-local ## set up, then train every cell of the matrix that this machine can run
	.venv/bin/python submit.py sweep matrix --cluster local

test: setup-dev ## the tests, a real Slurm cluster included, without the nightly ones
	$(in_venv) .venv/bin/python -m pytest -n 5 --dist loadgroup --no-loadscope-reorder --durations=25 $(PYTEST_ARGS)

test-slurm: setup-dev ## only the tests that start a Slurm cluster on this machine
	$(in_venv) .venv/bin/python -m pytest -m slurm $(PYTEST_ARGS)

nightly: setup-dev ## what is too slow for each push: slow tests, all faults, chaos, gradients
	$(in_venv) .venv/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m nightly $(PYTEST_ARGS)
	.ci/run driver
	.venv/bin/python -m tests.mutants
	.venv/bin/python -m tests.random_mutants --seed "$$(date +%j)"
	.venv/bin/python -m bench.stress.chaos
	.venv/bin/python -m bench.stress.fate --seed "$$(date +%j)"
	$(MAKE) lifecycle
	.venv/bin/python -m bench.proofs.gradients build/gradients

mutants: setup-dev ## put faults in one at a time and see the tests find them (MUTANTS_ARGS=--quick: a part)
	.venv/bin/python -m tests.mutants $(MUTANTS_ARGS)

CHAOS_ARGS ?=
chaos: setup-dev ## 20 random faults in a run on a Slurm cluster started here; CHAOS_ARGS="--seed 7"
	.venv/bin/python -m bench.stress.chaos $(CHAOS_ARGS)

FATE_ARGS ?= --cases 200
fate: setup-dev ## random options and files: is the verdict what TorchTitan does? FATE_ARGS="--seed 7"
	.venv/bin/python -m bench.stress.fate $(FATE_ARGS)

lifecycle: setup-dev ## 300 random histories of jobs against a model; LIFECYCLE_HISTORIES=1000
	LIFECYCLE_HISTORIES=$${LIFECYCLE_HISTORIES:-300} LIFECYCLE_SEED=$${LIFECYCLE_SEED:-$$(date +%j)000} .venv/bin/python -m pytest tests/test_slurm_lifecycle.py --timeout 0 $(PYTEST_ARGS)

check: setup-dev ## lint, format, types, shell scripts
	$(in_venv) ruff check .
	$(in_venv) ruff format --check .
	$(in_venv) mypy
	$(in_venv) shellcheck .ci/run $(wildcard *.sh)
	$(in_venv) shfmt -d -i 2 -ci -bn setup.sh .ci/run

golden: setup-dev ## renew the recorded scripts in tests/golden and train_*.sh
	.venv/bin/python -m tests.golden

docs: setup-dev ## renew the tables and figures of documents that follow from data
	.venv/bin/python -m docs.make
