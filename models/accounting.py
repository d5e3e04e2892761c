"""The cost of a model, from its configuration: FLOPs, memory, time; and the speed of the machine that it runs on.

A multiply-add counts as two FLOPs. A backward pass costs twice the forward pass: the usual 6 FLOPs per parameter and token. Attention's
products are counted exactly for a document mask; norms, rotations and softmax take far less than one percent and are not counted. Letters:
D model width, F feed-forward width, K head width, H query heads, G key-value heads, V vocabulary size."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch

from puna.kernels.linear import product
from puna.kernels.output_layer import CHUNK_BYTES, CHUNK_BYTES_GPU
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.parameters import matrix_parameters, parameters

Clock = Callable[[], float]
Precision = Literal["fp32", "bf16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ELEMENT_BYTES = {precision: dtype.itemsize for precision, dtype in DTYPES.items()}


def seen_keys(lengths: Iterable[int], window: int | None = None) -> int:
    """Return the number of query-key pairs in documents of these token lengths, under causal attention within `window` tokens."""
    total = 0
    for n in lengths:
        w = n if window is None else min(n, window)
        total += w * (w + 1) // 2 + (n - w) * w
    return total


def _pair_flops(config: ModelConfig) -> int:
    """Return the FLOPs of one query-key pair in one layer, over all heads: of the score and of the weighted value."""
    return 2 * config.num_attention_heads * (config.head_dim + config.value_dim)


def forward_flops(config: ModelConfig, lengths: Iterable[int]) -> int:
    """Return the FLOPs of one forward pass over documents of these lengths (tokens), packed in any way."""
    lengths = list(lengths)
    pairs = sum(count * seen_keys(lengths, window) for window, count in Counter(config.windows).items())
    return 2 * matrix_parameters(config) * sum(lengths) + _pair_flops(config) * pairs


def forest_flops(config: ModelConfig, forest: Forest) -> int:
    """Return the FLOPs of one forward pass over a forest, including the output layer for every token."""
    keys = forest.mask.depths + 1
    pairs = sum(
        count * int(keys.sum() if window is None else keys.clamp(max=window).sum()) for window, count in Counter(config.windows).items()
    )
    return 2 * matrix_parameters(config) * len(forest) + _pair_flops(config) * pairs


def training_flops(config: ModelConfig, lengths: Iterable[int]) -> int:
    """Return the FLOPs of a forward and a backward pass over documents of these lengths (tokens)."""
    return 3 * forward_flops(config, lengths)


def state_bytes(config: ModelConfig, precision: Precision = "fp32", moments: int = 8) -> int:
    """Return the bytes of weights, gradients and the optimizer's moments, which take `moments` bytes per parameter (AdamW: 8).

    Besides the moments, fp32 takes 8 bytes per parameter. bf16 takes 12: 2 + 2 for the bf16 weights and gradients, 4 + 4 for the fp32
    weights and accumulated gradients. Raise ValueError for another precision."""
    if precision not in ELEMENT_BYTES:
        raise ValueError(f"precision must be fp32 or bf16, not {precision!r}")
    return (moments + (8 if precision == "fp32" else 12)) * parameters(config).total


def _layer_elements(config: ModelConfig) -> int:
    """Return the elements per token that one layer keeps for its backward pass.

    These are inputs and outputs of two norms (4 D; 2 D if one norm feeds both blocks), rotated queries and keys, values, and the
    attention's output. Then gate, up and their product (3 F); with experts, these and an input and output (2 D) per expert of a token, and
    the router's logits and probabilities. Normalized or latent queries and keys add their own elements."""
    width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    inner = 3 * config.intermediate_size
    if config.moe is not None:
        inner = config.moe.num_experts_per_tok * (3 * config.moe.moe_intermediate_size + 2 * width)
        inner += 2 * config.moe.num_experts
    elements = (2 if config.parallel_block else 4) * width + 2 * config.head_dim * (heads + groups) + inner
    if config.qk_norm:
        elements += config.head_dim * (heads + groups)
    if config.mla is not None:
        elements += 2 * (config.mla.kv_lora_rank + config.mla.q_lora_rank) + heads * config.mla.v_head_dim
    return elements


def activation_bytes(config: ModelConfig, tokens: int, precision: Precision = "fp32", checkpointing: bool = False) -> int:
    """Return the bytes that a forward pass over `tokens` tokens keeps for the backward pass.

    With activation checkpointing, these are each layer's input, and all elements of the one layer that the backward pass is recomputing.
    The output layer works in chunks and keeps the gradient of its inputs instead of logits."""
    width, layers = config.hidden_size, config.num_hidden_layers
    layer = _layer_elements(config)
    elements = (layers - 1) * width + layer if checkpointing else layers * layer
    return ELEMENT_BYTES[precision] * tokens * (elements + width)


def peak_bytes(
    config: ModelConfig, tokens: int, precision: Precision = "fp32", checkpointing: bool = False, accumulated: bool = False,
    moments: int = 8,
) -> int:  # fmt: skip
    """Return the peak memory of a training step on `tokens` tokens at once, in bytes: tensors only, without the process's other memory.

    The peak sums weights, moments, gradients of earlier micro-batches if `accumulated`, and the largest of four stages of the step:

    1. the output layer: the activations that the forward pass kept, this layer's inputs and their gradient, the gradient of
       its weights, and the larger of a chunk of logits and a scaled copy of the weights' gradient;
    2. the backward pass of SwiGLU in the last layer: its product is freed; three gradients of the product's size, the gradient
       of the layer's output, and the weight gradients of the output layer and of the down projection exist;
    3. the same in the first layer: no other layer's activations are kept, but the gradients of all other layers exist;
    4. the end: all gradients, the embedding's part of the gradient of a tied output layer, and the embedding's inputs."""
    element, counts = ELEMENT_BYTES[precision], parameters(config)
    width, layers, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    vocabulary, down = config.vocab_size * width, width * inner
    if config.moe is not None:
        inner = config.moe.num_experts_per_tok * config.moe.moe_intermediate_size
        down = config.moe.num_experts * width * config.moe.moe_intermediate_size
    # The bf16 weights come on top of the fp32 weights; a micro-batch's gradients have the compute dtype.
    resting = (moments + (4 if precision == "fp32" else 6)) * counts.total + (4 * counts.total if accumulated else 0)
    limit = CHUNK_BYTES if precision == "fp32" else CHUNK_BYTES_GPU
    chunk = min(limit, element * tokens * config.vocab_size)
    layer = _layer_elements(config)
    saved = width if checkpointing else layer
    output = element * tokens * (layers * saved + 4 * width) + 4 * vocabulary + max(4 * vocabulary, chunk)
    # In fp32, gradients are added directly to the accumulated gradients.
    fresh = not (accumulated and precision == "fp32")
    one = element * (tokens * (layer + 2 * inner + width) + fresh * (vocabulary + down))
    last = one + element * tokens * (layers - 1) * saved
    first = one + fresh * element * (counts.layers + counts.norms) * (layers - 1) // layers
    beside = vocabulary if config.tie_word_embeddings or not fresh else 0
    end = element * (fresh * counts.total + beside + 2 * tokens * width)
    if precision == "bf16" and not accumulated:
        end = max(end, 4 * counts.total)  # the fp32 gradients, which replace the bf16 gradients
    return resting + max(output, last, first, end)


def cache_bytes(config: ModelConfig, tokens: int, precision: Precision = "fp32") -> int:
    """Return the bytes of the keys and values of `tokens` tokens during generation (MLA: of the latents that replace them)."""
    width = config.num_key_value_heads * (config.head_dim + config.value_dim)
    if config.mla is not None:
        width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return ELEMENT_BYTES[precision] * config.num_hidden_layers * width * tokens


def elementwise_bytes(config: ModelConfig, tokens: int, precision: Precision = "fp32") -> int:
    """Return the bytes that norms, rotations, SwiGLU, residual sums and the loss read and write, forward and backward.

    Elements per layer and token: 28 D for two norms with the residual sums and the sums of their gradients, 4 (H + G) K for the
    rotations, 8 F for SwiGLU (with experts: 8 (F + D) per expert of the token). Once per token: 3 V for the output layer's softmax."""
    heads = config.num_attention_heads + config.num_key_value_heads
    inner = config.intermediate_size
    if config.moe is not None:  # tokens are gathered and scattered for each of their experts
        inner = config.moe.num_experts_per_tok * (config.moe.moe_intermediate_size + config.hidden_size)
    layer = 28 * config.hidden_size + 4 * heads * config.head_dim + 8 * inner
    return ELEMENT_BYTES[precision] * tokens * (config.num_hidden_layers * layer + 3 * config.vocab_size)


def optimizer_bytes(config: ModelConfig) -> int:
    """Return the bytes that AdamW with clipping reads and writes: the norm (4 per parameter) and the update (28)."""
    return 32 * parameters(config).total


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step for matrix products, attention and memory traffic."""

    matrices: float
    attention: float
    memory: float

    @property
    def total(self) -> float:
        """Return the seconds of the whole step: the sum of its parts, which do not overlap."""
        return self.matrices + self.attention + self.memory


def step_time(
    config: ModelConfig, lengths: Iterable[int], machine: Machine, precision: Precision = "fp32", update: bool = True
) -> StepTime:
    """Return the time of a training step on documents of these lengths (tokens): forward, backward and, with `update`, AdamW's update."""
    lengths = list(lengths)
    tokens = sum(lengths)
    matrices = 6 * matrix_parameters(config) * tokens
    moved = elementwise_bytes(config, tokens, precision) + (optimizer_bytes(config) if update else 0)
    return StepTime(
        matrices / machine.matrix_flops, (training_flops(config, lengths) - matrices) / machine.attention_flops, moved / machine.bandwidth
    )


def intensity(config: ModelConfig, lengths: Iterable[int], precision: Precision = "fp32") -> float:
    """Return the arithmetic intensity of a training step: FLOPs per byte moved by elementwise work, the optimizer's update, and weight
    matrices (two reads, and one write of the gradient). A step below a machine's `ops_per_byte` is memory-bound."""
    lengths = list(lengths)
    matrices = 3 * ELEMENT_BYTES[precision] * (parameters(config).layers + config.vocab_size * config.hidden_size)
    moved = elementwise_bytes(config, sum(lengths), precision) + optimizer_bytes(config) + matrices
    return training_flops(config, lengths) / moved


def decode_time(
    config: ModelConfig, answers: int, context: int, machine: Machine, precision: Precision = "fp32"
) -> tuple[float, float]:
    """Return the minimum seconds of a decoding step for its FLOPs, and for the bytes that it reads; the two may overlap (roofline, Williams
    et al. 2009). The step computes token number `context` of each of `answers` sequences. Weights (of all experts) and each sequence's keys
    and values are read once; kernel launches are not counted."""
    counts, matrices = parameters(config), 2 * matrix_parameters(config)
    attention = forward_flops(config, [context]) - forward_flops(config, [context - 1]) - matrices
    weights = ELEMENT_BYTES[precision] * (counts.total - (0 if config.tie_word_embeddings else counts.embedding))
    operations = answers * (matrices / machine.matrix_flops + attention / machine.attention_flops)
    return operations, (weights + answers * cache_bytes(config, context, precision)) / machine.bandwidth


class DataSheet(NamedTuple):
    """A GPU's data sheet: dense bf16 operations per second, memory traffic in bytes per second, and bytes of memory. `within`, `between`:
    bytes per second that one GPU usually sends to GPUs of the same machine, and to other machines. `fp32`: fp32 operations per second."""

    flops: float
    bandwidth: float
    memory: float
    within: float
    between: float
    fp32: float


GPUS = {
    "B200": DataSheet(2250e12, 8.0e12, 180e9, 900e9, 50e9, 75e12),
    "H200": DataSheet(989e12, 4.8e12, 141e9, 450e9, 50e9, 67e12),
    "H100": DataSheet(989e12, 3.35e12, 80e9, 450e9, 50e9, 67e12),
    "A100": DataSheet(312e12, 2.0e12, 80e9, 300e9, 25e9, 19.5e12),
    "L40S": DataSheet(362e12, 0.864e12, 48e9, 32e9, 12.5e9, 91.6e12),
    "L4": DataSheet(121e12, 0.3e12, 24e9, 32e9, 12.5e9, 30.3e12),
    "RTX 4090": DataSheet(165e12, 1.0e12, 24e9, 32e9, 12.5e9, 82.6e12),
}
"""Data sheets by substrings of the GPU's name."""


def data_sheet(name: str) -> DataSheet:
    """Return the data sheet of the GPU with this name; raise ValueError if no key of `GPUS` is part of the name."""
    for part, sheet in GPUS.items():
        if part in name:
            return sheet
    raise ValueError(f"there is no data sheet for the GPU {name!r}; there are data sheets for {', '.join(GPUS)}")


@dataclass(frozen=True)
class Machine:
    """Rates of one device.

    matrix_flops     operations per second of the matrix products of a training step
    attention_flops  operations per second of attention, forward and backward, as counted by `accounting.py`
    bandwidth        bytes per second that elementwise work reads and writes, measured on SwiGLU"""

    matrix_flops: float
    attention_flops: float
    bandwidth: float

    @property
    def ops_per_byte(self) -> float:
        """Return the arithmetic intensity at which matrix products and memory traffic take equally long."""
        return self.matrix_flops / self.bandwidth

    @staticmethod
    def of(sheet: DataSheet, precision: Precision = "bf16") -> Machine:
        """Return a GPU's rates as shares of its data sheet's: 0.75 of the FLOPs in matrix products, 0.5 of the FLOPs in attention, 0.85 of
        the bandwidth. Good kernels reach these shares in bf16; they are assumed for fp32, too."""
        flops = sheet.flops if precision == "bf16" else sheet.fp32
        return Machine(0.75 * flops, 0.5 * flops, 0.85 * sheet.bandwidth)

    @staticmethod
    def gpu(name: str, precision: Precision = "bf16") -> Machine:
        """Return the rates of the GPU with this name, see `of`; raise ValueError if `GPUS` does not list the GPU."""
        return Machine.of(data_sheet(name), precision)


def best_seconds(function: Callable[[], object], clock: Clock, tries: int = 5, seconds: float = 0.15) -> float:
    """Return the seconds of the fastest call, after one untimed call; call at least `tries` times, for at least `seconds` in all."""
    function()
    best, start, count = float("inf"), clock(), 0
    while count < tries or clock() - start < seconds:
        before = clock()
        function()
        best, count = min(best, clock() - before), count + 1
    return best


def matrix_rate(size: int = 768, seconds: float = 0.3, dtype: torch.dtype = torch.float32) -> float:
    """Return the operations per second of `size`×`size` matrix products on torch's threads: one thread's rate per CPU second, times the
    number of threads, from the faster of two routines. Wall-clock time would understate the rate while other programs run."""
    threads = torch.get_num_threads()
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    routines = (lambda: product(left, right), lambda: torch.mm(left, right))
    torch.set_num_threads(1)
    try:
        spent = min(best_seconds(routine, time.process_time, 1, seconds / len(routines)) for routine in routines)
    finally:
        torch.set_num_threads(threads)
    return threads * 2.0 * size**3 / spent


@cache
def peak_flops(device: str, precision: Precision = "fp32") -> float | None:
    """Return the device's peak operations per second in matrix products: measured on a CPU; by data sheet for bf16 on a GPU; else None."""
    if device == "cpu":
        return matrix_rate(dtype=DTYPES[precision])
    if device != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name()
    return next((sheet.flops for part, sheet in GPUS.items() if part in name), None)


@cache
def bf16_pays() -> bool:
    """True if this CPU multiplies matrices over 1.25 times as fast in bf16 as in fp32. With AVX2, bf16 takes 180 times as long."""
    fast, full = (matrix_rate(256, 0.1, dtype) for dtype in (torch.bfloat16, torch.float32))
    return fast > 1.25 * full


PROBE_PARAMETERS = 100_000_000  # maximum size of the model that `measured_machine` trains; above, it times one linear layer's products


@cache
def measured_machine(config: ModelConfig, context: int, clock: Clock = time.perf_counter) -> Machine:
    """Return this CPU's fp32 rates at a model's shapes, for documents of `context` tokens (at most 1024), on torch's threads.

    Each rate is the best of several tries; results are cached. Attention and SwiGLU are timed alone. The matrix products' time is the rest
    of a training step with at most two layers or, above `PROBE_PARAMETERS`, that of one linear layer. On one thread, `clock` may be
    `time.process_time`, which other programs disturb less."""
    from puna.kernels.attention import ForestMask, attention
    from puna.kernels.swiglu import swiglu

    generator = torch.Generator().manual_seed(0)
    context = min(context, 1024)
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = ((context, heads, width), (context, groups, width), (context, groups, config.value_dim))
    q, k, v = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes)
    mask = ForestMask.from_end(torch.full((context,), context, dtype=torch.int32))
    upstream = torch.randn(context, heads, config.value_dim, generator=generator)
    gate, up = (torch.randn(1024, config.intermediate_size, generator=generator, requires_grad=True) for _ in range(2))

    def attend() -> None:
        with torch.enable_grad():
            attention(q, k, v, mask).backward(upstream)

    def activate() -> None:
        with torch.enable_grad():
            swiglu(gate, up).backward(gate.detach())

    attended = 3 * 2 * heads * (width + config.value_dim) * (context * (context + 1) // 2)
    machine = Machine(1.0, attended / best_seconds(attend, clock), 8 * gate.nbytes / best_seconds(activate, clock))
    return replace(machine, matrix_flops=_matrix_flops(config, context, machine, clock))


def _matrix_flops(config: ModelConfig, context: int, machine: Machine, clock: Clock) -> float:
    """Return the FLOPs per second of the matrix products in a training step.

    The time of the step's other operations, which `machine`'s rates imply, is subtracted from the step's time."""
    layers = min(2, config.num_hidden_layers)
    small = config.replace(num_hidden_layers=layers, sliding_layers=None, sliding_window=None, model_type="")
    rows, inner = 1024, config.intermediate_size
    if parameters(small).total > PROBE_PARAMETERS:
        x, w, g = (torch.ones(*shape) for shape in ((rows, config.hidden_size), (inner, config.hidden_size), (rows, inner)))
        seconds = sum(best_seconds(f, clock) for f in (lambda: product(x, w), lambda: product(g, w.T), lambda: torch.mm(g.T, x)))
        return 3 * 2 * rows * w.numel() / seconds
    from puna.models.transformer import Transformer

    model = Transformer(small, seed=0)
    lengths = [context] * max(1, rows // context)
    tokens = torch.arange(sum(lengths)) % config.vocab_size
    weights = torch.full((len(tokens),), 1.0 / len(tokens))

    def train() -> None:
        with torch.enable_grad():
            forest = Forest.pack(tokens.split(lengths))
            model.cross_entropy(forest, torch.arange(len(tokens)), tokens, weights).backward()
        model.zero_grad(set_to_none=True)

    other = step_time(small, lengths, replace(machine, matrix_flops=math.inf), update=False)
    remaining = max(best_seconds(train, clock) - other.total, 1e-9)
    return 6 * matrix_parameters(small) * len(tokens) / remaining
