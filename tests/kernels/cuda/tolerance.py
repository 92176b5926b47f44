"""How far a kernel may be from the exact value: twice as far as torch in the same precision, and a few ulps."""

import torch
from torch import Tensor


def assert_near(out: Tensor, exact: Tensor, own: Tensor, *, ulps: float = 4) -> None:
    """Compare `out` with `exact` (float64); `own` is what torch computes in the precision of `out`.

    The ulps are those of the largest exact value: where torch happens to be exact on a few elements, a kernel that
    adds in another order is not.
    """
    assert exact.dtype == torch.float64
    assert out.dtype == own.dtype
    assert out.isfinite().all()
    allowed = 2 * (own.double() - exact).abs().max() + ulps * torch.finfo(out.dtype).eps * exact.abs().max()
    error = (out.double() - exact).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
