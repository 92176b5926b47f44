"""The CUDA backend: a step as CUDA graphs and Triton kernels on one stream."""
