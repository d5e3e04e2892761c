"""Adapters trained on 4-bit matrices (QLoRA), compared with the same matrices unpacked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.align.dpo import DpoConfig, dpo
from puna.stages.align.reference_logprobs import ReferenceLogprobsConfig, reference_logprobs
from puna.stages.align.reinforcement import GrpoConfig, grpo
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.align.sft import SftConfig, sft
from puna.stages.contract import Facts, Model, SeededConfig, StageRun, execute, parse, stage
from puna.storage import Artifact, PunaError, Store

from .test_engines import STEPS, instructions, preferences
from .test_ppo_rewards import SETTINGS, asked

Tiny = Callable[..., Artifact]
nf4 = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra qlora")
LEVELS = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""NF4's levels: Dettmers et al. 2023, appendix E."""


def settings(quantization: str, **fields: Any) -> dict[str, Any]:
    return {"method": "lora", "lora": {"rank": 4, "quantization": quantization}, "training": {**STEPS, "epochs": 4.0}, **fields}


@stage(kind="model", version="1")
def unpacked(model: Model, config: SeededConfig, run: StageRun) -> None:
    """Write a model whose layers' matrices were rounded to NF4."""
    from puna.models.formats.quantized import merge, to_nf4

    found = to_nf4(load(model.path()))
    merge(found)
    save(found, run.folder, Tokenizer.load(model.path()))


def both(store: Store, start: Artifact) -> tuple[Artifact, Artifact]:
    """Return a model, and the same model with its layers' matrices rounded to NF4."""
    return start, execute(unpacked, SeededConfig(), {"model": start}, store)


@nf4
def test_a_matrix_is_rounded_to_the_numbers_of_nf4() -> None:
    """Blocks of 64 numbers, each divided by its largest; the scales are quantized to 8 bits, so they are slightly off."""
    from puna.models.formats.quantized import Nf4Linear
    from puna.models.layers import Linear

    linear = Linear(64, 32)
    linear.weight.data = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    packed = Nf4Linear(linear)
    blocks, found = linear.weight.detach().numpy(), packed.dequantize().numpy()
    scale = np.abs(blocks).max(1, keepdims=True)
    nearest = LEVELS[np.abs((blocks / scale)[..., None] - LEVELS).argmin(-1)]
    # One number of a block is its largest: 1 or -1, which unpacks to its scale.
    scales = np.abs(found).max(1, keepdims=True)
    np.testing.assert_allclose(found / scales, nearest, atol=1e-6)
    np.testing.assert_allclose(scales, scale, rtol=0.02)
    # Half a byte per number, one byte per block, and the tables to unpack scales: 256 levels, one fp32 per 256 blocks, the mean.
    assert packed.bytes() == 32 * 32 + 32 + 4 * (16 + 256 + 1 + 1)


@nf4
def test_products_and_gradients_are_those_of_the_unpacked_matrix() -> None:
    from puna.models.formats.quantized import Nf4Linear
    from puna.models.layers import Linear

    linear = Linear(128, 64, bias=True)
    generator = torch.Generator().manual_seed(1)
    linear.weight.data, linear.bias.data = torch.randn(64, 128, generator=generator), torch.randn(64, generator=generator)
    packed = Nf4Linear(linear)
    x, grad = torch.randn(7, 128, generator=generator, requires_grad=True), torch.randn(7, 64, generator=generator)
    y = packed(x)
    y.backward(grad)
    weight = packed.dequantize().double()
    torch.testing.assert_close(y.double(), x.double() @ weight.T + linear.bias.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(x.grad.double(), grad.double() @ weight, atol=1e-4, rtol=1e-5)


@nf4
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward_model"])
def test_training_is_that_of_adapters_beside_the_unpacked_matrices(tmp_path: Path, tiny_model: Tiny, kind: str) -> None:
    store = Store.open(tmp_path)
    start, rounded = both(store, tiny_model(store))
    stage_, config, data = {
        "sft": (sft, SftConfig, {"instructions": [instructions(store)]}),
        "dpo": (dpo, DpoConfig, {"preferences": [preferences(store), preferences(store, split="heldout")]}),
        "reward_model": (reward_model, RewardModelConfig, {"preferences": [preferences(store)]}),
    }[kind]
    made = execute(stage_, config(**settings("nf4")), {"model": start, **data}, store)
    expected = execute(stage_, config(**settings("none")), {"model": rounded, **data}, store)
    before, after, wanted = (load(one.path()).state_dict() for one in (rounded, made, expected))
    for name, tensor in wanted.items():
        torch.testing.assert_close(after[name], tensor, atol=2e-6, rtol=0)
        assert "_proj" not in name or not torch.equal(tensor, before[name]), name
    losses = [[row["loss"] for row in one.read("training_log").to_pylist()] for one in (made, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0][-1] < losses[0][0]
    assert made.manifest.metrics["weight_bytes"] < expected.manifest.metrics["weight_bytes"]
    if kind == "dpo":
        # The reference is the policy at the start of training, including its 4-bit matrices.
        assert made.manifest.metrics["first_margin"] == pytest.approx(0, abs=1e-6)
        assert made.manifest.metrics["heldout_margin"] == pytest.approx(expected.manifest.metrics["heldout_margin"], abs=1e-5)
        # Values that were stored for the model before its conversion to 4 bits are not those of the reference.
        stored = [execute(reference_logprobs, ReferenceLogprobsConfig(), {"model": start, "preferences": one}, store) for one in data["preferences"]]
        again = execute(stage_, config(**settings("nf4")), {"model": start, "preferences": stored}, store)
        assert again.data_digest == made.data_digest and again.manifest.metrics["first_margin"] == pytest.approx(0, abs=1e-6)


@nf4
def test_the_reward_of_a_policy_in_4_bits_rises(tmp_path: Path, tiny_model: Tiny) -> None:
    """Only the adapters learn; reference and start are the 4-bit policy."""
    store = Store.open(tmp_path)
    start, rounded = both(store, tiny_model(store))
    prompts = asked(store)
    settings = {name: value for name, value in SETTINGS.items() if name != "critic_learning_rate"}
    settings |= {"epochs": 2, "rollouts": 16, "schedule": {"learning_rate": 2e-2}}

    def learned(model: Artifact, quantization: str, **changes: Any) -> Artifact:
        config = GrpoConfig(method="lora", lora={"rank": 4, "quantization": quantization}, **settings | changes)
        return execute(grpo, config, {"policy": model, "prompts": prompts}, store)

    made = learned(start, "nf4")
    assert made.manifest.metrics["first_kl"] == pytest.approx(0, abs=1e-6)
    scores = made.read("training_log")["score"].to_pylist()
    assert sum(scores[-4:]) / 4 > sum(scores[:2]) / 2 + 0.15, scores
    before, after = (load(one.path()).state_dict() for one in (rounded, made))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    # The first rollout's answers equal those of the unpacked matrices, and so does the learning from them.
    ours, wanted = (learned(one, name, rollouts=1) for one, name in ((start, "nf4"), (rounded, "none")))
    assert ours.read("training_log")["score"].to_pylist() == wanted.read("training_log")["score"].to_pylist()
    for name, tensor in load(wanted.path()).state_dict().items():
        torch.testing.assert_close(load(ours.path()).state_dict()[name], tensor, atol=1e-4, rtol=0)


@nf4
def test_weights_in_bf16_leave_packed_bytes_alone(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    start, rounded = both(store, tiny_model(store))
    training = {**STEPS, "epochs": 4.0, "compute": {"precision": "bf16"}}
    data = {"instructions": [instructions(store)]}
    made = execute(sft, SftConfig(**settings("nf4", training=training)), {"model": start, **data}, store)
    expected = execute(sft, SftConfig(**settings("none", training=training)), {"model": rounded, **data}, store)
    losses = [[row["loss"] for row in one.read("training_log").to_pylist()] for one in (made, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02) and losses[0][-1] < losses[0][0]


@nf4
def test_a_mixture_of_experts_is_refused(tmp_path: Path, tiny_model: Tiny) -> None:
    from puna.models.formats.quantized import to_nf4

    sizes = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        moe={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    )  # fmt: skip
    with pytest.raises(ValueError, match="experts' matrices of a mixture cannot be kept in 4 bits"):
        to_nf4(Transformer(sizes, seed=0))


def test_what_cannot_go_together_is_refused() -> None:
    for lora in ({"dora": True}, {"initialization": "pissa"}):
        with pytest.raises(PunaError, match="set quantization to none"):
            parse(SftConfig, {"method": "lora", "lora": {"quantization": "nf4", **lora}}, "sft")
    with pytest.raises(PunaError, match=r"lora\.quantization must be none"):
        parse(DpoConfig, {"method": "lora", "engine": "trl", "lora": {"quantization": "nf4"}}, "dpo")


def test_a_missing_bitsandbytes_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.models.training.settings.find_spec", lambda name: None)
    for of, config in ((sft, SftConfig), (dpo, DpoConfig), (reward_model, RewardModelConfig), (grpo, GrpoConfig)):
        for quantization in ("nf4", "none"):
            told = of.unmet(config(method="lora", lora={"quantization": quantization}), Facts({}, None))
            said = f"{of.name}: lora.quantization: bitsandbytes is not installed; pip install 'puna[qlora]', or set it to none"
            assert told == ([said] if quantization == "nf4" else [])
