# `make demo` on a fresh machine: Python 3.11-3.13, a C compiler and Rust are all it needs.
#   PYTHON=...                     another interpreter
#   TORCH=2.11.0 TRANSFORMERS=...  other versions than the locked ones, in an environment of their own
#   ARGS=...                       handed to specrs demo or pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

PYTHON ?=
TORCH ?=
TRANSFORMERS ?=
ARGS ?=

VENV := .venv$(if $(TORCH),-torch$(TORCH))$(if $(TRANSFORMERS),-transformers$(TRANSFORMERS))
BIN := $(CURDIR)/$(VENV)/bin
RUST := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

# One interpreter for every cargo call: pyo3 builds again whenever it changes.
export PYO3_PYTHON := $(BIN)/python
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Nothing here needs a hub. Models of a few megabytes gain little from a second thread, and lose tenfold by one
# that waits for a busy core.
test demo bench: export HF_HUB_OFFLINE := 1
test: export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

$(VENV)/.installed: requirements.lock
	@python=$$(scripts/preflight $(PYTHON)) && set -x && "$$python" -m venv $(VENV)
ifeq ($(TORCH)$(TRANSFORMERS),)
	$(BIN)/python -m pip install --require-hashes -r requirements.lock
else
	$(BIN)/python -m pip install "pip>=25.1"
	$(BIN)/python -m pip install --group dev torch$(TORCH:%===%) transformers$(TRANSFORMERS:%===%)
endif
	@touch $@

$(VENV)/.built: $(VENV)/.installed pyproject.toml README.md $(RUST)
	PIP_QUIET=1 $(BIN)/maturin develop --release --locked --extras bench
	@touch $@

.PHONY: build
build: $(VENV)/.built ## the environment with the package in it, editable

.PHONY: demo
demo: build ## the bundled pair: plain decoding against K = 1, 3, 5, 7
	$(BIN)/specrs demo $(ARGS)

.PHONY: test
test: build ## all tests: cargo and pytest
	cargo test --workspace --locked
	$(BIN)/python -m pytest $(ARGS)

.PHONY: lint
lint: build ## rustfmt, clippy, ruff, mypy, stubtest
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/stubtest specrs._core --mypy-config-file scripts/stubtest.ini

.PHONY: bench
bench: build ## the Rust core, the scheduler through Python, a pass on the CPU, specrs against transformers
	cargo bench --locked
	$(BIN)/python benches/bench_scheduler.py
	$(BIN)/python benches/bench_cpu_pass.py
	$(BIN)/python benches/bench_cpu_vs_transformers.py

.PHONY: wheel
wheel: build ## dist/specrs-*.whl
	$(BIN)/maturin build --release --locked --out dist

.PHONY: lock
lock: ## resolve requirements.lock again (needs uv)
	uv pip compile pyproject.toml --extra serve --extra bench --group dev --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --custom-compile-command "make lock" --upgrade --output-file requirements.lock

.PHONY: clean
clean: ## remove what was built; environments (.venv*) stay
	cargo clean
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/specrs/_core*.so .venv*/.built
