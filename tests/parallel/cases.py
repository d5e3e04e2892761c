"""Jobs for the ranks: a step of each objective under a layout, compared with the same step in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from puna.kernels.adamw import gradient_norm
from puna.kernels.exact import exact_passes
from puna.models import progress
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.formats.quantized import to_nf4
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.sampling import RowError
from puna.models.generation.step import Cache
from puna.models.layers import Block
from puna.models.serving import engine_of
from puna.models.training import objectives as o
from puna.models.training.loop import fingerprint, train, weights_digest
from puna.models.training.objectives.base import Targets
from puna.models.training.parallel import boxes, vocabulary
from puna.models.training.parallel.base import Parallel, Piece, whole, write_weights
from puna.models.training.parallel.cut_model import without_values
from puna.models.training.parallel.groups import Groups
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.mesh import Mesh, store
from puna.models.training.parallel.parallel import parallel, part_of
from puna.models.training.parallel.pipeline import Pipelined
from puna.models.training.ppo import train_grpo, train_ppo
from puna.models.training.rl_settings import GrpoSettings, PpoSettings
from puna.models.training.rollouts import Rollouts, Sampled, Source
from puna.models.training.settings import ComputeSettings, LoraSettings, TrainConfig
from puna.models.training.state import cached_json, load_state, newest_first
from puna.models.training.trainer import TIMED, Trainer
from puna.models.transformer import Transformer

from .features import ADAPTERS, MODELS, PLAIN, WITH_SCALARS, micro_batches, objective_of
from .features import MOE as MOE

DEVICE = "cpu"
"""Device of the models; the script of GPU measurements sets it."""
OBJECTIVES = ("pretrain", "sft", "dpo", "reward", "distill", "ppo", "value", "grpo")


def network(variant: str, objective: str = "pretrain", seed: int = 0, **shape: int) -> Transformer:
    return copy.deepcopy(drawn_once(variant, "scalar" if objective in WITH_SCALARS else "lm", seed, **shape))


@functools.cache
def drawn_once(variant: str, head: Any, seed: int, **shape: int) -> Transformer:
    """Return a model to copy. Only the arguments may determine it: a job that patched `ADAPTERS` once left dropout in later jobs' models."""
    model = Transformer(ModelConfig(**PLAIN | MODELS[variant] | shape), head, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # gains are moved from one and biases from zero, which would hide errors
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.3, generator=generator))
    if variant in ADAPTERS:
        from puna.stages.training.lora import inject

        inject(to_nf4(model) if variant == "nf4" else model, LoraSettings(rank=4, **ADAPTERS[variant]), 0)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if ".lora_B." in name:  # a matrix of zeros hides the other one's gradient
                    parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    return model.to(DEVICE)


def scales_of(model: Transformer, variant: str) -> dict[str, float]:
    """Return the factors of a variant's learning rates."""
    if variant not in ADAPTERS:
        return {}
    from puna.stages.training.lora import learning_rate_scales  # needs packages that a machine with a GPU may lack

    return learning_rate_scales(model, LoraSettings(**ADAPTERS[variant]))


def teacher(layout: Layout, mesh: Mesh, variant: str) -> Transformer:
    whole = network("moe" if "moe" in MODELS[variant] else "plain", seed=9)
    return whole if layout.pipeline > 1 else part_of(whole, layout, mesh).model  # type: ignore[return-value]


def loss_of(objective: str, layout: Layout, mesh: Mesh, variant: str = "plain") -> Any:
    return objective_of(objective, lambda: teacher(layout, mesh, variant))


OPTIMIZERS: dict[str, dict[str, Any]] = {"adamw": {}, "muon": {"name": "muon"}, "galore": {"name": "galore", "parameters": {"rank": 8}}}


def train_config(layout: Layout, optimizer: str = "adamw", **compute: Any) -> TrainConfig:
    return TrainConfig(
        steps=4,
        schedule={"learning_rate": 0.01, "warmup_steps": 0, "shape": "constant"},
        optimizer={**OPTIMIZERS[optimizer], "epsilon": 1e-3, "weight_decay": 0.1, "embedding_scale": 0.7},
        compute={"layout": layout, **compute},
    )


def steps(objective: str, variant: str, layout: Layout, mesh: Mesh, layers: int, micro: int, **compute: Any) -> dict[str, Any]:
    """Return the gradients of a step, the numbers of its log row, and the weights after two steps."""
    model = network(variant, objective, num_hidden_layers=layers)
    config, scales = train_config(layout, **compute), scales_of(model, variant)
    with Trainer(model, loss_of(objective, layout, mesh, variant), config, scales, mesh) as trainer:
        held, found = trainer.parallel, list[dict[str, Tensor]]()

        def add_gradients(weights: dict[str, Tensor], add: Callable[[Any], None] = held.add_gradients) -> None:
            add(weights)
            own = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
            trained = {name: held.pieces[name] for name, p in model.named_parameters() if p.requires_grad}
            found.append({name: whole.clone().cpu() for name, whole in held.gather(trained, own)} if not found else {})

        rows = []
        with mock.patch.object(held, "add_gradients", add_gradients):
            for step, count in ((1, micro), (2, 1)):
                if step == 2:
                    with whole(model):  # as before answers are sampled
                        pass
                rows.append(trainer.step(step, micro_batches(objective, step, count), seed=1))
    with whole(model):
        return {
            "gradients": found[0],
            "rows": [{name: value for name, value in row.items() if name not in TIMED} for row in rows],
            "weights": {name: p.detach().clone().cpu() for name, p in model.named_parameters() if p.is_floating_point()},
        }


@functools.cache
def one_process(objective: str, variant: str, size: tuple[int, int], compute: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return steps(objective, variant, Layout(), Mesh(Layout()), *size, **dict(compute))


def warm_up() -> None:
    """Run trainings whose kernels every rank would otherwise compile or load by itself; their results stay as references."""
    for objective, variant, compute in (
        ("language and kto", "plain", {}), ("sft", "plain", {"precision": "bf16"}), ("outputs", "capped", {"optimizer": "galore"}),
        ("scalar", "rich", {"optimizer": "muon"}), ("sft", "rich_dora", {}), ("sft", "rich_lora", {}), ("sft", "rich_moe", {}),
        ("sft", "rich_mla", {"optimizer": "muon"}),
    ):  # fmt: skip
        one_process(objective, variant, (2, 3), tuple(compute.items()))


def of_one(objective: str, variant: str, size: Any, precision: str = "fp32", **compute: Any) -> list[dict[str, Any]]:
    """Return one process's result; in bf16, also its result in fp32. A layer that is computed twice has the same bits."""
    compute.pop("activation_checkpointing", None)
    every = [compute] if precision == "fp32" else [compute | {"precision": precision}, compute]
    return [one_process(objective, variant, size, tuple(sorted(some.items()))) for some in every]


def size_for(layout: dict[str, int]) -> tuple[int, int]:
    """Return the numbers of layers and micro-batches of a comparison; a pipeline has one micro-batch more than it has ranks."""
    return (4, layout["pipeline"] + 1) if "pipeline" in layout else (2, 3)


def is_first(members: Sequence[int]) -> bool:
    """True on the rank that computes the one-process result for all ranks."""
    return dist.get_rank() == members[0]


def difference(some: dict[str, Tensor], others: dict[str, Tensor], floor: float) -> float:
    """Return the largest difference of a tensor, relative to its own largest number or to `floor` times that of all tensors."""
    assert some.keys() == others.keys()
    top = max(float(x.abs().max()) for x in others.values())
    return max(float((some[n] - others[n]).abs().max()) / max(float(others[n].abs().max()), floor * top) for n in others)


def excess(some: dict[str, Tensor], others: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Return the error of `some` over that of `others`: of all tensors together, and the largest of a single tensor. An error is the norm
    of the difference from `exact`; a single tensor's error in `others` counts as at least their mean, relative to the tensors' norms."""

    def norm(of: Callable[[str], Tensor]) -> float:
        return float(torch.stack([of(name).norm() for name in exact]).norm())

    errors = [[float((x[n] - exact[n]).norm() / exact[n].norm().clamp(min=1e-30)) for x in (some, others)] for n in exact]
    mean = sum(error for _, error in errors) / len(errors)
    single = max(own / max(error, mean) for own, error in errors)
    return norm(lambda name: some[name] - exact[name]) / norm(lambda name: others[name] - exact[name]), single


def compare(
    members: Sequence[int], layout: dict[str, int], objective: str, variant: str = "plain", size: Sequence[int] = (), **compute: Any
) -> dict[str, float]:
    """Return the differences of gradients, log numbers and weights under a layout from those of one process. In bf16, also return how much
    larger than one process's their rounding errors are (`excess`); and how many other results the ranks have than the first (`unequal`).
    `size`: layers, micro-batches."""
    chosen = Layout(**layout)
    size = tuple(size or size_for(layout))  # type: ignore[assignment]
    mesh = Mesh(chosen, members)
    own = steps(objective, variant, chosen, mesh, *size, **compute)
    unequal = len(set(mesh.gather_texts(digest_of(own)))) - 1
    result = differences(own, of_one(objective, variant, size, **compute)) if is_first(members) else {}
    return json.loads(mesh.gather_texts(json.dumps(result))[0]) | {"unequal": unequal}  # type: ignore[no-any-return]


def digest_of(result: dict[str, Any]) -> str:
    """Return a digest of a training's gradients, log rows and weights."""
    digest = hashlib.sha256(repr(result["rows"]).encode())
    for name, tensor in sorted([*result["gradients"].items(), *result["weights"].items()], key=lambda item: item[0]):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def differences(own: dict[str, Any], every: list[dict[str, Any]]) -> dict[str, float]:
    """Return the differences of a training from that of one process; `every`: its result, and in bf16 its result in fp32, too."""
    one, exact = every[0], every[-1]
    assert all(a.keys() == b.keys() for a, b in zip(own["rows"], one["rows"], strict=True))
    # In bf16, a metric that counts, such as an accuracy, may change by one.
    compared = [key for key in one["rows"][0] if exact is one or key in ("loss", "gradient_norm")]
    numbers = [abs(a[k] - b[k]) / max(abs(b[k]), 0.1) for a, b in zip(own["rows"], one["rows"], strict=True) for k in compared]
    result = {name: difference(own[name], one[name], 1e-2) for name in ("gradients", "weights")} | {"rows": max(numbers)}
    if exact is not one:
        both = [excess(own[name], one[name], exact[name]) for name in ("gradients", "weights")]
        result["excess"], result["excess of a weight"] = (max(column) for column in zip(*both, strict=True))
    return result


def trained(
    members: Sequence[int], layout: dict[str, int], steps: int, folder: str | None = None, of: int = 4, variant: str = "deep",
    at: Callable[[str, int], None] = lambda place, number: None, optimizer: str = "adamw", precision: str = "fp32",
) -> dict[str, Any]:  # fmt: skip
    """Train up to step `steps` of `of` with the state in a folder; return the log's losses and the digest of the whole weights. `at` is
    called after each step."""
    chosen = Layout(**layout)
    model = network(variant)
    config = TrainConfig(
        steps=of,
        schedule={"learning_rate": 0.01, "warmup_steps": 0, "ema": 0.5},
        optimizer={**OPTIMIZERS[optimizer], "epsilon": 1e-3},
        compute={"layout": chosen, "precision": precision},
    )

    def on_step(row: dict[str, float]) -> None:
        at("step", int(row["step"]))
        if row["step"] == steps < of:
            raise KeyboardInterrupt

    log: list[Any] = []
    with contextlib.suppress(KeyboardInterrupt):
        log = train(
            model, o.LanguageModeling(), lambda step: micro_batches("pretrain", step), config, 1, checkpoint_dir=folder and Path(folder),
            checkpoint_every=1, on_step=on_step, mesh=Mesh(chosen, members),
        )  # fmt: skip
    return {"losses": [row["loss"] for row in log], "digest": weights_digest(model)}


def looped(members: Sequence[int], layout: dict[str, int], folder: str, variant: str) -> dict[str, Any]:
    """Train with the moments of an earlier training, moments in files, skipped spikes, and an average of the last steps. Return the log's
    losses, the skipped steps, and a sum and a norm of each whole weight."""
    chosen, model = Layout(**layout), network(variant)
    config = TrainConfig(
        steps=12,
        schedule={"learning_rate": 0.01, "warmup_steps": 0, "anneal_steps": 3, "average": 2},
        optimizer={"name": "muon", "epsilon": 1e-3, "state_in": "file", "spike_window": 8, "spike_limit": 0.01},
        compute={"layout": chosen},
    )

    def batches(step: int) -> list[Targets]:
        return [Targets.from_documents([[7] * 12])] if step == 10 else micro_batches("pretrain", step, 2)

    with mock.patch("puna.models.training.optimizers.base.SMALL", 64):  # pieces of small models, too
        log = train(model, o.LanguageModeling(), batches, config, 1, state=Path(folder), mesh=Mesh(chosen, members))
    with whole(model):
        sums = {name: [p.double().sum().item(), p.double().norm().item()] for name, p in model.named_parameters()}
    return {"losses": [row["loss"] for row in log], "skipped": [row["step"] for row in log if row["skipped"]], "sums": sums}


def refused_state(members: Sequence[int], **given: Any) -> str:
    """Return the error with which a rank refuses a checkpoint."""
    try:
        restored(members, **given)
    except ValueError as error:
        return str(error)
    return ""


def restored(
    members: Sequence[int], layout: dict[str, int], folder: str, variant: str = "deep", adopt: bool = False, optimizer: str = "adamw"
) -> dict[str, Any]:
    """Return a digest of the whole weights, moments and averages of a checkpoint as this layout reads them."""
    chosen = Layout(**layout)
    trainer = Trainer(network(variant), o.LanguageModeling(), train_config(chosen, optimizer), mesh=Mesh(chosen, members))
    averages = {f"average.{name}": weight for name, weight in trainer.weights.items()}
    state = trainer.parallel.load_state(Path(folder), trainer.tensors(), averages)
    assert state is not None
    tensors = {name: tensor for name, tensor in state[0].items() if not name.startswith("average.")}
    if adopt:  # moments of whole weights, as one phase passes them to the next
        trainer.restore({name: torch.zeros_like(tensor) if name.startswith("state.") else tensor for name, tensor in tensors.items()})
        whole = load_state(Path(folder))
        assert whole is not None
        trainer.adopt({name: tensor for name, tensor in whole[0].items() if name.startswith("state.")})
    else:
        trainer.restore(tensors)
    tensors = trainer.tensors() | {name: tensor for name, tensor in state[0].items() if name.startswith("average.")}
    digest = hashlib.sha256()
    pieces = {name: trainer.parallel.piece_of(name, tensor) for name, tensor in tensors.items()}
    shapes = [json.loads(text) for text in trainer.parallel.mesh.gather_texts(json.dumps({name: p.shape for name, p in pieces.items()}))]
    every = {name: tuple(shape) for some in shapes for name, shape in sorted(some.items())}
    elsewhere = {name: Piece.of(torch.empty(shape, device="meta"), cut=frozenset(["elsewhere"])) for name, shape in every.items()}
    for name, whole in trainer.parallel.gather(dict(sorted((elsewhere | pieces).items())), tensors):
        digest.update(f"{name} {every[name]}".encode() + whole.contiguous().numpy().tobytes())
    assert all(float(tensor) == state[1]["step"] for name, tensor in tensors.items() if name.startswith("state.step."))
    return {"digest": digest.hexdigest()}


def printed(members: Sequence[int], layout: dict[str, int], precision: Any) -> str:
    """Return the fingerprint of a reference model, frozen in this precision."""
    chosen = Layout(**layout)
    held = part_of(network("deep"), chosen, Mesh(chosen, members), precision=precision)
    return fingerprint(held, held.parameters | held.frozen)


def grown(members: Sequence[int], layout: dict[str, int], lacking: int) -> list[str]:
    """Return the names of the moments that a rank did not adopt from whole ones without rows for the last `lacking` tokens."""
    chosen, generator = Layout(**layout), torch.Generator().manual_seed(3)
    one = Trainer(network("deep"), o.LanguageModeling(), train_config(Layout()))
    moments = {name: torch.rand(t.shape, generator=generator) for name, t in one.tensors().items() if name.startswith("state.")}
    for name, moment in moments.items():
        if moment.dim() and name.endswith(("embed_tokens.weight", "lm_head.weight")):
            moment[-lacking:] = 0.0
    trainer = Trainer(network("deep"), o.LanguageModeling(), train_config(chosen), mesh=Mesh(chosen, members))
    trainer.adopt({n: m[:-lacking] if m.dim() and n.endswith(("embed_tokens.weight", "lm_head.weight")) else m for n, m in moments.items()})
    own = {name: tensor for name, tensor in trainer.tensors().items() if name.startswith("state.")}
    return [n for n, tensor in own.items() if not torch.equal(tensor, moments[n][trainer.parallel.piece_of(n, tensor).slices()])]


def whole_bytes(members: Sequence[int], layout: dict[str, int]) -> list[float]:
    """Return the bytes of the whole model's weights over those of fp32: before a trainer holds it, before the first step, and after it."""
    chosen, whole, shares = Layout(**layout), network("deep"), list[float]()

    def look() -> None:
        shares.append(sum(p.untyped_storage().nbytes() for p in whole.parameters()) / sum(4 * p.numel() for p in whole.parameters()))

    look()
    with Trainer(whole, o.LanguageModeling(), train_config(chosen), mesh=Mesh(chosen, members)) as trainer:
        look()
        trainer.step(1, micro_batches("pretrain", 1), 1)
        look()
    look()
    return shares


def passes(members: Sequence[int], layout: dict[str, int], layers: int, micro: int, **compute: Any) -> list[int]:
    """Return the largest number of a pipeline's passes whose result a rank kept, and how often a step computed a layer."""
    alive, counts, computed = list[weakref.ref[Tensor]](), list[int](), itertools.count()

    def forward(run: Callable[..., Any], *given: Any) -> Any:
        passed = run(*given)
        alive.append(weakref.ref(passed[1]))
        counts.append(sum(one() is not None for one in alive))
        return passed

    def block(run: Callable[..., Any], *given: Any) -> Any:
        next(computed)
        return run(*given)

    mesh = Mesh(Layout(**layout), members)
    trainer = Trainer(network("plain", num_hidden_layers=layers), o.LanguageModeling(), train_config(mesh.layout, **compute), mesh=mesh)
    with _wrapped(Pipelined, "_forward", forward), _wrapped(Block, "forward", block), trainer:
        trainer.step(1, micro_batches("pretrain", 1, micro), seed=1)
    return [max(counts), next(computed)]


def unwritten(members: Sequence[int], folder: str) -> dict[str, Any]:
    """Return the error of each rank of a training run in which one rank cannot write, and the steps of the complete checkpoints."""
    with mock.patch("puna.models.training.parallel.boxes.flush", side_effect=SafetensorError("no space left")) if dist.get_rank() else contextlib.nullcontext():
        try:
            trained(members, {"shard": 2}, 4, folder)
        except (OSError, SafetensorError) as error:
            Mesh(Layout(shard=2), members).wait()
            return {"error": str(error), "states": [path.name for path in Path(folder).glob("step-*")]}
    return {}


def unsaved(members: Sequence[int], layout: dict[str, int], folder: str, after: int) -> dict[str, Any]:
    """Return the error of each rank if rank 0's disk is full after so many weights; and the files that are left."""
    chosen, written = Layout(**layout), itertools.count()
    mesh, model = Mesh(chosen, members), network("deep")
    parallel(model, chosen, mesh).release()

    def write(weights: Iterable[tuple[str, Tensor]]) -> None:
        save(model, folder, weights=((name, weight) for name, weight in weights if allowed()))

    def allowed() -> bool:
        if next(written) == after:
            raise OSError("no space left")
        return True

    assert model.held is not None
    with mock.patch.object(Path, "mkdir", side_effect=OSError("no space left")) if after < 0 else contextlib.nullcontext():
        try:
            write_weights(model.held, write)
        except OSError as error:
            mesh.wait()  # the exchanges go on
            return {"error": str(error), "files": sorted(path.name for path in Path(folder).iterdir())}
    return {}


def in_small_chunks(members: Sequence[int], chunk_bytes: int, **given: Any) -> dict[str, float]:
    """Return `compare` with an output layer that computes few rows at a time."""
    if is_first(members):
        one_process(given["objective"], "plain", (2, 3), ())  # other tests compare with it, too
    with mock.patch("puna.kernels.output_layer.CHUNK_BYTES", chunk_bytes):
        return compare(members, **given)


def read_ratio(members: Sequence[int], layout: dict[str, int], folder: str) -> float:
    """Return the bytes that a rank reads from disk to load a state, over those of its own pieces; the files are not cached."""
    chosen = Layout(**layout)
    shape = ModelConfig(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
    mesh, model = Mesh(chosen, members), Transformer(shape, "lm", seed=0)
    trainer = Trainer(model, o.LanguageModeling(), train_config(chosen), mesh=mesh)
    own = trainer.tensors()
    trainer.parallel.save_state(Path(folder), 1, own, {})
    mesh.wait()
    for file in Path(folder).glob("step-*/*.safetensors"):
        with file.open("rb") as content:
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mesh.wait()
    before = disk_bytes()
    state = trainer.parallel.load_state(Path(folder), {name: torch.zeros_like(tensor) for name, tensor in own.items()}, {})
    read = disk_bytes() - before
    assert state is not None and all(torch.equal(state[0][name], tensor) for name, tensor in own.items())
    return read / sum(tensor.nbytes for tensor in own.values())


def _wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Replace a function by `change`, which gets the function and its arguments."""
    whole = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *given: change(whole, *given))


def _wipe(backward: Callable[..., None], held: Pipelined, *given: Any) -> None:
    for parameter in held.parameters.values():
        parameter.grad = None
    backward(held, *given)


def _enlarge_experts(add: Callable[..., None], held: Parallel, weights: dict[str, Tensor]) -> None:
    add(held, weights)
    for name, weight in weights.items():
        if "expert" in held.pieces[name].cut and weight.grad is not None:
            weight.grad *= held.mesh.size("expert")


FAULTS: dict[str, Callable[[], Any]] = {
    "the loss is averaged by rank": lambda: mock.patch.object(
        Parallel, "totals", lambda held, values: {name: value * held.mesh.layout.readers for name, value in values.items()}
    ),
    "the logarithm of the ranks is in the loss": lambda: _wrapped(
        vocabulary, "cross_entropy", lambda loss, hidden, weight, targets, weights, share: loss(hidden, weight, targets, weights, share)
        + weights.sum() * math.log(dist.get_world_size(share.group))
    ),
    "tokens are counted by every tensor rank": lambda: _wrapped(
        Parallel, "totals", lambda totals, held, values: {n: v * held.mesh.size("tensor") for n, v in totals(held, values).items()}
    ),
    "norms see one rank's rows": lambda: _wrapped(
        Parallel, "add_gradients", lambda add, held, weights: add(held, {n: w for n, w in weights.items() if "norm" not in n})
    ),
    "gradients are summed in bf16": lambda: _wrapped(
        Mesh, "add", lambda add, mesh, values, axis: values.copy_(add(mesh, values.bfloat16() if values.dtype == torch.float32 else values, axis))
    ),
    "FSDP2 sums gradients in bf16": lambda: mock.patch(
        "puna.models.training.parallel.shard.MixedPrecisionPolicy", lambda dtype, _, **given: MixedPrecisionPolicy(dtype, dtype, **given)
    ),
    "the norm of gradients is one rank's": lambda: mock.patch.object(
        Parallel, "norm", lambda held, weights: gradient_norm([w.grad for w in weights.values() if w.grad is not None])
    ),
    "experts' gradients count by rank": lambda: _wrapped(Parallel, "add_gradients", _enlarge_experts),
    "a stage forgets earlier micro-batches": lambda: _wrapped(Pipelined, "_backward", _wipe),
}
"""Faults that other trainers had in combinations of layouts."""


def in_small_buckets(members: Sequence[int], elements: int, **given: Any) -> dict[str, float]:
    """Return `compare` with small buckets of tensors in exchanges."""
    with mock.patch("puna.models.training.parallel.mesh.BUCKET", elements):
        return compare(members, **given)


def faulty(members: Sequence[int], fault: str, **given: Any) -> dict[str, float]:
    """Return `compare` of a run with the fault and one process without it."""
    if is_first(members):
        of_one(given["objective"], given.get("variant", "plain"), size_for(given["layout"]), given.get("precision", "fp32"))
    with FAULTS[fault]():
        return compare(members, **given)


def weights_read(members: Sequence[int], layout: dict[str, int], folder: str, **shape: int) -> dict[str, float]:
    """Return the bytes that a rank reads from disk, and the memory that it takes, to load its pieces of a checkpoint's weights, over the
    bytes of these pieces. One rank at a time, with an uncached file; afterwards all have one process's fingerprint."""
    chosen, file = Layout(**layout), Path(folder, "model.safetensors")
    mesh, device = Mesh(chosen, members), torch.device("cpu")
    if mesh.index == 0:
        save(network("plain", **shape), folder)
    for rank in range(chosen.processes):
        mesh.wait()
        if rank == mesh.index:
            with file.open("rb") as content:
                os.fsync(content.fileno())
                os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            before, held = disk_bytes(), private_bytes()
            mine = parallel(load(folder, dtype=None), chosen, mesh, device)
            read, taken = disk_bytes() - before, private_bytes() - held
            for weight in mine.whole.parameters():
                weight.data = weight.data[:0].clone()  # mapped pages would stay in the cache
    mark = fingerprint(mine, mine.parameters)
    whole = load(folder, dtype=None)
    assert mark == fingerprint(parallel(whole, Layout(), Mesh(Layout())), dict(whole.named_parameters()))
    share = sum(tensor.nbytes for tensor in mine.parameters.values())
    return {"read": read / share, "taken": taken / share}


def memory_taken(members: Sequence[int], layout: dict[str, int], folder: str, micro: int, tokens: int, **shape: int) -> dict[str, int]:
    """Return a rank's peak memory in two steps of `micro` micro-batches, and its memory besides the whole weights at that time."""
    chosen, device, ended = Layout(**layout), torch.device("cpu"), threading.Event()
    mesh, levels = Mesh(chosen, members), [private_bytes()]
    if mesh.index == 0:
        save(network("plain", **shape), folder)
    mesh.wait()
    gc.collect()
    before = private_bytes()
    rng = np.random.default_rng(0)
    parts = [Targets.from_documents([rng.integers(0, shape["vocab_size"], tokens).tolist()]) for _ in range(micro)]
    with Trainer(load(folder, dtype=None), o.LanguageModeling(), train_config(chosen), mesh=mesh, device=device) as trainer:

        def watch() -> None:
            while not ended.wait(0.002):
                levels.append(private_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        for step in (1, 2):
            trainer.step(step, parts, 1)
        ended.set()
        watcher.join()
        with whole(trainer.parallel.whole):
            return {"step": max(levels) - before, "between": private_bytes() - before}


def private_bytes() -> int:
    """Return the anonymous memory of this process, which no file backs."""
    return 1024 * int(dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())["RssAnon"].split()[0])


def disk_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def refusal(members: Sequence[int], **given: Any) -> str:
    """Return the message with which a layout is refused."""
    try:
        compare(members, **given)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def seconds(members: Sequence[int], layout: dict[str, int]) -> float:
    """Return the shortest time of a step of 8 micro-batches of 512 tokens, after a warm-up step."""
    chosen = Layout(**layout)
    shape = ModelConfig(vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3)
    model = Transformer(shape, "lm", seed=0)
    rng = np.random.default_rng(0)
    micro = [Targets.from_documents([rng.integers(0, 4096, 256).tolist() for _ in range(2)]) for _ in range(8)]
    with Trainer(model, o.LanguageModeling(), train_config(chosen), mesh=Mesh(chosen, members)) as trainer:
        return min([trainer.step(1 + step % 4, micro, 1)["seconds"] for step in range(6)][1:])


def answer_seconds(members: Sequence[int], layout: dict[str, int], rows: int, tokens: int = 32) -> list[float]:
    """Return the shortest of three wall times, and of this rank's CPU times, for `rows` answers, after a warm-up. Prompts of 16 tokens are
    divided over the groups, and answers have no stop token."""
    chosen = Layout(**layout)
    shape = ModelConfig(vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4)
    mesh, model = Mesh(chosen, members), Transformer(shape, "lm", seed=0)
    held, taken = parallel(model, chosen, mesh), list[tuple[float, float]]()
    engine = engine_of(held.model, None, held=held, exact=True)
    asked = [np.random.default_rng([1, i]).integers(0, 8192, 16).tolist() for i in range(rows)]

    def drawn(own: list[list[int]]) -> list[int]:
        return [len(answer.tokens) for (answer,) in engine.generate(own, SamplingParams(max_tokens=tokens, stop=()))]

    for _ in range(4):
        mesh.wait()
        started = time.perf_counter(), time.process_time()
        assert mesh.dealt(asked, drawn, tuple) == [tokens] * rows
        taken.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    return [min(column) for column in zip(*taken[1:], strict=True)]


PROMPTS = [np.random.default_rng([7, i]).integers(0, 37, 3 + i % 4).tolist() for i in range(5)] * 2


def sampled(members: Sequence[int], layout: dict[str, int], wavering: bool = False) -> dict[str, Any]:
    """Return the answers of a rollout, in which one prompt occurs twice, and the share of log-probs with the bits of exact passes.

    wavering: the scorer gives different scores on each rank, as a judge may.
    """

    def score(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Any]]) -> list[list[float]]:
        return [[value + wavering * dist.get_rank() for value in row] for row in by_length(prompts, completions)]

    policy = network("plain")
    settings = GrpoSettings(rollouts=1, prompts=10, answers=3, max_tokens=7, compute={"micro_batch_tokens": 64})
    groups = Groups(Layout(**layout), 0, members)
    held = groups.answering(parallel(policy, groups.mesh.layout, groups.mesh))
    reference = part_of(network("plain"), groups.mesh.layout, groups.mesh)
    first = Rollouts(held, reference, score if wavering else by_length, PROMPTS, [1], settings, 5, groups=groups).sample(1)
    return {
        "asked": first.asked, "answers": first.answers, "logprobs": first.logprobs.tolist(), "scores": first.scores.tolist(),
        "equal": equal_logprobs(policy, first), "reference": first.reference.tolist(),
    }  # fmt: skip


def equal_logprobs(policy: Transformer, answered: Sampled) -> float:
    """Return the share of log-probs whose bits equal those of exact passes."""
    targets = Targets.from_answers(answered.asked, answered.answers)
    with torch.no_grad(), exact_passes(torch.float32, torch.device("cpu")):
        own = policy.token_logprobs(targets.forest, targets.positions, targets.tokens)[0]
    return float((own == answered.logprobs).float().mean())


def gathered(held: Parallel) -> Transformer:
    """Return the whole model, gathered from the ranks' pieces."""
    if held.model is held.whole:
        return held.whole  # type: ignore[return-value]
    whole: Transformer = without_values(held.whole).to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in held.gather(held.pieces, {**held.parameters, **held.frozen}):
            whole.get_parameter(name).copy_(weight)
    return whole


def rolled(
    members: Sequence[int], layout: dict[str, int], generate: int = 0, max_stale: int = 0, critic: bool = False, variant: str = "plain",
    folder: str | None = None, at: Callable[[str, int], None] = lambda place, number: None, precision: str = "fp32", tensor: int = 1,
    epochs: int = 1, own: dict[str, Any] | None = None, wavering: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train by GRPO, or PPO, on three rollouts; return the log without times, the weights' digest, and for each rollout that this rank
    trained on the share of log-probs with the bits of a pass before its updates. `at` is called in each wave and after each rollout.
    own: settings. wavering: ranks differ in the reference's log-probs.
    """
    shape = {} if variant == "deep" else {"num_hidden_layers": 2}
    policy, equal, scored = network(variant, **shape), list[float](), itertools.count(1)
    settings = (PpoSettings if critic else GrpoSettings)(
        rollouts=3, prompts=6, answers=3, max_tokens=7, epochs=epochs, minibatches=2, generate=generate, max_stale=max_stale, generate_tensor=tensor,
        compute={"layout": layout, "micro_batch_tokens": 64, "precision": precision},
        schedule={"learning_rate": 0.01, "warmup_steps": 0}, optimizer={"epsilon": 1e-3}, **own or {},
    )  # fmt: skip

    def asked(self: Rollouts[Any], *given: Any, real: Callable[..., Tensor] = Rollouts._asked_logprobs) -> Tensor:
        return real(self, *given) * (1 + 0.1 * wavering * dist.get_rank())

    def score(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Any]]) -> list[list[float]]:
        at("wave", next(scored))
        return by_length(prompts, completions)

    def take(self: Source, real: Callable[[Source], Sampled] = Source.take) -> Sampled:
        answered = real(self)
        equal.append(equal_logprobs(gathered(self.held), answered))
        return answered

    groups = Groups(Layout(**layout), generate, members, tensor)
    reference = part_of(network(variant, **shape), groups.mesh.layout, groups.mesh)
    source: Rollouts[Any] = Rollouts(policy, reference, score, PROMPTS, [1], settings, 5, groups=groups)
    given: Any = {"checkpoint_dir": folder and Path(folder), "on_step": lambda row: at("rollout", int(row["step"]))}
    changes = mock.patch.multiple(Rollouts, _wave=lambda _: 3, _asked_logprobs=asked)  # two waves
    with mock.patch.object(Source, "take", take), changes:
        log = train_ppo(source, network(variant if variant in ("moe", "deep") else "plain", "value", **shape), **given) if critic else train_grpo(source, **given)
    log = [{name: value for name, value in row.items() if name not in TIMED} for row in log]
    return {"log": log, "digest": weights_digest(policy), "equal": equal, "trains": groups.trains}


ASKED = [*PROMPTS, list(range(1, 36)) * 2]
"""Prompts of a few tokens, each twice, and one of several pages."""


def answered(
    members: Sequence[int], layout: dict[str, int], variant: str = "plain", by_loops: bool = True, layers: int = 3,
    params: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the answers of a group of ranks that shares one model, and this rank's share of weights, keys and values; or the error, and
    how many answers follow it. by_loops: use compiled loops, not operators."""
    chosen, whole = Layout(**layout), network(variant, num_hidden_layers=layers)
    with mock.patch("puna.models.generation.dense.has_numba", lambda: by_loops):
        try:
            held = parallel(whole, chosen, Mesh(chosen, members))
            engine = engine_of(held.model, None, held=held, memory=1 << 17, step_tokens=24, exact=True)
        except ValueError as error:
            return {"error": str(error)}
        one = Engine(whole, memory=1 << 17)
        assert by_loops == (engine._loops[0] is not None)
        own = {"n": 3, "max_tokens": 9, "stop": (1,), "seed": 3}
        more = dict(params or {}) | ({"logit_bias": dict(params["logit_bias"])} if params and "logit_bias" in params else {})
        try:
            rows = engine.generate(ASKED, SamplingParams(**own | more))
        except RowError as error:
            return {"error": str(error), "asked": error.asked, "later": len(engine.generate(ASKED[:1], SamplingParams(**own))[0])}
    return {
        "answers": [[(c.tokens, c.logprobs, c.finished) for c in row] for row in rows],
        "weights": sum(p.numel() for p in held.parameters.values()) / sum(p.numel() for p in whole.parameters()),
        "cache": Cache(engine.model, 6).bytes / Cache(one.model, 6).bytes,
    }  # fmt: skip


def progressed(members: Sequence[int], layout: dict[str, int]) -> list[str]:
    """Return the names of the functions that report progress in a training on rollouts."""
    callers: set[str] = set()
    with mock.patch("puna.models.progress.advance", lambda seconds=0.0: callers.add(sys._getframe(1).f_code.co_name)):
        rolled(members, layout=layout, critic=True)
    return sorted(callers)


def silent(members: Sequence[int]) -> str:
    """Return the error by which the training rank reports a sampling rank whose thread hangs."""
    groups = Groups(generate=1, members=members)
    try:
        if not groups.trains:
            time.sleep(2.0)
        else:
            with mock.patch("puna.models.training.parallel.mesh.TIMEOUT", timedelta(seconds=0.6)):
                groups.take(lambda: None)
    except dist.DistError as error:
        return str(error)
    return ""


def late(members: Sequence[int], hangs: bool) -> list[str] | str:
    """Return what ranks gather, the last of which arrives after the timeout: it works meanwhile, or hangs. Return the error in that case."""
    mesh = Mesh(Layout(data=len(members)), members)
    mesh.wait()
    with mock.patch("puna.models.training.parallel.mesh.TIMEOUT", timedelta(seconds=0.6)):
        if mesh.index == len(members) - 1:
            for _ in range(40):
                time.sleep(0.1)
                progress.advance() if not hangs else None
        try:
            return mesh.meet() or "late" if hangs else mesh.gather_texts(str(mesh.index))
        except dist.DistError as error:
            return str(error)


def failing(members: Sequence[int]) -> str:
    """Return the error by which the training rank reports a sampling rank that failed, as printed by `ranks.follow`."""
    groups, words = Groups(generate=1, members=members), "words-1"
    if not groups.trains:
        store().set(words, "rank 1: ValueError: no room")
        return ""
    try:
        with mock.patch("puna.models.training.parallel.mesh.TIMEOUT", timedelta(seconds=20)):
            return groups.take(lambda: None)
    except (dist.DistError, TimeoutError) as error:
        return str(error)
    finally:
        store().delete_key(words)


def precision(members: Sequence[int]) -> str:
    """Return the precision of a rank whose own measurement differs from the other rank's."""
    with mock.patch("puna.models.accounting.bf16_pays", lambda: dist.get_rank() == 0), mock.patch("puna.models.training.parallel.mesh.together", True):
        return ComputeSettings(precision="fastest").precision_on("cpu")


def listed(members: Sequence[int], folder: str, unread: bool = False) -> int | str:
    """Return the step that a rank loads; all ranks but the first see no checkpoint in the shared folder. unread: they cannot read theirs; return
    the error."""
    mesh = Mesh(Layout(data=len(members)), members)
    boxes.save(mesh, {}, Path(folder), 3, {}, '{"step": 3}')
    seen = newest_first if mesh.index == 0 else lambda folder: []
    fails = mock.patch.object(boxes, "read", side_effect=ValueError("no box")) if unread and mesh.index else contextlib.nullcontext()
    try:
        with mock.patch.object(boxes, "newest_first", seen), fails:
            state = boxes.load(Path(folder), {}, {}, mesh)
    except (OSError, ValueError) as error:
        return str(error)
    return -1 if state is None else state[1]["step"]


def remembered(members: Sequence[int], folder: str) -> list[int]:
    """Return a wave of answers as read by a rank that, unless it is rank 0, sees no file of the wave; and how often it computed the wave again."""
    source, made = Source.__new__(Source), itertools.count()
    source.groups, source._folder, source._names, source.follow = Groups(Layout(data=len(members)), 0, members), Path(folder), "run", lambda: None
    file = Path(folder, "rollout-1-run", "0-0.json")
    if is_first(members):
        cached_json(file, lambda: 7)
    source.groups.mesh.wait()
    read = file.read_text() if is_first(members) else FileNotFoundError
    with mock.patch.object(Path, "read_text", side_effect=[read] if is_first(members) else read):
        return [source._remember(1)("0-0", lambda: next(made)), next(made)]


def lost_weights(members: Sequence[int]) -> str:
    """Return the error of a sampling rank whose model does not receive the sent weights."""
    groups, model = Groups(generate=1, members=members), network("plain", seed=len(members))
    if groups.trains:
        groups.ask(Parallel(model, groups.mesh), {"rollout": 1})
        return ""
    try:
        with mock.patch.object(torch.Tensor, "copy_", lambda own, other: own):
            next(groups.orders(Parallel(network("plain"), groups.mesh)))
    except ValueError as error:
        return str(error)
    return ""


def by_length(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Score answers by their number of tokens."""
    return [[float(len(c.tokens)) for c in some] for some in completions]


JOBS: dict[str, Callable[..., Any]] = {
    "compare": compare, "in_small_chunks": in_small_chunks, "in_small_buckets": in_small_buckets, "trained": trained, "refusal": refusal, "restored": restored, "refused_state": refused_state, "seconds": seconds,
    "read_ratio": read_ratio, "passes": passes, "printed": printed, "grown": grown, "whole_bytes": whole_bytes, "weights_read": weights_read, "faulty": faulty, "sampled": sampled,
    "rolled": rolled, "progressed": progressed, "silent": silent, "late": late, "failing": failing, "precision": precision, "listed": listed,
    "looped": looped, "remembered": remembered, "unwritten": unwritten, "unsaved": unsaved, "memory_taken": memory_taken, "lost_weights": lost_weights, "answered": answered, "answer_seconds": answer_seconds,
}  # fmt: skip
