# make demo | test | lab | lint | exercises | clean.  Needs Python 3.11 or 3.12 with venv, and 4 GB of disk.
# A CPU build of torch, or another mirror:  make demo PIP_ARGS="--extra-index-url <the CPU index on PyTorch's install page>"
# Another interpreter:                      make demo PYTHON=python3.12
# Tests in more processes than two:         make test JOBS=4  (each takes a core or two, and 2 GB of memory)
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PIP_ARGS ?=
JOBS ?= 2
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
PYTHONS := $(or $(PYTHON),python3 python3.12 python3.11)
PICK := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
# pip's own bar needs a terminal; a line a file shows progress everywhere, and errors still arrive on stderr.
PIP = set -o pipefail; $(PY) -m pip install --disable-pip-version-check --progress-bar off
SHOW = | awk '/Downloading|Processing|Building|Installing/ && !/finished/ \
    { gsub(/^ +| \(from.*|\/[^ ]*\//, ""); print "  " substr($$0, 1, 100); fflush() }'

.PHONY: demo test lab lint exercises clean

demo: $(VENV)/.installed
	@$(PY) -m grpo_lab run 06

test: $(VENV)/.installed
	@$(PY) -m pytest -n $(JOBS)

lab: $(VENV)/.installed
	@$(PY) -m jupyterlab notebooks/00_start_here.ipynb

exercises: $(VENV)/.installed
	@$(PY) -m grpo_lab exercises

lint: $(VENV)/.installed
	@$(PY) -m ruff check && $(PY) -m ruff format --check

# torch first and alone: whatever comes after finds it installed and does not go looking for a larger build.
$(VENV)/.installed: pyproject.toml
	@for python in $(PYTHONS); do if $$python -c '$(PICK)' 2>/dev/null; then break; fi; python=; done; \
	if [ -z "$$python" ]; then echo "No Python 3.11 or 3.12 with venv among: $(PYTHONS). Install one (on Debian and" \
	    "Ubuntu also the package python3-venv), or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	echo "set-up: $$($$python --version) -> $(VENV), then $(TORCH) and the pinned packages (once, some minutes)"; \
	[ -x $(PY) ] || $$python -m venv $(VENV)
	@$(PIP) $(PIP_ARGS) '$(TORCH)' $(SHOW)
	@$(PIP) $(PIP_ARGS) -e '.[test]' $(SHOW)
	@touch $@

clean:
	rm -rf $(VENV) .venv-vllm *.egg-info
