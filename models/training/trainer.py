"""A trainer that runs optimization steps on a model, with an objective and optimizers."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from puna.kernels.adamw import clipping_factor
from puna.kernels.operators import PLAIN, deterministic
from puna.models import accounting, progress
from puna.models.accounting import DTYPES, Precision
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.training.optimizers import OPTIMIZERS, Group, Optimizer
from puna.models.training.packing import Later
from puna.models.training.parallel.base import Parallel, Part, Piece
from puna.models.training.parallel.mesh import Mesh
from puna.models.training.parallel.owners import Matrices, Owners
from puna.models.training.parallel.parallel import parallel
from puna.models.training.settings import TrainConfig
from puna.models.transformer import Decoder

Row = dict[str, float]
RESERVED = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "seconds", "skipped")
TIMED = ("seconds", "tokens_per_second", "model_flops_utilization")  # columns of the training log that differ from run to run
Limits = tuple[float, float]  # largest loss, largest gradient norm
NO_LIMITS: Limits = (sys.float_info.max, sys.float_info.max)  # any finite number


def spike_limits(log: Sequence[Mapping[str, float]], window: int, limit: float) -> Limits:
    """Return the loss and gradient norm above which the next step is a spike.

    A limit is the median over the last `window` steps that were not skipped, plus `limit` standard deviations. The deviation is estimated
    from the median absolute deviation, which an accepted spike hardly widens, and is at least 1 % of the median. Before there are `window`
    steps that were not skipped, or if `window` is 0, no finite value is a spike."""
    recent: list[Mapping[str, float]] = []
    for row in reversed(log if window else ()):
        if not row["skipped"]:
            recent.append(row)
        if len(recent) == window:
            break
    if not window or len(recent) < window:
        return NO_LIMITS
    return _bound([r["loss"] for r in recent], limit), _bound([r["gradient_norm"] for r in recent], limit)


def _bound(values: list[float], limit: float) -> float:
    middle = median(values)
    # For a normal distribution, this factor turns the median absolute deviation into the standard deviation.
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return middle + limit * max(deviation, 0.01 * abs(middle))


def in_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights in `dtype`; return weights that are packed in bytes (quantized) unchanged."""
    return data.to(dtype) if data.is_floating_point() else data


@contextmanager
def computing_in(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Hold the model's parameters in `precision` within the context, rounded as in a training step (FSDP2 rounds its own)."""
    originals = [(p, p.data) for p in model.parameters() if p.dtype != DTYPES[precision] and type(p) in PLAIN]
    for parameter, data in originals:
        parameter.data = in_dtype(data, DTYPES[precision])
    try:
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


@contextmanager
def between_layers(models: Iterable[nn.Module], act: Callable[[], object]) -> Iterator[None]:
    """Call `act`, which may raise, between the models' layers in forward and backward passes, and while a server's reply is awaited."""

    def before(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        act()
        if given[0].requires_grad:
            given[0].register_hook(lambda _: act() and None)

    layers = [layer for model in models for decoder in model.modules() if isinstance(decoder, Decoder) for layer in decoder.layers]
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    outside, progress.leave = progress.leave, act
    try:
        yield
    finally:
        progress.leave = outside
        for hook in hooks:
            hook.remove()


class Trainer:
    """A model with its objective and optimizers, trained step by step. The constructor raises ValueError if no weight is to be trained.

    `weights` are the trained fp32 tensors by name: the model's own parameters or, in bf16, the originals that the optimizer updates while
    the model holds rounded copies. Leaving the trainer's context restores a bf16 model's fp32 weights. A step puts the model into training
    mode and then restores its mode, so dropout in a model in evaluation mode acts only on steps."""

    def __init__(
        self, model: nn.Module, objective: Callable[..., tuple[Tensor, dict[str, Any]]], config: TrainConfig,
        rate_scales: Mapping[str, float] | None = None, mesh: Mesh | None = None, device: torch.device | None = None,
    ) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("the model has no parameter that requires a gradient")
        self.device = device or next(p.device for p in model.parameters() if p.requires_grad)
        self.precision = config.compute.precision_on(self.device.type)
        self.parallel = parallel(model, config.compute.layout, mesh, self.device, self.precision)
        self.model, self.objective, self.config = self.parallel.model, objective, config
        self.parameters = self.parallel.parameters
        model = self.model
        self.weights = self.parameters
        self._originals: list[tuple[nn.Parameter, Tensor]] = []
        self._parts: list[Part] = []
        if self.precision == "bf16" and not self.parallel.rounds:
            self._originals = [(p, p.data) for p in model.parameters()]
        if self._originals:
            self.weights = {name: nn.Parameter(p.data) for name, p in self.parameters.items()}
            for parameter, data in self._originals:
                parameter.data = in_dtype(data, torch.bfloat16)
        self.optimizers = optimizers(self.parallel, self.weights, config, rate_scales or {})
        self._decoders = [m for m in model.modules() if isinstance(m, Decoder)]
        for decoder in self._decoders:
            decoder.checkpointing = config.compute.activation_checkpointing
        self.parallel.release()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        for decoder in self._decoders:
            decoder.checkpointing = False
        for weight in (*self.parameters.values(), *self.weights.values()):
            weight.grad = None
        for parameter, data in self._originals:
            parameter.data = data

    def step(self, step: int, batch: Sized | Sequence[Sized], seed: int, limits: Limits = NO_LIMITS) -> Row:
        """Run a step on a batch or a list of micro-batches; return its row of the training log. A step changes no weight if its loss or
        gradient norm is not finite or exceeds `limits`."""
        start = time.perf_counter()
        rate = self.config.rate(step)
        micro = list(batch) if isinstance(batch, list | tuple) else [batch]
        with _training(self.model):
            loss, metrics = self._accumulate(micro, int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1)
        self.parallel.add_gradients(self.weights)
        norm = self.parallel.norm(self.weights).to(self.device)
        # One transfer for everything that is logged.
        values = torch.stack([loss, norm, *metrics.values()]).tolist()
        # NaN is within no limit.
        skipped = not (values[0] <= limits[0] and 0 <= values[1] <= limits[1])
        if not skipped:
            limit = self.config.optimizer.max_grad_norm
            factor = None if limit is None else clipping_factor(norm, limit)
            for optimizer in self.optimizers:
                optimizer.step(rate, factor)
            self._publish()
        for weight in self.weights.values():
            weight.grad = None
        seconds = time.perf_counter() - start
        tokens = sum(len(part) for part in micro)
        return {
            "step": step, "loss": values[0], "learning_rate": rate, "gradient_norm": values[1], "tokens": tokens, "seconds": seconds,
            "skipped": int(skipped), "tokens_per_second": tokens / seconds, "precision_bits": torch.finfo(DTYPES[self.precision]).bits,
            **self._utilization(seconds), **dict(zip(metrics, values[2:], strict=True)),
        }  # fmt: skip

    def _accumulate(self, micro: Sequence[Sized], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = sum(len(part) for part in micro)
        if not tokens:
            raise ValueError("a step needs at least one batch with at least one token")
        with _seed(seed, self.device), deterministic(True) if self.config.compute.deterministic else nullcontext():
            parts = [(part.make() if isinstance(part, Later) else part, counted) for part, counted in self.parallel.deal(micro)]
            options, self._parts = self._totals(parts, len(micro)), parts

            def compute(model: nn.Module, part: Sized, counted: bool) -> tuple[Tensor, dict[str, Tensor]]:
                loss, values = self.objective(model, self._to_device(part), **options)
                loss, values = self._with_balance_loss(loss, values, len(part) / tokens)
                if hidden := sorted(name for name in values if name in RESERVED or name in TIMED):
                    raise ValueError(f"metric {hidden[0]!r} would hide a column of the training log")
                detached = {n: torch.as_tensor(v, dtype=torch.float32, device=self.device).detach() for n, v in values.items()}
                return loss * counted, {name: value * counted for name, value in detached.items()}

            return self.parallel.add_up(*self.parallel.forward_backward(parts, compute, self._collect))

    def _to_device(self, part: Sized) -> Sized:
        return part.to(self.device) if hasattr(part, "to") else part

    def _totals(self, parts: Sequence[Part], count: int) -> dict[str, dict[str, float]]:
        """Return the objective's keyword argument `totals`: its counts summed over the step's `count` micro-batches on all ranks."""
        if not hasattr(self.objective, "totals"):
            if count > 1 or self.parallel.processes > 1:
                raise TypeError("only an objective with totals() can split a step into micro-batches")
            return {}
        measure = getattr(self.objective, "measure", None)
        totals: dict[str, float] = {}
        for part, counted in parts:
            values = dict(self.objective.totals(part))
            if measure is not None:
                values |= measure(self.parallel.ask, self._to_device(part))
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + value * counted
        return {"totals": self.parallel.totals(totals)}

    def _with_balance_loss(self, loss: Tensor, metrics: dict[str, Any], part: float) -> tuple[Tensor, dict[str, Any]]:
        """Return loss and metrics with a mixture of experts' load-balancing loss, times `part`, this micro-batch's share of the tokens."""
        take = getattr(self.model, "take_balance_loss", None)
        balance = None if take is None else take()
        if balance is None:
            return loss, metrics
        return loss + part * balance, {**metrics, "balance_loss": part * balance.detach()}

    def _utilization(self, seconds: float) -> dict[str, float]:
        """Return the metric model FLOPs utilization: the step's model FLOPs over the devices' peak, estimated from this rank's part. Return
        no metric unless all weights of a `Transformer` are trained and `accounting.peak_flops` knows the device."""
        config = getattr(self.model, "config", None)
        parts, readers = [part for part, counted in self._parts if counted], self.parallel.mesh.layout.readers
        forests = [one for part in parts if isinstance(one := getattr(getattr(part, "targets", part), "forest", None), Forest)]
        whole = all(p.requires_grad for p in self.model.parameters())
        if not isinstance(config, ModelConfig) or not whole or len(forests) < len(parts):
            return {}
        peak = accounting.peak_flops(self.device.type, self.precision)
        if peak is None:
            return {}
        flops = sum(3 * accounting.forest_flops(config, forest) for forest in forests)
        return {"model_flops_utilization": flops * readers / seconds / peak / self.parallel.processes}

    def _collect(self) -> None:
        """Add a bf16 model's gradients to the gradients of the fp32 weights; in fp32 both are the same tensors. Called per micro-batch."""
        progress.advance()
        for name, parameter in self.parameters.items() if self._originals else ():
            if parameter.grad is not None:
                weight, gradient = self.weights[name], parameter.grad.float()
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the fp32 weights into a bf16 model."""
        for name, parameter in self.parameters.items() if self._originals else ():
            parameter.copy_(self.weights[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights and all state of their optimizers, by name."""
        state: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state[f"weight.{name}"] = weight.detach()
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(weight, {}).items():
                    state[f"state.{key}.{name}"] = value
        return state

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite weights and optimizer state with a result of `self.tensors`; raise ValueError if names or shapes differ."""
        own = self.tensors()
        shapes, saved_shapes = ({name: tensor.shape for name, tensor in some.items()} for some in (own, tensors))
        if different := sorted(name for name in own.keys() | tensors.keys() if shapes.get(name) != saved_shapes.get(name)):
            raise ValueError(f"the saved training state does not fit: {different[0]} is {saved_shapes.get(different[0])} in it, and "
                             f"{shapes.get(different[0])} in this model with its optimizer; remove the state to begin anew")  # fmt: skip
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self._publish()

    @torch.no_grad()
    def adopt(self, state: Mapping[str, Tensor], in_pieces: bool = False) -> None:
        """Overwrite the optimizers' state with another run's tensors `state.…`. `in_pieces`: they are this rank's pieces. Else they are
        whole, and this rank takes its pieces, with zeros for new tokens. Raise ValueError if the optimizers or other shapes differ."""
        own = self.tensors()
        pieces = {name: self.parallel.piece_of(name, tensor) for name, tensor in own.items() if name in state}
        # Other ranks restore the state of other pipeline stages and of the matrices that they own.
        apart = self.parallel.mesh.layout.pipeline > 1 or self.parallel.owned
        rest = {} if apart else {name: value for name, value in state.items() if name not in own}
        cut = {name: state[name] if in_pieces else _piece(name, state[name], piece) for name, piece in pieces.items()}
        self.restore({name: value for name, value in own.items() if name.startswith("weight.")} | cut | rest)

    @torch.no_grad()
    def assign(self, values: dict[str, Tensor]) -> None:
        """Overwrite weights by name; other weights stay."""
        for name, value in values.items():
            self.weights[name].copy_(value)
        self._publish()


def optimizers(held: Parallel, weights: Matrices, config: TrainConfig, scales: Mapping[str, float]) -> list[Optimizer | Owners]:
    """Return the configured optimizer (as `Owners` for matrices split across ranks), and AdamW for the weights that it does not take.

    A group's `scale` multiplies its learning rate: the parameter's value in `scales`, else 1, times `embedding_scale` for embeddings.
    Raise ValueError if `scales` names an unknown parameter."""
    settings, model = config.optimizer, held.whole
    if unknown := sorted(scales.keys() - held.pieces.keys()):
        raise ValueError(f"there is no trained parameter {unknown[0]} whose learning rate could be scaled")
    plain, embedded = no_decay_names(model), embeddings(model)
    kind, own = OPTIMIZERS[settings.name], settings.own()
    fitting = inner_matrices(model) if kind.whole_matrices else weights.keys()
    first = {name for name, whole in model.named_parameters() if name in weights and name in fitting and kind.takes(whole, **own)}

    def groups(some: Matrices) -> list[Group]:
        kinds: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, weight in some.items():
            scale = scales.get(name, 1.0) * (settings.embedding_scale if name in embedded else 1.0)
            kinds.setdefault((scale, name in plain), []).append(weight)
        return [Group(kinds[key], key[0], 0.0 if key[1] else settings.weight_decay) for key in sorted(kinds)]

    def updating(some: Matrices) -> Optimizer:
        return kind(groups(some), settings, **own)

    parts: list[Optimizer | Owners] = []
    if kind.whole_matrices and (owners := Owners(held, weights, first)).names:
        parts.append(owners.start(updating))
    if local := {name: weight for name, weight in weights.items() if name in first - held.owned}:
        parts.append(updating(local))
    if rest := {name: weight for name, weight in weights.items() if name not in first}:
        parts.append(OPTIMIZERS["adamw"](groups(rest), settings))
    return parts


def inner_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices inside the layers: not embeddings, heads or routers."""
    outer, skipped = ("lm_head.weight", "score.weight", "mlp.gate.weight"), embeddings(model)
    return {name for name, p in model.named_parameters() if p.ndim >= 2 and name not in skipped and not name.endswith(outer)}


def embeddings(model: nn.Module) -> set[str]:
    """Return the names of the embedding matrices; a tied output layer shares the embedding's name."""
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name for name, p in model.named_parameters() if id(p) in matrices}


def no_decay_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters without weight decay: vectors (norms, biases) and embeddings."""
    return {name for name, p in model.named_parameters() if p.ndim < 2} | embeddings(model)


def _piece(name: str, tensor: Tensor, piece: Piece) -> Tensor:
    """Return the piece of a whole state tensor, with zeros for the rows of new tokens. Return a tensor of another shape unchanged."""
    grows = tensor.dim() > 0 and name.endswith(("embed_tokens.weight", "lm_head.weight")) and len(tensor) < piece.shape[0]
    if tuple(tensor.shape) != piece.shape and not (grows and tensor.shape[1:] == piece.shape[1:]):
        return tensor
    part = tensor[piece.slices()]
    lacking = piece.box[0][1] - piece.box[0][0] - len(part) if grows else 0
    return nn.functional.pad(part, (*[0] * (2 * part.dim() - 1), lacking)) if lacking else part


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put the model into training mode within the context."""
    was_training = model.training
    model.train()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generators, which the adapters' dropout uses, within the context; then restore them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
