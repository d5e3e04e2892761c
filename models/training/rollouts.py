"""The answers of a rollout: prompts are drawn, answered by the policy, scored, and compared with the reference.

Rollout k draws its prompts and its samples from (seed, k), whatever earlier rollouts drew."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from puna.kernels.exact import can_be_exact, exact_passes
from puna.models import progress
from puna.models.generation import AnswerEngine, Completion, SamplingParams
from puna.models.generation.turns import converse
from puna.models.training.objectives.base import Targets
from puna.models.training.objectives.ppo import importance_weights
from puna.models.training.objectives.reward import answer_rewards
from puna.models.training.packing import pack, step_indices
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.groups import Groups
from puna.models.training.parallel.parallel import alone
from puna.models.training.parallel.staged_engine import held_engine
from puna.models.training.rl_settings import GrpoSettings, RolloutSettings
from puna.models.training.settings import ComputeSettings
from puna.models.training.state import cached_json
from puna.models.training.trainer import computing_in
from puna.models.transformer import Transformer

Config = TypeVar("Config", bound=RolloutSettings)
Scores = Sequence[Sequence[Any]]
Scorer = Callable[[Sequence[Sequence[int]], Sequence[Sequence[Completion]]], Scores | Mapping[str, Scores]]
"""Function that returns the answers' rewards, or a mapping with `score`, named parts, `steps` (end, reward), `unscored` (1: failed)."""
Keep = Callable[[int, list[dict[str, Any]] | None], object]
"""Function that stores a rollout's rows, one per answer; rows None: an earlier attempt of the run has stored the rows."""
Remember = Callable[[str, Callable[[], Any]], Any]  # returns the JSON value stored under a name, computed the first time
WAVE_FLOPS = 3e11  # FLOPs of the answers that a CPU samples between two saves: a few seconds of a core's time
MISMATCH = 0.1  # mean difference, nats per token, between another engine's log-probs and the policy's, beyond which answers are refused
WATCHED = 8  # about as many rollouts, besides the last, have their KL divergence measured although the reward does not need it


@dataclass(frozen=True)
class Sampled:
    """A rollout's prompts and answers with their scores; [A] by answer, [N] by answer token, replies between turns included.

    `mask`: True at the policy's own tokens; elsewhere `logprobs` (policy) and `reference` (reference model) are 0. `kl`: KL divergence from
    the reference, nats per answer; if None, `reference` repeats the policy's log-probs. `score`, `unequal`: mean score, and share of
    prompts whose answers differ in reward, over all sampled prompts, before the choice by `resample`. `drawn`: for all these prompts, the
    numbers of answers, policy tokens and unscored answers. `version`: number of rollouts on which the answering weights had been trained.
    `parts`: parts of the scores, [A] each, by name; `steps` has (end in tokens, reward) of each answer's steps. `importance`: the tokens'
    weights in the loss (Puna's engine: 1). `mismatch`: mean over tokens of log q - log p (q: another engine, p: the policy), or None."""

    asked: list[list[int]]
    completions: list[list[Completion]]
    scores: Tensor
    reference: Tensor
    importance: Tensor
    mismatch: float | None
    kl: float | None
    score: float
    unequal: float
    drawn: tuple[int, int, int]
    version: int
    parts: dict[str, list[Any]]

    answers = property(lambda self: [[one.tokens for one in row] for row in self.completions])
    flat = property(lambda self: [one for row in self.completions for one in row])
    lengths = property(lambda self: torch.tensor([len(one.tokens) for one in self.flat]))
    finished = property(lambda self: torch.tensor([float(one.finished) for one in self.flat]))
    logprobs = property(lambda self: torch.tensor([value for one in self.flat for value in one.logprobs]))
    mask = property(lambda self: torch.tensor([own for one in self.flat for own in one.mask]))

    def text(self) -> str:
        """Return all fields as JSON, without loss of precision."""
        return json.dumps({name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(self).items()})

    @classmethod
    def read(cls, text: str) -> Sampled:
        values = json.loads(text)
        values["completions"] = [[Completion(*one) for one in row] for row in values["completions"]]
        return cls(**values | {name: torch.tensor(values[name]) for name in ("scores", "reference", "importance")})


class Drawn(NamedTuple):
    """A prompt with its answers and scores. `unscored`: number of answers without a score. `unequal`: True if rewards (lowered for
    truncated answers) or steps differ."""

    prompt: list[int]
    completions: Sequence[Completion]
    scores: Sequence[float]
    unequal: bool
    unscored: int
    parts: dict[str, list[Any]]


@dataclass(frozen=True)
class Rollouts(Generic[Config]):
    """The models, prompts and settings for sampling and scoring a training run's answers.

    `prompts` are token ids up to and including the assistant's header, `stop` the ids that end an answer. `scorer` returns each answer's
    reward: `reward_model_scorer(model)`, or a verifier. `groups`: the ranks that train and the ranks that sample; None: by the settings. A
    rank answers some prompts, and all ranks score all answers; in exact passes the answers equal one process's. `keep` stores the answers'
    rows. `generate` answers prompts, in one turn or several (`converse`). `device`: where this rank's pieces of the policy are; None: the
    policy's device. `between`: the scorer of rollouts that are not in `watched_rollouts`; None: `scorer`. `other`: returns another engine
    for a model's weights, whose tokens get `importance_weights`; None: Puna's engine."""

    policy: Transformer | Parallel
    reference: Transformer | Parallel
    scorer: Scorer
    prompts: Sequence[Sequence[int]]
    stop: Sequence[int]
    config: Config
    seed: int
    groups: Groups | None = None
    keep: Keep = lambda rollout, rows: None
    generate: Callable[..., list[list[Completion]]] = converse
    device: torch.device | None = None
    between: Scorer | None = None
    other: Callable[[Transformer], AnswerEngine] | None = None

    def sample(self, rollout: int, remember: Remember = lambda _, make: make(), version: int = 0) -> Sampled:
        """Return the answers of rollout number `rollout` (1-based). `remember` stores each wave of sampled and scored answers.

        Raise ValueError if the engine's log-probs differ from the policy's: Puna's on the first prompt, another engine's by too much."""
        config = self.config
        measured = rollout in watched_rollouts(config.rollouts)
        candidates = self._draw(rollout, remember)
        # A stable sort: prompts with unequal rewards first, each part in the order of drawing.
        best = sorted(sorted(range(len(candidates)), key=lambda i: not candidates[i].unequal)[: config.prompts])
        prompts, completions = [candidates[i].prompt for i in best], [list(candidates[i].completions) for i in best]
        sampled = Sampled(
            asked=prompts, completions=completions, reference=torch.empty(0), mismatch=None, kl=None, version=version,
            importance=torch.ones(sum(len(one.tokens) for some in completions for one in some)),
            scores=torch.tensor([s for i in best for s in candidates[i].scores], dtype=torch.float32),
            score=sum(sum(one.scores) / len(one.scores) for one in candidates) / len(candidates),
            unequal=sum(one.unequal for one in candidates) / len(candidates),
            drawn=(sum(len(one.completions) for one in candidates), sum(sum(c.mask) for one in candidates for c in one.completions),
                   sum(one.unscored for one in candidates)),
            parts={name: [part for i in best for part in candidates[i].parts[name]] for name in candidates[0].parts},
        )  # fmt: skip
        if self.other is None:  # Puna's engine computes the trainer's own log-probs: they are only checked
            self._check(rollout, sampled)
        else:
            sampled = self._with_importance(rollout, sampled)
        logprobs = base = sampled.logprobs
        kl = None
        if measured or config.kl_coefficient:
            base = torch.where(sampled.mask, self._asked_logprobs(self.reference, prompts, sampled.answers), 0.0)
            kl = float((logprobs - base).sum()) / len(sampled.flat)
        return replace(sampled, reference=base, kl=kl)

    @torch.no_grad()
    def _check(self, rollout: int, sampled: Sampled) -> None:
        """Raise ValueError if log-probs differ from those of an exact training pass, if such passes are possible. With adapters or tensor
        parallelism, log-probs may differ by 1e-4."""
        held, targets = alone(self.policy), Targets.from_answers(sampled.asked[:1], sampled.answers[:1])
        if not can_be_exact(*self._place):
            return
        with exact_passes(*self._place):
            own = held.ask(self._logprobs, targets)
        difference = float(((own - sampled.logprobs[: len(own)]).abs() * sampled.mask[: len(own)]).max())
        whole = held.mesh.size("tensor") == 1 and all(p.requires_grad for p in held.whole.parameters())
        if not difference <= (0.0 if whole else 1e-4):
            raise ValueError(
                f"rollout {rollout}: log-probs of answers differ by up to {difference:.2g} nats from those of the policy's weights: "
                "the answers come from other weights"
            )

    def _with_importance(self, rollout: int, sampled: Sampled) -> Sampled:
        """Return another engine's answers with the policy's log-probs and the importance weights of the answers' tokens.

        Log-probs are computed as in training, so that the ratios of a rollout's first update are 1. Raise ValueError beyond `MISMATCH`."""
        mask, drawn = sampled.mask, sampled.logprobs
        with exact_passes(*self._place, can_be_exact(*self._place)):
            own = torch.where(mask, self._asked_logprobs(self.policy, sampled.asked, sampled.answers), 0.0)
        mismatch = float((drawn - own).sum() / mask.sum())
        if not abs(mismatch) <= MISMATCH:
            raise ValueError(
                f"rollout {rollout}: the engine's log-probs of its answers lie {mismatch:.2g} nats a token from the policy's, more than "
                f"{MISMATCH}: it answers with other weights, or reports wrong log-probs"
            )
        each = iter(own.split(sampled.lengths.tolist()))
        completions = [[one._replace(logprobs=next(each).tolist()) for one in some] for some in sampled.completions]
        importance = importance_weights(own, drawn, self.config.importance_cap)
        return replace(sampled, completions=completions, importance=importance, mismatch=mismatch)

    def _draw(self, rollout: int, remember: Remember) -> list[Drawn]:
        """Return a rollout's prompts with answers. While too few prompts have unequal rewards, draw more, up to `resample` times."""
        config, candidates, size = self.config, list[Drawn](), self._wave()
        held = alone(self.policy)
        exact = can_be_exact(*self._place)
        engine = held_engine(held, exact=exact) if self.other is None else self.other(cast("Transformer", held.whole))
        scorer = self.scorer if rollout in watched_rollouts(config.rollouts) else self.between or self.scorer
        for again in range(1 + (config.resample if isinstance(config, GrpoSettings) else 0)):
            # Further prompts come from beyond the last rollout.
            places = step_indices(rollout + again * config.rollouts, len(self.prompts), config.prompts, self.seed)
            for wave in range(0, len(places), size):
                prompts = [list(self.prompts[i]) for i in places[wave : wave + size]]
                seeds = [self.seed, rollout, again, wave]
                # No trailing zeros: a rollout of one wave has the seeds of earlier versions, which had no waves.
                own = seeds if wave else seeds[: 3 if again else 2]
                candidates += self._build_drawn(prompts, remember(f"{again}-{wave}", partial(self._sample, engine, scorer, prompts, own)))
            if sum(one.unequal for one in candidates) >= config.prompts:
                break
        return candidates

    @property
    def _place(self) -> tuple[torch.dtype, torch.device]:
        weight = next(iter(alone(self.policy).parameters.values()))
        return weight.dtype, weight.device

    def _wave(self) -> int:
        """Return the number of prompts that are answered together; on a GPU, all prompts of a draw."""
        held = alone(self.policy)
        if held.device.type != "cpu":
            return self.config.prompts
        flops = 2.0 * sum(p.numel() for p in held.whole.parameters()) * self.config.answers * self.config.max_tokens
        return max(1, int(WAVE_FLOPS / flops))

    def _sample(self, engine: AnswerEngine, scorer: Scorer, asked: Sequence[list[int]], seeds: Sequence[int]) -> list[Any]:
        """Return a pair (answers, scores by name) for each prompt, sampled and scored. An answer is the fields of a `Completion`."""
        config = self.config
        seed = int(np.random.default_rng(seeds).integers(2**31))
        params = SamplingParams(n=config.answers, temperature=config.temperature, max_tokens=config.max_tokens, stop=tuple(self.stop),
            seed=seed)  # fmt: skip
        groups = self.groups or Groups()
        # Equal prompts go to one rank: together they draw different answers.
        answers = groups.sampling.dealt(asked, lambda own: self.generate(engine, own, params), tuple)
        scores = scorer(asked, [[Completion(*answer) for answer in some] for some in answers])
        parts = scores if isinstance(scores, Mapping) else {"score": scores}
        own = [{name: list(values[i]) for name, values in parts.items()} for i in range(len(asked))]
        # A judge may score differently on each rank: all train on the first rank's scores.
        return list(zip(answers, json.loads(groups.mesh.gather_texts(json.dumps(own))[0]), strict=True))

    def _build_drawn(self, asked: Sequence[list[int]], sampled: Sequence[Any]) -> Iterator[Drawn]:
        for prompt, (answers, parts) in zip(asked, sampled, strict=True):
            some, scores = [Completion(*answer) for answer in answers], parts["score"]
            steps = map(str, parts.get("steps", scores))
            rewards = {(s - self.config.unfinished_penalty * (not c.finished), t) for s, c, t in zip(scores, some, steps, strict=True)}
            own = {name: part for name, part in parts.items() if name != "score"}
            yield Drawn(prompt, some, scores, len(rewards) > 1, sum(parts.get("unscored", ())), own)

    @torch.no_grad()
    def _asked_logprobs(self, model: Transformer | Parallel, asked: Sequence[list[int]], answers: Sequence[list[list[int]]]) -> Tensor:
        """Return the log-probs [N] of all answer tokens under a model, in fp32 on the CPU."""
        return torch.cat(by_group(model, self._logprobs, asked, answers, self.config.compute.micro_batch_tokens))

    def _logprobs(self, model: Transformer, t: Targets) -> Tensor:
        return model.token_logprobs(t.forest, t.positions, t.tokens, temperature=self.config.temperature)[0]


class Source:
    """A source of rollouts: the training ranks sample on request, or separate ranks sample while others train.

    held: this rank's policy. folder: the run's state folder, where waves of answers are stored until their rollout ends. identity:
    values that identify the run. `follow` is called after each wave."""

    def __init__(self, rollouts: Rollouts[Any], held: Parallel, groups: Groups, folder: Path | None, identity: dict[str, Any]) -> None:
        self.rollouts, self.held, self.groups, self._folder = replace(rollouts, groups=groups), held, groups, folder
        self._names = groups.sampler(hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16])
        self.follow: Callable[[], object] = lambda: None
        self._sampled: Sampled | None = None

    def ask(self, rollout: int, version: int) -> None:
        """Request rollout number `rollout`, sampled with the policy's current weights, which were trained on `version` rollouts."""
        if self.groups.apart:
            self.groups.ask(self.held, {"rollout": rollout, "version": version})
        else:
            self._sampled = self._sample(rollout, version)

    def _sample(self, rollout: int, version: int) -> Sampled:
        sampled = replace(self.rollouts, policy=self.groups.answering(self.held)).sample(rollout, self._remember(rollout), version)
        self.held.release()
        return sampled

    def take(self) -> Sampled:
        """Return the rollout requested by `ask`, once it is sampled."""
        sampled = Sampled.read(self.groups.take(self.follow)) if self.groups.apart else self._sampled
        assert sampled is not None
        return sampled

    def forget(self, rollout: int) -> None:
        if self._folder is not None:
            shutil.rmtree(self._of(rollout), ignore_errors=True)

    def serve(self, compute: ComputeSettings) -> list[dict[str, float]]:
        """Sample the rollouts that training ranks request until they end; return their log."""
        held, self.follow = self.held, self.groups.give
        with computing_in(held.model, compute.precision_on(held.device.type)):
            for order in self.groups.orders(held):
                if "rollout" in order:
                    self.groups.give(self._sample(order["rollout"], order["version"]).text())
        log: list[dict[str, float]] = json.loads(order["end"])
        return log

    def _of(self, rollout: int) -> Path:
        return (self._folder or Path()) / f"rollout-{rollout}-{self._names}"

    def _remember(self, rollout: int) -> Remember:
        def remember(name: str, make: Callable[[], Any]) -> Any:
            file, mesh = self._of(rollout) / f"{name}.json", self.groups.mesh
            value = make() if self._folder is None else cached_json(file, make, lambda text: mesh.gather_texts(text)[0])
            self.follow()
            return value

        return remember


def reward_model_scorer(model: Transformer | Parallel, micro_batch_tokens: int = 4096) -> Scorer:
    @torch.no_grad()
    def score(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Completion]]) -> list[list[float]]:
        answers = [[tuple(c.tokens) for c in row] for row in completions]
        # Equal answers get equal rewards: computed twice, they would differ by rounding, which a group's deviation magnifies.
        distinct = [list(dict.fromkeys(row)) for row in answers]
        parts = by_group(model, answer_rewards, prompts, distinct, micro_batch_tokens, by_answer=True)
        rewards = [dict(zip(some, part.tolist(), strict=True)) for some, part in zip(distinct, parts, strict=True)]
        return [[known[answer] for answer in row] for row, known in zip(answers, rewards, strict=True)]

    return score


def watched_rollouts(rollouts: int) -> frozenset[int]:
    """Return the numbers (1-based) of the rollouts whose KL divergence is always measured: evenly spaced, with the first and the last."""
    return frozenset({*range(1, rollouts + 1, max(1, round(rollouts / WATCHED))), rollouts})


def by_group(
    model: Transformer | Parallel, compute: Callable[[Any, Targets], Tensor], prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]], micro_batch_tokens: int, by_answer: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return `compute`'s values for prompts with answers, packed in rows: a CPU tensor per prompt, by token (`by_answer`: by answer)."""
    held = alone(model)
    tokens = [sum(len(answer) for answer in row) for row in answers]
    results: dict[int, Tensor] = {}
    for row in pack([len(p) + n for p, n in zip(prompts, tokens, strict=True)], micro_batch_tokens):
        targets = Targets.from_answers([prompts[i] for i in row], [answers[i] for i in row])
        sizes = [len(answers[i]) if by_answer else tokens[i] for i in row]
        rows = held.ask(compute, targets.to(held.device)).float().cpu().split(sizes)
        results |= zip(row, rows, strict=True)
        progress.advance()
    return [results[i] for i in range(len(prompts))]
