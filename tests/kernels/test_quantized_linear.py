"""8-bit linear layers: rounding by hand, products compared with their explicit definition, error of the approximation."""

import pytest
import torch

from puna.kernels import quantized_linear as module
from puna.kernels.quantized_linear import (
    TYPES,
    quantize_rows,
    quantized_linear,
    quantized_linear_reference,
)

KINDS = ["int8", "fp8"]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_int8_by_hand():
    q, scale = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-2.54, 1.2, 0.0, 0.009]]), "int8")
    assert q.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [-127, 60, 0, 0]]
    torch.testing.assert_close(scale[[0, 2]], torch.tensor([1.0, 0.02]))
    assert bool(torch.isnan(quantize_rows(torch.tensor([[1.0, float("inf")], [float("nan"), 1.0]]), "int8")[1]).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_errs_by_half_a_step(kind, dtype):
    x = draw(40, 33, dtype=dtype) * torch.logspace(-6, 6, 40, dtype=torch.float64)[:, None].to(dtype)
    q, scale = quantize_rows(x, kind)
    assert q.dtype == TYPES[kind]
    error = (q.double() * scale.double()[:, None] - x.double()).abs()
    # e4m3 has three mantissa bits, and steps of 2^-9 below 2^-6.
    step = scale.double()[:, None] if kind == "int8" else (x.double().abs() / 8).clamp_min(scale.double()[:, None] * 2**-9)
    assert bool((error <= 0.5 * step * (1 + 1e-5)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 7), (64, 128, 48)])
def test_products_equal_their_definition(kind, shape):
    """The quantized numbers are the same, so only the rounding of sums differs."""
    T, D, N = shape
    x, quantized = draw(T, D), quantize_rows(draw(N, D, seed=1), kind)
    torch.testing.assert_close(quantized_linear(x, *quantized), quantized_linear_reference(x, *quantized), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.012), ("fp8", 0.04)])
def test_close_to_the_product_in_full_precision(kind, bound):
    """Relative error for normal numbers: two roundings of about 1 / (127 * 12 / 3.3)^0.5 or 2^-4 / 3^0.5 each, added in squares."""
    x, w = draw(256, 512), draw(192, 512, seed=1)
    exact = x @ w.T
    assert (quantized_linear(x, *quantize_rows(w, kind)) - exact).norm() < bound * exact.norm()


def test_no_rows():
    assert quantized_linear(torch.zeros(0, 16), *quantize_rows(draw(8, 16), "int8")).shape == (0, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_registered_as_torch_expects(kind):
    checks = ("test_faketensor",) + (("test_schema",) if kind == "int8" else ())  # it cannot compare FP8
    torch.library.opcheck(module._quantize_rows.dispatched, (draw(4, 16), kind == "fp8"), test_utils=checks)


def test_devices_without_fp8_are_named(monkeypatch):
    monkeypatch.setattr(module, "capability", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"A100 \(compute capability 8.0\) has no FP8 products"):
        module.require_products("fp8", torch.device("cuda"))
    module.require_products("int8", torch.device("cuda"))


@pytest.mark.parametrize("shape", [(1, 5, 7), (6, 13, 100), (17, 64, 64), (5, 130, 192)])
def test_rows_of_bytes_have_the_bits_of_the_operator(shape):
    """Rows and columns beyond whole tiles, depths beyond whole steps; a row that is not finite gives NaN, as in the operator. This also
    runs on a CPU without AVX-512 VNNI, where LLVM used to end the process while compiling the loops of a model's layers, which call
    these."""
    pytest.importorskip("numba")
    from puna.kernels.cpu.int8_products import products8, quantize_row, row_bytes

    T, N, D = shape
    x, (q, scale) = draw(T, D), quantize_rows(draw(N, D, seed=1), "int8")
    x[-1, 0] = float("inf")
    rows, y, sums = torch.empty(T, row_bytes(D), dtype=torch.uint8), torch.empty(T, N), q.sum(1, dtype=torch.int32)
    for t in range(T):
        quantize_row(D, x[t].data_ptr(), rows[t].data_ptr())
    products8(T, N, D, rows.data_ptr(), q.data_ptr(), scale.data_ptr(), sums.data_ptr(), y.data_ptr(), 4 * N)
    assert torch.equal(y[:-1], module.quantized_linear(x, q, scale)[:-1]) and bool(y[-1].isnan().all())


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 130), (33, 65, 1025), (70, 30, 4097)])
@pytest.mark.parametrize("unit", [True, False])
def test_sums_of_bytes_are_exact(shape, unit, monkeypatch):
    """Sums of int64 are the oracle, at depths beyond which fp32 sums are exact, with and without the unit for bytes."""
    T, N, D = shape
    generator = torch.Generator().manual_seed(D)
    a, b = (torch.randint(-127, 128, (rows, D), dtype=torch.int8, generator=generator) for rows in (T, N))
    s, r = torch.rand(T, generator=generator), torch.rand(N, generator=generator)
    monkeypatch.setattr(module, "AVAILABLE", unit and module.AVAILABLE, raising=False)
    expected = (a.long() @ b.long().T).float() * s[:, None] * r
    assert torch.equal(module._product(a, s, b, r, torch.float32), expected)
