"""`align`: a base model, one's own or an imported one, to an aligned model, in rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from puna.flows.program import Output, flow, publish, setting, step
from puna.stages.align.average import average
from puna.stages.align.data_quality import data_quality
from puna.stages.align.dpo import dpo
from puna.stages.align.instructions import instructions
from puna.stages.align.ppo import ppo
from puna.stages.align.preferences import preferences
from puna.stages.align.prompts import PromptsConfig, prompts
from puna.stages.align.rejection_sample import rejection_sample
from puna.stages.align.reward_model import reward_model
from puna.stages.align.sample import sample
from puna.stages.align.settings import SftConfig
from puna.stages.align.sft import sft
from puna.stages.contract import Kind
from puna.stages.pretrain.evaluate import evaluate


@dataclass(frozen=True)
class State:
    """The aligned model, the second model that answers beside it, and the data gathered so far."""

    policy: Output
    other: Output
    instructions: tuple[Output, ...]
    preferences: tuple[Output, ...] = ()


@flow
def align(
    model: Annotated[Output, Kind("model")],
    demonstrations: list[Annotated[Output, Kind("instructions")]] | None = None,
    judged: list[Annotated[Output, Kind("preferences")]] | None = None,
) -> Output:
    """A model to an aligned model: supervised finetuning on gold answers, then rounds; with instructions and preferences of one's own."""
    rounds = setting("rounds", 2, minimum=0, maximum=20, description="Rounds of alignment")
    tasks = step(prompts)
    gold = [step(instructions, prompts=tasks), *(demonstrations or [])]
    policy = step(sft, "sft_first", through="model", model=model, instructions=gold)
    other = step(sft, "sft_lora", default=SftConfig(method="lora"), model=policy, instructions=gold)
    step(evaluate, "evaluate_sft", field="evaluate", model=policy, prompts=tasks)
    state = State(policy, other, tuple(gold), tuple(judged or []))
    for number in range(1, rounds + 1):
        state = align_round(number, state, tasks, last=number == rounds)
    return publish("policy", state.policy)


def align_round(number: int, before: State, heldout: Output, *, last: bool) -> State:
    """Answers, preferences, reward model, rejection sampling, SFT, DPO (PPO in the last round), averaging."""

    tasks = new_prompts(number)
    answers = step(sample, number=number, models=[before.policy, before.other], prompts=tasks)
    newest = step(preferences, number=number, answers=answers, prompts=tasks)
    pairs = (*before.preferences, newest)
    reward = publish("reward", step(reward_model, number=number, model=before.policy, preferences=pairs))
    best = step(rejection_sample, number=number, answers=answers, reward_model=reward, prompts=tasks)
    data = (*before.instructions, step(data_quality, number=number, through="instructions", instructions=best, model=before.policy))
    tuned = step(sft, number=number, through="model", model=before.policy, instructions=data)
    preferred = step(dpo, number=number, through="model", model=tuned, preferences=[newest])
    parts = [tuned, preferred]
    if last and (rewarded := step(ppo, number=number, off=True, policy=preferred, reward_model=reward, prompts=tasks)):
        parts = [preferred, rewarded]
    policy = step(average, number=number, through="models", models=parts)
    step(evaluate, f"evaluate_round_{number}", field="evaluate", model=policy, prompts=heldout)
    publish("policy", policy, f"round-{number}")
    return State(policy, tuned, data, pairs)


def new_prompts(number: int) -> Output:
    """New training prompts for round `number`: the slice after those of the first finetuning and earlier rounds.

    The seed and the held-out share stay, so that no held-out question becomes a training question.
    """
    train = setting("round_prompts", 400, minimum=1, maximum=10_000_000, description="New training prompts of each task in each round")

    def slice_of(config: PromptsConfig) -> PromptsConfig:
        skip = config.skip + config.train + (number - 1) * train
        return config.model_copy(update={"train": train, "heldout": 0, "skip": skip})

    return step(prompts, f"prompts_{number}", field="prompts", adapt=slice_of)
