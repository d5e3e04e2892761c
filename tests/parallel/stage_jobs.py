"""Jobs for the ranks that need the pipeline's stages and store."""

from __future__ import annotations

import json
import re
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from puna.models.generation import Engine
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.groups import Groups
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.mesh import Mesh
from puna.models.training.settings import ComputeSettings
from puna.models.training.state import save_state
from puna.models.training.trainer import Trainer
from puna.stages.align import distill, dpo, reinforcement, sample
from puna.stages.contract import External, execute, rank_jobs
from puna.stages.contract.declaration import REGISTRY
from puna.stages.evaluation import benchmark, evaluate
from puna.stages.executors import map_in_order
from puna.stages.pretrain import pretrain
from puna.stages.pretrain.pretrain import Watch
from puna.stages.training.phase import Acceptance, Phase
from puna.stages.training.token_rows import Packed, Reader
from puna.stages.verifiers.scoring import Child, Scorer, score_chunk, score_job
from puna.storage import Store

from .cases import network

STAGES = (sample, evaluate, benchmark, dpo, distill, reinforcement)  # these modules declare the stages


def tokens_read(members: Sequence[int], folder: str) -> dict[str, Any]:
    """Return a rank's view of tokens that all ranks write together, and the micro-batches of a step that it reads."""
    rng = np.random.default_rng(3)
    lengths = [rng.integers(2, 9, 2).tolist() for _ in range(4100)]
    rows = pa.table({
        "tokens": [rng.integers(0, 50, sum(row)).tolist() for row in lengths], "lengths": lengths,
        "documents": [[f"{number}a", f"{number}b"] for number in range(len(lengths))],
    })  # fmt: skip
    with mock.patch("puna.models.training.parallel.mesh.together", True):
        own = Packed.read(rows, Path(folder, "tokens.bin"))
    alone, made = Packed.read(rows), list[int]()
    reader = Reader(own, np.zeros(len(own.owners), dtype=bool), 16, 0, begin=0)
    with mock.patch.object(Reader, "_targets", lambda self, spans: made.append(len(spans))):
        layout = Layout(data=len(members))
        for part, _ in Parallel(network("plain"), Mesh(layout, members)).deal(reader.later(1, 24)):
            part.make()
    return {"same": all(np.array_equal(getattr(own, n), getattr(alone, n)) for n in ("tokens", "starts", "rows", "owners")),
            "largest": [own.largest, alone.largest, int(alone.tokens.max())], "made": len(made), "of": len(reader.later(1, 24))}  # fmt: skip


def stage(members: Sequence[int], store: str, name: str, config: dict[str, Any], inputs: dict[str, list[Any]]) -> str | None:
    """Run a stage in all ranks as `puna run` does; return the key of its artifact on rank 0."""
    everyone, opened, declared = Mesh(Layout(data=len(members)), members), Store.open(store), REGISTRY[name]
    if everyone.index:
        rank_jobs.do(json.loads(everyone.gather_texts("-")[0]))
        return None
    items = {key: [External.of(one) if isinstance(one, dict) else opened.find(*one) for one in some] for key, some in inputs.items()}
    given: dict[str, Any] = {spec.name: items[spec.name] if spec.many else items[spec.name][0] for spec in declared.inputs if spec.name in items}
    with mock.patch("puna.stages.executors.ranks._say", everyone.gather_texts):
        return execute(declared, declared.config(**config), given, opened).key


def stage_reads(members: Sequence[int], **given: Any) -> int:
    """Return the bytes of mapped weights that a rank has touched when a stage first releases or gathers a whole model, or begins a step."""

    def first(*_: Any) -> None:
        maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
        raise InterruptedError(sum(1024 * int(re.search(r"^Rss: *(\d+)", one, re.MULTILINE)[1]) for one in maps if ".safetensors" in one))  # type: ignore[index]

    with mock.patch.object(Trainer, "step", first), mock.patch.multiple(Parallel, publish=first, release=first):
        try:
            stage(members, **given)
        except InterruptedError as looked:
            return int(looked.args[0])
    raise AssertionError("the stage ended without a step")


class Live(TorchDispatchMode):
    """A count of the bytes in memory of all tensors that operators return. Tensors in mapped files do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):  # it dispatches its local tensor's operators, which are counted
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and not one.is_meta and not isinstance(one, DTensor):
                storage = one.untyped_storage()
                if storage._cdata not in self.sizes:
                    weakref.finalize(storage, self.set, storage._cdata, None)
                    self.set(storage._cdata, 0 if "from_file" in str(func) else storage.nbytes())
        return out

    def set(self, storage: int, size: int | None) -> None:
        self.now += (size or 0) - self.sizes.pop(storage, 0)
        if size is not None:
            self.sizes[storage] = size
        self.most = max(self.most, self.now)


def stage_memory(members: Sequence[int], bucket: int, **given: Any) -> int:
    """Return the most bytes that a rank's tensors take in a stage, outside of training steps. `bucket`: elements of an exchange."""
    live = Live()

    def step(self: Trainer, *asked: Any, real: Callable[..., Any] = Trainer.step) -> Any:
        with _disable_current_modes():
            return real(self, *asked)

    def resize(storage: Any, size: int, real: Callable[..., Any] = torch.UntypedStorage.resize_) -> Any:
        out = real(storage, size)
        if live.sizes.get(storage._cdata) is not None:
            live.set(storage._cdata, storage.nbytes())
        return out

    changes = mock.patch.object(Trainer, "step", step), mock.patch.object(torch.UntypedStorage, "resize_", resize)
    few = mock.patch("puna.models.training.parallel.mesh.BUCKET", bucket), mock.patch("puna.models.accounting.matrix_rate", lambda: 1.0)
    with changes[0], changes[1], few[0], few[1], live:
        stage(members, **given)
    return live.most


def verified(members: Sequence[int], **given: Any) -> int:
    """Return the number of answers that a rank's verifiers score in a stage."""
    count, real = 0, Scorer.scores

    def scores(self: Scorer, answers: Sequence[Any]) -> list[Any]:
        nonlocal count
        count += len(answers)
        return real(self, answers)

    with mock.patch.object(Scorer, "scores", scores):
        stage(members, **given)
    return count


def learned(members: Sequence[int], **given: Any) -> list[list[int]]:
    """Return the tokens that a rank is to learn in the first step of a distillation in which each rank samples other answers."""

    def generate(self: Engine, *asked: Any, real: Callable[..., Any] = Engine.generate) -> Any:
        return [[one._replace(tokens=[(token + dist.get_rank()) % 50 for token in one.tokens]) for one in some] for some in real(self, *asked)]

    def fit(_model: Any, _objective: Any, batches: Callable[[int], Any], *_: Any, **more: Any) -> None:
        raise InterruptedError([batch.tokens.tolist() for batch in batches(1)])

    with mock.patch.object(distill, "fit", fit), mock.patch.object(Engine, "generate", generate):
        try:
            stage(members, **given)
        except InterruptedError as looked:
            return looked.args[0]  # type: ignore[no-any-return]
    raise AssertionError("the stage ended without a step")


def decided(members: Sequence[int], folder: str) -> dict[str, Any]:
    """Return what a rank decides about a phase and about averaged weights, by a loss and an accuracy that differ from rank to rank."""
    rank, network_, everyone = dist.get_rank(), network("plain", seed=1), Mesh(Layout(data=len(members)), members)
    if not rank:
        save_state(Path(folder), 1, {f"weight.{name}": torch.zeros_like(p) for name, p in network_.named_parameters()}, {})
    everyone.wait()
    watch = Watch.__new__(Watch)
    watch.pieces, watch.vocabulary, watch.depths, watch.config = [], None, {}, SimpleNamespace(needle=None, compute=ComputeSettings())
    watch.run = SimpleNamespace(metric=lambda *_: None, figure=lambda *_: None, seed=lambda *_: 0)
    watch.after, watch.before, bounds = 1.0, 1.5, Acceptance(needle=0.5, attempts=2)
    accuracy = {0.5: SimpleNamespace(value=float(rank > 0))}
    parts = {"by_depth": lambda *_: accuracy, "noise_of": lambda *_: None, "heat": lambda *_: None}
    with mock.patch("puna.models.training.parallel.mesh.together", True), mock.patch.multiple(pretrain, **parts):
        accepted = watch.accepts(network_, Phase(), bounds, 1, 16, 1.0)
        with mock.patch.object(Watch, "loss", lambda *_: 2.0 - (rank > 0)):
            watch.try_average(network_, Path(folder), "initial")
    return {"accepted": accepted, "kept": sum(float(p.abs().sum()) for p in network_.parameters()) > 0}


def busy(members: Sequence[int]) -> str:
    """Return what the training rank receives from a rank whose scoring takes longer than the timeout: in a worker, then in this process."""
    groups = Groups(generate=1, members=members)
    if not groups.trains:
        with ThreadPoolExecutor(1) as pool:
            list(map_in_order(pool, time.sleep, [1.2], ()))
        with mock.patch("puna.stages.verifiers.scoring.child") as child:
            child.return_value = slow = Child(score_job)
            slow.ask = lambda job, seconds: time.sleep(1.2) or "slow"  # type: ignore[method-assign]
            score_chunk([{"verifier": {"name": "exact"}, "question": ("q", "t", "?", None, ()), "answer": ""}], 0.2)
        groups.give("scored")
        return ""
    with mock.patch("puna.models.training.parallel.mesh.TIMEOUT", timedelta(seconds=0.6)):
        return groups.take(lambda: None)


JOBS: dict[str, Callable[..., Any]] = {"tokens_read": tokens_read, "stage": stage, "stage_reads": stage_reads, "stage_memory": stage_memory, "verified": verified, "learned": learned, "decided": decided, "busy": busy}
