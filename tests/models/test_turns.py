"""Answers in several turns: only the tokens that the model wrote between the replies are trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from puna.models.forest import Forest
from puna.models.generation import Completion, Engine, SamplingParams
from puna.models.generation.turns import converse
from puna.models.training import rollouts
from puna.models.training.loop import weights_digest
from puna.models.training.ppo import train_grpo
from puna.models.training.rl_settings import GrpoSettings
from puna.models.training.rollouts import Rollouts, Sampled
from puna.models.training.trainer import Trainer
from puna.models.transformer import Transformer

from .test_stop import timeless
from .test_training_ppo import PROMPTS, STOP, model

REPLIES = [[7, 7, 8], [9], [10, 11]]


def respond(answers: Sequence[tuple[list[int], Completion]]) -> list[tuple[list[int], list[dict[str, Any]]] | None]:
    """Reply by the answer's first token: three kinds of replies, and none to an answer that begins with 3 or 4."""
    firsts = [one.tokens[0] for _, one in answers]
    return [None if first in (3, 4) else (REPLIES[first % 3], [{"role": "user", "content": str(first)}]) for first in firsts]


def in_turns(engine: Engine, prompts: Any, params: SamplingParams, progress: Any = None, turns: int = 4) -> list[list[Completion]]:
    return converse(engine, prompts, params, progress, turns, respond)


def scorer(prompts: Any, completions: Any) -> list[list[float]]:
    return [[sum(token for token, own in zip(one.tokens, one.mask, strict=True) if own) / 40 for one in row] for row in completions]


def settings(**more: Any) -> GrpoSettings:
    given: dict[str, Any] = {"rollouts": 1, "prompts": 4, "answers": 4, "max_tokens": 24, "minibatches": 1, "turns": 4, "kl_coefficient": 0.0}
    return GrpoSettings(**given | {"unfinished_penalty": 0.25, "compute": {"micro_batch_tokens": 256}} | more)


def source(config: GrpoSettings, policy: Transformer, **more: Any) -> Rollouts[GrpoSettings]:
    return Rollouts(policy, model(seed=1), scorer, PROMPTS, [STOP, 1, 2, 5], config, 3, generate=in_turns, **more)


def test_turns_and_replies_alternate_within_the_limits() -> None:
    engine, params = Engine(model()), SamplingParams(n=16, max_tokens=12, stop=(STOP, 1, 2, 5), seed=4)
    answers = [one for row in in_turns(engine, PROMPTS, params, turns=3) for one in row]
    kinds = set()
    for one in answers:
        assert len(one.tokens) == len(one.logprobs) == len(one.mask) <= 12
        start = 0
        for begin, end, messages in one.replies:
            assert one.tokens[begin - 1] in params.stop and begin > start  # a turn that ended by itself and is not empty
            assert one.tokens[begin:end] in REPLIES and messages == [{"role": "user", "content": str(one.tokens[0])}]
            assert one.mask[begin:end] == [False] * (end - begin) and one.logprobs[begin:end] == [0.0] * (end - begin)
            start = end
        assert start < len(one.tokens) and sum(one.mask) == len(one.tokens) - sum(end - begin for begin, end, _ in one.replies)
        assert all(p < 0 for p, own in zip(one.logprobs, one.mask, strict=True) if own)
        complete = one.tokens[-1] in params.stop and (one.tokens[0] in (3, 4) or len(one.replies) == 2)
        assert one.finished == complete, one
        kinds.add((one.finished, len(one.replies), len(one.tokens) == 12))
    # Complete at once and after two replies; truncated within a turn; and without room for a turn after the reply.
    assert {(True, 0, False), (True, 2, False), (False, 1, True)} <= kinds and {(False, 0, False), (False, 1, False)} & kinds
    assert in_turns(engine, PROMPTS, params, turns=1) == engine.generate(PROMPTS, params)


def test_gradients_are_those_of_the_policys_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with a pass over each answer alone: the advantage by hand, at ratio 1, times the log-prob's gradient, over own tokens
    only."""
    policy, config, seen, outputs = model(), settings(), list[Sampled](), list[torch.Tensor]()
    gradients: dict[str, torch.Tensor] = {}
    sample, accumulate, logprobs_of = Rollouts.sample, Trainer._accumulate, Transformer.token_logprobs

    def keep(self: Any, *given: Any) -> Sampled:
        seen.append(sample(self, *given))
        return seen[-1]

    def accumulated(self: Trainer, *given: Any) -> Any:
        result = accumulate(self, *given)
        gradients.update({name: p.grad.clone() for name, p in policy.named_parameters()})
        return result

    def watched(self: Transformer, *given: Any, **named: Any) -> Any:
        logprobs, entropy = logprobs_of(self, *given, **named)
        if logprobs.requires_grad:
            logprobs.retain_grad()
            outputs.append(logprobs)
        return logprobs, entropy

    for kind, name, function in ((Rollouts, "sample", keep), (Trainer, "_accumulate", accumulated), (Transformer, "token_logprobs", watched)):
        monkeypatch.setattr(kind, name, function)
    untrained = model()
    (row,) = train_grpo(source(config, policy))
    (sampled,) = seen
    own_tokens = sum(sum(one.mask) for one in sampled.flat)
    loss = torch.zeros((), dtype=torch.float64)
    untrained.double()
    for prompt, some in zip(sampled.asked, sampled.completions, strict=True):
        rewards = [sum(t for t, own in zip(one.tokens, one.mask, strict=True) if own) / 40 - 0.25 * (not one.finished) for one in some]
        mean = sum(rewards) / 4
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
        for reward, one in zip(rewards, some, strict=True):
            logits = untrained.logits(untrained.hidden(Forest.pack([torch.tensor([*prompt, *one.tokens])])))
            for place, (token, own) in enumerate(zip(one.tokens, one.mask, strict=True), len(prompt) - 1):
                if own:
                    loss = loss - (reward - mean) / (deviation + 1e-6) * logits[place].log_softmax(-1)[token] / own_tokens
    loss.backward()
    assert any(one.replies for one in sampled.flat)
    for name, parameter in untrained.named_parameters():
        assert torch.allclose(gradients[name].double(), parameter.grad, rtol=1e-4, atol=1e-7), name
    # Each target's own part of the gradient: 0 at every token of a reply, and where the advantage is 0.
    (logprobs,) = outputs
    assert len(logprobs) == len(sampled.mask) and not logprobs.grad[~sampled.mask].any() and logprobs.grad[sampled.mask].all()
    assert row["answer_tokens"] == own_tokens / 16 and row["turns"] == 1 + sum(len(one.replies) for one in sampled.flat) / 16
    assert row["approximate_kl"] == 0.0  # the training pass gives the bits of the sampled log-probs, in all turns


def test_what_stands_at_replies_counts_nowhere() -> None:
    """The divergence from the reference and the means in the table are over own tokens only."""
    rows: list[dict[str, Any]] = []
    source_ = source(settings(kl_coefficient=0.5), model(), keep=lambda _, given: rows.extend(given or ()))
    sampled = source_.sample(1)
    (log,) = train_grpo(source_)
    reference, total = model(seed=1), 0.0
    for at, (row, one) in enumerate(zip(rows, sampled.flat, strict=True)):
        prompt = sampled.asked[at // 4]
        with torch.no_grad():
            table = reference.logits(reference.hidden(Forest.pack([torch.tensor([*prompt, *one.tokens])]))).log_softmax(-1)
        own = [(p, float(table[len(prompt) - 1 + i, t])) for i, (t, p, m) in enumerate(zip(one.tokens, one.logprobs, one.mask, strict=True)) if m]
        assert row["completion"] == one and row["logprob"] == pytest.approx(sum(p for p, _ in own) / len(own), rel=1e-5)
        assert row["reference_logprob"] == pytest.approx(sum(q for _, q in own) / len(own), rel=1e-5)
        total += sum(p - q for p, q in own)
    assert log["kl"] == pytest.approx(total / 16, rel=1e-4)
    assert Sampled.read(sampled.text()).text() == sampled.text()


def test_a_stopped_rollout_of_turns_goes_on_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "WAVE_FLOPS", 0.0)  # one wave per prompt
    config, stops = settings(rollouts=2, minibatches=2, epochs=2), {"wave": 2, "update": 1}
    whole = model()
    expected = train_grpo(source(config, whole))
    step = Trainer.step

    def stopped(self: Trainer, number: int, *more: Any, **named: Any) -> dict[str, float]:
        row = step(self, number, *more, **named)
        if number == stops["update"]:
            stops["update"] = 0
            os.kill(os.getpid(), signal.SIGINT)
        return row

    def answering(*given: Any) -> list[list[Completion]]:
        stops["wave"] -= 1
        if stops["wave"] == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return in_turns(*given)

    monkeypatch.setattr(Trainer, "step", stopped)
    resumed = model()
    for _ in range(2):  # killed in a wave of the first rollout, then after its first update
        with pytest.raises(KeyboardInterrupt):
            train_grpo(Rollouts(model(), model(seed=1), scorer, PROMPTS, [STOP, 1, 2, 5], config, 3, generate=answering), tmp_path)
    log = train_grpo(source(config, resumed), tmp_path)
    assert weights_digest(resumed) == weights_digest(whole) and timeless(log) == timeless(expected)
