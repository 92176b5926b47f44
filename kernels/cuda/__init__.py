"""Triton kernels for CUDA devices, each a torch.library op with a reference in plain torch. The CPU path uses none.

Every op writes into its arguments: the caller owns outputs and scratch. Ops allocate nothing, never wait, and have no
shape that depends on data, so all of them can be captured in a CUDA graph. Rows may be padded; a masked row is at
position -1. Ops take no structs. If an op would have more than eight arguments, a function that takes structs calls it.
"""
