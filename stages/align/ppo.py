"""Proximal policy optimization of a policy against a reward model, verifiers or both."""

from __future__ import annotations

from puna.models.training.settings import PpoSettings
from puna.stages.contract import Model, Prompts, StageRun, stage
from puna.stages.training.rollouts import RolloutsConfig, needs, optimize
from puna.stages.verifiers.scoring import verifiers_named


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

    optimize(policy, reward_model or (), prompts, judges or (), config, run, train_ppo, critic=True)
