# `make demo` and `make test` set up what they need in .venv, once; again when pyproject.toml has changed.
# Another interpreter (3.11 or later): `make demo PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# program:Debian package, for what the tests run on their hosts. fish and tcsh are there as login shells.
TEST_PROGRAMS := sshd:openssh-server ssh:openssh-client ip:iproute2 unshare:util-linux mount:mount nft:nftables fish:fish tcsh:tcsh

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.NOTPARALLEL:
.PHONY: help demo test lint bench clean packages

help:
	@echo "make demo   run a real job on a practice cluster on this machine"
	@echo "make test   run all checks and every test that this machine can run"
	@echo "make lint   the checks alone: ruff and mypy"
	@echo "make bench  measure launches and logs against pdsh and clush (as root)"
	@echo "make clean  remove .venv and all that was built; runs/ stays"

demo: $(VENV)/.demo
	@$(BIN)/gpulayer demo

test: packages lint
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: TEST_PROGRAMS += pdsh:pdsh
bench: packages $(VENV)/.test
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find gpulayer tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# As root, installs with apt-get what is missing of the programs that tests run; otherwise says what is left out.
packages:
	@missing=; PATH="$$PATH:/usr/sbin:/sbin"; \
	for pair in $(TEST_PROGRAMS); do \
	    command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair#*:}"; \
	done; \
	test -e $(VENV)/.made || $(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ "$$(id -u)" = 0 ] && [ -n "$$missing" ] && command -v apt-get >/dev/null; then \
	    echo "make: installing$$missing"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing && missing=; \
	fi; \
	if [ -n "$$missing" ]; then \
	    echo "make: not installed, so the tests that need them are left out:$$missing"; \
	fi; \
	if [ "$$(id -u)" != 0 ]; then \
	    echo "make: not root, so the tests on hosts of their own (network namespaces) are left out"; \
	fi

$(VENV)/.demo: pyproject.toml $(VENV)/.made
	@echo "make: installing gpulayer and PyTorch into $(VENV); this can take minutes, the first time"
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.made
	@echo "make: installing gpulayer, PyTorch and the test tools into $(VENV); this can take minutes, the first time"
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $(VENV)/.demo $@

# --clear: what an interrupted set-up has left does not count.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: Python 3.11 or later is needed; name one: make PYTHON=python3.12 demo" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "make: $(PYTHON) cannot make a virtual environment; on Debian or Ubuntu:" >&2; \
	    echo "      sudo apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
