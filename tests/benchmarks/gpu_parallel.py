"""Layouts of several devices compared with one process without groups: results, checkpoints, tokens per second.

    PYTHONPATH=.pkg python tests/benchmarks/gpu_parallel.py --json parallel.json > parallel.txt

Starts its own ranks, one per GPU, over NCCL. Without a GPU, `--device cpu --ranks 2` runs the same checks over gloo.

1. every exchange of models/training/parallel, against the plain result
2. each layout that the devices allow: gradients, loss and gradient norm (within 1e-5 in fp32, TF32 off; loss and norm on a GPU 5e-5), the
   weights after two steps (5e-5), a checkpoint in boxes, bit for bit. In bf16, gradients are within 1e-5 if ranks compute the products of
   one process; otherwise see `EXCESS`. With one device the groups have one rank. The first row repeats one process, which shows the
   device's noise
3. tokens per second of a step, in fp32 and bf16
4. with one GPU: the same layouts on two and four ranks that share it, over gloo; pipelines are left out, because gloo sends their messages
   only from host memory, and speeds mean nothing

Ends with status 1 if a number differs, a check fails, or no line comes within two minutes. Layouts that are refused on GPUs are shown as
refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from puna.kernels.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from puna.kernels.linear_token_logprobs import linear_token_logprobs  # noqa: E402
from puna.models.accounting import DTYPES  # noqa: E402
from puna.models.config import ModelConfig  # noqa: E402
from puna.models.training.objectives import LanguageModeling  # noqa: E402
from puna.models.training.objectives.base import Targets  # noqa: E402
from puna.models.training.parallel import collectives, vocabulary  # noqa: E402
from puna.models.training.parallel.base import Parallel  # noqa: E402
from puna.models.training.parallel.context import Cut  # noqa: E402
from puna.models.training.parallel.layout import AXES, PROVED, Layout  # noqa: E402
from puna.models.training.parallel.mesh import Mesh, bounds, cut, join  # noqa: E402
from puna.models.training.trainer import Trainer  # noqa: E402
from puna.models.transformer import Transformer  # noqa: E402
from tests.parallel import cases  # noqa: E402

EQUAL = 1e-5
EXCESS = 1.25
"""Largest error in bf16 of a layout that rounds elsewhere, over that of one process in bf16; errors are differences from fp32."""
PATIENCE = 120.0
"""Maximum seconds of a check; the first check compiles Triton programs."""
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
    "cuda": {
        "vocab_size": 1003, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "initializer_range": 0.07,
    },
}  # fmt: skip
"""Models of the comparisons; the GPU's model allows eight ranks on each axis."""
FAST: dict[str, tuple[dict[str, Any], int]] = {
    "cpu": ({**SHAPES["cpu"], "vocab_size": 512}, 64),
    "cuda": (
        {
            "vocab_size": 32_768, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }, 4096,
    ),
}  # fmt: skip
"""Models of the speed measurements, and tokens of a micro-batch."""


@dataclass(frozen=True)
class Check:
    """A check: `kind` names its function; `layout` has the sizes above 1. `alone`: an axis whose group has one rank."""

    kind: str
    layout: tuple[tuple[str, int], ...] = ()
    objective: str = "pretrain"
    variant: str = "plain"
    precision: str = "fp32"
    alone: str = ""

    def __str__(self) -> str:
        place = " x ".join(f"{axis} {size}" for axis, size in self.layout) or (f"{self.alone} of one" if self.alone else "one process")
        return f"{self.kind}, {place}" + ("" if self.kind == "collectives" else f", {self.variant}, {self.objective}, {self.precision}")


def layouts(ranks: int) -> list[tuple[tuple[str, int], ...]]:
    """Return the proved layouts of `ranks` ranks with even sizes: all on one axis, or divided over two and three axes."""
    found = []
    for axes in sorted(PROVED, key=lambda some: (len(some), sorted(some))):
        names = [axis for axis in AXES if axis in axes]
        first = ranks // 2 ** (len(names) - 1)
        if first > 1 and first * 2 ** (len(names) - 1) == ranks:
            found.append(tuple((axis, first if i == 0 else 2) for i, axis in enumerate(names)))
    return found


def checks(ranks: int, shared: bool, only: str) -> list[Check]:
    """Return the checks for `ranks` ranks whose names match the pattern `only`. shared: the ranks share a device."""
    return [check for check in _all_checks(ranks, shared) if re.search(only, str(check))]


def _all_checks(ranks: int, shared: bool) -> list[Check]:
    out = [Check("collectives"), Check("numbers")]
    if ranks == 1:
        kinds = {"data": "plain", "shard": "tied", "tensor": "tied", "expert": "moe"}
        for axis, variant in kinds.items():
            out += [Check("numbers", (), objective, variant, alone=axis) for objective in ("pretrain", "dpo")]
            out.append(Check("checkpoint", (), "pretrain", variant, alone=axis))
        out += [Check("numbers", (), "pretrain", variant, "bf16", axis) for axis, variant in kinds.items()]
        out += [Check("speed", precision=p, alone=axis) for axis in ("", "shard", "tensor") for p in ("fp32", "bf16")]
        return out
    for layout in layouts(ranks):
        axes = {axis for axis, _ in layout}
        if shared and "pipeline" in axes:
            continue
        variant = "moe" if "expert" in axes else "plain"
        out += [Check("numbers", layout, objective, variant) for objective in ("pretrain", "dpo")[: 1 if shared and len(axes) > 1 else 2]]
        out.append(Check("checkpoint", layout, "pretrain", variant))
        if "pipeline" in axes and 2 * dict(layout)["pipeline"] <= SHAPES[cases.DEVICE]["num_hidden_layers"]:
            out.append(Check("numbers", (*layout, ("virtual_stages", 2))))
        if not shared and len(layout) == 1:
            out += [Check("speed", layout, variant=variant, precision=precision) for precision in ("fp32", "bf16")]
        out.append(Check("numbers", layout, "pretrain", variant, "bf16"))
    return out if shared else [*out, Check("speed"), Check("speed", precision="bf16")]


# --- one rank ---


class Alone(Mesh):
    """A mesh of one process that exchanges with itself along one axis, as a rank of a layout exchanges with others."""

    def __init__(self, axis: str) -> None:
        super().__init__(Layout())
        self._groups, self._ranks, self.everyone = {axis: dist.group.WORLD}, {axis: [0]}, dist.group.WORLD


@contextlib.contextmanager
def alone(axis: str) -> Iterator[Mesh]:
    """Let trainers within the context exchange over groups of one rank."""
    from puna.models.training.parallel.shard import Sharded

    kind = {"data": Parallel, "shard": Sharded, "tensor": Cut, "expert": Cut}[axis]
    made = mock.patch("puna.models.training.trainer.parallel", lambda model, layout, mesh, device, precision, **_: kind(model, mesh, device, DTYPES[precision]))
    with made, mock.patch.object(Parallel, "processes", 2):
        yield Alone(axis)


@contextlib.contextmanager
def mesh_of(check: Check) -> Iterator[Mesh]:
    if check.alone:
        with alone(check.alone) as mesh:
            yield mesh
    else:
        yield Mesh(Layout(**dict(check.layout)))


def numbers(check: Check) -> dict[str, Any]:
    """Return the differences from one process without groups; without a layout, those between two runs of one process."""
    given = {"precision": check.precision, "deterministic": True}
    size = SHAPES[cases.DEVICE]["num_hidden_layers"], 5
    with mesh_of(check) as mesh:
        own = cases.steps(check.objective, check.variant, mesh.layout, mesh, *size, **given)
    one = cases.one_process(check.objective, check.variant, size, tuple(sorted(given.items())))
    rows = [abs(a[k] - b[k]) / max(abs(b[k]), 0.1) for a, b in zip(own["rows"], one["rows"], strict=True) for k in b]
    out = {name: cases.difference(own[name], one[name], 1e-2) for name in ("gradients", "weights")} | {"rows": max(rows)}
    # bf16 rounds the weights after a step, so a difference of one bit in their sum may grow.
    # The order of a GPU's sums depends on the shapes of the products; the second step's loss shows this.
    rows_equal = out["rows"] <= (EQUAL if cases.DEVICE == "cpu" else 5 * EQUAL)
    if check.precision == "fp32":
        return {**out, "equal": out["gradients"] <= EQUAL and rows_equal and out["weights"] <= 5 * EQUAL}
    exact = cases.one_process(check.objective, check.variant, size, (("deterministic", True), ("precision", "fp32")))
    out["excess"] = max(cases.excess(own[name], one[name], exact[name])[0] for name in ("gradients", "weights"))
    alike = {"data", "shard", "pipeline"}.issuperset({axis for axis, _ in check.layout} or {check.alone or "data"})
    return {**out, "equal": out["gradients"] <= EQUAL if alike else out["excess"] <= EXCESS}


def checkpoint(check: Check, folder: Path) -> dict[str, Any]:
    """Write a checkpoint in boxes and read it: the rank's own pieces, and the whole tensors as one process reads them."""
    micro = cases.micro_batches(check.objective, 1)
    with mesh_of(check) as mesh:
        config = cases.train_config(mesh.layout, precision=check.precision)
        with Trainer(cases.network(check.variant), cases.loss_of(check.objective, mesh.layout, mesh), config, mesh=mesh) as trainer:
            trainer.step(1, micro, 1)
            own = trainer.tensors()
            trainer.parallel.save_state(folder, 1, own, {})
            state = trainer.parallel.load_state(folder, own, {})
            assert state is not None
            same = state[0].keys() == own.keys() and all(torch.equal(state[0][n], own[n].detach().cpu()) for n in own)
            trainer.restore(state[0])
            mesh.wait()
    return {"equal": same, "tensors": len(own)}


def speed(check: Check) -> dict[str, Any]:
    """Return tokens per second of the fastest of three steps after two warm-up steps, and the peak of a GPU's memory."""
    shape, tokens = FAST[cases.DEVICE]
    extra = {"moe": {**cases.MOE, "num_experts": 8, "moe_intermediate_size": shape["intermediate_size"] // 4}} if check.variant == "moe" else {}
    config = ModelConfig(**shape, **extra)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, config.vocab_size, (tokens // 2,), generator=generator) for _ in range(2)]
    if cases.DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = Transformer(config, seed=0).to(cases.DEVICE)
    batch = [Targets.from_documents(documents) for _ in range(8)]
    with mesh_of(check) as mesh:
        settings = cases.train_config(mesh.layout, precision=check.precision)
        with Trainer(model, LanguageModeling(), settings, mesh=mesh) as trainer:
            taken = min([trainer.step(1 + step % 4, batch, 1)["seconds"] for step in range(5)][2:])
    memory = torch.cuda.max_memory_allocated() / 1e9 if cases.DEVICE == "cuda" else math.nan
    return {"tokens_per_second": 8 * tokens / taken, "peak_gigabytes": memory, "equal": True}


def _pair(call: Any, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of a call, and the gradient of its input given a gradient of the result."""
    x = x.detach().requires_grad_()
    y = call(x)
    y.backward(gradient)
    assert x.grad is not None
    return y.detach(), x.grad


def exchanges(rank: int, ranks: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield for each exchange its name, the result, and the result computed from all ranks' inputs."""
    group, device = dist.group.WORLD, cases.DEVICE

    def drawn(seed: int, *shape: int) -> Tensor:
        # Whole numbers: their sums are exact in any order.
        return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    rows = 5 * ranks - 1 if ranks > 1 else 5
    wholes, gradients = [drawn(i, rows, 3) for i in range(ranks)], [drawn(100 + i, rows, 3) for i in range(ranks)]
    pieces, short = [drawn(200 + i, 5, 3) for i in range(ranks)], [drawn(300 + i, 5, 3) for i in range(ranks)]
    total, of_gradients = torch.stack(wholes).sum(0), torch.stack(gradients).sum(0)
    mine = slice(*bounds(rows, ranks, rank))

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(5 - len(x), 3)])

    yield "own_rows", collectives.own_rows(wholes[rank], group), padded(wholes[rank][mine])
    for name, call, given, gradient, expected, back in (
        ("add_parts", lambda x: collectives.add_parts(x, group), wholes[rank], gradients[rank], total, gradients[rank]),
        ("add_gradients", lambda x: collectives.add_gradients(x, group), wholes[rank], gradients[rank], wholes[rank], of_gradients),
        (
            "gather_rows, partial", lambda x: collectives.gather_rows(x, rows, group, partial=True), pieces[rank], gradients[rank],
            torch.cat(pieces)[:rows], padded(of_gradients[mine]),
        ),
        (
            "gather_rows", lambda x: collectives.gather_rows(x, rows, group, partial=False), pieces[rank], gradients[0],
            torch.cat(pieces)[:rows], padded(gradients[0][mine]),
        ),
        (
            "scatter_rows", lambda x: collectives.scatter_rows(x, group), wholes[rank], short[rank],
            padded(total[mine]), torch.cat(short)[:rows],
        ),
    ):  # fmt: skip
        y, dx = _pair(call, given, gradient)
        yield name, y, expected
        yield f"{name}, backward", dx, back
    # Rank i sends i + j + 1 of its rows to rank j.
    counts = [[i + j + 1 for j in range(ranks)] for i in range(ranks)]
    sent = [drawn(400 + i, sum(counts[i]), 3) for i in range(ranks)]
    receive = [counts[i][rank] for i in range(ranks)]
    expected = torch.cat([sent[i].split(counts[i])[rank] for i in range(ranks)])
    y, dx = _pair(lambda x: collectives.exchange_rows(x, counts[rank], receive, group), sent[rank], expected)
    yield "exchange_rows", y, expected
    yield "exchange_rows, backward", dx, sent[rank]


def output_layers(rank: int, ranks: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the losses of a split vocabulary with their gradients, and those of the whole vocabulary."""
    device, generator = cases.DEVICE, torch.Generator().manual_seed(0)
    x, w = torch.randn(70, 64, generator=generator).to(device), torch.randn(151, 64, generator=generator).to(device)
    targets = torch.randint(0, 151, (70,), generator=generator).to(device)
    weights = torch.rand(70, generator=generator).to(device)
    start, stop = bounds(151, ranks, rank)
    share = vocabulary.Share(start, cut(151, ranks), dist.group.WORLD)
    wholes = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    cuts = [x.clone().requires_grad_(), w[start:stop].clone().requires_grad_()]
    for name, of_cut, of_whole in (
        (
            "cross_entropy", lambda: vocabulary.cross_entropy(*cuts, targets, weights, share),
            lambda: linear_cross_entropy(*wholes, targets, weights),
        ), (
            "token_logprobs", lambda: torch.stack(vocabulary.token_logprobs(*cuts, targets, 0.7, share)[:2]).mul(weights).sum(),
            lambda: torch.stack(linear_token_logprobs(*wholes, targets, 0.7)).mul(weights).sum(),
        ),
    ):  # fmt: skip
        some, others = of_cut(), of_whole()
        yield name, some.detach(), others.detach()
        gradients = torch.autograd.grad(some, cuts), torch.autograd.grad(others, wholes)
        yield f"{name}, hidden", gradients[0][0], gradients[1][0]
        yield f"{name}, weights", gradients[0][1], gradients[1][1][start:stop]


def collectives_of(rank: int, ranks: int) -> dict[str, Any]:
    """Return the exchanges whose result differs from the plain one, and the largest difference of a split output layer."""
    mesh = Mesh(Layout(data=ranks)) if ranks > 1 else Alone("data")
    wrong = [f"{name} in {dtype}" for dtype in (torch.float32, torch.bfloat16) for name, y, z in exchanges(rank, ranks, dtype) if not torch.equal(y, z)]
    for device in dict.fromkeys(("cpu", cases.DEVICE)):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16):
            for add in (lambda values: mesh.add(values, "data"), mesh.add_everywhere):
                if add(torch.full((3,), 1 + rank, dtype=dtype, device=device)).tolist() != [ranks * (ranks + 1) / 2] * 3:
                    wrong.append(f"a sum of {dtype} on {device}")
    texts = mesh.gather_texts("é" * (1 + rank)) if ranks > 1 else ["é"]
    if texts != ["é" * (1 + i) for i in range(ranks)] or not mesh.agree(rank == ranks - 1) or mesh.agree(False):
        wrong.append("texts and wishes")
    worst = {name: float((y - z).abs().max() / z.abs().max()) for name, y, z in output_layers(rank, ranks)}
    wrong += [f"{name}: {value:.1e}" for name, value in worst.items() if value > EQUAL]
    return {"wrong": wrong, "worst": max(worst.values()), "equal": not wrong}


def result_of(check: Check, rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    if check.kind == "collectives":
        return collectives_of(rank, ranks)
    if check.kind == "checkpoint":
        return checkpoint(check, folder)
    return (numbers if check.kind == "numbers" else speed)(check)


def serve(device: str, shared: bool, only: str, first: int, folder: Path) -> None:
    """Run the checks from number `first` on; write each result of this rank as a line of JSON. An error ends the process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    cases.DEVICE = device
    cases.PLAIN.update(SHAPES[device])
    if device == "cuda":
        cases.MOE.update(num_experts=8, moe_intermediate_size=64)
    join(device, "cpu:gloo,cuda:gloo" if shared else "")
    with (folder / f"rank-{rank}.jsonl").open("a", buffering=1, encoding="utf-8") as out:
        for number, check in enumerate(checks(ranks, shared, only)):
            if number < first:
                continue
            result: dict[str, Any] = {"number": number}
            started = time.perf_counter()
            try:
                result |= result_of(check, rank, ranks, folder / f"state-{number}")
            except Exception as error:  # noqa: BLE001 (the table shows it)
                if "proved only on CPUs" not in str(error):
                    out.write(json.dumps(result | {"error": traceback.format_exc()}) + "\n")
                    os._exit(1)
                result |= {"refused": str(error), "equal": True}  # on all ranks, before any exchange
            out.write(json.dumps(result | {"seconds": time.perf_counter() - started}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


# --- all ranks ---


def _lines(folder: Path, ranks: int) -> list[dict[int, dict[str, Any]]]:
    """Return each rank's results by the number of the check."""
    out = []
    for rank in range(ranks):
        file = folder / f"rank-{rank}.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        out.append({line["number"]: line for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines())})
    return out


def _attempt(given: list[str], ranks: int, first: int, folder: Path, until: float, seen: Callable[[], int]) -> str:
    """Start the ranks at a check and wait; return why they ended early, or "". `seen` returns the number of result lines so far."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--serve", str(first), "--folder", str(folder), *given]
    workers = [subprocess.Popen(command, env=os.environ | common | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)]
    count, since = 0, time.monotonic()
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.1)
            if any(worker.poll() for worker in workers):
                time.sleep(1.0)  # to get the other ranks' last lines
                return "a rank ended: " + ", ".join(f"rank {r} with {w.poll()}" for r, w in enumerate(workers) if w.poll())
            if (lines := seen()) > count:
                count, since = lines, time.monotonic()
            if time.monotonic() > until:
                return "the time is up"
            if time.monotonic() - since > PATIENCE:
                return f"nothing for {PATIENCE:.0f} seconds"
        return ""
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def run(device: str, ranks: int, shared: bool, only: str, until: float) -> list[dict[str, Any]]:
    """Run all checks for `ranks` ranks; after a failure continue with the next check. Print and return a row for each."""
    todo, failures, rows = checks(ranks, shared, only), dict[int, str](), dict[int, dict[str, Any]]()
    given = ["--device", device, f"--only={only}", *(["--shared"] if shared else [])]
    with tempfile.TemporaryDirectory() as root:
        folder, first = Path(root), 0

        def seen() -> int:
            answers = _lines(folder, ranks)
            for number in sorted({number for own in answers for number in own} | failures.keys()):
                own = [one[number] for one in answers if number in one]
                if number not in rows and (number in failures or (len(own) == ranks and not any("error" in one for one in own))):
                    rows[number] = _row(str(todo[number]), ranks, shared, own, failures.get(number))
                    print(_line(rows[number]), flush=True)
            return sum(map(len, answers))

        while first < len(todo) and time.monotonic() < until:
            problem = _attempt(given, ranks, first, folder, until, seen)
            seen()
            first = next((number for number in range(first, len(todo)) if number not in rows), len(todo))
            if first < len(todo):
                failures[first] = problem or "the ranks ended without it"
                seen()
                first += 1
    return [rows.get(n) or _row(str(check), ranks, shared, [], "not run: the time is up") for n, check in enumerate(todo)]


def _row(check: str, ranks: int, shared: bool, own: list[dict[str, Any]], problem: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"check": check, "ranks": ranks, "shared": shared}
    if problem is not None:
        errors = sorted((one["error"] for one in own if "error" in one), key=lambda error: "Connection closed by peer" in error)
        return row | {"ok": False, "problem": (errors or [problem])[0]}
    row |= {"ok": all(one["equal"] for one in own), **own[0]}
    return row | {key: max(one[key] for one in own) for key in ("gradients", "rows", "weights", "worst", "excess") if key in own[0]}


def _line(row: dict[str, Any]) -> str:
    figures = [f"{key} {row[key]:.1e}" for key in ("gradients", "rows", "weights", "worst", "excess") if key in row]
    figures += [f"{row['tokens_per_second']:.0f} tokens/s, peak {row['peak_gigabytes']:.1f} GB"] if "tokens_per_second" in row else []
    figures += [f"refused: {row['refused']}"] if "refused" in row else []
    figures += [", ".join(row["wrong"])] if row.get("wrong") else []
    problem = row.get("problem", "").strip().splitlines()
    where = f"{row['ranks']} ranks on one device" if row["shared"] else f"{row['ranks']} ranks"
    return f"{'ok  ' if row['ok'] else 'FAIL'} {where}: {row['check']}: " + "; ".join(figures + problem[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--ranks", type=int, help="processes; as many as GPUs where it is left out, on a CPU 2")
    parser.add_argument("--only", default="", metavar="PATTERN", help="run the checks whose names match it, such as '^collectives|shard'")
    parser.add_argument("--seconds", type=float, default=420.0, help="the ranks end after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows there, too")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: see --help for how to check the script without one")
    if given.serve is not None:
        serve(given.device, given.shared, given.only, given.serve, given.folder)
        return
    started = time.monotonic()
    devices = torch.cuda.device_count() if given.device == "cuda" else 2
    ranks = devices if given.ranks is None else given.ranks
    if given.device == "cuda" and ranks > devices:
        raise SystemExit(f"--ranks {ranks}: NCCL takes one rank a GPU, and {devices} are here")
    worlds = [(ranks, False)] + ([(2, True), (4, True)] if given.device == "cuda" and devices == 1 else [])
    rows = [row for count, shared in worlds for row in run(given.device, count, shared, given.only, started + given.seconds)]
    failed = sum(not row["ok"] for row in rows)
    print(f"# {len(rows) - failed} of {len(rows)} checks hold; {time.monotonic() - started:.0f} seconds", flush=True)
    if given.json:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        clean = [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]
        given.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": clean}, indent=1), encoding="utf-8")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
