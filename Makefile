# The README's two commands are `make demo` and `make test`. Each sets itself up: a virtual
# environment in .venv with the versions of requirements.lock, renewed only when pyproject.toml or
# the lock changed. What only the tests need comes when they are run.

# The first Python on the PATH that is new enough and can make environments; or say
# `make PYTHON=... setup`.
PYTHON ?= $(shell for python in python3.11 python3.12 python3 python3.13; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && { echo $$python; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
FOR_THE_DEMO := $(VENV)/.demo-installed
FOR_THE_TESTS := $(VENV)/.dev-installed
FOR_THE_DOCS := $(VENV)/.docs-installed
ifdef PIP_INDEX_URL # A mirror that pip was told of is one for uv, too.
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint requirements.lock

.DEFAULT_GOAL := help
.PHONY: help setup java hosts demo test test-thorough test-all test-fast bench bench-peers sim chaos \
	chaos-transactions chaos-queues chaos-principals chaos-hostile chaos-groups lint lock configs docs clean hunt mutants

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(FOR_THE_TESTS) ## Make the environment in .venv, with all that developers need

# uv resolves and unpacks in seconds what pip needs minutes for. Packages that come as sources are
# built in environments of their own, so that nothing depends on what happens to be in .venv.
define ENVIRONMENT
	@test -n "$(PYTHON)" || { echo "rayq needs Python 3.11, 3.12 or 3.13 with its venv module" \
		"(on Debian: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version); the first time this takes a minute."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet \
		--constraint requirements.lock uv
endef

$(FOR_THE_DEMO): pyproject.toml requirements.lock
	$(ENVIRONMENT)
	@$(INSTALL) --editable '.[spark,cli,demo]'
	@$(MAKE) --no-print-directory java
	@touch $@

$(FOR_THE_TESTS): $(FOR_THE_DEMO)
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(FOR_THE_DOCS): pyproject.toml requirements.lock
	$(ENVIRONMENT)
	@$(INSTALL) --editable '.[docs]'
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

demo: $(FOR_THE_DEMO) ## Stream 336,776 flights through three brokers and kill a leader half-way; then Spark
	@$(BIN)/python -m rayq.demo
	@if $(BIN)/python -m rayq.spark; then $(BIN)/python examples/flight_delays_spark.py; fi

# Compiled modules are kept, whatever the environment says: each worker, and each process that a test
# starts, would compile all of them again.
unexport PYTHONDONTWRITEBYTECODE

# Three workers keep two cores busy while tests wait for something; tests/conftest.py says which has
# what. Those of test-fast start no whole clusters, so that there is room for a fourth.
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := --numprocesses 3

test: $(FOR_THE_TESTS) ## Run the tests; below 10 minutes on two cores
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not thorough and not hunt"

test-thorough: $(FOR_THE_TESTS) $(FOR_THE_DOCS) ## Run what `make test` leaves out
	@$(PYTEST) $(SIDE_BY_SIDE) -m "thorough and not hunt"

test-all: test test-thorough ## Run all tests; below an hour

test-fast: SIDE_BY_SIDE := --numprocesses 4
test-fast: $(FOR_THE_TESTS) ## Run the tests of the floors below whole clusters; below 2 minutes
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not thorough and not hunt" \
		tests/pure tests/storage tests/wire tests/client tests/simulated

hunt: $(FOR_THE_TESTS) ## Plant each bug and let the simulation find it; up to an hour
	@$(BIN)/python -m pytest -m hunt tests/simulated/test_planted_bugs.py

MODULES ?=
SAMPLE ?= 50
SEED ?= 1
mutants: $(FOR_THE_TESTS) ## Plant small mistakes into the servers' code; say which nothing notices: MODULES=rayq/core SAMPLE=50 SEED=1
	@$(BIN)/python -m proving.mutants $(if $(MODULES),--modules $(MODULES)) --sample $(SAMPLE) --seed $(SEED)

bench: $(FOR_THE_TESTS) ## Measure this disk and rayq on it; 6 minutes, a table and .bench/results.json
	@$(BIN)/python -m benchmarks.run

ONLY ?=
bench-peers: $(FOR_THE_TESTS) ## Measure rayq beside Kafka (by Maven); half an hour, ratios and .bench/peers.json: ONLY=latency
	@$(BIN)/python -m benchmarks.peers $(if $(ONLY),--only $(ONLY))

SEEDS ?= 0:200
SCENARIO ?= ordinary
sim: $(FOR_THE_TESTS) ## Run seeds of the simulation: make sim SEEDS=0:2000 SCENARIO=groups (half open)
	@$(BIN)/python -m proving.simulation --scenario $(SCENARIO) $(SEEDS)

MINUTES ?= 5
chaos: $(FOR_THE_TESTS) ## Kill and stop real processes at load: make chaos MINUTES=5; a table, exit 1 on loss
	@$(BIN)/python -m proving.chaos --minutes $(MINUTES)

chaos-transactions: $(FOR_THE_TESTS) ## The same beside clients with transactions, which die and hang as well: MINUTES=5
	@$(BIN)/python -m proving.chaos --transactions --rate 300 --minutes $(MINUTES)

chaos-queues: $(FOR_THE_TESTS) ## The same beside queues, whose workers die and hang as well: MINUTES=5
	@$(BIN)/python -m proving.chaos --queues --rate 300 --minutes $(MINUTES)

chaos-principals: $(FOR_THE_TESTS) ## The same with clients that are principals, some of whom lose their rights: MINUTES=5
	@$(BIN)/python -m proving.chaos --principals --minutes $(MINUTES)

chaos-hostile: $(FOR_THE_TESTS) ## Ten hostile clients beside ten honest ones, every other minute: MINUTES=5
	@$(BIN)/python -m proving.chaos --hostile --minutes $(MINUTES)

chaos-groups: $(FOR_THE_TESTS) ## Members of a group come and go at load, some by SIGKILL: MINUTES=2
	@$(BIN)/python -m proving.chaos.groups --minutes $(MINUTES)

lint: $(FOR_THE_TESTS) ## Check style, types, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Versions that fit stay as they are; `make lock UPGRADE=--upgrade` takes the newest of everything.
lock: $(FOR_THE_TESTS) ## Resolve the dependencies, for every Python version, into requirements.lock
	@cp requirements.lock requirements.lock.new
	@$(BIN)/uv pip compile --quiet --no-header --no-annotate $(UPGRADE) --universal \
		--python-version 3.11 --extra dev --extra docs --output-file requirements.lock.new \
		pyproject.toml > /dev/null
	@{ echo "# Made by 'make lock': what '.[dev,docs]' resolves to, for Python 3.11 to 3.13 on Linux."; \
	   cat requirements.lock.new; } > requirements.lock
	@rm requirements.lock.new

configs: $(FOR_THE_TESTS) ## Write docs/reference/configs.md and rayq/config/keywords.py as the source has them
	@$(BIN)/python docs/hooks/write_configs.py

# Draws the diagrams of the site. Where it cannot be fetched the site shows them as text.
MERMAID := .mermaid/package/dist/mermaid.min.js
$(MERMAID):
	@mkdir -p .mermaid
	@cd .mermaid && { npm pack --silent mermaid@11.17.2 && tar xzf mermaid-11.17.2.tgz package/dist/mermaid.min.js package/LICENSE; } >/dev/null 2>&1 || \
		echo "The script for diagrams could not be fetched by npm: the site shows them as text."

docs: $(FOR_THE_DOCS) $(MERMAID) ## Build the documentation into site/, for site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Built site/. With its search: $(BIN)/python -m http.server -d site 8000"

clean: ## Remove all that the other targets made
	rm -rf $(VENV) .bench .mermaid .mutants demo-data build dist site .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
