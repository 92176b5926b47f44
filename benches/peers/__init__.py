"""What `benches/bench_cpu_peers.py` measures beside specrs on a CPU, each engine in an environment of its own.

`job` and the `run_*` modules run in those environments and import nothing else of this repository."""
