"""What `make gpu-bench` measures on one GPU; `benches/bench_gpu.py` is the command. Tests nothing."""
