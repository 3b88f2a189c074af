# `make demo` and `make test` set up what they need in .venv, once; again when pyproject.toml has changed.
# Another interpreter (3.11 or later): `make demo PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# program:Debian package, for what the tests run on their hosts. fish and tcsh are there as login shells.
TEST_PROGRAMS := sshd:openssh-server ssh:openssh-client ip:iproute2 unshare:util-linux mount:mount nft:nftables fish:fish tcsh:tcsh

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.NOTPARALLEL:
.PHONY: help demo test faults lint bench clean packages slurm

help:
	@echo "make demo   run a real job on a practice cluster on this machine"
	@echo "make test   run all checks and every test that this machine can run"
	@echo "make faults run the slow rows of the fault matrix, which make test leaves out (as root)"
	@echo "make lint   the checks alone: ruff and mypy"
	@echo "make bench  measure launches and logs against pdsh and clush (as root)"
	@echo "make clean  remove .venv and all that was built; runs/ stays"

demo: $(VENV)/.demo
	@$(BIN)/gpulayer demo

test: packages lint
	$(BIN)/python -m pytest -m "not slow"

faults: packages $(VENV)/.test slurm
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: TEST_PROGRAMS += pdsh:pdsh
bench: packages $(VENV)/.test
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/bundle.py

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

# Slurm's packages, and what they need, are unpacked and not installed: no daemon starts, and no account is made.
slurm: $(VENV)/.made
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -e $(VENV)/slurm ]; then \
	    echo "make: unpacking Slurm into $(VENV)/slurm"; \
	    rm -rf $(VENV)/slurm-packages; mkdir -p $(VENV)/slurm-packages/partial; \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends --download-only \
	        -o Dir::Cache::archives=$(abspath $(VENV))/slurm-packages slurmctld slurmd slurm-client munge && \
	    mkdir $(VENV)/slurm.new && \
	    for package in $(VENV)/slurm-packages/*.deb; do dpkg-deb -x "$$package" $(VENV)/slurm.new || exit 1; done && \
	    mv $(VENV)/slurm.new $(VENV)/slurm; \
	    rm -rf $(VENV)/slurm-packages $(VENV)/slurm.new; \
	fi; \
	test -e $(VENV)/slurm || echo "make: no Slurm, so the tests that need it are left out"

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
