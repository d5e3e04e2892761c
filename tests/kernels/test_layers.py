"""RMSNorm, rotary embedding, SwiGLU, and the linear product."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from puna.kernels.exact import exact_passes
from puna.kernels.linear import linear, linear_reference, product
from puna.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from puna.kernels.rope import rope, rope_reference, rope_table
from puna.kernels.swiglu import swiglu, swiglu_reference


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def same_with_gradients(ours, reference, inputs, tolerance=1e-12):
    upstream = normal(*ours.shape, seed=9).detach().to(ours.dtype)
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
    pairs = (torch.autograd.grad(out, inputs, upstream) for out in (ours, reference))
    for gradient, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (3, 7)])
def test_rms_norm(shape):
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    same_with_gradients(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5), torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5))


def test_rms_norm_of_zeros_is_zero_with_a_finite_gradient():
    x, weight = torch.zeros(2, 4, requires_grad=True), torch.ones(4)
    out = rms_norm(x, weight, 1e-5)
    assert torch.equal(out, torch.zeros(2, 4))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.full((2, 4), 1e-5**-0.5))


def test_rms_norm_without_autograd_is_the_same():
    x, weight = normal(5, 8), normal(8, seed=1)
    with torch.no_grad():
        quiet = rms_norm(x, weight, 1e-5)
    assert torch.equal(quiet, rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (130, 8), (3, 7)])
def test_add_rms_norm(within_budget, shape, dtype):
    """130 rows: dweight is summed in more than one block of the CPU loop."""
    inputs = (normal(*shape), normal(*shape, seed=2), normal(shape[-1], seed=1))
    ours, reference = (lambda x, r, w, f=f: f(x, r, w, 1e-5) for f in (add_rms_norm, add_rms_norm_reference))
    within_budget(ours, reference, inputs, dtype)
    assert torch.autograd.gradcheck(reference, inputs)
    within_budget(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), inputs[::2], dtype)


def test_add_rms_norm_when_only_the_total_is_used():
    x, r, w = normal(3, 4), normal(3, 4, seed=1), normal(4, seed=2)
    gradients = torch.autograd.grad(add_rms_norm(x, r, w, 1e-5)[1].sum(), (x, r))
    assert all(torch.equal(g, torch.ones_like(g)) for g in gradients)


def test_add_rms_norm_refuses_what_is_not_alike():
    with pytest.raises(ValueError, match="must be alike"):
        add_rms_norm(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_no_worse_than_torch(within_budget, dtype):
    inputs = (normal(40, 16), normal(40, 16, seed=1))
    within_budget(swiglu, swiglu_reference, inputs, dtype)
    within_budget(lambda x, w: rms_norm(x, w[0], 1e-5), lambda x, w: rms_norm_reference(x, w[0], 1e-5), inputs, dtype)
    tables = rope_table(torch.arange(40), 16, 10_000.0, torch.float64)
    within_budget(lambda x, c, s: rope(x[:, None], c, s), lambda x, c, s: rope_reference(x[:, None], c, s), (inputs[0], *tables), dtype)


def test_the_cpu_loops_give_the_same_on_two_threads(monkeypatch):
    """Rows are divided among threads; only the order in which parts of dweight are added may differ."""
    monkeypatch.setattr("puna.kernels.cpu.loops.THREAD_ELEMENTS", 16)
    gate, up, w = (x.detach().float() for x in (normal(33, 8), normal(33, 8, seed=1), normal(8, seed=2)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def run():
        leaves = [x.clone().requires_grad_() for x in (gate, up, w)]
        y = add_rms_norm(swiglu(*leaves[:2]), leaves[1], leaves[2], 1e-5)[0]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    two = run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for first, second in zip(two, run(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


def test_swiglu_of_the_halves_of_one_product(within_budget):
    x = normal(5, 24)
    within_budget(lambda x: swiglu(*x.chunk(2, -1)), lambda x: swiglu_reference(*x.chunk(2, -1)), (x,), torch.float32)
    assert swiglu(torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("heads", [1, 3])
def test_rope_in_fp32(within_budget, heads):
    tables = rope_table(torch.arange(9), 8, 10_000.0, torch.float64)
    within_budget(rope, rope_reference, (normal(9, heads, 8), *tables), torch.float32)
    within_budget(
        lambda x, c, s: rope(x.view(9, heads + 1, 8)[:, 1:], c, s),
        lambda x, c, s: rope_reference(x.view(9, heads + 1, 8)[:, 1:], c, s), (normal(9, (heads + 1) * 8), *tables), torch.float32,
    )  # fmt: skip


def test_swiglu_keeps_nan_and_saturates():
    x = torch.tensor([float("nan"), float("inf"), -100.0, -30.0, 0.0, 90.0])
    ours, exact = swiglu(x, torch.ones(6)), swiglu_reference(x.double(), torch.ones(6).double())
    assert bool(ours[0].isnan()) and ours[1] == float("inf")
    torch.testing.assert_close(ours[2:].double(), exact[2:], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("layer", ["rms_norm", "add_rms_norm", "swiglu", "rope"])
def test_operators_are_registered_as_torch_expects(layer):
    """torch.library's own checks: schema, fake outputs, autograd, tracing with symbolic shapes."""
    from puna.kernels import rms_norm as norms
    from puna.kernels import rope as ropes
    from puna.kernels import swiglu as gates

    x, y, w = (t.detach().float().requires_grad_() for t in (normal(4, 6), normal(4, 6, seed=1), normal(6)))
    heads, (cos, sin) = x.detach().view(4, 1, 6).requires_grad_(), rope_table(torch.arange(4), 6, 1e4, torch.float32)
    cases = {
        "rms_norm": (norms._rms_norm, (x, w, 1e-5)),
        "add_rms_norm": (norms._add_rms_norm, (x, y, w, 1e-5)),
        "swiglu": (gates._swiglu, (x, y)),
        "rope": (ropes._rope, (heads, cos, sin, False)),
    }
    operation, given = cases[layer]
    torch.library.opcheck(operation.dispatched, given)


def test_modes_see_operators():
    """Without a mode, an operator may skip the dispatcher; a mode, such as torch's FLOP counter, must still see it."""

    def count(*args, **kwargs):
        return 7

    gate, up = normal(5, 8).detach().float(), normal(5, 8, seed=1).detach().float()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping={torch.ops.puna.swiglu: count}) as counter:
        inside = swiglu(gate, up)
    assert counter.get_total_flops() == 7 and torch.equal(inside, swiglu(gate, up))


def test_swiglu():
    gate, up = normal(5, 8), normal(5, 8, seed=1)
    same_with_gradients(swiglu(gate, up), swiglu_reference(gate, up), (gate, up))
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    with torch.no_grad():
        assert torch.equal(swiglu(gate, up), swiglu_reference(gate, up)) or torch.allclose(
            swiglu(gate, up), swiglu_reference(gate, up), rtol=1e-14
        )


def test_rope_is_a_rotation_of_complex_numbers():
    """Pair i at position p is (x[i] + j x[i + K/2]) * exp(j p theta^(-2i/K))."""
    positions = torch.tensor([0, 1, 5, 2000])
    x = normal(4, 3, 8)
    cos, sin = rope_table(positions, 8, 10_000.0, torch.float64)
    frequencies = 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = positions[:, None, None] * frequencies
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rope(x, cos, sin), torch.cat([turned.real, turned.imag], -1))
    same_with_gradients(rope(x, cos, sin), rope_reference(x, cos, sin), (x,))
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), (x,))
    with torch.no_grad():
        assert torch.equal(rope(x, cos, sin), rope(x.detach(), cos, sin))


def test_rope_scores_depend_on_distance_only():
    q, k = normal(1, 1, 8).detach(), normal(1, 1, 8, seed=1).detach()

    def score(a, b):
        turned = [rope(x, *rope_table(torch.tensor([p]), 8, 500_000.0, torch.float64)) for x, p in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(1007, 1003))


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_linear(rows):
    x, w = normal(rows, 16, dtype=torch.float32), normal(128, 16, dtype=torch.float32, seed=1)
    same_with_gradients(linear(x, w), linear_reference(x, w), (x, w), tolerance=2e-5)
    exact = x.detach().double() @ w.detach().double().T
    assert (product(x.detach(), w.detach()) - exact).abs().max() < 1e-5
    batched = linear(x.view(rows, 1, 16), w)
    torch.testing.assert_close(batched[:, 0], linear(x, w))


def test_linear_sees_weights_changed_in_place():
    x, w = torch.ones(300, 16), torch.ones(128, 16)
    assert product(x, w)[0, 0] == 16
    w.mul_(2)
    assert product(x, w)[0, 0] == 32


def test_linear_gradient_only_where_asked():
    x, w = normal(300, 16, dtype=torch.float32), normal(128, 16, dtype=torch.float32, seed=1)
    linear(x, w.detach()).sum().backward()
    assert x.grad is not None and w.grad is None


@pytest.mark.parametrize(("N", "D"), [(48, 32), (83, 700), (7, 5)])
def test_an_exact_product_is_the_product_and_has_the_same_bits_in_any_company(N, D):
    x, w = normal(300, D, dtype=torch.float32).detach(), normal(N, D, dtype=torch.float32, seed=1).detach()
    with exact_passes(torch.float32, torch.device("cpu")):
        whole = product(x, w)
        torch.testing.assert_close(whole, linear_reference(x, w), rtol=1e-4, atol=1e-4)
        for start, rows in ((0, 1), (7, 1), (31, 2), (0, 3), (100, 9), (13, 17), (200, 64)):
            assert torch.equal(product(x[start : start + rows], w), whole[start : start + rows])
