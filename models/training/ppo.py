"""The driver of PPO and GRPO: sample, score, estimate advantages, update the policy (and PPO's critic), repeat.

Rollout k draws prompts, samples and minibatches from (seed, k), so the state after a rollout is weights, moments and a few numbers. While a
rollout is sampled, scored waves are saved; between updates, all inputs (not with `max_stale`). A resumed run on a CPU is bit-identical."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from puna.kernels.advantages import advantages
from puna.kernels.exact import can_be_exact, exact_passes
from puna.models.accounting import DTYPES
from puna.models.training.loop import Row, Trainer, TrainLog, as_begun, check_skips, fingerprint, progress
from puna.models.training.objectives.base import Targets, sum_segments
from puna.models.training.objectives.ppo import Ppo, PpoBatch, Value, group_advantages, step_advantages, token_values, whiten
from puna.models.training.packing import pack
from puna.models.training.parallel.groups import Groups
from puna.models.training.parallel.parallel import alone, parallel
from puna.models.training.rl_settings import GrpoSettings, PpoSettings, RolloutSettings
from puna.models.training.rollouts import Rollouts, Sampled, Source, by_group
from puna.models.training.state import Job, Saver, check_identity
from puna.models.training.trainer import between_layers
from puna.models.transformer import Transformer

Estimate = tuple[Tensor, Tensor, Tensor]  # values, advantages and returns of N answer tokens, [N] each
Estimator = Callable[[Sampled, dict[str, float], Mapping[str, Trainer]], Estimate]
Parts = dict[str, tuple[nn.Module, Ppo | Value, float | None, Mapping[str, float] | None]]
"""The models that are trained, each with its objective, its learning rate, and factors of that rate by parameter."""


@dataclass(frozen=True)
class Group:
    """One prompt's answers: `scores` and `finished` by answer, other tensors by answer token; `mask`: True for trained tokens."""

    prompt: list[int]
    answers: list[list[int]]
    mask: Tensor
    logprobs: Tensor
    values: Tensor
    scores: Tensor
    finished: Tensor
    advantages: Tensor
    returns: Tensor
    importance: Tensor

    def __len__(self) -> int:
        return len(self.prompt) + len(self.logprobs)


def train_ppo(
    rollouts: Rollouts[PpoSettings], critic: Transformer, checkpoint_dir: Path | None = None,
    on_step: Callable[[Row], None] | None = None, rate_scales: Mapping[str, float] | None = None,
) -> TrainLog:  # fmt: skip
    """Optimize the policy (lm head) and the critic (scalar head) in place; return one row per rollout.

    Rows hold the training log's columns (loss, learning_rate, gradient_norm: the policy's, means over the rollout's updates) and
    score (raw mean), drawn_answers, drawn_tokens, drawn_unscored (of all sampled prompts), unequal_prompts (share of them whose rewards
    differ), kl (from the reference, in nats per answer; without a KL penalty only in about `WATCHED` rollouts, the first and the last
    included), gold (mean score of the verifiers, if a reward model gives the reward), clip_fraction, approximate_kl, entropy, value_loss,
    value_error, explained_variance, answer_tokens, finished, version (rollouts trained before sampling), staleness (rollouts trained
    since). If another engine answers: mismatch, its KL divergence from the policy in nats per token, and the tokens' mean importance.

    With `checkpoint_dir` the state is saved after each rollout and when `Saver` decides; a run that finds a state continues from it.
    `rate_scales`: factors of the policy's learning rate by parameter name. Raise TrainingDiverged if two rollouts in a row are skipped."""
    config = rollouts.config
    objective = Ppo(config.clip, config.entropy_weight, config.temperature)
    parts: Parts = {
        "policy": (alone(rollouts.policy).whole, objective, config.schedule.learning_rate, rate_scales),
        "critic": (critic, Value(config.value_clip), config.critic_learning_rate, None),
    }

    def estimate(sampled: Sampled, numbers: dict[str, float], trainers: Mapping[str, Trainer]) -> Estimate:
        if not numbers.get("normalized") and config.normalize_rewards:
            numbers["score_mean"] = float(sampled.scores.mean())
            deviation = float(sampled.scores.std(correction=0))
            numbers["score_scale"] = deviation if deviation > 1e-6 else 1.0  # equal scores have no scale
        numbers["normalized"] = 1.0
        rewards = (sampled.scores - numbers["score_mean"]) / numbers["score_scale"]
        rewards = rewards - config.unfinished_penalty * (1.0 - sampled.finished)
        with torch.no_grad():
            held, size = trainers["critic"].parallel, config.compute.micro_batch_tokens
            values = torch.cat(by_group(held, token_values, sampled.asked, sampled.answers, size))
        inputs = sampled.logprobs, sampled.reference, values, rewards, sampled.lengths
        raw, returns = advantages(*inputs, kl=config.kl_coefficient, gamma=config.gamma, lam=config.lam)
        return values, whiten(raw, torch.ones_like(raw, dtype=torch.bool)), returns

    return _train(rollouts, parts, estimate, checkpoint_dir, on_step)


def train_grpo(
    rollouts: Rollouts[GrpoSettings], checkpoint_dir: Path | None = None, on_step: Callable[[Row], None] | None = None,
    rate_scales: Mapping[str, float] | None = None,
) -> TrainLog:  # fmt: skip
    """Optimize the policy in place, without a critic: the answers to a prompt are compared with each other. For the rest, see `train_ppo`.

    The reward is the score, less `unfinished_penalty` if the answer was truncated. All tokens of an answer have the answer's advantage
    (`group_advantages`), or each step's tokens have the step's (`step_advantages`), less the whole answer's KL penalty (as in RLOO) over
    its group's mean. The penalty is not divided by the rewards' deviation: with equal rewards, the policy would then learn only the
    penalty's noise. Groups whose advantages are all 0 (within `ROUNDING`) count in the mean but are not computed, unless there is an
    entropy bonus."""
    config = rollouts.config
    objective = Ppo(
        config.clip, config.entropy_weight, config.temperature, config.clip_high, config.surrogate, config.ratio, config.normalizer,
        config.max_tokens,
    )  # fmt: skip
    parts: Parts = {"policy": (alone(rollouts.policy).whole, objective, config.schedule.learning_rate, rate_scales)}

    def estimate(sampled: Sampled, numbers: dict[str, float], trainers: Mapping[str, Trainer]) -> Estimate:
        kl = sum_segments(sampled.logprobs - sampled.reference, sampled.lengths)
        rewards = sampled.scores - config.unfinished_penalty * (1.0 - sampled.finished)
        penalty = config.kl_coefficient * group_advantages(kl.view(-1, config.answers), "rloo" if config.baseline == "rloo" else "mean")
        none = torch.zeros_like(sampled.logprobs)
        if config.credit == "steps":
            rows = zip(sampled.parts["steps"], sampled.flat, rewards.tolist(), strict=True)
            steps = [[*some, (len(one.tokens), reward)] for some, one, reward in rows]
            groups = (steps[at : at + config.answers] for at in range(0, len(steps), config.answers))
            by_token = torch.cat([step_advantages(group, config.baseline) for group in groups])
        else:
            by_answer = group_advantages(rewards.view(-1, config.answers), config.baseline).flatten()
            by_token = by_answer.repeat_interleave(sampled.lengths)
        return none, (by_token - penalty.flatten().repeat_interleave(sampled.lengths)) * sampled.mask, none

    return _train(rollouts, parts, estimate, checkpoint_dir, on_step)


def _train(
    rollouts: Rollouts[Any], parts: Parts, estimate: Estimator, checkpoint_dir: Path | None, on_step: Callable[[Row], None] | None,
) -> TrainLog:  # fmt: skip
    config: RolloutSettings = rollouts.config
    current = config.replace(compute=as_begun(config.compute, checkpoint_dir))
    groups = rollouts.groups or Groups(config.compute.layout, config.generate, tensor=config.generate_tensor)
    training, mesh, where = current.training, groups.mesh, rollouts.device
    own = parts.items() if groups.trains else ()
    trainers = {who: Trainer(model, goal, training(rate), scales, mesh, where) for who, (model, goal, rate, scales) in own}
    ranks = trainers["policy"].parallel if trainers else parallel(parts["policy"][0], mesh.layout, mesh, where)
    ranks.beside = {who: trainer.parallel for who, trainer in trainers.items() if who != "policy"}
    reference = alone(rollouts.reference)
    weights = [(one.parallel, one.weights) for one in trainers.values()] or [(ranks, ranks.parameters)]
    initial = [fingerprint(held, some | held.frozen) for held, some in (*weights, (reference, reference.parameters))]
    identity = {"config": config.identity(), "seed": rollouts.seed, "initial": initial}
    source = Source(rollouts, ranks, groups, checkpoint_dir, identity)
    if not groups.trains:
        return source.serve(current.compute)
    state = _resume(checkpoint_dir, trainers, identity, config)
    for rollout in range(1, len(state.log) + 1 + (state.begun is not None)):
        rollouts.keep(rollout, None)
    log, stale = state.log, config.max_stale

    def write() -> Job | None:
        assert checkpoint_dir is not None
        # Between a rollout's updates, the weights that sample the next rollout are gone, so the state before the updates stays.
        return None if stale and state.begun else _saving(checkpoint_dir, trainers, identity, config, state)

    with ExitStack() as stack:
        for trainer in trainers.values():
            stack.enter_context(trainer)
        saver = stack.enter_context(Saver(config.compute.save_seconds, write if checkpoint_dir is not None else None, ranks.mesh.agree))
        source.follow = saver.end_if_asked
        if ranks.processes == 1:  # not between the critic's layers: by then the policy is already updated
            stack.enter_context(between_layers((parts["policy"][0], reference.model), saver.leave_if_asked))
        for rollout in range(len(log) + 1, config.rollouts + 1):
            start = time.perf_counter()
            if state.begun is None:
                if state.sampled is None:
                    source.ask(rollout, len(log))
                    state.sampled = source.take()
                if stale and rollout < config.rollouts:
                    source.ask(rollout + 1, len(log))
                state.begun = _begin(state, trainers, estimate, rollouts, start)
            _updates(trainers, state.begun, source, rollout, saver)
            start = time.perf_counter()
            state.sampled = source.take() if stale and rollout < config.rollouts else None
            state.begun.row["seconds"] += time.perf_counter() - start
            log.append(_finish(state.begun, rollout))
            check_skips(log, 2)
            state.begun = None
            saver.save_if_due(now=True)  # waits until the previous state is on disk
            source.forget(rollout - 1)
            if on_step is not None:
                on_step(log[-1])
            saver.end_if_asked()
    source.forget(len(log))
    groups.end(json.dumps(log))
    return log


BY_ANSWER = ("scores", "finished")
BY_TOKEN = ("logprobs", "values", "advantages", "returns", "importance")
COLUMNS = (*BY_ANSWER, "mask", *BY_TOKEN)
ROUNDING = 1e-6  # largest advantage of a group with equal rewards, from rounding of its KL penalty while policy and reference agree


@dataclass
class Begun:
    """A rollout in training: its updates' input, the first columns of its row in the training log, and its updates' rows by trainer."""

    groups: list[Group]
    row: Row
    rows: dict[str, list[Row]]

    def tensors(self) -> dict[str, Tensor]:
        return {f"rollout.{name}": torch.cat([getattr(group, name) for group in self.groups]) for name in COLUMNS}

    def record(self) -> dict[str, Any]:
        return {"asked": [g.prompt for g in self.groups], "answers": [g.answers for g in self.groups], "row": self.row, "rows": self.rows}

    @classmethod
    def read(cls, tensors: dict[str, Tensor], record: dict[str, Any]) -> Begun:
        numbers = {name: tensors[f"rollout.{name}"] for name in COLUMNS}
        return cls(_groups(record["asked"], record["answers"], numbers), record["row"], record["rows"])


@dataclass
class State:
    """A run's state besides weights and moments. `begun`: the rollout in training; `sampled`: the next rollout, once sampled."""

    numbers: dict[str, float]
    log: TrainLog
    begun: Begun | None = None
    sampled: Sampled | None = None


def _begin(state: State, trainers: dict[str, Trainer], estimate: Estimator, rollouts: Rollouts[Any], started: float) -> Begun:
    """Return `state.sampled`, which is cleared, as a rollout to train; store the answers' rows. `started`: when the rollout began."""
    sampled, state.sampled, numbers = state.sampled, None, state.numbers
    assert sampled is not None
    # A group without advantages is left out; on ranks that round otherwise, another group might be.
    values, weights, returns = (trainers["policy"].parallel.mesh.of_first(one.clone()) for one in estimate(sampled, numbers, trainers))
    by_token = {"mask": sampled.mask, "logprobs": sampled.logprobs, "values": values, "advantages": weights, "returns": returns}
    by_token["importance"] = sampled.importance
    rollouts.keep(len(state.log) + 1, _rows(sampled, weights))
    groups = _groups(sampled.asked, sampled.answers, by_token | {"scores": sampled.scores, "finished": sampled.finished})
    row = _summary(sampled, groups, "critic" in trainers, getattr(rollouts.config, "turns", 1) > 1)
    row |= {"version": sampled.version, "staleness": len(state.log) - sampled.version}
    return Begun(groups, row | {"seconds": time.perf_counter() - started}, {who: [] for who in trainers})


def _rows(sampled: Sampled, advantages: Tensor) -> list[Row | dict[str, Any]]:
    """Return a row per sampled answer; log-probs and advantage are means over the answer's tokens that the policy wrote."""
    means = {"advantage": advantages, "logprob": sampled.logprobs}
    means |= {} if sampled.kl is None else {"reference_logprob": sampled.reference}
    counts = sum_segments(sampled.mask.float(), sampled.lengths)
    numbers = {name: sum_segments(values, sampled.lengths) / counts for name, values in means.items()}
    numbers |= {"score": sampled.scores, "finished": sampled.finished.bool()}
    prompts = [prompt for prompt, some in zip(sampled.asked, sampled.completions, strict=True) for _ in some]
    columns: dict[str, Any] = {name: column.tolist() for name, column in numbers.items()}
    columns |= {**sampled.parts, "prompt": prompts, "completion": sampled.flat}
    return [{"version": sampled.version, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)]


def _groups(asked: list[list[int]], answers: list[list[list[int]]], numbers: dict[str, Tensor]) -> list[Group]:
    """Return a `Group` per prompt. `numbers`: name → values by answer (`BY_ANSWER`) or by token."""
    sizes, counts = [sum(map(len, row)) for row in answers], [len(row) for row in answers]
    parts = {name: value.split(counts if name in BY_ANSWER else sizes) for name, value in numbers.items()}
    return [Group(asked[g], answers[g], **{name: part[g] for name, part in parts.items()}) for g in range(len(asked))]


def _updates(trainers: dict[str, Trainer], begun: Begun, source: Source, rollout: int, saver: Saver) -> None:
    config, seed = source.rollouts.config, source.rollouts.seed
    for update in range(len(begun.rows["policy"]), updates := config.updates):
        _update(trainers, begun, config, seed, rollout, update)
        if update + 1 < updates:
            saver.save_if_due()
            saver.end_if_asked()


def _update(trainers: dict[str, Trainer], rollout_state: Begun, config: RolloutSettings, seed: int, rollout: int, update: int) -> None:
    """Run a rollout's update number `update` (0-based) in each trainer; append the trainers' rows to `rollout_state`."""
    start = time.perf_counter()
    epoch, index = divmod(update, config.minibatches)
    order = np.random.default_rng([seed, rollout, epoch]).permutation(len(rollout_state.groups))
    part = np.array_split(order, config.minibatches)[index]
    minibatch = [rollout_state.groups[i] for i in sorted(part.tolist())]
    teaching = minibatch
    if len(trainers) == 1 and not config.entropy_weight:  # without an advantage a group has no gradient; one group must stay
        teaching = [group for group in minibatch if bool((group.advantages.abs() > ROUNDING).any())] or minibatch[:1]
    tokens, teaching_tokens = (sum(int(group.mask.sum()) for group in groups) for groups in (minibatch, teaching))
    left_out = (tokens - teaching_tokens, (len(minibatch) - len(teaching)) * config.answers)
    packed = pack([len(group) for group in teaching], config.compute.micro_batch_tokens)
    batches = [_collate([teaching[i] for i in row], (0, 0) if number else left_out) for number, row in enumerate(packed)]
    step = (rollout - 1) * config.updates + update + 1
    for who, trainer in trainers.items():
        place, whole = (DTYPES[trainer.precision], trainer.device), trainer.parallel.mesh.layout.axes <= {"data", "pipeline"}
        with exact_passes(*place, who == "policy" and whole and can_be_exact(*place)):  # ratios are 1 where nothing was updated
            rollout_state.rows[who].append(trainer.step(step, batches, seed))
    rollout_state.row["seconds"] += time.perf_counter() - start


def _finish(begun: Begun, rollout: int) -> Row:
    """Return a rollout's row of the training log; losses and metrics are means over the rollout's updates."""
    mean = {who: {name: sum(row[name] for row in some) / len(some) for name in some[0]} for who, some in begun.rows.items()}
    rows = [row for some in begun.rows.values() for row in some]
    policy, critic = mean["policy"], mean.get("critic")
    columns = ("loss", "learning_rate", "gradient_norm", "clip_fraction", "approximate_kl", "entropy")
    return {
        "step": rollout, **begun.row, **{name: policy[name] for name in columns}, "tokens": sum(int(row["tokens"]) for row in rows),
        "skipped": int(all(row["skipped"] for row in rows)), "skipped_updates": sum(row["skipped"] for row in rows),
        **({"value_loss": critic["loss"], "value_error": critic["value_error"]} if critic else {}),
    }  # fmt: skip


def _summary(sampled: Sampled, groups: Sequence[Group], critic: bool, several: bool) -> Row:
    values = torch.cat([group.values for group in groups])
    returns = torch.cat([group.returns for group in groups])
    spread, unexplained = (float(numbers.var(correction=0)) for numbers in (returns, returns - values))
    return {
        "score": sampled.score, **({} if sampled.kl is None else {"kl": sampled.kl}),
        **({"gold": sum(sampled.parts["verifier"]) / len(sampled.scores)} if {"verifier", "reward_model"} <= sampled.parts.keys() else {}),
        **({"explained_variance": 1.0 - unexplained / spread if spread else 0.0} if critic else {}),
        **{f"drawn_{name}": float(count) for name, count in zip(("answers", "tokens", "unscored"), sampled.drawn, strict=True)},
        "unequal_prompts": sampled.unequal, "answer_tokens": float(sampled.mask.sum()) / len(sampled.scores),
        **({"turns": 1.0 + sum(len(one.replies) for one in sampled.flat) / len(sampled.scores)} if several else {}),
        "finished": float(sampled.finished.mean()),
        **({} if sampled.mismatch is None else {"mismatch": sampled.mismatch, "importance": float(sampled.importance.mean())}),
    }  # fmt: skip


def _collate(groups: Sequence[Group], left_out: tuple[int, int]) -> PpoBatch:
    masks = [[part.tolist() for part in g.mask.split([len(answer) for answer in g.answers])] for g in groups]
    targets = Targets.from_answers([g.prompt for g in groups], [g.answers for g in groups], masks)
    by_token = {name: torch.cat([getattr(g, name) for g in groups]) for name in BY_TOKEN}
    return PpoBatch(targets, **by_token, left_out=left_out[0], answers_left_out=left_out[1])


def _saving(folder: Path, trainers: dict[str, Trainer], identity: dict[str, Any], config: RolloutSettings, state: State) -> Job | None:
    """Return a job that writes a copy of the state. If moments are in files, which are not copied, write the state now and return None."""
    ranks, done = trainers["policy"], 0
    tensors = {f"{who}.{name}": value for who, u in trainers.items() for name, value in u.tensors().items()}
    record = {**identity, "precision": ranks.precision, "numbers": state.numbers, **progress("rollout", config.rollouts, state.log)}
    if state.begun is not None:
        tensors, record["begun"], done = tensors | state.begun.tensors(), state.begun.record(), len(state.begun.rows["policy"])
    if state.sampled is not None:
        record["sampled"] = state.sampled.text()
    step = len(state.log) * config.updates + done
    return ranks.parallel.save_state(folder, step, tensors, record, config.optimizer.state_in == "memory")


def _resume(folder: Path | None, trainers: dict[str, Trainer], identity: dict[str, Any], config: RolloutSettings) -> State:
    own = {f"{who}.{name}": tensor for who, trainer in trainers.items() for name, tensor in trainer.tensors().items()}
    state = None if folder is None else trainers["policy"].parallel.load_state(folder, own, {})
    if state is None:
        return State({"score_mean": 0.0, "score_scale": 1.0}, [])
    tensors, record = state
    check_identity(folder, record, identity)
    for who, trainer in trainers.items():
        prefix = f"{who}."
        trainer.restore({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    rollout_state = Begun.read(tensors, record["begun"]) if "begun" in record else None
    return State(record["numbers"], record["log"], rollout_state, Sampled.read(record["sampled"]) if "sampled" in record else None)
