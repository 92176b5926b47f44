"""Measurements of other engines on a CPU for `benches/bench_cpu_peers.py`, each in an environment of its own.

`job` and the `run_*` modules run in those environments and import nothing else of this repository.
"""
