"""RoPE against rotations of single pairs with math.cos, and the frequencies against transformers."""

import math

import pytest
import torch
from checkpoints import LLAMA3_ROPE
from specrs.kernels.rotary import apply_rotary_, inverse_frequencies, rotary_cos_sin, signed_frequencies
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

THETA = 1e4
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (5, 48)])
def test_rotates_pairs(heads: int, dim: int, dtype: torch.dtype, tolerance: float) -> None:
    positions = [0, 1, 7, 63, 2]
    x = torch.randn(len(positions), heads, dim).to(dtype)
    before = x.clone().tolist()
    signed = signed_frequencies(inverse_frequencies(dim, THETA))
    cos, sin = rotary_cos_sin(torch.tensor(positions), signed, dtype)
    assert apply_rotary_(x, cos, sin) is x
    for n, position in enumerate(positions):
        for h in range(heads):
            for i in range(dim // 2):
                angle = position * THETA ** (-2 * i / dim)
                a, b = before[n][h][i], before[n][h][i + dim // 2]
                expected = [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]
                result = [x[n, h, i].item(), x[n, h, i + dim // 2].item()]
                assert result == pytest.approx(expected, rel=tolerance, abs=10 * tolerance)


def test_a_slice_of_heads_is_rotated_in_place() -> None:
    x = torch.randn(3, 6, 8)
    rest = x[:, 4:].clone()
    cos, sin = rotary_cos_sin(torch.tensor([1, 2, 3]), signed_frequencies(inverse_frequencies(8, THETA)), torch.float32)
    expected = apply_rotary_(x[:, :4].clone(), cos, sin)
    apply_rotary_(x[:, :4], cos, sin)
    # Two products and a sum, which a loop over another layout may fuse.
    torch.testing.assert_close(x[:, :4], expected, rtol=0, atol=2 * EPS * float(expected.abs().max()))
    assert torch.equal(x[:, 4:], rest)


def test_masked_rows_stay_finite() -> None:
    cos, sin = rotary_cos_sin(torch.tensor([-1]), signed_frequencies(inverse_frequencies(8, THETA)), torch.float32)
    assert apply_rotary_(torch.randn(1, 2, 8), cos, sin).isfinite().all()


@pytest.mark.parametrize("position", [0, 1, 4095, 131_071])
def test_angles_have_the_bits_of_transformers(position: int) -> None:
    """Check angles at far positions bit by bit against transformers: an fp32 product of position and frequency is off
    by 1e-2 there, so it must be the same product.

    Angles are one product and one function per element. There is no order of a sum, so bits are equal on any machine.
    """
    frequencies = inverse_frequencies(64, 5e5)
    cos, sin = rotary_cos_sin(torch.tensor([position]), signed_frequencies(frequencies), torch.float64)
    angles = torch.tensor([position]).float() * frequencies
    assert torch.equal(cos[0, 0, 32:], angles.cos().double())
    assert torch.equal(cos[0, 0, :32], angles.cos().double())
    assert torch.equal(sin[0, 0, 32:], angles.sin().double())
    assert torch.equal(sin[0, 0, :32], -angles.sin().double())


def test_default_frequencies() -> None:
    expected = [THETA ** (-2 * i / 48) for i in range(24)]
    assert inverse_frequencies(48, THETA).tolist() == pytest.approx(expected, rel=1e-6)


def test_llama3_frequencies() -> None:
    config = LlamaConfig(head_dim=48, rope_parameters=dict(LLAMA3_ROPE))
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    arguments = {key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_type", "rope_theta")}
    plain = inverse_frequencies(48, LLAMA3_ROPE["rope_theta"])
    scaled = inverse_frequencies(48, LLAMA3_ROPE["rope_theta"], **arguments)
    # The same formula element by element: bits, because an angle far out is a multiple of them.
    assert torch.equal(scaled, expected)
    # All three regimes occur, or equality would say little.
    ratio = (plain / scaled).tolist()
    assert min(ratio) == 1
    assert max(ratio) == pytest.approx(LLAMA3_ROPE["factor"])
    assert any(1.01 < r < LLAMA3_ROPE["factor"] - 0.01 for r in ratio)
