"""Measurements of `make gpu-bench` on one GPU; `benches/bench_gpu.py` is the command. Tests nothing."""
