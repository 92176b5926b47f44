"""Triton kernels for CUDA devices, each a torch.library op beside its plain-torch reference. The CPU path uses none.

Every op writes into arguments: outputs and scratch are the caller's, nothing is allocated, nothing waits, no shape
depends on data, so every op can be captured in a CUDA graph. Rows may be padded; a masked row is at position -1. Ops
know no structs: a function of structs stands before an op that would have more than eight arguments.
"""
