"""Costs compared with published sizes, with the model itself and with counted operations."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from puna.models import accounting
from puna.models.accounting import Machine
from puna.models.config import Mla, ModelConfig, Moe
from puna.models.forest import Forest
from puna.models.transformer import Transformer

LLAMA = {
    # name: (vocabulary, width, feed-forward, layers, heads, key-value heads, tied, published parameters)
    "llama3-8b": (128256, 4096, 14336, 32, 32, 8, False, 8_030_261_248),
    "llama3-70b": (128256, 8192, 28672, 80, 64, 8, False, 70_553_706_496),
    "llama3-405b": (128256, 16384, 53248, 126, 128, 8, False, 405_853_388_800),
    "llama3.2-1b": (128256, 2048, 8192, 16, 32, 8, True, 1_235_814_400),
    "smollm2-135m": (49152, 576, 1536, 30, 9, 3, True, 134_515_008),
}


def shape(name: str) -> ModelConfig:
    vocabulary, width, feed_forward, layers, heads, groups, tied, _ = LLAMA[name]
    return ModelConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=feed_forward, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=tied)


def small(tied: bool = False) -> ModelConfig:
    return ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)


@pytest.mark.parametrize("name", LLAMA)
def test_published_sizes(name: str) -> None:
    assert accounting.parameters(shape(name)).total == LLAMA[name][-1]


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_the_built_model(tied: bool) -> None:
    model = Transformer(small(tied), seed=0)
    assert accounting.parameters(small(tied)).total == sum(p.numel() for p in model.parameters())


def test_operations_of_the_405b_run() -> None:
    # 15.6T tokens at 8192 context: the report states 3.8e25, which is 6 N D with N = 405e9.
    config = shape("llama3-405b")
    n = accounting.matrix_parameters(config)
    assert 6 * n * 15.6e12 == pytest.approx(3.8e25, rel=0.01)
    attention = accounting.training_flops(config, [8192]) / 8192 - 6 * n
    assert attention == 12 * 126 * 16384 * (8192 + 1) / 2


def test_operations_against_a_count_of_matrix_products() -> None:
    """The matrix products of a forward pass are counted at the modules, attention's by its definition."""
    config = small()
    model = Transformer(config, seed=0)
    counted = 0

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal counted
        counted += 2 * inputs[0].shape[0] * module.weight.numel()

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    forest = Forest.pack([list(range(10)), list(range(20))])
    model.logits(model.hidden(forest))
    pairs = sum(1 for length in (10, 20) for query in range(length) for _ in range(query + 1))
    attention = 2 * 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    assert accounting.forward_flops(config, [10, 20]) == counted + attention
    assert accounting.training_flops(config, [10, 20]) == 3 * accounting.forward_flops(config, [10, 20])


def test_packing_does_not_change_the_operations_of_documents() -> None:
    config = small()
    whole = accounting.forward_flops(config, [7, 13, 5])
    assert whole == sum(accounting.forward_flops(config, [n]) for n in (7, 13, 5))
    assert whole < accounting.forward_flops(config, [25])


VARIANTS = {
    "dense": {},
    "biases and norms": {"qkv_bias": True, "o_bias": True, "qk_norm": True},
    "parallel": {"parallel_block": True},
    "experts": {"moe": Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)},
    "latent": {"num_key_value_heads": 4, "mla": Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10, q_lora_rank=16), "o_bias": True, "qkv_bias": True},
    "latent, full queries": {"num_key_value_heads": 4, "mla": Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)},
    "window": {"sliding_window": 7, "sliding_layers": (1,)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_and_operations_of_every_variant(name: str) -> None:
    """Parameters are compared with the model's; matrix products are counted as they run, expert by expert; pairs come from the mask."""
    config = ModelConfig(**{**small().model_dump(), "model_type": "", **VARIANTS[name], "head_dim": 0})
    model = Transformer(config, seed=0)
    assert accounting.parameters(config).total == sum(p.numel() for p in model.parameters())
    forest = Forest.branch(list(range(20)), [list(range(9)), list(range(4))])
    pairs = sum(int(forest.mask.within(window).dense().sum()) for window in config.windows)
    counted = pairs * 2 * config.num_attention_heads * (config.head_dim + config.value_dim)
    # The counter does not see inside operators: [N, D] rows times one matrix of [E, F, D] each.
    experts = {torch.ops.puna.grouped_linear: lambda x, w, *_, **__: 2 * x[0] * w[1] * w[2]}
    with FlopCounterMode(display=False, custom_mapping=experts) as counter:
        linear = model.hidden(forest)
        model.logits(linear)
    products = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in products.items() if "bmm" not in str(op))
    assert accounting.forest_flops(config, forest) == counted + products
    if name != "window":
        assert accounting.forest_flops(config, Forest.pack([[1] * 9, [2] * 5])) == accounting.forward_flops(config, [9, 5])


@pytest.mark.parametrize("window", [1, 5, 30])
def test_keys_seen_under_a_window(window: int) -> None:
    expected = sum(min(query + 1, window) for length in (10, 20) for query in range(length))
    assert accounting.seen_keys([10, 20], window) == expected


def test_activations_are_what_autograd_keeps() -> None:
    config = ModelConfig(vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    model = Transformer(config, seed=0)
    forest = Forest.pack([list(range(200)), list(range(56))])
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(forest)
    del hidden
    ratio = accounting.activation_bytes(config, len(forest)) / sum(kept.values())
    assert 0.95 < ratio < 1.05, ratio


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (ModelConfig(vocab_size=4096, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2), [512] * 2),
        (ModelConfig(vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8), [200] * 5),
        (ModelConfig(vocab_size=2048, hidden_size=64, intermediate_size=176, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True), [32] * 4),  # the peak is in the first layer
        (ModelConfig(vocab_size=2048, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True), [32]),  # the peak is at the end
        (ModelConfig(vocab_size=20_000, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2), [128] * 2),  # the peak is in the output layer
    ],
)
def test_peak_memory_of_a_step_is_within_five_percent(shape: tuple[ModelConfig, list[int]], checkpointing: bool) -> None:
    file = Path(__file__).parents[1] / "benchmarks" / "accounting.py"
    spec = importlib.util.spec_from_file_location("benchmark_accounting", file)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    measured = benchmark.peak_of(*shape, checkpointing)
    assert accounting.peak_bytes(shape[0], sum(shape[1]), checkpointing=checkpointing) == pytest.approx(measured, rel=0.05)


def test_gradients_of_earlier_micro_batches_count() -> None:
    config, tokens = shape("llama3.2-1b"), 16
    vocabulary, row = config.vocab_size * config.hidden_size, tokens * config.hidden_size
    # With so few tokens, in bf16 the end is the peak: the whole state, the embedding's gradient and its inputs.
    found = accounting.peak_bytes(config, tokens, "bf16", accumulated=True)
    assert found == accounting.state_bytes(config, "bf16") + 2 * (vocabulary + 2 * row)
    # In fp32 the output layer is the peak: its gradient, a scaled copy of it, and three rows on top of what the layers keep.
    found = accounting.peak_bytes(config, tokens, accumulated=True)
    assert found == accounting.state_bytes(config) + 8 * vocabulary + accounting.activation_bytes(config, tokens) + 4 * 3 * row


def test_step_time_and_intensity_by_hand() -> None:
    config, machine = small(), Machine(matrix_flops=1e9, attention_flops=1e8, bandwidth=1e7)
    time = accounting.step_time(config, [10, 20], machine)
    matrices = 6 * accounting.matrix_parameters(config) * 30
    assert time.matrices == matrices / 1e9
    assert time.attention == pytest.approx((accounting.training_flops(config, [10, 20]) - matrices) / 1e8)
    assert time.total == time.matrices + time.attention + time.memory
    assert machine.ops_per_byte == 100
    # More tokens share the update's memory traffic, so the intensity rises towards that of the elementwise work.
    values = [accounting.intensity(config, [n]) for n in (1, 10, 100, 10_000)]
    assert values == sorted(values)
    assert Machine.gpu("NVIDIA H100 80GB HBM3").matrix_flops == pytest.approx(0.75 * 989e12)
    with pytest.raises(ValueError, match="there is no data sheet for the GPU 'TPU'"):
        Machine.gpu("TPU")


def test_memory() -> None:
    config = small()
    assert accounting.state_bytes(config) == 16 * accounting.parameters(config).total
    # 8B, 8192 tokens of bf16 cache: 2 * 32 layers * 1024 wide * 2 bytes = 128 KiB per token.
    assert accounting.cache_bytes(shape("llama3-8b"), 8192, "bf16") == 8192 * 128 * 1024
    with pytest.raises(ValueError, match="precision must be"):
        accounting.state_bytes(config, "fp8")  # type: ignore[arg-type]


def test_matrix_rate_is_a_rate() -> None:
    # Any bound on a speed would fail on some machine or under some load.
    assert math.isfinite(rate := accounting.matrix_rate(128, 0.05)) and rate > 0


def test_the_ceiling_is_the_fastest_routine_by_cpu_time_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # The product takes 2 s of CPU time, torch's own routine 8 s, whatever the wall time; torch's thread count is restored.
    spent = {"now": 0.0, "wall": 0.0}

    def routine(seconds: float) -> Callable[..., None]:
        def run(*_: object) -> None:
            assert torch.get_num_threads() == 1
            spent["now"] += seconds
            spent["wall"] += 100.0

        return run

    monkeypatch.setattr(accounting, "product", routine(2.0))
    monkeypatch.setattr(torch, "mm", routine(8.0))
    monkeypatch.setattr(time, "process_time", lambda: spent["now"])
    monkeypatch.setattr(time, "perf_counter", lambda: spent["wall"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if spent.get("one") else 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: spent.update(one=float(count == 1)))
    assert accounting.matrix_rate(10, 1.0) == 3 * 2 * 10**3 / 2.0
    assert torch.get_num_threads() == 3
