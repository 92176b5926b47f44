# Environments from the lock files of this folder, and the targets that need one of their own. Included by Makefile.
#   CHROMIUM=...     for make test-browser: the browser
#   SCREENSHOTS=...  for make test-browser: a folder that keeps pictures
#   VLLM_PYTHON=...  for make test-vllm: an interpreter that has vLLM

CREATE_VENV = @python=$$(scripts/preflight $(PYTHON)) && set -x && "$$python" -m venv $(VENV)

# The main environment in two steps: what a CPU needs (47 MB), then everything (3 GB). A package has the same version in
# all lock files, so the second step adds and changes nothing, and Rust is built once.
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

CLIENTS := openai agents lm-eval guidellm aiperf schemathesis
SCALING := kv-events routers ray dynamo
TOOLS := wheels docs deploy

# Others have environments of their own, because their requirements contradict each other.
INSTALL = rm -rf $(@D) && $(BIN)/uv venv --quiet --python $(1) $(@D) && \
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes --no-deps -r $<
# They look for torch and specrs in $(VENV), after their own packages.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
SHARE = $(BIN)/python $(PURELIB) > "$$($(@D)/bin/python $(PURELIB))/packages-of-specrs.pth"

.venv-clients/%/.installed: environments/%.lock $(VENV)/.installed
	$(call INSTALL,$(BIN)/python)
	$(SHARE)
	@touch $@

.venv-scaling/%/.installed: environments/%.lock $(VENV)/.installed
	$(call INSTALL,$(BIN)/python)
	$(SHARE)
	@touch $@

.venv-tools/%/.installed: environments/%.lock $(VENV)/.installed
	$(call INSTALL,$(BIN)/python)
	@touch $@

.venv-hosts/%/.installed: environments/%.lock $(VENV)/.installed
	$(call INSTALL,3.11)
	@touch $@

.PHONY: test-clients
test-clients: build $(CLIENTS:%=.venv-clients/%/.installed) .venv-clients/otel/.installed ## real clients against a real server: openai, agents, lm-eval, guidellm, aiperf, schemathesis; traces by OpenTelemetry
	$(BIN)/python -m pytest tests/server/clients $(WORKERS) $(ARGS)
	PYTHONPATH=python .venv-clients/otel/bin/python -m pytest tests/server/tracing $(ARGS)

# playwright drives a chromium that is there, and downloads none.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
SCREENSHOTS ?=

.PHONY: test-browser chromium
chromium:
	@test -n "$(CHROMIUM)" || { echo "make test-browser needs a chromium (apt: chromium; CHROMIUM=... says where)" >&2; exit 1; }
test-browser: chromium build .venv-clients/browser/.installed ## the page in a headless chromium; SCREENSHOTS=folder keeps pictures
	CHROMIUM="$(CHROMIUM)" SCREENSHOTS="$(SCREENSHOTS)" PYTHONPATH=python .venv-clients/browser/bin/python -m pytest tests/server/browser $(ARGS)

.PHONY: test-scaling test-kv-events test-routers test-ray test-dynamo
test-scaling: $(SCALING:%=test-%) ## KV events over ZeroMQ, routers, Ray Serve, Dynamo: half an hour
# Importing Ray warns of what it uses itself.
test-kv-events test-ray: test-%: build .venv-scaling/%/.installed
	PYTHONPATH=python .venv-scaling/$*/bin/python -m pytest tests/scaling/test_$(subst -,_,$*).py --timeout 900 -s $(if $(filter ray,$*),-W default) $(ARGS)
test-routers test-dynamo: test-%: build .venv-scaling/%/.installed
	$(BIN)/python -m pytest tests/scaling/test_$*.py --timeout 900 -s $(ARGS)

# Packages have the models, which are downloaded (89 and 227 MB) and never installed; where the index lacks them, there
# is nothing to test.
.PHONY: test-real
test-real: build .venv-clients/openai/.installed ## real models, SmolLM2 (Q4_1) and Gemma 3 270M (Q4_K_M): text, served, drafts, their speed
	@model() { scripts/real_model $(BIN)/python $$1; }; \
	smollm2=$$(model smollm2) && gemma3=$$(model gemma3); code=$$?; [ $$code = 3 ] && exit 0; [ $$code = 0 ] || exit $$code; \
	SPECRS_REAL_MODEL="$$smollm2" SPECRS_REAL_GEMMA3="$$gemma3" $(BIN)/python -m pytest tests/real -s $(ARGS)

VLLM_PYTHON ?=

.PHONY: test-vllm
test-vllm: build $(if $(VLLM_PYTHON),,.venv-hosts/vllm/.installed) ## drafts from the text inside a real vLLM, whose environment takes 3 GB
	SPECRS_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest tests/integrations/hosts $(ARGS)

# Zig links against glibc 2.17, which every Linux since 2014 has, for either processor.
WHEEL_TARGETS := x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
MATURIN := env -u PYO3_PYTHON -u VIRTUAL_ENV PATH="$(CURDIR)/.venv-tools/wheels/bin:$$PATH" maturin

.PHONY: wheel
wheel: .venv-tools/wheels/.installed ## dist/specrs-*.whl for x86-64 and 64-bit ARM, and specrs_core-*.whl, which needs numpy alone: ten minutes
	rm -f dist/specrs*.whl
	for target in $(WHEEL_TARGETS); do \
		rustc --print target-libdir --target $$target | xargs test -d || rustup target add $$target || exit 1; \
		for project in Cargo.toml rust/py/Cargo.toml; do \
			(cd $$(dirname $$project) && $(MATURIN) build --release --locked --strip --zig --target $$target \
				--compatibility manylinux2014 --out $(CURDIR)/dist) || exit 1; \
		done; \
	done

PYTEST_WHEELS := .venv-tools/wheels/bin/python -m pytest --noconftest -c /dev/null --rootdir .

.PHONY: test-wheel test-wheel-arm64
test-wheel: .venv-tools/wheels/.installed ## the wheels in dist/: what they link, their ABI, installed into an empty environment
	$(PYTEST_WHEELS) tests/wheels/test_wheels.py $(ARGS)
test-wheel-arm64: build .venv-tools/wheels/.installed ## those for 64-bit ARM run under qemu's emulator, on a Python of Debian 12's (apt: qemu-user)
	$(PYTEST_WHEELS) tests/wheels/test_arm64.py $(ARGS)

COMPILE = uv pip compile --generate-hashes --no-emit-index-url --custom-compile-command "make $@" --upgrade --quiet
UNIVERSAL := --universal --python-version 3.11
X86_64 := --python-version 3.11 --python-platform x86_64-unknown-linux-gnu
# Environments that look into $(VENV) take torch from there.
WITHOUT_TORCH := $(patsubst %,--no-emit-package %,torch triton $(shell sed -n 's/^\(nvidia-[^=]*\|cuda-[^=]*\)==.*/\1/p' environments/dev.lock))
EACH = for name in $(1); do $(BIN)/$(COMPILE) environments/$$name.in $(2) --output-file environments/$$name.lock || exit 1; done

.PHONY: lock lock-clients lock-scaling lock-tools lock-vllm
lock: ## resolve the lock files of the main environment again (needs uv)
	$(COMPILE) pyproject.toml $(UNIVERSAL) --extra cuda --extra transformers --extra bench --group dev --output-file environments/dev.lock
	$(COMPILE) pyproject.toml $(UNIVERSAL) --group build --constraint environments/dev.lock --output-file environments/runtime.lock
	$(COMPILE) pyproject.toml $(UNIVERSAL) --extra cuda --group build --constraint environments/dev.lock --output-file environments/cuda.lock
lock-clients: build ## those of make test-clients and test-browser
	$(call EACH,$(CLIENTS) browser otel,$(UNIVERSAL) $(WITHOUT_TORCH))
lock-scaling: build ## those of make test-scaling
	$(call EACH,$(SCALING),$(X86_64) --override environments/scaling-override.txt $(WITHOUT_TORCH))
lock-tools: build ## those of make wheel and make docs
	$(call EACH,$(TOOLS),$(UNIVERSAL) --no-annotate)
lock-vllm: build ## that of make test-vllm
	$(call EACH,vllm,$(X86_64) --override environments/vllm-override.txt --no-annotate)
