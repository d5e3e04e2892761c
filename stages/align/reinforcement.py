"""Reinforcement learning of a policy against a reward model, verifiers or both: PPO, and GRPO or RLOO without a critic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from puna.models.training.settings import GrpoSettings, PpoSettings, RolloutSettings
from puna.stages.contract import Facts, Figure, Model, Prompts, StageRun, stage
from puna.stages.conversations import prompt_ids
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.lora import adapted
from puna.stages.training.needs import chat_template, one_tokenizer, trained
from puna.stages.training.rewards import CENTER, ENSEMBLE, REWARDS, Center, Ensemble, Reward, gold_of, rewards_of
from puna.stages.training.settings import AdapterConfig
from puna.stages.training.train import (
    CHECKPOINTS,
    check_one_tokenizer,
    context_limit,
    divergence_named,
    load_model,
    save_model,
    training_precision,
    write_log,
)
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.stages.verifiers.settings import ScoringConfig
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.transformer import Transformer
    from puna.stages.training.rewards import Completions, Ids, Rewards, Scores


class RolloutsConfig(RolloutSettings, AdapterConfig):
    """Settings of the sampled answers, of their rewards, and of the weights to train."""

    reward: Reward = Field("reward_model", description=REWARDS)
    floor: float = Field(
        0.0, ge=0, le=100, description="With reward product: added to the sigmoid, so that a right answer counts whatever its number"
    )
    center: Center = Field("start", description=CENTER)
    ensemble: Ensemble = Field("mean", description=ENSEMBLE)
    gold: bool = Field(
        False,
        description="With reward reward_model: score the answers of about eight rollouts by the prompts' verifiers, too, and show both "
        "against the KL divergence",
    )
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits within which the prompts' verifiers score the answers")

    @property
    def scored(self) -> bool:
        """True if verifiers score the answers."""
        return self.gold or self.reward != "reward_model"


def needs(config: RolloutsConfig, facts: Facts) -> list[str]:
    """Require a chat template, the reward model that `reward` uses, one tokenizer for both, and memory."""
    missing = [] if config.reward == "verifier" or "reward_model" in facts.inputs else [_without(config)]
    one = one_tokenizer(facts, "policy", "reward_model")
    memory = trained(facts, "policy", config.optimizer, config.method)
    return [*missing, *chat_template(facts, "policy"), *one, *memory, *config.unmet()]


def _without(config: RolloutsConfig) -> str:
    return f"reward={config.reward} needs a reward_model; give one, or set reward=verifier"


class PpoConfig(PpoSettings, RolloutsConfig):
    """Settings of the optimization."""


@stage(kind="model", device=True, needs=needs, named=verifiers_named)
def ppo(
    policy: Model, reward_model: list[Model] | None, prompts: Prompts, judges: list[Model] | None, config: PpoConfig, run: StageRun
) -> None:
    """Train by PPO with a frozen reference, the starting policy (Schulman et al. 2017; Ziegler et al. 2019).

    The reward is a frozen reward model's number (of several: see `ensemble`), the score of each prompt's verifier, or their product; see
    `reward`. The critic starts as the first reward model, without one as the policy with a head of zeros. `judges` are models that
    verifiers name. An answer whose verifier fails has the score 0 and is counted in the metric `unscored_answers`. Prompts that the
    chat template refuses, and those that with their answers may be longer than a row, are in `dropped`; see `bad_rows`.
    """
    from puna.models.training.ppo import train_ppo

    _optimize(policy, reward_model or (), prompts, judges or (), config, run, train_ppo, critic=True)


class GrpoConfig(GrpoSettings, RolloutsConfig):
    """Settings of the optimization."""

    reward: Reward = Field("verifier", description=REWARDS)


@stage(kind="model", device=True, needs=needs, named=verifiers_named)
def grpo(
    policy: Model, reward_model: list[Model] | None, prompts: Prompts, judges: list[Model] | None, config: GrpoConfig, run: StageRun
) -> None:
    """Train by comparing each answer with the others to its prompt: GRPO (Shao et al. 2024) or RLOO (Ahmadian et al. 2024), see `baseline`.

    The loss is PPO's clipped surrogate, a mean over the tokens of an update (as DAPO has it); the KL divergence to the starting
    policy is taken off the reward of the answer. Rewards, `judges` and dropped prompts are those of `ppo`. Prompts whose answers
    all have one reward teach nothing: the log's `unequal_prompts` is the share of the others.
    """
    from puna.models.training.ppo import train_grpo

    _optimize(policy, reward_model or (), prompts, judges or (), config, run, train_grpo, critic=False)


def _optimize(
    policy: Artifact,
    reward_models: Sequence[Artifact],
    prompts: Artifact,
    judges: Sequence[Artifact],
    config: RolloutsConfig,
    run: StageRun,
    drive: Callable[..., list[dict[str, float]]],
    critic: bool,
) -> None:
    """Train the policy by `drive` (`train_ppo` or `train_grpo`) on the prompts, and save it.

    The `critic` starts as the first reward model (by digest), without one as the policy with a head of zeros."""
    from puna.models.machine import DTYPES
    from puna.models.training.rollouts import Rollouts

    if not reward_models and config.reward != "verifier":
        raise PunaError(f"{run.stage}: {_without(config)}")
    check_one_tokenizer([policy, *reward_models], f"{run.stage}: reward models read the policy's tokens")
    model, tokenizer = load_model(policy, "lm", quantization=config.quantization)
    scalars = [load_model(one, "scalar")[0] for one in sorted(reward_models, key=lambda one: one.data_digest)]
    # What is only asked computes as the policy does: a KL divergence to fp32 would have bf16's rounding in it.
    dtype = DTYPES[training_precision(config.compute, run)]
    within = context_limit(model, config.max_tokens)
    rows, asked = _training_prompts(prompts, lambda row: prompt_ids(tokenizer, row), within, config, run)
    scorer = Scorer(rows, config.scoring, run, judges, needed=run.stage) if config.scored else None
    used = [] if config.reward == "verifier" else scalars
    frozen = [copy.deepcopy(scalar).requires_grad_(False).to(dtype) for scalar in used]
    judging = None if config.reward == "reward_model" else scorer
    rewards = rewards_of(judging, frozen, rows, asked, tokenizer, config.compute.micro_batch_tokens, config.floor, config.ensemble)
    if config.reward == "product" and config.center == "start":
        rewards = _centered(rewards, model, asked, tokenizer.stop_ids, config, run)
    valuing = (scalars[0] if scalars else load_model(policy, "scalar", new=True)[0]) if critic else None
    reference = copy.deepcopy(model).requires_grad_(False).to(dtype)
    with divergence_named(run.stage), adapted(model, config, run) as scales:
        watch = None if scorer is None or config.reward == "verifier" else _gold(gold_of(scorer, rows, asked, tokenizer))
        log = drive(
            Rollouts(model, reference, rewards, asked, tokenizer.stop_ids, config, run.seed("loop"), watch),
            *([valuing] if valuing is not None else []),
            checkpoint_dir=run.scratch / CHECKPOINTS,
            on_step=lambda row: run.progress(row["step"], config.rollouts, f"reward {row['score']:.3f}"),
            rate_scales=scales,
        )
    if scorer is not None:
        scorer.report()
    write_log(log, run)
    _against_kl(log, run)
    for name in ("score", "gold", "kl", "entropy", "explained_variance"):
        if name in log[0]:
            run.metric(f"first_{name}", log[0][name])
            run.metric(f"final_{name}", log[-1][name])
    save_model(model, tokenizer, run.folder)


def _centered(rewards: Rewards, policy: Transformer, asked: Ids, stop: Sequence[int], config: RolloutsConfig, run: StageRun) -> Rewards:
    """Center the rewards by the untrained policy's answers to as many prompts as a rollout has; the same when a run resumes."""
    from puna.models.generation import Engine, SamplingParams

    some = [asked[i] for i in run.generator("center").permutation(len(asked))[: config.prompts].tolist()]
    params = SamplingParams(
        n=config.answers, temperature=config.temperature, max_tokens=config.max_tokens, stop=tuple(stop), seed=run.seed("center")
    )
    centered = rewards.centered(some, Engine(policy).generate(some, params))
    run.metric("center", centered.center)
    return centered


def _gold(scores: Scores) -> Callable[[Ids, Completions], dict[str, float]]:
    """Return a function that computes the mean of the verifiers' scores."""

    def watch(prompts: Ids, completions: Completions) -> dict[str, float]:
        found = [score for some in scores(prompts, completions) for score in some]
        return {"gold": sum(found) / len(found)}

    return watch


def _against_kl(log: Sequence[dict[str, float]], run: StageRun) -> None:
    """Plot rewards and verifiers' scores against the KL divergence to the reference (Gao et al. 2023)."""
    points = [row for row in log if "kl" in row]
    series: dict[str, list[tuple[Any, float]]] = {"reward": [(row["kl"], row["score"]) for row in points]}
    if gold := [(row["kl"], row["gold"]) for row in points if "gold" in row]:
        series["verifiers"] = [*gold]
    figure = Figure(
        title="Reward against KL divergence",
        x="KL divergence to the reference, nats per answer",
        y="mean score of the rollout's answers",
        series=series,
        kind="scatter",
        note="Where the reward rises and the verifiers' score falls, the reward is over-optimized.",
    )
    if len(points) > 1:
        run.figure("against_kl", figure)


def _training_prompts(
    prompts: Artifact, ids_of: Callable[[dict[str, Any]], list[int]], within: Limit, config: RolloutsConfig, run: StageRun
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the training prompts and their ids; drop those that are too long. `within`: longest context of the policy."""
    rows = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    what = f"the prompt with {config.answers} answers of max_tokens={config.max_tokens}"
    limit = Limit(config.compute.micro_batch_tokens, "compute.micro_batch_tokens", what)
    bad = BadRows(config, run.stage)
    answers = config.answers * config.max_tokens
    rendered = bad.examples(rows, ids_of, lambda ids: len(ids) + config.max_tokens, within, (lambda ids: len(ids) + answers, limit))
    if rows:
        bad.check_left(len(rendered), f"{len(rows)} training prompts")
    if len(rendered) < config.prompts:
        left = f"{len(rows)} training prompts" + (f", {len(bad.dropped)} of them dropped" if bad.dropped else "")
        raise PunaError(f"{run.stage}: a rollout takes {config.prompts} prompts, but {prompts.id} has {left}")
    bad.write(run)
    return [row for row, _ in rendered], [ids for _, ids in rendered]
