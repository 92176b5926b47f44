"""Triton kernels for CUDA devices, each beside its plain-torch reference. The CPU path uses none.

What computes on activations or logits is a torch.library op, so that it can be traced; `prepare` and `update`, which
move an iteration's integers, are plain functions. All write into arguments: outputs and scratch are the caller's,
nothing is allocated, nothing waits, no shape depends on data, so all can be captured in a CUDA graph. Rows may be
padded; a masked row is at position -1.
"""
