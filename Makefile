# `make demo` on a fresh machine: Python 3.11-3.13, a C compiler and Rust are all it needs.
#   PYTHON=...                     another interpreter
#   TORCH=2.11.0 TRANSFORMERS=...  other versions than the locked ones, in an environment of their own
#   MODEL=...                      for make demo: hybrid, smollm2, or a folder or GGUF file, instead of the bundled pair
#   ARGS=...                       passed to specrs demo or pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

PYTHON ?=
TORCH ?=
TRANSFORMERS ?=
MODEL ?=
ARGS ?=

VENV := .venv$(if $(TORCH),-torch$(TORCH))$(if $(TRANSFORMERS),-transformers$(TRANSFORMERS))
BIN := $(CURDIR)/$(VENV)/bin
RUST := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

# One interpreter for every cargo call: pyo3 builds again whenever it changes.
export PYO3_PYTHON := $(BIN)/python
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Nothing here needs a hub.
export HF_HUB_OFFLINE := 1

# Prints the documented targets of the makefiles $(1).
LIST = awk -F':.*\#\# ' '/^[a-z0-9 -]+:.*\#\# / { split($$1, names, ":"); printf "make %-16s %s\n", names[1], $$2 }' $(1)

.PHONY: help help-all
help: ## this list; make help-all has the other targets too
	@$(call LIST,Makefile)
help-all:
	@for file in $(MAKEFILE_LIST); do echo; echo "$$file"; $(call LIST,$$file); done

# Without a group of its own maturin installs the group dev, and with it torch.
$(VENV)/.built: $(VENV)/.installed-runtime pyproject.toml README.md $(RUST)
	PIP_QUIET=1 $(BIN)/maturin develop --release --locked --group build $(if $(TORCH)$(TRANSFORMERS),--extras bench)
	@touch $@

.PHONY: environment build
environment: $(VENV)/.installed
build: environment $(VENV)/.built ## the environment with everything that tests need, and the package in it, editable

# An NVIDIA driver is there. On such a machine the demo runs on the GPU.
NVIDIA := $(wildcard /dev/nvidia[0-9]* /usr/lib/wsl/lib/libcuda.so.1)

.PHONY: demo
demo: $(VENV)/.built $(if $(NVIDIA),$(VENV)/.installed-cuda) ## the bundled pair: plain decoding against K = 1, 3, 5, 7; MODEL=hybrid: the bundled hybrid and its MTP head; MODEL=smollm2: a real model, drafts from its text
	$(if $(MODEL),model=$(if $(filter smollm2,$(MODEL)),$$(scripts/real_model $(BIN)/python),$(MODEL)) &&) $(BIN)/specrs demo $(if $(MODEL),--model "$$model") $(ARGS)

# A worker for each core: half the time on two. Idle workers take tests from busy ones, so that no long file is last.
WORKERS := -n auto --maxprocesses 8 --dist worksteal

.PHONY: test test-rust test-python
test: test-rust test-python ## all tests: cargo and pytest
test-rust: $(VENV)/.installed-runtime
	cargo test --workspace --locked
test-python: build
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

# Tests that need no model, or one that is made in a moment, and that build nothing.
FAST_TESTS := $(wildcard tests/test_*.py) $(filter-out %wheel.py %packages.py,$(wildcard tests/repository/test_*.py)) \
	tests/cli/test_help.py tests/cli/test_option_flags.py

define QUICK_LINTS
	cargo fmt --all --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
endef

.PHONY: check
check: build ## before each commit, in a minute once built: lints of Python and Rust's format, types, fast tests
	$(QUICK_LINTS)
	$(BIN)/python -m pytest -q $(WORKERS) $(FAST_TESTS) $(ARGS)

.PHONY: lint lint-rust lint-python
lint: lint-rust lint-python ## rustfmt, ruff, mypy, clippy, stubtest
lint-rust: $(VENV)/.installed-runtime
	cargo clippy --workspace --all-targets --locked -- -D warnings
lint-python: build
	$(QUICK_LINTS)
	$(BIN)/stubtest specrs._core --mypy-config-file scripts/stubtest.ini

.PHONY: bench
bench: build ## the Rust core, the scheduler through Python, a pass on the CPU, specrs against transformers
	cargo bench --locked
	$(BIN)/python benches/bench_scheduler.py
	$(BIN)/python benches/bench_cpu_pass.py
	$(BIN)/python benches/bench_cpu_vs_transformers.py

.PHONY: generate
generate: build ## the pages of docs/ that scripts/*_page.py print, and python/specrs/record_fields.py, from the code
	for page in $(patsubst scripts/%_page.py,%,$(wildcard scripts/*_page.py)); do \
		$(BIN)/python scripts/$${page}_page.py > docs/$$page.md.new && mv docs/$$page.md.new docs/$$page.md || exit 1; \
	done
	$(BIN)/python scripts/record_fields.py > python/specrs/record_fields.py.new
	mv python/specrs/record_fields.py.new python/specrs/record_fields.py

.PHONY: docs
docs: .venv-tools/docs/.installed ## dist/site: the pages of docs/ and an API reference from docstrings; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-tools/docs/bin/mkdocs build --strict

.PHONY: clean
clean: ## remove what was built; environments (.venv*) stay
	cargo clean
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/specrs/_core*.so .venv*/.built

include environments/targets.mk scripts/checks.mk
