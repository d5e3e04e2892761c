"""Rollouts sampled by vLLM: truncated importance weights for the loss, compared with weights derived from passes over each answer alone.

A stub replaces vLLM (see `test_vllm_engine`), with the signatures of vLLM's `LLM`, over weights close to the policy's.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from puna.models.forest import Forest
from puna.models.generation import Engine
from puna.models.generation.vllm import VllmEngine
from puna.models.training import objectives as o
from puna.models.training.loop import weights_digest
from puna.models.training.ppo import train_grpo
from puna.models.training.rl_settings import GrpoSettings, RolloutSettings
from puna.models.training.rollouts import Rollouts, Sampled
from puna.models.training.trainer import Trainer
from puna.models.transformer import Transformer

from .test_stop import timeless
from .test_vllm_engine import SHAPE, TOKENIZER, Asked, Model

PROMPTS = [[11, 12], [13], [14, 15, 16], [17, 18]]
CAP = 1.05


def model(seed: int = 0) -> Transformer:
    return Transformer(SHAPE, seed=seed)


def scorer(prompts: Any, completions: Any) -> list[list[float]]:
    return [[sum(token % 7 for token in one.tokens) / 20 for one in row] for row in completions]


def settings(**more: Any) -> GrpoSettings:
    given: dict[str, Any] = {"rollouts": 1, "prompts": 4, "answers": 4, "max_tokens": 6, "minibatches": 1, "kl_coefficient": 0.0, "engine": "vllm"}
    return GrpoSettings(**given | {"importance_cap": CAP, "compute": {"micro_batch_tokens": 64}} | more)


def source(config: GrpoSettings, policy: Transformer, other: Callable[[Transformer], Any] | None) -> Rollouts[GrpoSettings]:
    return Rollouts(policy, model(1), scorer, PROMPTS, TOKENIZER.stop_ids, config, 3, other=other)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Callable[[Transformer], Any]]:
    """Return `vllm(noise)`: an engine whose weights differ from the policy's by this noise."""
    Model.made.clear()
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=Model, SamplingParams=Asked))

    def stand_in(noise: float = 0.0) -> Callable[[Transformer], Any]:
        monkeypatch.setattr(Model, "noise", noise)
        return VllmEngine(tmp_path, TOKENIZER, memory=0.3).holding

    return stand_in


def log_table(network: Transformer, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    """Return the log-probs [n, V] of the next token at each of an answer's tokens, from a pass over the answer alone, in fp64."""
    network = network.double()
    logits = network.logits(network.hidden(Forest.pack([torch.tensor([*prompt, *answer])])))[len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("cap", [1.0, 1.3, 1e9])
def test_weights_are_the_truncated_ratio(cap: float) -> None:
    """Over a whole vocabulary: the mean weight under the engine's distribution is the sum of min(p, cap q), which is 1 without
    truncation."""
    p, q = (torch.randn(50, generator=torch.Generator().manual_seed(s), dtype=torch.float64).softmax(0) for s in (0, 1))
    weights = o.ppo.importance_weights(p.log(), q.log(), cap)
    assert float((q * weights).sum()) == pytest.approx(sum(min(a, cap * b) for a, b in zip(p.tolist(), q.tolist(), strict=True)), rel=1e-12)
    assert (float((q * weights).sum()) == pytest.approx(1.0, rel=1e-12)) == (cap == 1e9) and not weights.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_answers_have_the_policys_log_probs_and_the_weights_of_their_tokens(vllm: Any, temperature: float) -> None:
    config = settings(temperature=temperature)
    sampled = source(config, model(), vllm(0.02)).sample(1)
    (engine,) = Model.made
    assert engine.share == 0.3 and engine.mode == ("raw_logprobs" if temperature == 1.0 else "processed_logprobs")
    policy, weights, gaps = model(), iter(sampled.importance.tolist()), []
    with torch.no_grad():
        for prompt, row in zip(sampled.asked, sampled.completions, strict=True):
            for one in row:
                p = log_table(policy, prompt, one.tokens, temperature)
                q = log_table(engine.weights, prompt, one.tokens, temperature)
                for place, (token, logprob) in enumerate(zip(one.tokens, one.logprobs, strict=True)):
                    assert logprob == pytest.approx(float(p[place, token]), abs=2e-6)
                    gap = float(q[place, token] - p[place, token])
                    assert next(weights) == pytest.approx(min(math.exp(-gap), CAP), rel=1e-5)
                    gaps.append(gap)
    assert next(weights, None) is None and any(-gap > math.log(CAP) for gap in gaps) and any(gap > 0 for gap in gaps)
    assert sampled.mismatch == pytest.approx(sum(gaps) / len(gaps), abs=1e-6)
    assert Sampled.read(sampled.text()).text() == sampled.text()


def test_the_gradient_is_the_weighed_one(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At ratio 1 to the sampling policy: advantage times min(p / q, cap) times the log-prob's gradient, by hand."""
    policy, kept, gradients = model(), list[Sampled](), dict[str, torch.Tensor]()
    sample, accumulate = Rollouts.sample, Trainer._accumulate

    def keep(self: Any, *given: Any) -> Sampled:
        kept.append(sample(self, *given))
        return kept[-1]

    def accumulated(self: Trainer, *given: Any) -> Any:
        result = accumulate(self, *given)
        gradients.update({name: p.grad.clone() for name, p in policy.named_parameters()})
        return result

    monkeypatch.setattr(Rollouts, "sample", keep)
    monkeypatch.setattr(Trainer, "_accumulate", accumulated)
    (row,) = train_grpo(source(settings(), policy, vllm(0.02)))
    (sampled,), untrained = kept, model()
    loss, total = torch.zeros((), dtype=torch.float64), sum(len(one.tokens) for one in sampled.flat)
    for prompt, some in zip(sampled.asked, sampled.completions, strict=True):
        rewards = [sum(token % 7 for token in one.tokens) / 20 - (not one.finished) for one in some]
        mean = sum(rewards) / 4
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
        for reward, one in zip(rewards, some, strict=True):
            own, drawn = log_table(untrained, prompt, one.tokens, 1.0), log_table(Model.made[0].weights, prompt, one.tokens, 1.0).detach()
            for place, token in enumerate(one.tokens):
                weight = min(math.exp(float(own[place, token].detach() - drawn[place, token])), CAP)
                loss = loss - weight * (reward - mean) / (deviation + 1e-6) * own[place, token] / total
    loss.backward()
    for name, parameter in untrained.named_parameters():
        assert torch.allclose(gradients[name].double(), parameter.grad, rtol=1e-4, atol=1e-7), name
    assert row["approximate_kl"] == 0.0  # the update's ratio is relative to the policy, not to the engine
    assert row["mismatch"] > 0 and row["importance"] == pytest.approx(float(sampled.importance.mean()))


def test_punas_own_engine_has_weights_of_one_and_is_not_asked_again() -> None:
    """Even with a cap of 1: the engine's log-probs equal the policy's bit by bit, so the weights change no bit of a training run."""
    plain, weighed = model(), model()
    config = settings(rollouts=2, epochs=2, importance_cap=1.0, kl_coefficient=0.1)
    engines = {id(weighed): Engine(weighed, exact=True)}
    own = source(config, weighed, lambda policy: engines[id(policy)])
    sampled = own.sample(1)
    assert torch.equal(sampled.importance, torch.ones(len(sampled.mask))) and sampled.mismatch == 0.0
    log = train_grpo(own)
    assert all(row["mismatch"] == 0.0 and row["importance"] == 1.0 for row in log)
    expected = train_grpo(source(config.replace(engine="puna", importance_cap=2.0), plain, None))
    assert not {"mismatch", "importance"} & expected[0].keys()
    assert timeless([{name: value for name, value in row.items() if name in expected[0]} for row in log]) == timeless(expected)
    assert weights_digest(weighed) == weights_digest(plain) != weights_digest(model())


def test_each_rollout_is_drawn_with_the_weights_trained_so_far(vllm: Any) -> None:
    policy = model()
    log = train_grpo(source(settings(rollouts=3, schedule={"learning_rate": 2e-2, "warmup_steps": 0}), policy, vllm()))
    assert [row["mismatch"] for row in log] == [0.0] * 3 and len(Model.made) == 1
    assert weights_digest(policy) != weights_digest(model())
    assert not torch.equal(Model.made[0].weights.lm_head.weight, model().lm_head.weight)


def test_an_engine_with_other_weights_is_refused() -> None:
    stale = Engine(model(5), exact=True)
    with pytest.raises(ValueError, match=r"rollout 1: the engine's log-probs of its answers lie \S+ nats a token from the policy's, more than 0.1"):
        source(settings(), model(), lambda policy: stale).sample(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"turns": 2}, "engine vllm answers in one turn: set turns to 1, not 2"),
        ({"generate": 1}, "set generate to 0"),
        ({"compute": {"micro_batch_tokens": 64, "layout": {"data": 2}}}, "leave compute.layout out"),
        ({"importance_cap": 0.9}, "greater than or equal to 1"),
    ],
)
def test_what_no_test_proves_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**wrong)
    assert RolloutSettings().engine == "puna"
