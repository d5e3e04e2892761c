"""Reinforcement learning of a policy against a reward model, verifiers or both: PPO, and critic-free GRPO and RLOO."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from puna.models.serving import without_vllm
from puna.models.training.rl_settings import GrpoSettings, PpoSettings, RolloutSettings
from puna.stages.contract import Facts, Figure, Model, Prompts, StageRun, stage
from puna.stages.conversations import answer_text, as_text
from puna.stages.training import train
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.lora import adapters
from puna.stages.training.needs import adaptable, one_tokenizer
from puna.stages.training.rewards import REWARDS, Reward, RewardSettings, rewards_of
from puna.stages.training.settings import AdapterConfig
from puna.stages.training.turns import TurnsConfig, in_turns, turns_of, with_tools
from puna.stages.verifiers.judges import Tools
from puna.stages.verifiers.registry import from_text
from puna.stages.verifiers.scoring import Scorer, leaves, verifiers_named
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.stages.training.rewards import Completions, Ids, Rewards


class RolloutsConfig(RewardSettings, RolloutSettings, AdapterConfig):
    """Settings of the rollouts, the rewards, and the weights to train."""

    gold: bool = Field(False, description="With reward=reward_model: also score about 8 rollouts with verifiers, and plot both against KL")

    @model_validator(mode="after")
    def _consistent_rewards(self) -> Self:
        if self.engine == "vllm" and self.method == "lora":
            raise ValueError("engine=vllm loads the policy's full matrices, without merging adapters; set method to full")
        if self.reward != "reward_model":
            self.refuse_unused(f"reward {self.reward} always has the verifiers' scores", "gold")
        elif not self.gold and getattr(self, "turns", 1) == 1:
            self.refuse_unused("reward reward_model without gold asks no verifier", "scoring")
        return self


def needs(config: RolloutsConfig, facts: Facts) -> list[str]:
    """Return messages about a missing chat template, memory, engine package, or reward model with the policy's tokenizer."""
    missing = [] if config.reward == "verifier" or "reward_model" in facts.inputs else [_without(config)]
    missing += [*without_vllm(config.engine, "engine"), *config.scoring.unmet("scoring")]
    missing += ["generate: only CPUs can have ranks that only sample; set it to 0"] * (config.generate > 0 and train.device().type != "cpu")
    return [*missing, *one_tokenizer(facts, "policy", "reward_model"), *adaptable(facts, "policy", config, config)]


def _without(config: RolloutsConfig) -> str:
    return f"reward={config.reward} needs a reward_model; give one, or set reward=verifier"


class PpoConfig(PpoSettings, RolloutsConfig):
    """Settings of PPO."""


@stage(kind="model", device=True, ranks=True, needs=needs, named=verifiers_named)
def ppo(
    policy: Model, reward_model: list[Model] | None, prompts: Prompts, judges: list[Model] | None, config: PpoConfig, run: StageRun
) -> None:
    """Train by PPO with the starting policy as frozen reference (Schulman et al. 2017; Ziegler et al. 2019).

    `reward` chooses a frozen reward model's output (see `ensemble` for several models), the score from each prompt's verifier, or their
    product. The critic starts from the first reward model (by digest) or, without one, from the policy with a zero head. `judges` are
    models that verifiers refer to. If its verifier fails, an answer has score 0 and is counted in the metric `unscored_answers`. Prompts
    that the chat template rejects, or that may not fit into a row with their answers, are in `dropped`; see `bad_rows`."""
    from puna.models.training.ppo import train_ppo

    _optimize(policy, reward_model or (), prompts, judges or (), config, run, train_ppo, critic=True)


class GrpoConfig(GrpoSettings, TurnsConfig, RolloutsConfig):
    reward: Reward = Field("verifier", description=REWARDS)

    @model_validator(mode="after")
    def _steps_are_the_verifiers(self) -> Self:
        if self.credit == "steps" and self.reward == "reward_model":
            raise ValueError("credit=steps takes its steps from the verifier; set reward to verifier or product")
        return self


@stage(kind="model", device=True, ranks=True, needs=needs, named=verifiers_named)
def grpo(
    policy: Model, reward_model: list[Model] | None, prompts: Prompts, judges: list[Model] | None, config: GrpoConfig, run: StageRun
) -> None:
    """Train by comparing the answers to a prompt: GRPO (Shao et al. 2024) or RLOO (Ahmadian et al. 2024), see `baseline`.

    The default loss is PPO's clipped surrogate, averaged over the tokens of an update as in DAPO; `surrogate`, `ratio` and `normalizer`
    change it. `kl_coefficient` times the KL divergence to the starting policy is subtracted from rewards. For rewards, `judges` and dropped
    prompts, see `ppo`. A prompt whose answers all have the same reward gives no gradient; `unequal_prompts` logs the others' share."""
    from puna.models.training.ppo import train_grpo

    _optimize(policy, reward_model or (), prompts, judges or (), config, run, train_grpo, critic=False)


def _optimize(
    policy: Artifact, reward_models: Sequence[Artifact], prompts: Artifact, judges: Sequence[Artifact], config: RolloutsConfig,
    run: StageRun, drive: Callable[..., list[dict[str, float]]], critic: bool,
) -> None:  # fmt: skip
    """Train the policy with `drive` (`train_ppo` or `train_grpo`) on the prompts, and save it.

    `critic`: train a value model, too; see `ppo`."""
    from puna.models.generation.vllm import VllmEngine
    from puna.models.training.parallel.groups import Groups
    from puna.models.training.parallel.parallel import parallel, part_of
    from puna.models.training.parallel.staged_engine import held_engine
    from puna.models.training.rollouts import Rollouts

    _check(policy, reward_models, config, run)
    groups = Groups(config.compute.layout, config.generate, tensor=config.generate_tensor)
    layout = groups.mesh.layout
    model, tokenizer = train.load_model(policy, "lm", quantization=config.quantization, layout=layout)
    scalars = [train.load_model(one, "scalar", layout=layout)[0] for one in sorted(reward_models, key=lambda one: one.data_digest)]
    # Frozen models compute in the policy's precision; with fp32, the KL divergence would include bf16's rounding error.
    precision = train.training_precision(config.compute, run)
    frozen = partial(part_of, layout=layout, mesh=groups.mesh, device=train.device(), precision=precision)
    steps = getattr(config, "credit", "") == "steps"
    bad, limit = BadRows(config, run.stage), Limit(config.compute.micro_batch_tokens, "compute.micro_batch_tokens")
    talk = config if isinstance(config, TurnsConfig) else TurnsConfig()
    given = [with_tools(row, talk.tools) for row in prompts.read().to_pylist()]
    chosen_rows, rendered = train.training_prompts(given, model, tokenizer, config.answers, config.max_tokens, limit, bad)
    if len(rendered) < config.prompts:
        left = f"{len(chosen_rows)} training prompts" + (f", {len(bad.dropped)} of them dropped" if bad.dropped else "")
        raise PunaError(f"{run.stage}: a rollout needs {config.prompts} prompts, but {prompts.id} has {left}")
    bad.write(run)
    rows, prompt_ids = [row for row, _ in rendered], [ids for _, ids in rendered]
    scorer = Scorer(rows, config.scoring, run, judges, needed=run.stage) if config.gold or config.reward != "reward_model" else None
    if steps and not any(leaf.stepwise for row in rows for leaf in leaves(from_text(row["verifier"]))):
        raise PunaError(f"{run.stage}: credit=steps needs verifiers that check steps, such as chain; no prompt has one: set credit=answer")
    networks = [] if config.reward == "verifier" else [frozen(one) for one in scalars]
    kinds = config.compute.micro_batch_tokens, config.floor, config.ensemble, steps, groups.mesh.index == 0
    rewards = replace(rewards_of(scorer, networks, rows, prompt_ids, tokenizer, *kinds), watched=config.reward == "reward_model")
    turns = in_turns(rows, prompt_ids, tokenizer, talk, Tools(config.scoring, run), run.stage)
    if config.reward == "product" and config.center == "start":
        untrained = groups.answering(parallel(model, layout, groups.mesh, train.device()))
        rewards = _center(rewards, partial(turns, held_engine(untrained)), prompt_ids, tokenizer.stop_ids, config, run)
    valuing = (scalars[0] if scalars else train.load_model(policy, "scalar", new=True, layout=layout)[0]) if critic else None
    reference, centering = frozen(model), 0 if scorer is None else scorer.failures[0]
    with train.divergence_named(run.stage), adapters(model, config, run) as scales:
        other = VllmEngine(run.scratch / "vllm", tokenizer, memory=config.gpu_memory).holding if config.engine == "vllm" else None
        answered = groups, _keep(rows, prompt_ids, tokenizer, run), turns, train.device()
        between = replace(rewards, gold=None).parts if rewards.watched else None
        log = drive(
            Rollouts(model, reference, rewards.parts, prompt_ids, tokenizer.stop_ids, config, run.seed("loop"), *answered, between, other),
            *([valuing] if valuing is not None else []), checkpoint_dir=run.scratch / train.CHECKPOINTS,
            on_step=lambda row: run.progress(row["step"], config.rollouts, f"reward {row['score']:.3f}"), rate_scales=scales,
        )  # fmt: skip
    if scorer is not None:
        centering, scorer.failures = json.loads(groups.sampler(json.dumps([centering, scorer.failures])))
        scorer.report(centering + int(sum(row["drawn_unscored"] for row in log)))
    train.write_log(log, run)
    _budget(log, config, run)
    _against_kl(log, run)
    train.report_ends(log, ("score", "gold", "kl", "entropy", "explained_variance"), run)
    train.save_model(model, tokenizer, run.folder)


def _check(policy: Artifact, reward_models: Sequence[Artifact], config: RolloutsConfig, run: StageRun) -> None:
    if not reward_models and config.reward != "verifier":
        raise PunaError(f"{run.stage}: {_without(config)}")
    train.check_one_tokenizer([policy, *reward_models], f"{run.stage}: the reward models need the policy's tokenizer")


def _keep(rows: Sequence[dict[str, Any]], asked: Ids, tokenizer: Tokenizer, run: StageRun) -> Callable[[int, Any], None]:
    """Return a function that writes a rollout's answers to the table `rollouts`, once. It raises PunaError for None, or without a score."""
    names = {tuple(ids): row["id"] for ids, row in zip(asked, rows, strict=True)}

    def rollout_rows(rollout: int, answers: list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
        if answers is None:
            raise PunaError(f"{run.stage}: the answers of rollout {rollout} are lost; delete {run.scratch} to start again")
        counts: Counter[str] = Counter()
        if 0 not in [answer.pop("unscored", 0) for answer in answers]:
            problem = f"none of the {len(answers)} answers of rollout {rollout} could be scored"
            raise PunaError(f"{run.stage}: {problem}; check the verifiers and their judge, and delete {run.scratch} to start again")
        for answer in answers:
            name, one = names[tuple(answer.pop("prompt"))], answer.pop("completion")
            text = as_text(turns_of(one, tokenizer)) if one.replies else answer_text(one.tokens, tokenizer)
            own = {"text": text, "tokens": one.tokens, "turns": 1 + len(one.replies)}
            own["steps"] = [reward for _, reward in answer.pop("steps")] if "steps" in answer else None
            yield {"step": rollout, "prompt_id": name, "sample": counts[name], **own, **answer}
            counts[name] += 1

    return lambda rollout, answers: run.rows_once(str(rollout), lambda: list(rollout_rows(rollout, answers)), "rollouts")


def _budget(log: Sequence[dict[str, float]], config: RolloutsConfig, run: StageRun) -> None:
    """Record the numbers of verifier calls, sampled tokens, updates, and answers x epochs. `_center` has started the first two counts."""
    checked = [row for row in log if config.reward != "reward_model" or "gold" in row]
    run.metric("checker_calls", float(run.metrics.get("checker_calls", 0.0)) + sum(row["drawn_answers"] for row in checked))
    run.metric("sampled_tokens", float(run.metrics.get("sampled_tokens", 0.0)) + sum(row["drawn_tokens"] for row in log))
    run.metric("updates", len(log) * config.epochs * config.minibatches)
    run.metric("trained_answers", len(log) * config.epochs * config.prompts * config.answers)


def _center(rewards: Rewards, answer: Callable[..., Completions], asked: Ids, stop: Any, config: RolloutsConfig, run: StageRun) -> Rewards:
    """Return the rewards, centered on the starting policy's answers to `config.prompts` random prompts, the same ones after a restart."""
    from puna.models.generation import SamplingParams

    some = [asked[i] for i in run.generator("center").permutation(len(asked))[: config.prompts].tolist()]
    params = SamplingParams(
        n=config.answers, temperature=config.temperature, max_tokens=config.max_tokens, stop=tuple(stop), seed=run.seed("center")
    )
    answers = answer(some, params)
    run.metric("checker_calls", sum(map(len, answers)))
    run.metric("sampled_tokens", sum(sum(one.mask) for row in answers for one in row))
    return rewards.center_by(some, answers, run)


def _against_kl(log: Sequence[dict[str, float]], run: StageRun) -> None:
    """Plot rewards and verifier scores against the KL divergence to the reference (Gao et al. 2023)."""
    points = [row for row in log if "kl" in row]
    series: dict[str, list[tuple[Any, float]]] = {"reward": [(row["kl"], row["score"]) for row in points]}
    if gold := [(row["kl"], row["gold"]) for row in points if "gold" in row]:
        series["verifiers"] = [*gold]
    note = "Where the reward rises and the verifiers' score falls, the reward is over-optimized."
    x, y = "KL divergence to the reference, nats per answer", "mean score of the rollout's answers"
    if len(points) > 1:
        run.figure("against_kl", Figure("Reward against KL divergence", x, y, series, "scatter", note=note))
