# The README's two commands are `make demo` and `make test`. Each sets itself up: a virtual
# environment in .venv with the versions of requirements.lock, renewed only when pyproject.toml or
# the lock changed.

# The first Python >= 3.11 on the PATH that can make environments; or say `make PYTHON=... setup`.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && { echo $$python; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint requirements.lock

.DEFAULT_GOAL := help
.PHONY: help setup java hosts demo test test-fast bench sim chaos chaos-groups lint lock clean hunt

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the environment in .venv

$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "rayq needs Python 3.11 or later with its venv module" \
		"(on Debian: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Setting up $(VENV); the first time this takes a minute or two."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python $(PIP_INSTALL) hatchling editables
	@$(BIN)/python $(PIP_INSTALL) pyspark raydp
	@$(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@$(MAKE) --no-print-directory java
	@touch $@

# Only Spark needs Java; everything else of rayq runs, and is tested, without it.
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
java: ## Install a Java runtime for Spark where there is none, if root may with apt-get
	@command -v java >/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing a Java 17 runtime for Spark."; \
			{ $(APT_INSTALL) openjdk-17-jre-headless || { apt-get update -qq && \
				$(APT_INSTALL) openjdk-17-jre-headless; }; } >/dev/null || true; \
		fi; }
	@command -v java >/dev/null || echo "There is no Java, so Spark's tests and its demo" \
		"will be left out. To have them: sudo apt-get install openjdk-17-jre-headless"

# The tests of deploy/local.yaml play several hosts on this machine, as root. No sshd is started
# here (RUNLEVEL=1); the tests start their own, in namespaces.
hosts: ## Install what tests on several hosts need (ip, sshd, rsync), if root may with apt-get
	@command -v ip >/dev/null && test -x /usr/sbin/sshd && command -v rsync >/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing ip, sshd and rsync for tests on several hosts."; \
			export RUNLEVEL=1; TOOLS="iproute2 openssh-client openssh-server rsync"; \
			{ $(APT_INSTALL) $$TOOLS || { apt-get update -qq && $(APT_INSTALL) $$TOOLS; }; } \
				>/dev/null || true; \
		fi; }

demo: $(STAMP) ## Stream 336,776 flights through three brokers and kill a leader half-way; then Spark
	@$(BIN)/python -m rayq.demo
	@if $(BIN)/python -m rayq.spark; then $(BIN)/python examples/flight_delays_spark.py; fi

test: $(STAMP) ## Run all tests; below 25 minutes on two cores
	@$(BIN)/python -m pytest -m "not hunt"

test-fast: $(STAMP) ## Run the tests that need no Ray cluster; below 2 minutes
	@$(BIN)/python -m pytest -m "not real and not slow"

hunt: $(STAMP) ## Plant each bug and let the simulation find it; up to an hour
	@$(BIN)/python -m pytest -m hunt tests/simulated/test_planted_bugs.py

bench: $(STAMP) ## Measure this disk and rayq on it; below 6 minutes, a table and .bench/results.json
	@$(BIN)/python -m benchmarks.run

SEEDS ?= 0:200
SCENARIO ?= ordinary
sim: $(STAMP) ## Run seeds of the simulation: make sim SEEDS=0:2000 SCENARIO=groups (half open)
	@$(BIN)/python -m rayq.testing.simulation --scenario $(SCENARIO) $(SEEDS)

MINUTES ?= 5
chaos: $(STAMP) ## Kill and stop real processes at load: make chaos MINUTES=5; a table, exit 1 on loss
	@$(BIN)/python -m rayq.testing.chaos --minutes $(MINUTES)

chaos-groups: $(STAMP) ## Members of a group come and go at load, some by SIGKILL: MINUTES=2
	@$(BIN)/python -m rayq.testing.chaos.groups --minutes $(MINUTES)

lint: $(STAMP) ## Check style, types, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

lock: ## Resolve the dependencies anew into requirements.lock
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && $(PYTHON) -m venv "$$work/venv" && \
		"$$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
			hatchling editables '.[dev]' && \
		{ echo "# Made by 'make lock': what '.[dev]' resolved to, for Python 3.11 on Linux."; \
		  "$$work/venv/bin/python" -m pip freeze --exclude rayq; } > "$$work/lock" && \
		cp "$$work/lock" requirements.lock

clean: ## Remove all that the other targets made
	rm -rf $(VENV) .bench demo-data build dist .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
