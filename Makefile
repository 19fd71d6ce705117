# Set-up, demo, tests. `make` alone lists what there is.
#
# Everything runs in .venv, which is made when something first needs it and brought up to date when
# a requirements file changes. `make test PYTHON=python3.12` makes it with an interpreter you name.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -qq --disable-pip-version-check
RANKS := 2

# ---- set-up: a stamp per requirements file, so that it is done once and again after a change ----

# The Pythons for which the pinned packages exist. Without PYTHON=, the first of these that suits.
SUITS := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10)

# Is there no whole .venv, or is it another Python's than the one that was asked for?
STALE := $(shell [ -x $(RUN) ] && [ -x $(VENV)/bin/pip ] || echo yes)
ifdef PYTHON
VERSION := import sys; print(sys.version_info[:2])
STALE := $(or $(STALE),$(shell [ "$$($(PYTHON) -c '$(VERSION)' 2>&1)" = \
	"$$($(RUN) -c '$(VERSION)' 2>&1)" ] || echo yes))
endif
ifeq ($(STALE),yes)
.PHONY: $(VENV)/.run
endif

$(VENV)/.run: requirements.txt
	@if [ "$(STALE)" = yes ]; then \
		for python in $(CANDIDATES) ""; do \
			if [ -z "$$python" ]; then \
				echo "Python 3.10 to 3.13 is needed. Tried: $(CANDIDATES)." >&2; \
				echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; \
				exit 1; \
			fi; \
			if "$$python" -c '$(SUITS)' >/dev/null 2>&1; then break; fi; \
		done; \
		echo "Setting up $(VENV) with $$("$$python" --version): once, some minutes."; \
		rm -rf $(VENV) && "$$python" -m venv $(VENV); \
	fi
	@$(PIP) -r requirements.txt
	@touch $@

$(VENV)/.dev: requirements-dev.txt requirements-notebooks.txt $(VENV)/.run
	@$(PIP) -r requirements-dev.txt
	@touch $@

# ---- what there is ----

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.run ## train with every stage, offload and mode on two ranks, and compare them
# Without --local-addr torchrun waits for minutes on a laptop that cannot resolve its own name.
	@OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --local-addr localhost \
		--nproc-per-node $(RANKS) notebooks/compare.py

.PHONY: test
test: $(VENV)/.dev ## run the whole test suite
	@$(RUN) -m pytest -q

.PHONY: soak
soak: $(VENV)/.dev ## the tests of faults, much longer; what they tried goes to runs/soak.txt
	@mkdir -p runs && rm -f runs/soak.txt
	@SOAK=$(CURDIR)/runs/soak.txt $(RUN) -m pytest -q tests/test_faults_disk.py \
		tests/test_faults_processes.py tests/test_faults_races.py

.PHONY: mutations
mutations: $(VENV)/.dev ## plant faults in copies of the source: the suite has to fail for each
	@$(RUN) tests/mutations.py

.PHONY: notebooks
notebooks: $(VENV)/.dev ## run the course, each notebook top to bottom, and keep the outputs
	@$(RUN) notebooks/build.py

# DeepSpeed compiles parts of itself; without a compiler its rows of the table are left out.
$(VENV)/.deepspeed: requirements-deepspeed.txt $(VENV)/.dev
	@$(PIP) setuptools wheel && $(PIP) --no-build-isolation -r requirements-deepspeed.txt || \
		echo "DeepSpeed cannot be installed here."
	@touch $@

.PHONY: bench
bench: $(VENV)/.deepspeed ## time and memory beside DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed
	@$(RUN) tests/benchmarks/bench.py $(BENCH)

.PHONY: lint
lint: $(VENV)/.dev ## check style and formatting, change nothing
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m ruff format --check --quiet .

.PHONY: format
format: $(VENV)/.dev ## mend what the formatter and the linter can mend
	@$(RUN) -m ruff check --quiet --fix .
	@$(RUN) -m ruff format --quiet .

.PHONY: setup
setup: $(VENV)/.dev ## only make .venv, or bring it up to date
	@:

.PHONY: clean
clean: ## remove .venv, runs/ and all caches
	@rm -rf $(VENV) runs .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@find . -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +
