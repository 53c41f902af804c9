# make apply: both upstreams fetched, patched and verified under build/current.
# make test: everything that this machine can run. Both set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIN_REQUIREMENTS := build/current/vllm/requirements/common.txt

.PHONY: apply test lint format locks bump plots clean

apply: .venv/ready
	$(BIN)/neaptide apply

test: .venv/ready-test
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: .venv/ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run scripts/build-image scripts/gpu-ci scripts/upstream-check scripts/upstream-issue \
	  $(filter-out %.py %/__pycache__,$(wildcard scripts/image/*))
	$(BIN)/hadolint Dockerfile

format: .venv/ready-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Record guards, hashes and tree ids of every pin that PyPI has.
locks: .venv/ready
	$(BIN)/neaptide pins --lock current
	$(BIN)/neaptide pins --lock r12

# The series on thirteen releases, against git and GNU patch; writes the table of docs/rebase.md.
bump: .venv/ready
	$(BIN)/python tests/bench/bump

# The plots of README and docs, and the tables of docs/ledger.md: ledgers, and a ladder through the simulated allocator.
plots: .venv/ready-test
	$(BIN)/neaptide ledger turnkey --plot docs/ledger-turnkey.svg
	$(BIN)/neaptide ledger gate --plot docs/ledger-gate.svg
	$(BIN)/python tests/bench/ledger_tables.py
	$(BIN)/neaptide simulate 8192:98304 --plot docs/ladder-simulated.svg

clean:
	rm -rf build .venv

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "found $$($(PYTHON) --version), wanted Python 3.11 or newer; say PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

# torch is pinned: the tests run upstream's Python on a CPU, and nothing here needs a newer one.
# vLLM's own requirements come from the pinned tree.
.venv/ready-test: .venv/ready patches/pins/current.toml
	$(BIN)/neaptide apply
	$(PIP) --editable '.[test]' --requirement $(PIN_REQUIREMENTS)
	@touch $@

.venv/ready-lint: .venv/ready
	$(PIP) --editable '.[dev]'
	@touch $@
