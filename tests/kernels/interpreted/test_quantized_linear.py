"""Triton versions of 8-bit linear layers: the same integers as the definition, and their products."""

import pytest
import torch

from puna.kernels import quantized_linear as module
from puna.kernels.configurations import Configuration
from puna.kernels.quantized_linear import quantize_rows, quantize_rows_reference, quantized_linear


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "configuration", lambda *_: Configuration(16, 32, 4, 1, 32))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [16, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8_numbers_are_the_definitions(monkeypatch, dtype, block):
    monkeypatch.setattr(module, "BLOCK", block)
    x = (draw(9, 37) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    x[4] = 0
    x[5, :3] = torch.tensor([127.0, 0.5, -2.5])  # halves round to the even neighbour
    x[6, 2] = float("inf")
    (q, scale), (expected, expected_scale) = quantize_rows(x, "int8"), quantize_rows_reference(x.float(), "int8")
    finite = torch.arange(9) != 6
    assert torch.equal(q[finite], expected[finite])
    assert torch.equal(scale[finite], expected_scale[finite]) and bool(scale[6].isnan())


@pytest.mark.parametrize("shape", [(5, 33, 7), (40, 64, 48), (1, 1, 1)])
def test_int8_linear(shape):
    T, D, N = shape
    x, w = draw(T, D), draw(N, D, seed=1)
    y = quantized_linear(x, *quantize_rows(w, "int8"))
    (a, s), (b, r) = (quantize_rows_reference(z, "int8") for z in (x, w))
    exact = (a.double() @ b.double().T) * s.double()[:, None] * r.double()
    assert (y.double() - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_fp8_linear():
    """The interpreter's casts to FP8 are wrong below 2^-6 and where rounding reaches the next power of two; all other numbers are
    compared."""
    x, w = draw(20, 48), draw(24, 48, seed=1)
    (q, scale), (expected, expected_scale) = quantize_rows(x, "fp8"), quantize_rows_reference(x, "fp8")
    assert torch.equal(scale, expected_scale)
    scaled, power = x / scale[:, None], torch.frexp(expected.float())[0].abs() == 0.5
    right = (scaled.abs() >= 2**-6) & ~(power & (expected.float().abs() > scaled.abs()))
    assert right.float().mean() > 0.9 and torch.equal(q.float()[right], expected.float()[right])
    other, other_scale = quantize_rows(w, "fp8")
    product = (q.float() * scale[:, None]) @ (other.float() * other_scale[:, None]).T
    torch.testing.assert_close(quantized_linear(x, other, other_scale), product, rtol=1e-5, atol=1e-5)
