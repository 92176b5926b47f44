# Longer checks: other processors, ranks, soaks, GPUs, compiled kernels, sanitizers. Included by Makefile.

# Where sums are taken: nothing may hang on the order that one instruction set takes them in. Every example meets the
# sums, so that a few of the sweeps' examples do. What only reads configurations and files is left out.
ISA_TESTS := $(wildcard tests/kernels/test_*.py) tests/verify tests/integrations/test_transformers.py \
	$(filter-out %config.py %fields.py %support.py %loader.py,$(wildcard tests/models/test_*.py)) \
	$(addprefix tests/kernels/cuda/test_,skinny_linear.py lm_head.py row_kernels.py tolerance.py) \
	tests/lora/test_native.py tests/core/test_instruction_sets.py $(addprefix tests/backends/test_,cuda_runner.py) \
	$(addprefix tests/engine/test_,fp32.py equivalence.py hybrid_requests.py)

.PHONY: test-isa test-isa-portable test-isa-avx2
test-isa: test-isa-portable test-isa-avx2 ## the numerical tests as on a CPU without AVX and on one with AVX2; -j2: both at once
test-isa-portable test-isa-avx2: test-isa-%: build
	SPECRS_ISA=$* SPECRS_SWEEP=5 $(BIN)/python -m pytest $(ISA_TESTS) $(ARGS)

.PHONY: test-ranks
test-ranks: build ## ranks as processes: served, killed, stopped, interrupted, under torchrun
	$(BIN)/python -m pytest tests/parallel/rank_processes $(ARGS)

.PHONY: sweeps
sweeps: build ## every sweep with all its examples, three times those of make test: half an hour of two cores
	SPECRS_SWEEP=full $(BIN)/python -m pytest $(WORKERS) $$(grep -rl 'from sweep import' tests) $(ARGS)

.PHONY: steps
steps: build ## STEPS=1000000 random steps of the CPU runner against the reference: two hours of a core
	SPECRS_STEPS=$(or $(STEPS),1000000) $(BIN)/python -m pytest $(WORKERS) tests/backends/test_native.py --timeout 0 $(ARGS)

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
	SPECRS_GPU=1 SPECRS_SWEEP=full TRITON_INTERPRET=0 $(GPU_PYTHON) -m pytest -p no:benchmark tests/gpu tests/kernels/cuda \
		tests/backends/test_cuda_runner.py tests/backends/test_cuda_drafters.py $(ARGS)

.PHONY: gpu-rehearsal
gpu-rehearsal: build ## the kernels' tests as make gpu-test runs them, the host's memory for the GPU's: three minutes
	SPECRS_GPU=rehearsal $(BIN)/python -m pytest -p no:benchmark $(WORKERS) tests/kernels/cuda $(ARGS)

.PHONY: gpu-bench
gpu-bench: ## on a CUDA device: the table of bars as JSON and pictures in benches/results
	$(GPU_PYTHON) benches/bench_gpu.py $(ARGS)
	$(GPU_PYTHON) benches/plot_gpu.py "$$(ls -t benches/results/*_bench_gpu.json | head -1)"

# The oldest Triton that is supported, alone in a folder: torch wants the one in the environment.
.venv-triton%/.installed: $(VENV)/.installed
	rm -rf $(@D)
	$(BIN)/python -m pip install --no-deps --target $(@D) triton==$*
	@touch $@

.PHONY: aot aot-short
aot-short: build .venv-triton3.6.0/.installed ## every Triton kernel compiled, by the oldest Triton for the H100 and H200 alone; real passes looked through for faults
	$(BIN)/python scripts/aot_kernels.py $(ARGS)
	PYTHONPATH=.venv-triton3.6.0 $(BIN)/python scripts/aot_kernels.py --capability 90 $(ARGS)
	$(BIN)/python scripts/lint_kernels.py
aot: build .venv-triton3.6.0/.installed ## every Triton kernel compiled for every GPU, against the baseline; real passes looked through for faults; no GPU needed
	$(BIN)/python scripts/aot_kernels.py --neighbours $(ARGS)
	PYTHONPATH=.venv-triton3.6.0 $(BIN)/python scripts/aot_kernels.py $(ARGS)
	$(BIN)/python scripts/lint_kernels.py

.PHONY: fuzz fuzz-short
fuzz: ## the core's operation streams under libFuzzer, a minute each (ARGS="600 scheduler": that one for ten)
	scripts/fuzz $(ARGS)
fuzz-short: ## the same, a quarter of a minute each
	scripts/fuzz 15

.PHONY: instructions
instructions: ## instruction counts of the core's main paths against a baseline, under valgrind
	scripts/instructions

.PHONY: test-neon check-neon
check-neon: ## clippy of rust/cpu and rust/cpu-kernels for 64-bit ARM
	scripts/neon check
test-neon: ## rust/cpu and rust/cpu-kernels on NEON under qemu's emulator, four minutes (apt: gcc-aarch64-linux-gnu qemu-user)
	scripts/neon $(ARGS)

.PHONY: miri sanitize
miri: ## borrowed memory and threads of rust/cpu and rust/cpu-kernels under Miri, five minutes; fetches the nightly toolchain that it names
	scripts/sanitize miri
sanitize: ## the tests of rust/cpu and rust/cpu-kernels under AddressSanitizer and ThreadSanitizer, a quarter of an hour; the same toolchain
	scripts/sanitize address
	scripts/sanitize thread

.PHONY: bench-memory
bench-memory: build ## peak memory of an engine on a checkpoint of 1.19 GB, which is written to a temporary folder
	$(BIN)/python benches/bench_cpu_memory.py $(ARGS)

.PHONY: package
package: ## the crate specrs-core as it would be handed out: packed, unpacked elsewhere, its tests run there
	scripts/package

DEPLOY := .venv-tools/deploy/bin
.PHONY: lint-deploy
lint-deploy: .venv-tools/deploy/.installed ## the files of deploy/: Dockerfiles, compose, Kubernetes, YAML
	$(DEPLOY)/hadolint deploy/Dockerfile deploy/Dockerfile.cuda
	$(DEPLOY)/yamllint --strict -c deploy/.yamllint deploy
	$(DEPLOY)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(DEPLOY)/kubernetes-validate --strict --quiet deploy/kubernetes.yaml
