"""AdamW over many tensors, compared with torch's and with its definition in fp64."""

import pytest
import torch

from puna.kernels.adamw import CPU_CHUNK, adamw_, adamw_reference, clipping_factor, gradient_norm, gradient_norm_reference

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def draw(dtype=torch.float64, gradient=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (3, 4), (130,), (1,)]
    parameters = [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]
    gradients = [[torch.randn(s, dtype=torch.float64, generator=generator).to(gradient or dtype) for s in shapes] for _ in range(3)]
    moments = [[torch.zeros(s, dtype=torch.float64 if dtype == torch.float64 else torch.float32) for s in shapes] for _ in range(2)]
    return parameters, gradients, *moments


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_three_steps_equal_torch(clip):
    parameters, gradients, first, second = draw()
    theirs = [torch.nn.Parameter(p.clone()) for p in parameters]
    optimizer = torch.optim.AdamW(theirs, **SETTINGS)
    for step, given in enumerate(gradients, 1):
        for p, g in zip(theirs, given, strict=True):
            p.grad = g.clone()
        expected = torch.nn.utils.clip_grad_norm_(theirs, clip or 1e30)
        optimizer.step()
        before = [g.clone() for g in given]
        norm = gradient_norm(given)
        factor = None if clip is None else clipping_factor(norm, clip)
        adamw_(parameters, given, first, second, step=step, factor=factor, **SETTINGS)
        torch.testing.assert_close(norm, expected)
        assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
    for mine, other in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_equal_the_reference(dtype):
    ours, exact = draw(dtype), draw()
    for step in (1, 2, 3):
        norms = [f(x[1][step - 1]) for f, x in ((gradient_norm, ours), (gradient_norm_reference, exact))]
        factors = [clipping_factor(norm, 0.7) for norm in norms]
        adamw_(ours[0], ours[1][step - 1], *ours[2:], step=step, factor=factors[0], **SETTINGS)
        adamw_reference(exact[0], exact[1][step - 1], *exact[2:], factors[1], step, 0.02, 0.9, 0.95, 1e-6, 0.1)
        torch.testing.assert_close(norms[0].double(), norms[1], rtol=1e-6, atol=0)
    for mine, other in zip(ours[0], exact[0], strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_tensor_steps_alike_on_any_number_of_threads(threads):
    """Eight chunks and an odd remainder: each element has the bits that it has in a tensor of its own."""
    size = 8 * CPU_CHUNK + 5
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(size, generator=generator) for _ in range(3)] + [torch.rand(size, generator=generator)]
    ends = [t[-37:].clone() for t in whole]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for p, g, m, v in (whole, ends):
            adamw_([p], [g], [m], [v], step=3, factor=torch.tensor(0.3), **SETTINGS)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(large[-37:], small) for large, small in zip(whole, ends, strict=True))


def test_a_norm_that_is_not_finite_shows_in_the_parameters():
    parameters, gradients, first, second = draw(torch.float32)
    gradients[0][1][0, 0] = torch.nan
    norm = gradient_norm(gradients[0])
    assert bool(norm.isnan())
    adamw_(parameters, gradients[0], first, second, step=1, factor=clipping_factor(norm, 1.0), **SETTINGS)
    assert all(bool(p.isnan().all()) for p in parameters)


def test_the_operator_says_what_it_changes():
    from puna.kernels.adamw import _adamw_, _gradient_norm

    parameters, gradients, first, second = draw(torch.float32)
    arguments = (parameters, gradients[0], first, second, torch.tensor(0.5), 1, 0.1, 0.9, 0.95, 1e-8, 0.0)
    torch.library.opcheck(_adamw_.dispatched, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(_gradient_norm.dispatched, (gradients[0],), test_utils=("test_schema", "test_faketensor"))


def test_what_does_not_fit_is_refused():
    parameters, gradients, first, second = draw()
    with pytest.raises(ValueError, match="step counts from 1"):
        adamw_(parameters, gradients[0], first, second, step=0, lr=0.1)
    with pytest.raises(ValueError, match="clip must be positive"):
        clipping_factor(torch.ones(()), 0.0)
    with pytest.raises(ValueError, match="must be alike"):
        adamw_(parameters, gradients[0][::-1], first, second, step=1, lr=0.1)


def test_no_parameters_no_step():
    adamw_([], [], [], [], step=1, lr=0.1)
    assert float(gradient_norm([])) == 0.0
