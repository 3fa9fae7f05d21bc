# Everything a newcomer or a contributor runs. Needs Python 3.11+, pip and make, nothing else:
# each target builds the virtual environment .venv first, at the versions in constraints.txt.

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
# On Linux the torch on PyPI brings CUDA along. The tutorial has a way to the small CPU build.
TORCH := torch==2.13.0
# A second environment, in which an older torch reads what the Checkpointer saved.
OLD_TORCH := .venv-old-torch
OLD_TORCH_PINS := tests/roundtrip/stock_readers/requirements.txt
# A third one, with pip-audit alone.
AUDIT := .venv-audit
AUDIT_PINS := .ci/audit-requirements.txt
# A fourth one, with build, twine and uv.
DIST := .venv-dist
DIST_PINS := .ci/dist-requirements.txt
# The tests of a file share what takes long to make: one worker runs them.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder

# The first interpreter that is new enough; `make PYTHON=/path/to/python demo` overrides it.
PYTHON ?= $(or $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$python; break; fi; done),$(error Python 3.11 or newer is needed, none was found))

export OMP_NUM_THREADS = 1

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.demo ## Train a tiny Llama with FSDP2, consolidate it, load it with Transformers
	@$(BIN)/python examples/demo/demo.py

.PHONY: test
test: $(VENV)/.dev ## Run the tests but the slow ones (PYTEST_ARGS="-n 3 --dist loadfile --no-loadscope-reorder" by default)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(VENV)/.dev ## Run the slow tests: trainers, kills, and all cases of which `make test` has a sample
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

.PHONY: old-torch
old-torch: $(OLD_TORCH)/.ready ## Install torch 2.6, with which the tests then read saves too

.PHONY: lint
lint: $(VENV)/.dev ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(VENV)/.dev ## Check types
	$(BIN)/mypy

.PHONY: imports
imports: $(VENV)/.dev ## Check that imports follow the layers
	$(BIN)/lint-imports

.PHONY: audit
audit: ## Look for known vulnerabilities of the pinned packages
	@if $(MAKE) --no-print-directory $(AUDIT)/.ready; \
	then $(AUDIT)/bin/python .ci/audit.py $(AUDIT)/bin/python; \
	else echo "pip-audit cannot be installed: nothing was looked up"; fi

.PHONY: dist
dist: $(DIST)/.ready ## Build wheel and sdist into dist, and check what is in them
	@$(DIST)/bin/python .ci/dist.py dist $(if $(RELEASE),--release)

.PHONY: licences
licences: $(VENV)/.dev ## List what is installed with ckptkit, with licences; dist/sbom.json as CycloneDX
	@$(BIN)/python .ci/licences.py
	@$(BIN)/python .ci/licences.py --cyclonedx dist/sbom.json

.PHONY: test-lowest
test-lowest: $(DIST)/.ready ## Quick tests with the oldest dependencies that pyproject.toml allows
	@$(DIST)/bin/python .ci/test_versions.py lowest $(PYTHON) $(if $(MAY_SKIP),--may-skip)

.PHONY: test-newest
test-newest: $(DIST)/.ready ## Quick tests with the newest dependencies: make PYTHON=python3.13 test-newest
	@$(DIST)/bin/python .ci/test_versions.py newest $(PYTHON)

.PHONY: fixtures
fixtures: $(DIST)/.ready $(VENV)/.dev ## Save with other frameworks and read it: FRAMEWORK=verl, newest or all; KEEP=1
	@$(BIN)/python fixtures/environments.py $(if $(KEEP),--keep) $(FRAMEWORK)

.PHONY: test-frameworks
test-frameworks: $(DIST)/.ready ## Train with unmodified frameworks, kill and resume: FRAMEWORK=lightning, or all
	@PYTHONPATH=fixtures $(DIST)/bin/python -m tests.frameworks.run $(or $(FRAMEWORK),all)

.PHONY: test-pythons
test-pythons: $(DIST)/.ready ## The same with each later Python that is found here
	@$(DIST)/bin/python .ci/test_versions.py newest each $(if $(MAY_SKIP),--may-skip)

.PHONY: check
check: lint types imports docs test test-slow ## All of the checks above

.PHONY: docs
docs: $(VENV)/.docs ## Build the documentation site into build/site; open build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.PHONY: docs-serve
docs-serve: $(VENV)/.docs ## Show the documentation site at http://127.0.0.1:8000, and follow changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

.PHONY: coverage
coverage: $(VENV)/.dev ## Run every test and report branch coverage
	$(BIN)/python -m pytest $(PYTEST_ARGS) --cov --cov-report=term

.PHONY: bit-rot
bit-rot: $(VENV)/.dev ## Flip bits in every format and count what is found (SEED=1 FLIPS=400)
	$(BIN)/python -m tests.campaigns.bit_rot --seed $(or $(SEED),1) --flips $(or $(FLIPS),400)

.PHONY: bench
bench: $(VENV)/.dev ## Measure against cp, accelerate and torch
	$(BIN)/python benchmarks/run.py

.PHONY: soak
soak: $(VENV)/.dev ## A random life of runs, with faults: MINUTES=10 SEED=1
	$(BIN)/python -m tests.campaigns.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz
fuzz: $(VENV)/.dev ## Fuzz every parser, guided by coverage (RUNS=100000, or MINUTES=, and SEED=1)
	$(BIN)/python -m tests.campaigns.fuzz all $(if $(MINUTES),--minutes $(MINUTES),--runs $(or $(RUNS),100000)) --seed $(or $(SEED),1)

.PHONY: chaos
chaos: $(VENV)/.dev ## Kills and faults at each system call: PARTS=disks,commands SEED=1 MOST=5
	$(BIN)/python -m tests.campaigns.chaos $(if $(PARTS),--parts $(PARTS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(MOST),--most $(MOST)) $(if $(ONLY),--only '$(ONLY)')

.PHONY: attacks
attacks: $(VENV)/.dev ## Attacks by files, by other users of the machine (as root), and planted secrets
	$(BIN)/python -m pytest tests/attacks tests/crash/test_other_users.py \
		tests/cli/test_no_output_has_secrets.py $(PYTEST_ARGS)

.PHONY: differential
differential: $(VENV)/.dev ## Random models, meshes and savers against all readers: RUNS=200 SEED=1
	$(BIN)/python -m tests.campaigns.differential \
		--runs $(or $(RUNS),200) --seed $(or $(SEED),1)
	$(BIN)/python -m tests.campaigns.differential --families \
		--runs $(or $(RUNS),200) --seed $(or $(SEED),1)
	CKPTKIT_EXAMPLES=1 $(BIN)/python -m pytest tests/property tests/unit/core tests/unit/engine \
		$(PYTEST_ARGS)
	$(BIN)/python fixtures/generators/class_facts.py
	$(BIN)/python fixtures/generators/model_shapes.py

.PHONY: gpu
gpu: $(VENV)/.dev ## Check and measure saves on a CUDA device, if there is one
	$(BIN)/python -m tests.campaigns.gpu $(GPU_ARGS)

.PHONY: clean
clean: ## Remove the environment, caches and what the demo wrote
	rm -rf $(VENV) $(OLD_TORCH) $(AUDIT) $(DIST) .venv-lowest .venv-newest .venv-fixtures runs/demo runs/demo-model build dist .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis .import_linter_cache .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The second form serves systems whose Python comes without ensurepip.
$(VENV)/.created:
	@if [ -e $(VENV)/pyvenv.cfg ]; then \
		echo "$(VENV) was not made by make: remove it, or choose another: make VENV=.venv-make demo" >&2; \
		exit 1; fi
	@echo "building the virtual environment in $(VENV) (once)"
	@$(PYTHON) -m venv --clear $(VENV) 2>/dev/null || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

# Compiling torch's files would take longer than the tests that use them.
$(OLD_TORCH)/.ready: $(VENV)/.created $(OLD_TORCH_PINS)
	@echo "building $(OLD_TORCH) with $$(grep torch== $(OLD_TORCH_PINS)) (once)"
	@$(PYTHON) -m venv --clear --without-pip $(OLD_TORCH)
	@$(BIN)/python -m pip --disable-pip-version-check --python $(OLD_TORCH)/bin/python \
		install -qq --no-compile --requirement $(OLD_TORCH_PINS)
	@touch $@

$(AUDIT)/.ready: $(VENV)/.created $(AUDIT_PINS)
	@$(PYTHON) -m venv --clear --without-pip $(AUDIT)
	@$(BIN)/python -m pip --disable-pip-version-check --python $(AUDIT)/bin/python \
		install -qq --timeout 15 --retries 1 --requirement $(AUDIT_PINS)
	@touch $@

$(DIST)/.ready: $(VENV)/.created $(DIST_PINS)
	@$(PYTHON) -m venv --clear --without-pip $(DIST)
	@$(BIN)/python -m pip --disable-pip-version-check --python $(DIST)/bin/python \
		install -qq --requirement $(DIST_PINS)
	@touch $@

# torch goes first and alone, so that what depends on it finds this release and keeps it.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	@echo "installing $(TORCH) (the first time this takes a while)"
	@$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing ckptkit and what the demo needs"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing the tools for tests and checks"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@echo "installing what builds the documentation"
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@
