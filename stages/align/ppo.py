"""Proximal policy optimisation of a policy against a reward model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from puna.stages.align.fitting import check_one_tokenizer, divergence_named, load_model, save_model, write_log
from puna.stages.contract import Model, Prompts, SeededConfig, StageRun, stage
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.training.ppo import PpoConfig as Settings


class PpoConfig(SeededConfig):
    """How the policy is optimised."""

    rollouts: int = Field(8, ge=1, description="Times that answers are sampled")
    prompts: int = Field(64, ge=1, description="Prompts of a rollout")
    answers: int = Field(4, ge=1, description="Answers to each prompt of a rollout")
    epochs: int = Field(2, ge=1, description="Passes over a rollout")
    minibatches: int = Field(2, ge=1, description="Updates in each pass")
    learning_rate: float = Field(3e-4, gt=0, le=1, description="Learning rate of the policy")
    critic_learning_rate: float = Field(3e-4, gt=0, le=1, description="Learning rate of the critic")
    warmup_steps: int = Field(0, ge=0, description="Updates in which both rates rise from 0")
    clip: float = Field(0.2, gt=0, lt=1, description="Clip range of the probability ratio")
    value_clip: float = Field(0.2, gt=0, description="Clip range of a step of the critic")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda")
    entropy_weight: float = Field(0.0, ge=0, description="Weight of the entropy bonus")
    kl_coefficient: float = Field(0.05, ge=0, description="Penalty on the KL divergence to the reference, per nat and token")
    kl_target: float | None = Field(
        None, gt=0, description="KL to the reference that the penalty is steered to, nats per answer; none: fixed penalty"
    )
    kl_horizon: float = Field(10_000.0, gt=0, description="Answers over which the penalty is steered")
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature, and that of every log-probability")
    max_tokens: int = Field(64, ge=1, description="Longest answer, its end token included, tokens")
    normalize_rewards: bool = Field(True, description="Shift and scale rewards to mean 0 and variance 1 of the first rollout")
    unfinished_penalty: float = Field(1.0, ge=0, description="Taken off the reward of an answer that was cut off")
    row_tokens: int = Field(4096, ge=16, description="Tokens of one packed row, tokens")

    @model_validator(mode="after")
    def _settings_hold(self) -> PpoConfig:
        self.settings().training(self.learning_rate)
        if self.answers * self.max_tokens >= self.row_tokens:
            raise ValueError(f"row_tokens {self.row_tokens} cannot hold {self.answers} answers of {self.max_tokens} tokens and a prompt")
        return self

    def settings(self) -> Settings:
        """The driver's settings."""
        from puna.models.training.ppo import PpoConfig as Settings

        values = self.model_dump(exclude={"seed", "normalize_rewards", "row_tokens"})
        return Settings(**values, normalize_scores=self.normalize_rewards, capacity=self.row_tokens)


@stage(kind="model")
def ppo(policy: Model, reward_model: Model, prompts: Prompts, config: PpoConfig, run: StageRun) -> None:
    """PPO with a frozen reward model, a frozen reference (the starting policy) and a critic that starts as the
    reward model (Schulman et al. 2017; Ziegler et al. 2019).
    """
    from puna.models.training.ppo import reward_model_scorer, train_ppo

    check_one_tokenizer([policy, reward_model], "ppo: the reward model reads the policy's tokens")
    model, tokenizer = load_model(policy, "lm")
    scorer, _ = load_model(reward_model, "scalar")
    rows = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    if len(rows) < config.prompts:
        raise PunaError(f"ppo: a rollout takes {config.prompts} prompts, but {prompts.id} has {len(rows)} training prompts")
    asked = [tokenizer.chat([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True) for row in rows]
    longest = max(range(len(asked)), key=lambda i: len(asked[i]))
    if (needed := len(asked[longest]) + config.answers * config.max_tokens) > config.row_tokens:
        raise PunaError(
            f"ppo: prompt {rows[longest]['id']} and {config.answers} answers of max_tokens={config.max_tokens} may take {needed} tokens, "
            f"but a row holds row_tokens={config.row_tokens}; raise row_tokens"
        )
    with divergence_named(run.stage):
        log = train_ppo(
            model,
            copy.deepcopy(model).requires_grad_(False),
            reward_model_scorer(copy.deepcopy(scorer).requires_grad_(False), config.row_tokens),
            scorer,
            asked,
            (tokenizer.eot, tokenizer.eos),
            config.settings(),
            run.seed("loop"),
            checkpoint_dir=run.scratch / "training",
            on_step=lambda row: run.progress(row["step"], config.rollouts, f"reward {row['score']:.3f}"),
        )
    write_log(log, run)
    for name in ("score", "kl", "entropy", "explained_variance"):
        run.metric(f"first_{name}", log[0][name])
        run.metric(f"final_{name}", log[-1][name])
    save_model(model, tokenizer, run.folder)
