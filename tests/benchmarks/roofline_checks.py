"""Each operator on small shapes, whose edges are not multiples of any block, compared with its definition."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from roofline_cases import Function, Machine
from torch import Tensor

from puna.kernels.adamw import adamw_, adamw_reference, clipping_factor, gradient_norm, gradient_norm_reference
from puna.kernels.advantages import advantages, advantages_reference
from puna.kernels.attention import ForestMask, attention, attention_reference
from puna.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from puna.kernels.kv_append import kv_append_, kv_append_reference
from puna.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from puna.kernels.linear_token_logprobs import linear_token_logprobs, linear_token_logprobs_reference
from puna.kernels.moe import (
    combine,
    combine_reference,
    dispatch,
    dispatch_reference,
    sort_by_expert,
    top_k_routing,
    top_k_routing_reference,
)
from puna.kernels.paged_attention import PAGE, PagedPlan, paged_attention, paged_attention_reference
from puna.kernels.quantized_linear import quantize_rows, quantize_rows_reference, quantized_linear
from puna.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from puna.kernels.rope import rope, rope_reference, rope_table
from puna.kernels.swiglu import swiglu, swiglu_reference


def check(name: str, function: Function, reference: Function, inputs: list[Tensor], dtype: torch.dtype) -> str:
    """Compare values and gradients with the fp64 definition: at most twice the error of the definition in `dtype`, and the same bits in two
    runs."""

    def run(f: Function, kind: torch.dtype) -> list[Tensor]:
        given = [
            x.to(kind).requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for x in (y.detach().requires_grad_(y.requires_grad) for y in inputs)
        ]
        outputs = f(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        wanted = [x for x in given if x.requires_grad]
        return [*(out.detach() for out in outputs), *(torch.autograd.grad(outputs, wanted, upstream) if wanted else ())]

    exact, plain, ours, again = run(reference, torch.float64), run(reference, dtype), run(function, dtype), run(function, dtype)
    for index, (e, p, o, a) in enumerate(zip(exact, plain, ours, again, strict=True)):
        error = float((o.double() - e).abs().max())
        budget = 2 * float((p.double() - e).abs().max()) + 8 * torch.finfo(dtype).eps * max(1.0, float(e.abs().max()))
        if not error <= budget:
            return f"{name}: WRONG, tensor {index} is off by {error:.3g}, {budget:.3g} is allowed"
        if not torch.equal(o, a):
            return f"{name}: WRONG, tensor {index} differs between two runs"
    return f"{name}: right"


def equal(name: str, ours: Tensor, expected: Tensor, tolerance: float) -> str:
    """Check that the largest difference is within `tolerance` times the largest number."""
    error, most = float((ours.double() - expected.double()).abs().max()), float(expected.double().abs().max())
    return f"{name}: right" if error <= tolerance * most else f"{name}: WRONG, off by {error:.3g} of {most:.3g}"


def checks(machine: Machine) -> Iterator[str]:
    """Yield a verdict on every operator, on small shapes whose edges are not multiples of any block."""
    draw = partial(_normal64, machine.device)
    done = partial(check, dtype=machine.dtype)
    yield done(
        "add + RMSNorm",
        partial(add_rms_norm, eps=1e-5),
        partial(add_rms_norm_reference, eps=1e-5),
        [draw(300, 4096), draw(300, 4096), draw(4096)],
    )
    yield done("RMSNorm of heads", partial(rms_norm, eps=1e-5), partial(rms_norm_reference, eps=1e-5), [draw(3000, 128), draw(128)])
    yield done("SwiGLU", swiglu, swiglu_reference, [draw(100, 5000), draw(100, 5000)])
    tables = rope_table(torch.arange(100, device=machine.device), 128, 5e5, torch.float64)
    yield done("RoPE", rope, rope_reference, [draw(100, 5, 128), *tables])
    targets = torch.randint(0, 5000, (70,), device=machine.device)
    x, w = draw(70, 64), draw(5000, 64)
    weights = torch.rand(70, dtype=torch.float64, device=machine.device) / 70
    yield done(
        "linear + cross-entropy",
        lambda x, w: linear_cross_entropy(x, w, targets, weights),
        lambda x, w: linear_cross_entropy_reference(x, w, targets, weights.to(x)),
        [x, w],
    )
    yield done(
        "linear + log-probs",
        lambda x, w: linear_token_logprobs(x, w, targets, 0.8),
        lambda x, w: linear_token_logprobs_reference(x, w, targets, 0.8),
        [x, w],
    )
    end = torch.tensor([700] * 300 + [500] * 200 + [700] * 200 + [1001] * 301, dtype=torch.int32, device=machine.device)
    for window in (None, 130):
        mask = ForestMask.from_end(end).within(window)
        for K in (64, 128):
            inputs = [draw(1001, 4, K), draw(1001, 2, K), draw(1001, 2, K)]
            name = f"attention, heads of {K}" + (f", window {window}" if window else "")
            ours, plain = (lambda q, k, v, f=f, mask=mask: f(q, k, v, mask) for f in (attention, attention_reference))
            yield done(name, ours, plain, inputs)


def _normal64(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))).to(device).requires_grad_()


def more_checks(machine: Machine, small: bool = False) -> Iterator[str]:
    """Yield verdicts on the operators that have no gradient, or whose definition is not a chain of torch operators."""
    dev, kind = machine.device, machine.dtype
    draw = partial(_normal64, dev)
    done = partial(check, dtype=kind)
    fixed = lambda *shape: draw(*shape).detach()  # noqa: E731
    n = 8 if small else 1
    T, D, N = 200 // n, 520 // n, 136 // n
    yield done("routing", lambda z: top_k_routing(z, 4, True)[:2], lambda z: top_k_routing_reference(z, 4, True)[:2], [draw(50, 20)])
    order, place, _ = sort_by_expert(torch.rand(T, 6, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :3].to(dev), 6)
    yield done("MoE dispatch", lambda x: dispatch(x, order, place), lambda x: dispatch_reference(x, order), [draw(T, D)])
    ours, plain = (lambda y, w: combine(y, w, order, place)), (lambda y, w: combine_reference(y, w, order))
    yield done("MoE combine", ours, plain, [draw(3 * T, D), draw(T, 3)])
    offsets = torch.tensor([0, T // 2, T // 2, T - 3, T], device=dev)
    ours, plain = (lambda x, w, f=f: f(x, w, offsets) for f in (grouped_linear, grouped_linear_reference))
    yield done("grouped linear", ours, plain, [draw(T, D), draw(4, N, D)])  # by the table: torch's product or the kernel
    yield done("grouped linear, odd widths", ours, plain, [draw(T, D - 1), draw(4, N - 1, D - 1)])
    tables = torch.tensor([[4, 1, 7], [4, 1, 0], [4, 1, 3], [2, 0, 0]], dtype=torch.int32)
    sequence, position = (torch.tensor(row, dtype=torch.int32) for row in ([0, 1, 2, 2, 3], [40, 32, 45, 46, 8]))
    plan = PagedPlan(tables, sequence, position, dev)
    for window in (None, 18):
        ours, plain = (partial(f, plan=plan, window=window) for f in (paged_attention, paged_attention_reference))
        yield done("paged attention", ours, plain, [fixed(5, 8, 32), *(fixed(8, PAGE, 2, 32) for _ in "kv")])

    def appended(append: Function, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pages = torch.zeros(2, 3, 16, 2, 32, dtype=k.dtype, device=dev)
        append(*pages, k, v, torch.tensor([33, 0, 47, 16], device=dev))
        return pages[0], pages[1]

    ours, plain = (partial(appended, f) for f in (kv_append_, kv_append_reference))
    yield done("KV append", ours, plain, [fixed(4, 2, 32), fixed(4, 2, 32)])
    for quantized in ("int8", "fp8"):
        x, w = fixed(T, D).to(kind), fixed(N, D).to(kind)
        (a, s), (b, r) = (quantize_rows_reference(z.float(), quantized) for z in (x, w))
        expected = (a.double() * s.double()[:, None]) @ (b.double() * r.double()[:, None]).T
        # The interpreter's casts to FP8 truncate, with an error of up to a sixteenth of a number.
        loose = 0.1 if quantized == "fp8" and not x.is_cuda else 8 * torch.finfo(kind).eps
        yield equal(f"{quantized} linear", quantized_linear(x, *quantize_rows(w, quantized)), expected, loose)
    lengths = torch.tensor([3, 1, 0, 2000 // n, 77], device=dev)
    tokens, scores = [fixed(int(lengths.sum())) for _ in range(3)], fixed(5)
    exact = advantages_reference(*tokens, scores, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), 0.1, 0.99, 0.95)
    given = [x.float() for x in (*tokens, scores)]
    yield equal("GAE with KL rewards", advantages(*given, lengths, 0.1, 0.99, 0.95)[0], exact[0], 1e-5)
    five = [fixed(1000 // n, 7).float(), fixed(1000 // n, 7).float(), *(torch.zeros(1000 // n, 7, device=dev) for _ in "mv")]
    wide = [[x.double()] for x in five]
    norm, expected = gradient_norm([five[1]]), gradient_norm_reference(wide[1])
    yield equal("gradient norm", norm, expected, 1e-5)
    adamw_(*([x] for x in five), step=1, lr=0.01, factor=clipping_factor(norm, 1.0))
    adamw_reference(*wide, clipping_factor(expected, 1.0), 1, 0.01, 0.9, 0.95, 1e-8, 0.0)
    yield equal("AdamW", five[0], wide[0][0], 1e-6)
