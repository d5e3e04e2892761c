"""The shared oracle of kernel tests; tests under the interpreter run in a separate process."""

import os

import pytest
import torch

# Triton and puna.kernels.operators decide at import whether to interpret.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]


def _with_gradients(function, inputs):
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(9)
    upstream = [torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype) for out in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, upstream) if wanted else ()
    return [out.detach() for out in outputs] + list(gradients)


@pytest.fixture(scope="session")
def within_budget():
    """Return check(function, reference, inputs, dtype), which compares values and gradients with the fp64 reference.

    In `dtype`, the function's largest error is at most twice that of the reference run in `dtype`, plus a few
    units in the last place of the largest value. `inputs` are fp64; those that require gradients are compared.
    """

    def cast(x, dtype):
        return x.detach().to(dtype if x.is_floating_point() else x.dtype).requires_grad_(x.requires_grad)

    def check(function, reference, inputs, dtype, ulps=4):
        exact = _with_gradients(reference, inputs)
        plain = _with_gradients(reference, [cast(x, dtype) for x in inputs])
        ours = _with_gradients(function, [cast(x, dtype) for x in inputs])
        again = _with_gradients(function, [cast(x, dtype) for x in inputs])
        for index, (e, p, o, a) in enumerate(zip(exact, plain, ours, again, strict=True)):
            assert o.shape == e.shape and bool(o.isfinite().all()), index
            budget = 2 * (p.double() - e).abs().max() + ulps * torch.finfo(dtype).eps * max(1.0, float(e.abs().max()))
            assert (o.double() - e).abs().max() <= budget, (index, float((o.double() - e).abs().max()), float(budget))
            assert torch.equal(o, a), f"output {index} differs between two runs"

    return check


@pytest.fixture(scope="session")
def normal():
    """Return normal(*shape, seed=0), which draws fp64 standard normal numbers that require gradients."""

    def draw(*shape, seed=0, scale=1.0):
        generator = torch.Generator().manual_seed(seed)
        return (scale * torch.randn(shape, dtype=torch.float64, generator=generator)).requires_grad_()

    return draw
