"""Root mean square normalisation over the last dimension, in plain torch. No mean is subtracted, no bias added."""

import torch
from specrs.kernels._scalars import scalar
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, inplace: bool = False) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight`, with the mean over the last dimension (Zhang and Sennrich 2019, eq.
    4).

    `x` is `[..., D]` of any floating dtype. `weight` has x's dtype and broadcasts against it, so one call can norm
    heads that have different weights. With `inplace` the result is written to `x`.

    The normalisation is computed in fp32 for every dtype, also for float64, and rounded to x's dtype before it is
    multiplied with the weight, as in transformers. So float64 runs agree with transformers to 1e-12; a norm in float64
    would differ by 1e-7.
    """
    y = x.float()
    size, offset = scalar(x.shape[-1], torch.float32, x.device), scalar(eps, torch.float32, x.device)
    # The bits of mean and of square: sum and division take a third of the time, a product half.
    scale = torch.addcdiv(offset, torch.mul(y, y).sum(-1, keepdim=True), size).rsqrt_()
    if y is not x:
        normed = y.mul_(scale).to(x.dtype)
        return torch.mul(normed, weight, out=x) if inplace else normed.mul_(weight)
    return (y.mul_(scale) if inplace else y.mul(scale)).mul_(weight)
