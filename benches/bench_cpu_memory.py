"""Measures the peak memory of an engine on a CPU beyond the size of its checkpoint and its KV cache. Measures no time.

    python benches/bench_cpu_memory.py [--layers 28] [--dtype bfloat16] [--folder FOLDER]

A checkpoint of random bf16 weights at Qwen3-0.6B's shape (1.19 GB with 28 layers) is written to a temporary folder, and
served by a process of its own: 64 tokens after a prompt of 128, greedy. Its peak is what the kernel has counted as
resident (VmHWM), mapped pages of the file among it. `import torch` alone takes up to 530 MB of it, by what torch was
built for, so that is shown apart. Fails above file + KV + torch + 400 MB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

ALLOWED = 400e6
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 16, 8, 128, 151_936
CONTEXT, BLOCK_SIZE = 1024, 16


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write a checkpoint of random weights, whose standard deviation keeps hidden states finite. Return the file's
    bytes."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    torch.manual_seed(0)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return (folder / "model.safetensors").stat().st_size


def resident(field: str) -> int:
    """Return in bytes the value of a field of /proc/self/status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


def serve(folder: str, dtype: str) -> None:
    """Run the measured process: serve, and print the memory as JSON."""
    with_torch = resident("VmHWM")
    from specrs.config import EngineConfig
    from specrs.engine.build import build_engine
    from specrs.engine.request import Request
    from specrs.sampling import SamplingParams

    blocks = CONTEXT // BLOCK_SIZE
    config = EngineConfig(
        model=folder,
        dtype=dtype,
        device="cpu",
        max_model_len=CONTEXT,
        max_num_seqs=1,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=blocks,
    )
    engine = build_engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    job = Request(0, list(range(128)), params, num_speculative_tokens=0)
    engine.add_request(job)
    while engine.has_unfinished():
        engine.step()
    assert len(job.output_token_ids) == 64
    kv_cache = sum(layer.numel() * layer.element_size() for layer in engine.runner.kv_cache.layers)
    print(json.dumps({"torch": with_torch, "peak": resident("VmHWM"), "kv_cache": kv_cache}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--folder", help="where the checkpoint is written; a temporary folder by default")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.dtype)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size = write_checkpoint(Path(folder), options.layers)
        command = [sys.executable, __file__, "--serve", folder, "--dtype", options.dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    known = {"file": size, "KV cache": found["kv_cache"], "torch": found["torch"]}
    above = found["peak"] - sum(known.values())
    parts = ", ".join(f"{name} {number / 1e6:.0f} MB" for name, number in known.items())
    print(f"{options.dtype}: peak {found['peak'] / 1e6:.0f} MB; {parts}; {above / 1e6:.0f} MB above these")
    if above > ALLOWED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
