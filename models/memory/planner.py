"""Choice of a near-fastest plan for a model larger than memory: streamed layers, batch size, step tokens (FlexGen, Sheng et al. 2023).

A pass overlaps loading the streamed layers with computing all layers. It takes the longer of the two times plus a quarter of the shorter.
Loading does not depend on the number of tokens. Computing takes the longer of reading weights and KV cache from memory and multiplying.
Answers and weights compete for memory, so each division of memory is rated by its tokens per second. Rates are measured on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from puna.kernels.exact import exact_passes
from puna.kernels.paged_attention import PAGE
from puna.models.accounting import Precision, best_seconds, cache_bytes, forward_flops
from puna.models.config import ModelConfig
from puna.models.memory import Work
from puna.models.memory.offload import Level, Shell, Source
from puna.models.memory.streams import Buffer
from puna.models.parameters import matrix_parameters
from puna.models.transformer import rotary_table

STEP_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROBE_TOKENS = 256
PROBE_LAYERS = 5
OWN = 8_000_000  # bytes of the interpreter's objects and of allocator reserves: measured at 3 to 7 MB
EXPOSED = 0.25  # share of the shorter of loading and computing that does not overlap: .09 to .46 in tests/benchmarks/offload.py


@dataclass(frozen=True)
class Rates:
    """The machine's rates with this model, per second. `loading`: bytes of streamed layers; `bandwidth`: bytes of weights that a pass over
    one token reads from memory; `flops`: floating-point operations of a pass over many tokens."""

    loading: float
    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Shape:
    """A model's sizes in bytes. `element`: of a number; `layer`: of a layer's weights; `rest`: of the weights outside the layers; `loaded`:
    read per streamed layer; `beside`: of the streaming buffers."""

    config: ModelConfig
    element: int
    layer: int
    rest: int
    loaded: int
    beside: int
    token: int  # keys and values of a token, the draft model's included

    @staticmethod
    def of(source: Source, device: torch.device, draft: ModelConfig | None = None) -> Shape:
        """Return a model's sizes. Streaming needs two layers on a GPU; on a CPU two read buffers, plus a layer if weights are converted."""
        beside = 2 * source.read_bytes + (0 if source.as_it_lies else source.layer_bytes)
        if device.type == "cuda":
            beside = 2 * source.layer_bytes
        precision: Precision = "fp32" if source.dtype == torch.float32 else "bf16"
        token = sum(cache_bytes(config, 1, precision) for config in (source.config, draft) if config is not None)
        return Shape(source.config, source.dtype.itemsize, source.layer_bytes, source.rest_bytes, source.read_bytes, beside, token)

    def kv_bytes(self, tokens: int) -> int:
        """Return the KV cache's bytes for a prompt with its answer, `tokens` tokens in total: whole pages, plus one more page."""
        return (-(-tokens // PAGE) + 1) * PAGE * self.token

    def scratch(self, step_tokens: int, answers: int) -> int:
        """Return a step's temporary bytes: one layer's activations of `step_tokens` tokens, four fp32 copies of `answers` logit rows."""
        config = self.config
        heads = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
        inner = config.intermediate_size
        if config.moe is not None:
            inner = config.moe.num_experts_per_tok * (config.moe.moe_intermediate_size + config.hidden_size)
        each = 6 * config.hidden_size + heads + config.value_dim * config.num_attention_heads + 3 * inner
        return self.element * each * step_tokens + 16 * config.vocab_size * answers


@dataclass(frozen=True)
class Plan:
    """A generation plan with its speed. Each pass loads `streamed` of `layers` layers. `pages`: KV cache bytes; `memory`: all
    bytes; `bound`: the bottleneck of a step."""

    streamed: int
    layers: int
    sequences: int
    step_tokens: int
    pages: int
    memory: int
    tokens_per_second: float
    step_seconds: float
    bound: str

    def line(self, level: Level) -> str:
        """Return the plan in one line, for the log. `level`: where streamed layers are stored."""
        where = f"{self.layers - self.streamed} of {self.layers} layers stay in memory, {self.streamed} come from {level} for each pass"
        return (
            f"{where if self.streamed else f'all {self.layers} layers fit into memory'}; {self.sequences} answers at once, "
            f"{self.step_tokens} tokens a step, {self.pages / 1e9:.2f} GB of keys and values, {self.memory / 1e9:.2f} GB in all: "
            f"{self.tokens_per_second:.3g} tokens/s expected, {self.step_seconds:.3g} s a step, bound by {self.bound}"
        )


def choose(shape: Shape, memory: int, rates: Rates, work: Work, step_tokens: int | None = None) -> Plan:
    """Return the plan with the fewest concurrent answers among those that fit and reach at least 99 % of the best plan's tokens per second.
    `step_tokens`: maximum tokens of a pass (None: chosen here). Raise ValueError, which names the memory needed, if no plan fits."""
    plans = list(_plans(shape, memory, rates, work, step_tokens))
    if not plans:
        longest = max(work.prompt + work.answer, work.longest)
        least = OWN + shape.rest + shape.beside + shape.kv_bytes(longest) + shape.scratch(step_tokens or STEP_TOKENS[0], 1)
        raise ValueError(
            f"memory = {memory / 1e9:.3g} GB is too little even with all layers offloaded: one answer of {longest} tokens with its "
            f"prompt needs {least / 1e9:.3g} GB; give more memory, or ask for fewer tokens"
        )
    best = max(plan.tokens_per_second for plan in plans)
    near = (plan for plan in plans if plan.tokens_per_second >= 0.99 * best)
    return min(near, key=lambda plan: (plan.sequences, -plan.tokens_per_second))


def _plans(shape: Shape, memory: int, rates: Rates, work: Work, step_tokens: int | None) -> Iterator[Plan]:
    layers, longest = shape.config.num_hidden_layers, shape.kv_bytes(work.longest)
    for tokens in STEP_TOKENS if step_tokens is None else (step_tokens,):
        for answers in range(1, work.answers + 1):
            pages = max(answers * shape.kv_bytes(work.prompt + work.answer), longest)
            left = memory - OWN - shape.rest - shape.scratch(max(tokens, answers), answers) - pages
            if left >= layers * shape.layer:
                streamed = 0
            elif left >= shape.beside:
                streamed = layers - min((left - shape.beside) // shape.layer, layers - 1)
            else:
                break
            waves = -(-work.answers // answers)
            prefill = -(-answers * work.prompt // tokens)
            size = min(tokens, answers * work.prompt)
            first = pass_seconds(shape, rates, streamed, size, work.prompt // 2, 0)[0]
            step, bound = pass_seconds(shape, rates, streamed, answers, work.prompt + work.answer // 2, answers)
            seconds = waves * (prefill * first + work.answer * step)
            spent = memory - left + (layers - streamed) * shape.layer + (shape.beside if streamed else 0)
            speed = work.answers * work.answer / seconds
            yield Plan(streamed, layers, answers, tokens, pages, spent, speed, step, bound)


def pass_seconds(shape: Shape, rates: Rates, streamed: int, tokens: int, context: int, drawn: int) -> tuple[float, str]:
    """Return a pass's seconds and bottleneck. Each of the `tokens` tokens has `context` tokens before it; `drawn` tokens get logits."""
    config = shape.config
    loading = streamed * shape.loaded / rates.loading
    head = config.vocab_size * config.hidden_size
    matrices = 2 * (matrix_parameters(config) - head) * tokens
    attention = forward_flops(config, [context + 1]) - forward_flops(config, [context]) - 2 * matrix_parameters(config)
    weights = config.num_hidden_layers * shape.layer
    reading = (weights + (head * shape.element if drawn else 0) + (shape.kv_bytes(context) * drawn)) / rates.bandwidth
    multiplying = (matrices + attention * tokens + 2 * head * drawn) / rates.flops
    computing, bound = max((reading, "reading weights"), (multiplying, "products"))
    return max(loading, computing) + EXPOSED * min(loading, computing), "loading layers" if loading > computing else bound


def measure(source: Source, level: Level, device: torch.device) -> Rates:
    """Measure this machine's rates in a few seconds: the disk's on the first `PROBE_LAYERS` layers, the others on the first layer."""
    shell = Shell(source.config)
    shell.put(source.layer(0, device))
    rates = [_compute_seconds(shell, source, tokens, device) for tokens in (1, PROBE_TOKENS)]
    matrices = (matrix_parameters(source.config) - source.config.vocab_size * source.config.hidden_size) / source.config.num_hidden_layers
    layer_rates = Rates(float("inf"), source.layer_bytes / rates[0], 2 * matrices * PROBE_TOKENS / rates[1])
    if device.type == "cuda":
        pinned = {name: p.detach().cpu().pin_memory() for name, p in shell.block.named_parameters()}
        copying = _seconds(lambda: [tensor.to(device, non_blocking=True) for tensor in pinned.values()], device)
        layer_rates = replace(layer_rates, loading=source.read_bytes / copying)
    if level == "disk":
        layer_rates = replace(layer_rates, loading=min(layer_rates.loading, _disk_rate(source)))
    return layer_rates


def _disk_rate(source: Source) -> float:
    """Return the disk's bytes per second: the median over reads of the first layers, because other programs may use the disk, too."""
    buffer, rates = Buffer(source.read_bytes), []
    for layout in source.layouts[:PROBE_LAYERS]:
        before = time.perf_counter()
        size = source.reader.fill(layout, buffer)
        rates.append(size / (time.perf_counter() - before))
    return median(rates)


def _compute_seconds(shell: Shell, source: Source, tokens: int, device: torch.device) -> float:
    config = source.config
    x_TD = torch.full((tokens, config.hidden_size), 0.1, dtype=source.dtype, device=device)
    cos, sin = rotary_table(config, torch.arange(tokens, device=device), source.dtype)

    def attend(_: int, q_THK: torch.Tensor, __: torch.Tensor, v_TGV: torch.Tensor) -> torch.Tensor:
        return q_THK.new_zeros(tokens, config.num_attention_heads, config.value_dim)

    exact = device.type == "cpu" and source.dtype == torch.float32
    with torch.inference_mode(), exact_passes(source.dtype, device, exact):
        return _seconds(lambda: shell.compute(0, x_TD, cos, sin, attend), device)


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of three calls of `function` after an untimed one, the work on the device included."""

    def call() -> None:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return best_seconds(call, time.perf_counter, tries=3, seconds=0)


def free_memory(device: torch.device) -> int:
    """Return the bytes that a model may take by default: nine tenths of a GPU's free memory, or four fifths of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 9 // 10
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of the physical memory
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return free * 4 // 5
