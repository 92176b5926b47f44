"""Bounds on a kernel's distance from the exact value, and between two sums of the same products."""

import torch
from torch import Tensor


def assert_near(out: Tensor, exact: Tensor, own: Tensor, *, ulps: float = 4, least: float = 0.0) -> None:
    """Compare `out` with `exact` (float64); `own` is what torch computes in the precision of `out`.

    Allowed is twice the error of `own`, plus a few ulps of the largest exact value: torch may happen to be exact on a
    few elements, where a kernel that adds in another order is not. The ulps are at least those of `least`, for results
    that are small because terms of about that size cancel, or because they come from the tail of an activation.
    """
    assert exact.dtype == torch.float64
    assert out.dtype == own.dtype
    assert out.isfinite().all()
    largest = max(float(exact.abs().max()), least)
    allowed = 2 * (own.double() - exact).abs().max() + ulps * torch.finfo(out.dtype).eps * largest
    error = (out.double() - exact).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def apart(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the maximum difference between two `x W^T` summed in `dtype` in different orders, `[N, out]` float64.

    A sum of K products has at most K roundings on the way of each product, so it is within g sum |x_i w_i| of the exact
    one, g = K u / (1 - K u), u = eps / 2 (Higham 2002, section 3.1); two of them are within twice that of each other.
    Libraries choose the order by instruction set, shape, stride and split, so no two calls that differ in one of these
    need give the same bits.
    """
    rounding = x.shape[1] * torch.finfo(dtype).eps / 2
    return 2 * rounding / (1 - rounding) * (x.double().abs() @ weight.double().abs().t())


def assert_same_product(a: Tensor, b: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compare two `x W^T` `[N, out]`, each summed in fp32 in its own order from `x` `[N, in]`, `weight` `[out, in]`."""
    assert a.shape == b.shape
    over = (a.double() - b.double()).abs() - apart(x, weight)
    assert (over <= 0).all(), f"{over.max():.3g} beyond what the order of a sum explains"


def assert_argmax(ids: Tensor, top: Tensor, logits: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compare an argmax and its value, `[N]` each, with logits `[N, out]` of the same product in another order."""
    slack = apart(x, weight).amax(dim=1)
    best, chosen = logits.double().amax(dim=1), logits.double().gather(1, ids[:, None])[:, 0]
    assert (best - chosen <= 2 * slack).all(), f"ids {ids.tolist()}, expected {logits.argmax(dim=1).tolist()}"
    assert ((top.double() - best).abs() <= slack).all(), f"{top.tolist()}, expected {best.tolist()}"
