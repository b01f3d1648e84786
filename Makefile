# Every target makes its own .venv first, so a fresh clone needs nothing but make and a Python.
.DEFAULT_GOAL := help
.PHONY: help demo test bench mini lint types format docs-figures clean

# Paths are relative to this file: `make -C` works from anywhere, and PYTHON=... chooses an interpreter.
PYTHON ?=
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3)
EXTRAS := gallery,web,plots,mini,demo,dev
RUN := .venv/bin/python

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: .venv ## search photographs, train on drawn scenes, serve the page (DEMO_SERVE=0 stops before)
	@$(RUN) -m seps.demo

test: .venv ## run every test
	@$(RUN) -m pytest

# What trains models (reid_table) or reads finished runs (study) takes hours and is started by hand.
BENCHMARKS := pairs rounding slimming_cost service gallery

bench: .venv ## measure speed and memory (benchmarks/)
	@set -e; for name in $(BENCHMARKS); do echo "benchmarks/$$name.py"; $(RUN) "benchmarks/$$name.py"; done

# The default model, from the first step to the folder that ships. DATA holds flickr8k/ and coco_dense/.
DATA ?= data
MINI := --data.folder $(DATA)/flickr8k --data.also '["$(DATA)/coco_dense"]' --data.cache $(DATA)/kept

mini: .venv ## train the default model again (DATA=folder of its photographs; hours)
	@$(RUN) -m seps train examples/mini/encoders.yaml $(MINI)
	@$(RUN) -m seps train examples/mini/head.yaml $(MINI)
	@rm -rf runs/mini-head-weighed runs/mini-blended runs/mini-weighed runs/seps-mini
	@$(RUN) -m seps weigh runs/mini-head/best $(DATA)/coco_dense runs/mini-head-weighed --cache $(DATA)/kept
	@$(RUN) -m seps train examples/mini/descriptions.yaml --data.folder $(DATA)/coco_dense --data.cache $(DATA)/kept
	@$(RUN) -m seps blend runs/mini-head-weighed runs/mini-descriptions/best runs/mini-blended
	@$(RUN) -m seps weigh runs/mini-blended $(DATA)/coco_dense runs/mini-weighed --cache $(DATA)/kept
	@$(RUN) -m seps shrink runs/mini-weighed runs/seps-mini

lint: .venv ## check style and format
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: .venv ## check types
	@$(RUN) -m mypy

format: .venv ## rewrite the code in the project's format
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

docs-figures: .venv ## draw the figures of the documentation (docs/figures/*.py)
	@set -e; for script in $(sort $(wildcard docs/figures/*.py)); do echo "$$script"; $(RUN) "$$script"; done

clean: ## remove caches and builds (.venv and runs stay)
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks docs examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last: an interrupted installation is taken up again, a changed dependency installed.
.venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Installing seps and its dependencies into .venv; the first time takes some minutes."
	@$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

.venv/bin/pip:
	@for python in $(PYTHONS); do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			exec "$$python" -m venv .venv; \
		fi; \
	done; \
	echo "seps needs Python 3.11 or later with its venv module; tried: $(PYTHONS)." \
		"Install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 1
