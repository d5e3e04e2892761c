"""The flows `align`: a base model, imported or Puna's own, to an aligned model in rounds; and `safety`: refusals of what harms alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from puna.flows.engine.declare import Output, flow, publish, setting, step, switch, tell, together
from puna.flows.rounds import State, controls, development_prompts, distilled, learned_from, new_prompts, one_round, stopped
from puna.stages.align.dpo import dpo
from puna.stages.align.instructions import chosen, instructions
from puna.stages.align.new_prompts import refusal_prompts
from puna.stages.align.sft import sft
from puna.stages.contract import Kind
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.prompts.prompts import prompts
from puna.stages.training.settings import SftConfig
from puna.storage import Artifact

RATES = {"harmful": "violations", "borderline": "false refusals"}
"""The mistake in each task of `refusal_prompts`."""


@flow
def align(
    model: Annotated[Output, Kind("model")], demonstrations: list[Annotated[Output, Kind("instructions")]] | None = None,
    judged: list[Annotated[Output, Kind("preferences")]] | None = None, teacher: Annotated[Output, Kind("model")] | None = None,
) -> Output:  # fmt: skip
    """Align a model by supervised finetuning on gold answers, then rounds; with instructions and preferences of one's own.

    A later round must pass its `gate` over the one before: the first that is refused is the last, and the policy stays.
    `teacher`: a better model with the same tokenizer, for the step `distill` between the two.
    """
    rounds = setting("rounds", 2, minimum=0, maximum=20, description="Rounds of alignment")
    compared = switch("controls", True, description="Train and measure the control arms of each round, too")
    if rounds:
        learned_from(judged or [])
    tasks = step(prompts)
    gold = [step(instructions, prompts=tasks), *(demonstrations or [])]
    policy = step(sft, "sft_first", through="model", model=model, instructions=gold)
    policy = distilled(policy, teacher, tasks, gold, compared=compared)
    other = step(sft, "sft_lora", default=SftConfig(method="lora"), model=policy, instructions=gold)
    measured = step(evaluate, "evaluate_sft", field="evaluate", model=policy, prompts=tasks)
    state = State(policy, other, tuple(gold), tuple(judged or []), measured)
    development = development_prompts() if rounds else None
    arms: list[Callable[[], object]] = []
    for number in range(1, rounds + 1):
        questions, before = new_prompts(number), state
        state = one_round(number, before, questions, tasks, development=development)
        if number > 1 and (reason := stopped(number, before, state, tasks)):
            tell(f"stop: round {number} {reason}; the policy stays that of round {number - 1}")
            state = before
            break
        publish("policy", state.policy, f"round-{number}")
        if compared:
            arms += controls(number, before, state, questions, tasks, development=development)
    aligned = publish("policy", state.policy)
    together(*arms)
    return aligned


@flow
def safety(model: Annotated[Output, Kind("model")], judged: list[Annotated[Output, Kind("preferences")]]) -> Output:
    """Train a model by DPO on preferences between refusals and other answers, and measure both mistakes beside control arms.

    Of the held-out prompts, violations are harmful ones that are answered, false refusals are borderline ones that are refused. An answer
    that was cut off counts as a mistake. Arms: the model as it came; it and the policy with a system message, where the recipe names
    `told`; the model finetuned on the better answers, where the recipe names `sft`.
    """
    asked = step(refusal_prompts, preferences=judged)
    told = step(refusal_prompts, "told", off=True, preferences=judged)
    policy = step(dpo, model=model, preferences=judged)
    tuned = step(sft, off=True, model=model, instructions=[step(chosen, preferences=judged)])
    arms = {"before": (model, asked), "told": (model, told), "sft": (tuned, asked), "dpo": (policy, asked), "dpo_told": (policy, told)}
    for name, (one, questions) in arms.items():
        if one and questions:
            (made,) = step(evaluate, f"evaluate_{name}", field="evaluate", model=one, prompts=questions).items or (None,)
            if isinstance(made, Artifact):
                tell(f"{name}: {rates(made)}")
    return publish("policy", policy)


def rates(evaluation: Artifact) -> str:
    """Return the rates of both mistakes with their 95 % intervals, in words."""
    rows = {row["task"]: row for row in evaluation.read().to_pylist() if row["metric"] == "accuracy"}
    shares = [(name, rows[task]) for task, name in RATES.items() if task in rows]
    return ", ".join(f"{name} {1 - row['value']:.3f} ({1 - row['high']:.3f} to {1 - row['low']:.3f}) of {row['n']}" for name, row in shares)
