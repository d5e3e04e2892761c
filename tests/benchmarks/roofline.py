"""Each kernel against the machine's ceiling and against its peers: one table.

    PYTHONPATH=.pkg python tests/benchmarks/roofline.py [--device cpu|cuda] [--only NAME …] [--json]

Without --device the GPU if there is one. First each operator is checked on small shapes against its fp64
definition in the precision that is timed, then both are timed on the same inputs, taking turns.

    floor      the larger of bytes / copy bandwidth and FLOPs / matrix-product rate, both measured here first
    ceiling    floor / time: 1 is all that the machine can do
    peer       the fastest of the peers that are installed: torch's operators, torch.compile, Liger-Kernel

On a GPU: bf16, the shapes of a Llama 3 8B layer over 16384 tokens. On CPU: fp32, one thread, process CPU time,
a small model's shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from puna.kernels.attention import ForestMask, attention, attention_reference
from puna.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from puna.kernels.linear_token_logprobs import linear_token_logprobs, linear_token_logprobs_reference
from puna.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from puna.kernels.rope import rope, rope_reference, rope_table
from puna.kernels.swiglu import swiglu, swiglu_reference

Function = Callable[..., Any]


@dataclass(frozen=True)
class Machine:
    """Where and in what precision; shapes: tokens, width, feed-forward width, heads, key-value heads, head width, vocabulary."""

    device: torch.device
    dtype: torch.dtype
    T: int
    D: int
    F: int
    H: int
    G: int
    K: int
    V: int

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=self.device)).to(self.dtype).requires_grad_()


@dataclass
class Case:
    """`function(*inputs)` and its peers; the backward is timed too where any input requires a gradient."""

    name: str
    function: Function
    inputs: tuple[Any, ...]
    bytes: tuple[float, float]  # forward, backward
    flops: tuple[float, float]
    peers: dict[str, Function] = field(default_factory=dict)


@dataclass
class Line:
    op: str
    gigabytes: float
    gigaflops: float
    milliseconds: float
    ceiling: float
    peer: str
    peer_milliseconds: float
    ratio: float
    peak_gigabytes: float


# --- measuring -------------------------------------------------------------------------------------------


def milliseconds(functions: dict[str, Function], device: torch.device, budget: float) -> dict[str, float]:
    """Median of GPU times (the cache flushed before each), best of CPU times; the functions take turns."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if device.type == "cuda" else None
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    started = time.perf_counter()
    while not all(len(taken) >= 3 for taken in times.values()) or (
        time.perf_counter() - started < budget and len(next(iter(times.values()))) < 50
    ):
        for name, function in functions.items():
            if flush is None:
                begun = time.process_time()
                function()
                times[name].append(1e3 * (time.process_time() - begun))
            else:
                flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                function()
                end.record()
                torch.cuda.synchronize()
                times[name].append(begin.elapsed_time(end))
    return {name: min(taken) if flush is None else statistics.median(taken) for name, taken in times.items()}


def ceilings(machine: Machine) -> tuple[float, float]:
    """(copy bandwidth in bytes/s, matrix-product rate in FLOP/s) of this machine, as measured."""
    gpu = machine.device.type == "cuda"
    source = torch.empty((1 << 30) if gpu else (64 << 20), dtype=torch.int8, device=machine.device)
    target = torch.empty_like(source)
    size = 8192 if gpu else 1536
    a, b = (machine.normal(size, size).detach() for _ in range(2))
    taken = milliseconds({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, machine.device, 2.0)
    return 2e3 * len(source) / taken["copy"], 2e3 * size**3 / taken["product"]


def measure(case: Case, machine: Machine, bandwidth: float, rate: float, budget: float) -> Iterator[Line]:
    """The lines of one case. A peer that cannot run here is left out, and named."""
    functions = {"ours": case.function}
    for name, peer in case.peers.items():
        try:
            peer(*case.inputs)
            functions[name] = peer
        except Exception as error:  # noqa: BLE001  a peer's failure, of whatever kind, is not ours to mend
            print(f"# {case.name}: {name} does not run here: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    wanted = [x for x in case.inputs if isinstance(x, Tensor) and x.requires_grad]

    def forward(function: Function) -> Function:
        def run() -> None:
            with torch.no_grad():
                function(*case.inputs)

        return run

    def backward(function: Function) -> Function:
        outputs = function(*case.inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.randn_like(out) for out in outputs]
        return lambda: torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)

    for phase, (wrap, size, flops) in enumerate(zip((forward, backward), case.bytes, case.flops, strict=True)):
        if phase and not wanted:
            return
        ready = {name: wrap(function) for name, function in functions.items()}
        peak = _peak(ready["ours"], machine.device)
        taken = milliseconds(ready, machine.device, budget)
        ours = taken.pop("ours")
        peer = min(taken, key=taken.__getitem__) if taken else ""
        floor = 1e3 * max(size / bandwidth, flops / rate)
        theirs = taken.get(peer, math.nan)
        name = f"{case.name} {'backward' if phase else 'forward'}"
        yield Line(name, size / 1e9, flops / 1e9, ours, floor / ours, peer, theirs, theirs / ours, peak)


def _peak(function: Function, device: torch.device) -> float:
    """GB that one call allocates at most; NaN on CPU."""
    if device.type != "cuda":
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def check(name: str, function: Function, reference: Function, inputs: list[Tensor], dtype: torch.dtype) -> str:
    """Values and gradients against the fp64 definition: at most twice the error of the definition in `dtype`."""

    def run(f: Function, kind: torch.dtype) -> list[Tensor]:
        given = [
            x.to(kind).requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for x in (y.detach().requires_grad_(y.requires_grad) for y in inputs)
        ]
        outputs = f(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        return [*outputs, *torch.autograd.grad(outputs, [x for x in given if x.requires_grad], upstream)]

    exact, plain, ours, again = run(reference, torch.float64), run(reference, dtype), run(function, dtype), run(function, dtype)
    for index, (e, p, o, a) in enumerate(zip(exact, plain, ours, again, strict=True)):
        error = float((o.double() - e).abs().max())
        budget = 2 * float((p.double() - e).abs().max()) + 8 * torch.finfo(dtype).eps * max(1.0, float(e.abs().max()))
        if not error <= budget:
            return f"{name}: WRONG, tensor {index} is off by {error:.3g}, {budget:.3g} is allowed"
        if not torch.equal(o, a):
            return f"{name}: WRONG, tensor {index} differs between two runs"
    return f"{name}: right"


# --- the operators ---------------------------------------------------------------------------------------


def compiled(function: Function, machine: Machine) -> dict[str, Function]:
    """torch.compile of the definition, where compiling takes seconds and not minutes."""
    return {"compile": torch.compile(function)} if machine.device.type == "cuda" else {}


def liger(name: str, adapt: Function = lambda f: f) -> dict[str, Function]:
    """A function of Liger-Kernel's functional interface, where it is installed."""
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return {}
    return {"liger": adapt(getattr(functional, f"liger_{name}"))}


def checks(machine: Machine) -> Iterator[str]:
    """Every operator on small shapes, with edges that are no multiples of any block."""
    draw = partial(_normal64, machine.device)
    done = partial(check, dtype=machine.dtype)
    yield done(
        "add + RMSNorm",
        partial(add_rms_norm, eps=1e-5),
        partial(add_rms_norm_reference, eps=1e-5),
        [draw(300, 4096), draw(300, 4096), draw(4096)],
    )
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
            yield done(
                name,
                lambda q, k, v, mask=mask: attention(q, k, v, mask),
                lambda q, k, v, mask=mask: attention_reference(q, k, v, mask),
                inputs,
            )


def _normal64(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))).to(device).requires_grad_()


def cases(m: Machine) -> Iterator[Case]:
    """Every operator at the machine's shapes; made one at a time, so that only one's tensors live."""
    size = m.dtype.itemsize
    row = m.T * m.D * size
    x, r, w = m.normal(m.T, m.D), m.normal(m.T, m.D), m.normal(m.D)
    peers = {"torch": lambda x, r, w: (lambda total: (F.rms_norm(total, (m.D,), w, 1e-5), total))(x + r)}
    peers |= liger("fused_add_rms_norm", lambda f: lambda x, r, w: f(x, r, w, 1e-5))
    yield Case("add + RMSNorm", partial(add_rms_norm, eps=1e-5), (x, r, w), (4 * row, 4 * row), (0, 0), peers | compiled(peers["torch"], m))
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


def _output_layer(m: Machine, size: int) -> Iterator[Case]:
    x, w = m.normal(m.T, m.D), m.normal(m.V, m.D, scale=0.02)
    targets, weights = torch.randint(0, m.V, (m.T,), device=m.device), torch.full((m.T,), 1 / m.T, device=m.device)
    product = 2.0 * m.T * m.D * m.V
    matrices = (x.numel() + w.numel()) * size

    def whole_step(loss: Function) -> Function:
        """Forward and backward in one, since ours makes the gradients in its forward pass."""

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
    """torch's variable-length attention, which only runs on a GPU; grouped heads are repeated where it wants that."""
    if device.type != "cuda":
        return {}
    from torch.nn.attention.varlen import varlen_attn

    cuts = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
        return varlen_attn(q, k, v, cuts, cuts, max(documents), max(documents), is_causal=True)

    return {"varlen": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[], help="operators whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each line")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cuda":
        machine = Machine(torch.device("cuda"), torch.bfloat16, 16384, 4096, 14336, 32, 8, 128, 128256)
    else:
        torch.set_num_threads(1)
        machine = Machine(torch.device("cpu"), torch.float32, 2048, 1024, 2816, 8, 4, 64, 8192)
    wrong = False
    for verdict in checks(machine):
        wrong |= "WRONG" in verdict
        print(f"# {verdict}", flush=True)
    bandwidth, rate = ceilings(machine)
    print(f"# copy {bandwidth / 1e9:.1f} GB/s, {machine.dtype} product {rate / 1e12:.3g} TFLOP/s, torch {torch.__version__}", flush=True)
    header = f"{'op':38} {'GB':>8} {'GFLOP':>9} {'ms':>9} {'ceiling':>8} {'peer':>18} {'ms':>9} {'ratio':>6} {'peak GB':>8}"
    print(header if not options.json else "", flush=True)
    for case in cases(machine):
        if options.only and not any(part.lower() in case.name.lower() for part in options.only):
            continue
        for line in measure(case, machine, bandwidth, rate, options.seconds):
            if options.json:
                print(json.dumps(asdict(line)), flush=True)
                continue
            print(
                f"{line.op:38} {line.gigabytes:8.3f} {line.gigaflops:9.1f} {line.milliseconds:9.3f} {line.ceiling:8.2f}"
                f" {line.peer:>18} {line.peer_milliseconds:9.3f} {line.ratio:6.2f} {line.peak_gigabytes:8.2f}",
                flush=True,
            )
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
