"""The cases of `roofline.py`: every operator at the machine's shapes, its bytes and FLOPs, and its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from puna.kernels import configurations
from puna.kernels.adamw import adamw_, clipping_factor, gradient_norm
from puna.kernels.advantages import advantages
from puna.kernels.attention import ForestMask, attention
from puna.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from puna.kernels.kv_append import kv_append_
from puna.kernels.linear_cross_entropy import linear_cross_entropy
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
from puna.kernels.paged_attention import PAGE, PagedPlan, new_pages, paged_attention
from puna.kernels.quantized_linear import quantize_rows, quantized_linear
from puna.kernels.rms_norm import add_rms_norm, rms_norm
from puna.kernels.rope import rope, rope_reference, rope_table
from puna.kernels.swiglu import swiglu

Function = Callable[..., Any]


@dataclass(frozen=True)
class Machine:
    """The device and precision of the measurement, and shapes: tokens, width, feed-forward width, heads, key-value heads, head width,
    vocabulary."""

    device: torch.device
    dtype: torch.dtype
    T: int
    D: int
    F: int
    H: int
    G: int
    K: int
    V: int

    @staticmethod
    def of(device: str, small: bool = False) -> Machine:
        """Return the machine: a Llama 3 8B layer over 16384 tokens in bf16; on CPU a small model in fp32; `small`: shapes for the
        interpreter."""
        if small:
            kind = torch.bfloat16 if device == "cuda" else torch.float32
            return Machine(torch.device(device), kind, 64, 64, 96, 4, 2, 16, 200)
        if device == "cuda":
            return Machine(torch.device("cuda"), torch.bfloat16, 16384, 4096, 14336, 32, 8, 128, 128256)
        return Machine(torch.device("cpu"), torch.float32, 2048, 1024, 2816, 8, 4, 64, 8192)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=self.device)).to(self.dtype).requires_grad_()


@dataclass
class Case:
    """A function with its inputs and its peers; the backward pass is timed too if any input requires a gradient."""

    name: str
    function: Function
    inputs: tuple[Any, ...]
    bytes: tuple[float, float]  # forward, backward
    flops: tuple[float, float]
    peers: dict[str, Function] = field(default_factory=dict)


def compiled(function: Function, machine: Machine) -> dict[str, Function]:
    """Return torch.compile of the definition on machines where compiling takes seconds, not minutes."""
    return {"compile": torch.compile(function)} if machine.device.type == "cuda" else {}


def liger(name: str, adapt: Function = lambda f: f) -> dict[str, Function]:
    """Return a function of Liger-Kernel's functional interface, if it is installed."""
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return {}
    return {"liger": adapt(getattr(functional, f"liger_{name}"))}


def cases(m: Machine) -> Iterator[Case]:
    """Yield every operator at the machine's shapes, one at a time, so that only one operator's tensors are in memory."""
    size = m.dtype.itemsize
    row = m.T * m.D * size
    x, r, w = m.normal(m.T, m.D), m.normal(m.T, m.D), m.normal(m.D)
    peers = {"torch": lambda x, r, w: (lambda total: (F.rms_norm(total, (m.D,), w, 1e-5), total))(x + r)}
    peers |= liger("fused_add_rms_norm", lambda f: lambda x, r, w: f(x, r, w, 1e-5))
    yield Case("add + RMSNorm", partial(add_rms_norm, eps=1e-5), (x, r, w), (4 * row, 4 * row), (0, 0), peers | compiled(peers["torch"], m))
    x, w = m.normal(m.T * m.H, m.K), m.normal(m.K)
    heads = x.numel() * size
    peers = {"torch": lambda x, w: F.rms_norm(x, (m.K,), w, 1e-5)}
    yield Case("RMSNorm of heads", partial(rms_norm, eps=1e-5), (x, w), (2 * heads, 3 * heads), (0, 0), peers | compiled(peers["torch"], m))
    wide = m.T * m.F * size
    peers = {"torch": lambda g, u: F.silu(g) * u}
    yield Case(
        "SwiGLU",
        swiglu,
        (m.normal(m.T, m.F), m.normal(m.T, m.F)),
        (3 * wide, 5 * wide),
        (0, 0),
        peers | compiled(peers["torch"], m) | liger("swiglu"),
    )
    x = m.normal(m.T, m.H, m.K)
    cos, sin = rope_table(torch.arange(m.T, device=m.device), m.K, 5e5, m.dtype)
    twice = (2 * x.numel() + 2 * cos.numel()) * size
    yield Case("RoPE", rope, (x, cos, sin), (twice, twice), (0, 0), {"torch": rope_reference} | compiled(rope_reference, m))
    yield from _output_layer(m, size)
    yield from _attention(m, size)
    yield from _decoding(m, size)
    yield from _linear_layers(m, size)
    yield from _experts(m, size)
    yield from _the_rest(m)


def _output_layer(m: Machine, size: int) -> Iterator[Case]:
    x, w = m.normal(m.T, m.D), m.normal(m.V, m.D, scale=0.02)
    targets, weights = torch.randint(0, m.V, (m.T,), device=m.device), torch.full((m.T,), 1 / m.T, device=m.device)
    product = 2.0 * m.T * m.D * m.V
    matrices = (x.numel() + w.numel()) * size

    def whole_step(loss: Function) -> Function:
        """Return a function for forward and backward together, because Puna's operator computes gradients in its forward pass."""

        def run(*_: Any) -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(loss(x, w), (x, w))

        return run

    peers = {"torch": whole_step(lambda x, w: F.cross_entropy(F.linear(x, w), targets))}
    if hasattr(F, "linear_cross_entropy"):
        peers["torch fused"] = whole_step(lambda x, w: F.linear_cross_entropy(x, w, targets))
    peers |= liger("fused_linear_cross_entropy", lambda f: whole_step(lambda x, w: f(x, w, targets)))
    ours = whole_step(lambda x, w: linear_cross_entropy(x, w, targets, weights))
    yield Case("linear + cross-entropy, step", ours, (), (2 * matrices, 0), (3 * product, 0), peers)
    yield Case(
        "linear + log-probs", lambda x, w: linear_token_logprobs(x, w, targets), (x, w), (matrices, 2 * matrices), (product, 3 * product),
        {"torch": lambda x, w: linear_token_logprobs_reference(x, w, targets)} if m.T * m.V < 3e9 else {},
    )  # fmt: skip


def _attention(m: Machine, size: int) -> Iterator[Case]:
    def sdpa(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), enable_gqa=True, **how)[0].transpose(0, 1)

    T = m.T // 2
    for name, documents in (("one document", [T]), ("packed", [T // 2, T // 4, T // 8, T // 16, T // 16])):
        end = torch.cat([torch.full((n,), sum(documents[: i + 1]), dtype=torch.int32) for i, n in enumerate(documents)]).to(m.device)
        mask = ForestMask.from_end(end)
        q, k, v = (m.normal(T, heads, m.K) for heads in (m.H, m.G, m.G))
        pairs = sum(n * (n + 1) / 2 for n in documents)
        flops = 4.0 * pairs * m.H * m.K
        moved = (2 * q.numel() + 2 * k.numel()) * size
        if len(documents) == 1:
            peers: dict[str, Function] = {"SDPA": partial(sdpa, is_causal=True)}
        else:
            peers = {"SDPA, dense mask": partial(sdpa, attn_mask=mask.dense())} | _varlen(documents, m.device)
        ours = partial(attention, mask=mask)
        yield Case(f"attention, {name}", ours, (q, k, v), (moved, 2 * moved), (flops, 2.5 * flops), peers)


def _varlen(documents: list[int], device: torch.device) -> dict[str, Function]:
    """Return torch's variable-length attention, which runs only on a GPU; grouped heads are repeated if it needs that."""
    if device.type != "cuda":
        return {}
    from torch.nn.attention.varlen import varlen_attn

    cuts = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
        return varlen_attn(q, k, v, cuts, cuts, max(documents), max(documents), window_size=(-1, 0))

    return {"varlen": run}


def _decoding(m: Machine, size: int) -> Iterator[Case]:
    """Yield one new token for each of 64 sequences: with separate contexts, and with one shared prompt."""
    B, W = 64, m.T // 4
    q, own = m.normal(B, m.H, m.K).detach(), max(1, W // PAGE // 8)
    shared = W // PAGE
    k_PSGK, v_PSGK = new_pages(shared + B * own, m.G, m.K, m.K, m.dtype, m.device)
    for pages in (k_PSGK, v_PSGK):
        pages.normal_()
    each = shared + torch.arange(B * own, dtype=torch.int32).view(B, own)
    whole = torch.arange(shared, dtype=torch.int32).expand(B, -1)
    sequence = torch.arange(B, dtype=torch.int32)
    for name, tables in (("own contexts", each), ("shared prompt", torch.cat([whole, each], 1))):
        length = tables.shape[1] * PAGE
        plan = PagedPlan(tables.contiguous(), sequence, torch.full((B,), length - 1, dtype=torch.int32), m.device)
        read = 2 * tables.unique().numel() * PAGE * m.G * m.K * size
        products = 4.0 * B * length * m.H * m.K
        yield Case(f"paged attention, {name}", partial(paged_attention, plan=plan), (q, k_PSGK, v_PSGK), (read, 0), (products, 0))
    new = [m.normal(B, m.G, m.K).detach() for _ in range(2)]
    places = torch.arange(B, device=m.device) * PAGE

    def copies(k_PSGK: Tensor, v_PSGK: Tensor, k: Tensor, v: Tensor, places: Tensor) -> None:
        k_PSGK.view(-1, *k.shape[1:]).index_copy_(0, places, k)
        v_PSGK.view(-1, *v.shape[1:]).index_copy_(0, places, v)

    moved = 4 * new[0].numel() * size
    yield Case("KV append", kv_append_, (k_PSGK, v_PSGK, *new, places), (moved, 0), (0, 0), {"index_copy_": copies})


def _linear_layers(m: Machine, size: int) -> Iterator[Case]:
    T, D, N = m.T // 2, m.D, m.F
    x, w = m.normal(T, D).detach(), m.normal(N, D, scale=0.02).detach()
    product, moved = 2.0 * T * D * N, (T * D + N * D + T * N) * size
    plain = {"bf16 product" if m.dtype == torch.bfloat16 else "product": F.linear}
    for kind in ("int8", "fp8"):
        q, scale = quantize_rows(w, kind)
        ours = partial(_quantized, q=q, scale=scale)
        yield Case(f"{kind} linear", ours, (x, w), (moved, 0), (product, 0), plain)


def _quantized(x: Tensor, w: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    return quantized_linear(x, q, scale)


def _experts(m: Machine, size: int) -> Iterator[Case]:
    E, k, inner = 64, 8, max(64, m.F // 8)
    logits = m.normal(m.T, E)
    routed = m.T * (E * (size + 4) + 12 * k)
    yield Case(
        "top-k routing", lambda z: top_k_routing(z, k, True)[:2], (logits,), (routed, routed), (0, 0),
        {"torch": lambda z: top_k_routing_reference(z.float(), k, True)[:2]},
    )  # fmt: skip
    few = max(1, m.T // k)  # so that there are as many expert rows as tokens elsewhere
    order, place, _ = sort_by_expert(top_k_routing(logits[:few].detach(), k, True)[2], E)
    rows, weight, tokens = m.normal(few * k, m.D), torch.rand(few, k, device=m.device).requires_grad_(), m.normal(few, m.D)
    large, small = rows.numel() * size, tokens.numel() * size
    yield Case(
        "MoE dispatch", lambda x: dispatch(x, order, place), (tokens,), (large + small, large + small), (0, 0),
        {"torch": lambda x: dispatch_reference(x, order)},
    )  # fmt: skip
    yield Case(
        "MoE combine", lambda y, w: combine(y, w, order, place), (rows, weight), (large + small, 2 * large + small), (0, 0),
        {"torch": lambda y, w: combine_reference(y, w, order)},
    )  # fmt: skip
    N = m.T
    shares = torch.distributions.Dirichlet(torch.full((E,), 4.0)).sample()
    cuts = (shares.cumsum(0) * N).round().long()
    cuts[-1] = N
    offsets = torch.cat([cuts.new_zeros(1), cuts]).to(m.device)
    x, w = m.normal(N, m.D), m.normal(E, inner, m.D, scale=0.02)
    product, moved = 2.0 * N * m.D * inner, (x.numel() + w.numel() + N * inner) * size
    peers: dict[str, Function] = {"loop": grouped_linear_reference}
    if m.device.type == "cuda":
        peers["torch grouped"] = lambda x, w, o: torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=o[1:].to(torch.int32))
    yield Case("grouped linear, 64 experts", without_library, (x, w, offsets), (moved, 2 * moved), (product, 2 * product), peers)


def without_library(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Return the result of Puna's kernel even if the table prefers torch's product, which is a peer here.

    The table stays changed for the backward pass, which runs later.
    """
    for place, (values, machine) in configurations.table().items():
        if values.library:
            configurations.table()[place] = replace(values, library=False), machine
            configurations.configuration.cache_clear()
    return grouped_linear(x, w, offsets)


def _the_rest(m: Machine) -> Iterator[Case]:
    """Yield AdamW, advantages and MinHash, which have no matrix product."""
    sizes = [(m.F, m.D)] * 3 + [(m.D, m.D)] * 2 + [(m.D,)] * 4
    parameters = [torch.randn(s, device=m.device) for s in sizes]
    gradients = [torch.randn(s, device=m.device).to(m.dtype) for s in sizes]
    moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    count = sum(p.numel() for p in parameters)
    theirs = [torch.nn.Parameter(p.clone()) for p in parameters]
    for p, g in zip(theirs, gradients, strict=True):
        p.grad = g.float()
    optimizer = torch.optim.AdamW(theirs, fused=True)

    def torch_step() -> None:
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()

    def our_step() -> None:
        factor = clipping_factor(gradient_norm(gradients), 1.0)
        adamw_(parameters, gradients, *moments, step=1, lr=1e-4, factor=factor)

    # Parameters and moments are read and written in fp32, gradients read twice.
    yield Case("AdamW with clipping", our_step, (), (count * (24 + 2 * m.dtype.itemsize), 0), (0, 0), {"torch fused": torch_step})
    answers = max(4, m.T // 64)
    lengths = torch.randint(m.T // 64 + 1, m.T // 16 + 2, (answers,))
    tokens = [torch.randn(int(lengths.sum()), device=m.device) for _ in range(3)]
    scores, lengths = torch.randn(answers, device=m.device), lengths.to(m.device)
    ours = partial(advantages, kl=0.1, gamma=1.0, lam=0.95)
    yield Case("GAE with KL rewards", ours, (*tokens, scores, lengths), (20 * len(tokens[0]), 0), (0, 0))
