# Everything here works in a fresh clone: what is missing is set up in $(VENV) first, once.
# PYTHON= names another interpreter, PYTEST_ARGS= is added to pytest's arguments.

SHELL := /bin/sh
.SHELLFLAGS := -euc
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 600
SAMPLE := two-socket-8gpu
UNITS := build/units
# What the compile pool is measured with: real XGrammar, which needs torch. The CPU build of it is a tenth of
# the default one, which is the CPU build itself on aarch64.
BENCH_PYTHON ?=
BENCH_VENV := build/bench
BENCH_TORCH ?= $(if $(filter aarch64,$(shell uname -m)),torch,torch==2.13.0+cpu)

bin := $(VENV)/bin
vm_packages := cpio mmdebstrap qemu-system-x86 zstd

# As root on Debian, $(call apt,PACKAGES) installs them; else it says that they are missing.
define apt
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	echo "Installing $(1) ..."
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends $(1) >/dev/null
else
	echo "Missing: $(1). On Debian and Ubuntu, as root: apt-get install $(1)" >&2
fi
endef

.NOTPARALLEL:
.PHONY: help render test test-vm bench fuzz wheel clean

help:
	@cat <<-END
		make render    this host's units into $(UNITS), or a sample's where it has no accelerator
		make test      all tests and linters
		make test-vm   the tests on booted machines (QEMU; as root on Debian it installs what they need)
		make bench     how fast render, topology, planning and a worker's bind are; a loop beside compilations
		make fuzz      every reader against made-up input, $(FUZZ_SECONDS) seconds in all
		make wheel     the wheel into dist
		make clean     remove what was made, $(VENV) included
	END

# The main job.
render: $(VENV)/.installed
	@machine=$$($(bin)/provision topology --json)
	cards=$$(printf '%s' "$$machine" | $(bin)/python -c 'import json, sys; print(len(json.load(sys.stdin)["accelerators"]))')
	if [ "$$cards" -gt 0 ]; then
		$(bin)/provision render --output $(UNITS)
		echo "$(UNITS) holds the units of this host, for its $$cards accelerator(s)."
	else
		$(bin)/provision render --sample $(SAMPLE) --output $(UNITS)
		echo "This host has no accelerator: $(UNITS) holds the units of the sample '$(SAMPLE)'."
	fi

test: $(VENV)/.installed-dev
	@{ command -v systemd-analyze && command -v lstopo-no-graphics; } >/dev/null || { $(call apt,systemd hwloc-nox); } || echo "Tests that ask systemd-analyze or lstopo are skipped" >&2
	$(bin)/pytest --ignore=tests/vm -n logical --maxprocesses=8 --dist=loadgroup $(PYTEST_ARGS)

test-vm: $(VENV)/.installed-dev
	@for tool in cpio mmdebstrap qemu-system-x86_64 zstd; do command -v $$tool >/dev/null || { $(call apt,$(vm_packages)); break; }; done
	PROVISION_VM=1 $(bin)/pytest tests/vm -n logical --maxprocesses=4 --dist=loadgroup $(PYTEST_ARGS)

bench: $(VENV)/.installed-dev $(if $(BENCH_PYTHON),,$(BENCH_VENV)/.installed)
	@$(bin)/python -m bench.render
	$(bin)/python -m bench.topology
	$(bin)/python -m bench.planning
	$(bin)/python -m bench.fleet
	$(bin)/python -m bench.binding
	python=$(or $(BENCH_PYTHON),$(BENCH_VENV)/bin/python)
	[ -x "$$python" ] || python=$(bin)/python
	PYTHONPATH=. "$$python" -m bench.compile_pool

# Where it can't be had the rest is measured all the same, and the last script says what it lacks.
$(BENCH_VENV)/.installed: $(VENV)/.made
	@rm -rf $(BENCH_VENV)
	$(bin)/python -m venv $(BENCH_VENV)
	echo "Installing xgrammar and $(BENCH_TORCH) into $(BENCH_VENV) ..."
	if $(BENCH_VENV)/bin/python -m pip install --quiet xgrammar '$(BENCH_TORCH)'; then
		touch $@
	else
		echo "Missing: xgrammar with $(BENCH_TORCH). BENCH_TORCH=torch takes the default build, some gigabytes" >&2
	fi

# Goes on from what earlier runs kept in build/fuzz; what fails is written there too, and ends it.
fuzz: $(VENV)/.installed-fuzz
	@targets='archive tar hwloc tree plan_file config facts texts'
	for target in $$targets; do
		echo "fuzzing $$target"
		$(bin)/python -m fuzz.run $$target $$(( $(FUZZ_SECONDS) / 8 ))
	done

wheel: $(VENV)/.installed-dev
	$(bin)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find bench provisioner tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment ------------------------------------------------------------------------------------

# The first interpreter that is new enough and can make an environment: Debian's python3 alone can't.
$(VENV)/.made:
	@find_python() {
		for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do
			"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
			echo "$$python"
			return
		done
	}
	python=$$(find_python)
	if [ -z "$$python" ] && [ -z "$(PYTHON)" ]; then
		$(call apt,python3-venv)
		python=$$(find_python)
	fi
	if [ -z "$$python" ]; then
		echo "Error: No Python of 3.11 or newer with its venv module: tried $(or $(PYTHON),python3 to python3.14)" >&2
		echo "(Install one, with python3-venv on Debian and Ubuntu, or name it: make PYTHON=/path/to/python3 ...)" >&2
		exit 1
	fi
	rm -rf $(VENV)
	"$$python" -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml provisioner/__init__.py
	$(bin)/python -m pip install --quiet --editable .
	$(bin)/python -m compileall -q provisioner
	touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml provisioner/__init__.py
	$(bin)/python -m pip install --quiet --editable '.[dev]'
	$(bin)/python -m compileall -q provisioner
	touch $@ $(VENV)/.installed

# Atheris has wheels for some versions of Python alone, and takes a compiler of its own elsewhere.
$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	@if ! $(bin)/python -m pip install --quiet --only-binary atheris --editable '.[dev,fuzz]'; then
		echo "Error: atheris has no wheel for this Python: $$($(bin)/python --version)" >&2
		echo "(Fuzz with another: make fuzz PYTHON=python3.11 VENV=.venv-fuzz)" >&2
		exit 1
	fi
	touch $@
