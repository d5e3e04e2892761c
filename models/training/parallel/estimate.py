"""An estimate of time and memory of a training step under a layout, and the search for layouts that N devices can run.

The time is one device's time for matrices, attention and memory traffic (`puna.models.accounting`), divided over the layout. Exposed
transfers, the pipeline's bubble and the update are added. `REACHED` is fitted to one published run. torch.distributed is not imported."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, replace
from itertools import product

from puna.models.accounting import DataSheet, Machine, Precision, activation_bytes, optimizer_bytes, state_bytes, step_time
from puna.models.config import ModelConfig
from puna.models.parameters import parameters
from puna.models.training.parallel.layout import AXES, BUCKET, PROVED, Layout

REACHED = 0.735  # factor on a device's rates for inefficiencies that are not modelled, fitted to the 43 % MFU of Llama 3 405B on 8,192 H100
HIDDEN = 0.9  # share of the computing time (0 to 1) that can overlap with the gathering of sharded weights
FULL = 0.9  # maximum share of a device's memory that a layout may fill
NODE = 8  # number of devices in a machine; fast links connect them
BYTES = {"fp32": 4, "bf16": 2}
VIRTUAL_STAGES = (1, 2, 4, 8)  # numbers of stages per rank that the search tries


@dataclass(frozen=True)
class Work:
    """A training step: `rows` sequences of `length` tokens. `micro_tokens`: tokens of a data-parallel rank's micro-batch.

    checkpointing: True if the backward pass computes each layer again. moments: bytes of optimizer state per parameter.
    matrix_factor: speed of matrix products relative to bf16 (1; more with 8 bits). whole: True if each process needs whole weights between
    steps, to answer questions."""

    rows: int
    length: int
    micro_tokens: int
    precision: Precision = "bf16"
    checkpointing: bool = False
    moments: int = 8
    matrix_factor: float = 1.0
    whole: bool = False


@dataclass(frozen=True)
class Estimate:
    """An estimate: a step's seconds by activity, the bytes on the fullest device, and whether these fit into its memory. `state`: those
    bytes of weights, gradients and optimizer state."""

    layout: Layout
    work: Work
    compute: float
    transfers: float
    bubble: float
    update: float
    state: float
    bytes: float
    fits: bool

    @property
    def seconds(self) -> float:
        """Return the seconds of a whole step, the sum of all activities."""
        return self.compute + self.transfers + self.bubble + self.update

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of one device."""
        return self.work.rows * self.work.length / self.seconds / self.layout.processes

    @property
    def reason(self) -> str:
        """Return a description: whether layers are computed twice, and the shares of the step's time not spent computing."""
        rest = {"transfers": self.transfers, "pipeline bubble": self.bubble, "update": self.update}
        parts = [f"{name} {value / self.seconds:.0%}" for name, value in rest.items() if value / self.seconds >= 0.005]
        said = ["computes each layer twice"] * self.work.checkpointing
        return ", ".join(said + parts) or "nothing but computing"


def estimate(config: ModelConfig, work: Work, layout: Layout, sheet: DataSheet, reached: float = REACHED) -> Estimate:
    """Return a step's time and memory. `reached`: see `REACHED`. Raise ValueError if a data-parallel rank would have less than one row."""
    machine, readers = Machine.of(sheet, work.precision), layout.readers
    if work.rows < readers:
        raise ValueError(f"{work.rows} rows a step are too few for {readers} readers")
    own_rows = -(-work.rows // readers)
    rows_at_once = max(1, min(own_rows, work.micro_tokens // work.length))
    micro = -(-own_rows // rows_at_once)
    tokens = rows_at_once * work.length
    stages, cuts = layout.pipeline, layout.tensor * layout.context
    one = step_time(config, [work.length] * rows_at_once, machine, work.precision, update=False)
    again = 4 / 3 if work.checkpointing else 1.0
    share = layout.virtual_stages * -(-config.num_hidden_layers // layout.stages) / config.num_hidden_layers  # layers of the fullest rank
    compute = again * (one.matrices / work.matrix_factor + one.attention + one.memory) * share / (cuts * reached)
    transfers = _transfers(config, work, layout, sheet, tokens) * share
    counts = parameters(config)
    held = (counts.total - counts.experts * (1 - 1 / layout.expert)) / (layout.tensor * stages)
    moved = held * (1 - 1 / layout.shard) / _speed(layout, "shard", sheet) if layout.shard > 1 else 0.0
    # Each micro-batch gathers weights twice and scatters gradients once, while it computes. A stage does both once per step, alone.
    element, hidden = BYTES[work.precision], HIDDEN * micro * compute
    exposed = max(0.0, 3 * element * moved * micro - hidden) if stages == 1 else (element + 4) * moved
    summed = 2 * (1 - 1 / layout.data) * 4 * held / layout.shard / _speed(layout, "data", sheet) if layout.data > 1 else 0.0
    if layout.expert > 1:
        shared = (counts.total - counts.experts) / layout.shard
        summed += 2 * (1 - 1 / layout.expert) * 4 * shared / _speed(layout, "expert", sheet)
    update = optimizer_bytes(config) * held / counts.total / layout.shard / machine.bandwidth  # each rank updates only its own boxes
    absent = -micro % stages * (1 if micro < stages else 2 / 3)  # of the last group: both passes or only the backward one
    bubble = (stages - 1 + absent * (layout.virtual_stages - 1)) / layout.virtual_stages * (compute + transfers)
    needed, state = process_bytes(config, work, layout, tokens, micro)
    transfers = micro * transfers + exposed + summed
    return Estimate(layout, work, micro * compute, transfers, bubble, update, state, needed, needed <= FULL * sheet.memory)


def _speed(layout: Layout, axis: str, sheet: DataSheet) -> float:
    """Return the bytes per second of one rank in exchanges along an axis: over its machine's links, or its share of the network."""
    inner = math.prod(layout.size(one) for one in AXES[AXES.index(axis) + 1 :])
    if inner * layout.size(axis) <= NODE:
        return sheet.within
    return min(sheet.within, sheet.between * max(1, NODE // inner))


def _transfers(config: ModelConfig, work: Work, layout: Layout, sheet: DataSheet, tokens: int) -> float:
    """Return the seconds of one micro-batch's exchanges of rows, in all layers; computing waits for the exchanges."""
    element, seconds = BYTES[work.precision], 0.0
    passes = 3 if work.checkpointing else 2
    if layout.tensor > 1:  # each pass through a layer gathers and scatters the rows twice
        moved = 4 * passes * element * tokens / layout.context * config.hidden_size * (1 - 1 / layout.tensor)
        seconds += config.num_hidden_layers * moved / _speed(layout, "tensor", sheet)
    if layout.context > 1:  # keys and values
        width = config.num_key_value_heads * (config.head_dim + config.value_dim) / layout.tensor
        moved = passes * element * tokens * width * (1 - 1 / layout.context)
        seconds += config.num_hidden_layers * moved / _speed(layout, "context", sheet)
    if layout.expert > 1 and config.moe is not None:  # each token's rows, sent to its experts and back
        moved = 2 * passes * element * tokens * config.moe.num_experts_per_tok * config.hidden_size * (1 - 1 / layout.expert)
        seconds += config.num_hidden_layers * moved / _speed(layout, "expert", sheet)
    return seconds


def process_bytes(config: ModelConfig, work: Work, layout: Layout, tokens: int = 0, micro: int = 1) -> tuple[float, float]:
    """Return the peak bytes on the fullest device, in a step or, if that is more, between steps; and the bytes of its state.

    In a step: the state of its pieces, the activations of the micro-batches in progress, and gathered layers. Between steps: the state
    without gradients, and in fp32 a bucket of whole weights for saving, or all whole weights (`work.whole`)."""
    counts, stages, element = parameters(config), layout.pipeline, BYTES[work.precision]
    layers = layout.virtual_stages * -(-config.num_hidden_layers // layout.stages)
    body = (counts.layers - counts.experts * (1 - 1 / layout.expert) + counts.norms) * layers / config.num_hidden_layers
    held = (body + max(counts.embedding, counts.head) + (counts.head if stages == 1 else 0)) / layout.tensor
    rounded = "fp32" if layout.shard > 1 else work.precision  # FSDP2 rounds what it gathers, and has no rounded shards
    state = state_bytes(config, rounded, work.moments) / counts.total * held / layout.shard
    activations = activation_bytes(config, tokens, work.precision) / config.num_hidden_layers  # of one layer
    kept = element * tokens * config.hidden_size if work.checkpointing else activations  # of a layer, of each micro-batch under way
    rows = kept * layers * min(micro, stages) + activations * work.checkpointing
    needed = state + rows / (layout.tensor * layout.context)
    if layout.shard > 1 and stages > 1:  # a stage's weights, and their gradients in fp32
        needed += (element + 4) * held
    elif layout.shard > 1:  # two layers' weights, one layer's gradient and its reduce-scatter; twice the weights outside layers
        needed += element * (4 * body / layers + 2 * (counts.embedding + counts.head)) / layout.tensor
    if layout.axes <= {"data"}:
        return needed, state
    resting = max(0, work.moments) + (4 if rounded == "fp32" else 6)  # below 0: frozen weights have no gradients either
    largest = max(counts.embedding, config.hidden_size * config.intermediate_size, counts.experts / config.num_hidden_layers * 2 / 3)
    gathered = counts.total if work.whole else min(counts.total, BUCKET + largest)
    return max(needed, resting * held / layout.shard + 4 * gathered), state


@functools.cache
def layouts(devices: int) -> tuple[Layout, ...]:
    """Return all layouts of `devices` devices whose set of axes is in `PROVED`, that is, covered by a test. `VIRTUAL_STAGES` are varied."""
    divisors, every = [size for size in range(1, devices + 1) if devices % size == 0], list[Layout]()
    for axes in sorted(PROVED, key=sorted):
        names = sorted(axes)
        for *sizes, stages in product(*[divisors[1:]] * len(names), VIRTUAL_STAGES if "pipeline" in axes else (1,)):
            if math.prod(sizes) == devices:
                with contextlib.suppress(ValueError):  # beyond the bounds of an axis
                    every.append(Layout(**dict(zip(names, sizes, strict=True)), virtual_stages=stages))
    return tuple(every)


def best_layouts(
    config: ModelConfig, work: Work, devices: int, sheet: DataSheet, most: int = 3, only: Layout | None = None, **used: object
) -> list[Estimate]:
    """Return up to `most` estimates that fit, fastest first, one per set of axes; if none fits, the one with the fewest bytes.
    `checkpointing` is varied. Layouts refused on GPUs (`used`: see `Layout.refusal`) are left out. `only`: the one layout to estimate."""
    fitting: dict[frozenset[str], Estimate] = {}
    smallest: Estimate | None = None
    for layout in [only or Layout()] if only or devices == 1 else layouts(devices):
        try:
            able = (False, True) if layout.refusal("cuda", config, **used) is None else ()
            estimates = [estimate(config, replace(work, checkpointing=less), layout, sheet) for less in able]
        except ValueError:
            continue
        for one in estimates:
            if smallest is None or one.bytes < smallest.bytes:
                smallest = one
            if one.fits and (layout.axes not in fitting or one.seconds < fitting[layout.axes].seconds):
                fitting[layout.axes] = one
    ranked = sorted(fitting.values(), key=lambda one: one.seconds)[:most]
    return ranked or ([smallest] if smallest is not None else [])
