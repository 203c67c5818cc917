# make demo        the example under `otel-dl run`, with the summary of its traces
# make test        the tests, without those that take long
# make test-long   the others; gets a real collector and Jaeger first
# make test-torch  PyTorch's own DataLoader tests with and without otel-dl; PYTORCH=checkout of the version installed
# make lint types  ruff; pyright
# make collector   a collector and a Jaeger on this machine, until Ctrl-C
# make bench       what otel-dl costs
#
# Each makes the virtual environment .venv first, where it is missing or older than pyproject.toml and what is compiled. A torch that
# OTEL_DL_TORCH_FROM (a Python; default: python3) can import is used in it; else pip gets one, which is 3 GB.

PYTHON ?= python3
OTEL_DL_TORCH_FROM ?= $(PYTHON)
unexport OTEL_DL_TORCH_FROM # no setting of otel-dl's, which would say so
VENV := .venv
IN_VENV := $(VENV)/bin/python

.PHONY: demo test test-long test-torch lint types collector bench venv

demo: venv
	$(VENV)/bin/otel-dl run -- $(IN_VENV) examples/digits.py

test: venv
	$(IN_VENV) -m pytest -m "not long and not gpu"

test-long: venv
	collector-config/build.sh
	$(IN_VENV) -m pytest -m long

test-torch: venv
	$(IN_VENV) -m pip install --quiet expecttest
	$(IN_VENV) .ci/torchs_own_tests.py $(PYTORCH)

lint: venv
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .

types: venv
	$(IN_VENV) -m pyright --pythonpath $(IN_VENV)

collector:
	collector-config/build.sh
	collector-config/start.sh

bench: venv
	set -e; for script in benchmarks/[!_]*.py; do $(IN_VENV) $$script; done

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml hatch_build.py $(wildcard src/otel_dl/recording/c/*.[ch])
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.10 or later (Debian: apt install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no module venv: install it (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(IN_VENV) -m pip install --quiet --upgrade "pip>=25.1" setuptools
	if $(IN_VENV) .ci/reuse_torch.py $(OTEL_DL_TORCH_FROM); \
	then $(IN_VENV) -m pip install --quiet --ignore-installed --editable ".[cli]" --group test --group lint; \
	else $(IN_VENV) -m pip install --quiet --editable ".[cli,instruments]" --group test --group lint; fi
	@touch $@
