"""One round of alignment: its steps, and what it hands to the next one."""

from __future__ import annotations

from dataclasses import dataclass

from puna.flows.program import Output, publish, setting, step
from puna.stages.align.average import average
from puna.stages.align.data_quality import data_quality
from puna.stages.align.dpo import dpo
from puna.stages.align.ppo import ppo
from puna.stages.align.preferences import preferences
from puna.stages.align.prompts import PromptsConfig, prompts
from puna.stages.align.rejection_sample import rejection_sample
from puna.stages.align.reward_model import reward_model
from puna.stages.align.sample import sample
from puna.stages.align.sft import sft
from puna.stages.pretrain.evaluate import evaluate


@dataclass(frozen=True)
class State:
    """The aligned model and what measured it, the second model that answers beside it, and the data gathered so far.

    `start`: the model that reward model and SFT start from; none: the policy.
    """

    policy: Output
    other: Output
    instructions: tuple[Output, ...]
    preferences: tuple[Output, ...] = ()
    evaluation: Output | None = None
    start: Output | None = None


def one_round(
    number: int, before: State, tasks: Output, heldout: Output, *, last: bool, development: Output | None = None
) -> State:
    """Answers to `tasks`, preferences, reward model, rejection sampling, SFT, DPO (PPO in the last round), averaging, evaluation.

    Steps are labelled with `number`, which also draws the random numbers of the round. No alias is set but the reward model's.
    `development`: held-out prompts on which the weights of the average are searched.
    """
    start = before.start or before.policy
    answers = step(sample, number=number, models=[before.policy, before.other], prompts=tasks)
    newest = step(preferences, number=number, answers=answers, prompts=tasks)
    pairs = (*before.preferences, newest)
    reward = publish("reward", step(reward_model, number=number, model=start, preferences=pairs))
    best = step(rejection_sample, number=number, answers=answers, reward_model=reward, prompts=tasks)
    data = (*before.instructions, step(data_quality, number=number, through="instructions", instructions=best, model=before.policy))
    tuned = step(sft, number=number, through="model", model=start, instructions=data)
    preferred = step(dpo, number=number, through="model", model=tuned, preferences=[newest])
    parts = [tuned, preferred]
    if last and (rewarded := step(ppo, number=number, off=True, policy=preferred, reward_model=reward, prompts=tasks)):
        parts = [preferred, rewarded]
    policy = step(average, number=number, through="models", models=parts, prompts=development)
    measured = step(evaluate, f"evaluate_round_{number}", field="evaluate", model=policy, prompts=heldout)
    return State(policy, tuned, data, pairs, measured, before.start)


def new_prompts(number: int) -> Output:
    """New training prompts for round `number`: the slice after those of the first finetuning and earlier rounds.

    The seed and the held-out share stay, so that no held-out question becomes a training question.
    """
    train = setting("round_prompts", 400, minimum=1, maximum=10_000_000, description="New training prompts of each task in each round")

    def slice_of(config: PromptsConfig) -> PromptsConfig:
        skip = config.skip + config.train + (number - 1) * train
        return config.model_copy(update={"train": train, "heldout": 0, "skip": skip})

    return step(prompts, f"prompts_{number}", field="prompts", adapt=slice_of)
