"""The flow `align`, which turns a base model (imported or trained by Puna) into an aligned model."""

from __future__ import annotations

from collections.abc import Callable

from puna.flows.engine.declare import Instructions, Model, Output, Preferences, flow, publish, setting, step, switch, tell, together
from puna.flows.rounds import State, controls, development_prompts, distil_policy, learned_from, new_prompts, one_round, stop_reason, unseen
from puna.stages.align.instructions import instructions
from puna.stages.align.sft import sft
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.prompts.prompts import prompts
from puna.stages.training.settings import SftConfig


@flow
def align(
    model: Model, demonstrations: list[Instructions] | None = None, judged: list[Preferences] | None = None,
    teacher: Model | None = None,
) -> Output:  # fmt: skip
    """Align a model: supervised finetuning on gold answers, then rounds of preference training.

    From round 2 on, each round must pass a `gate` against the previous policy. If the gate refuses a round or waits for a person's
    approval, no further round starts and the previous policy stays. `demonstrations`: your own instructions, added to the gold answers.
    `judged`: your own preferences. `teacher`: a better model with the same tokenizer, for the step `distill`."""
    rounds = setting("rounds", 2, minimum=0, maximum=20, description="Number of alignment rounds")
    compared = switch("controls", True, description="Also train and evaluate each round's control arms")
    if rounds:
        learned_from(judged or [])
    tasks = step(prompts)
    unseen(tasks, [*(demonstrations or []), *(judged or [])])
    gold = [step(instructions, prompts=tasks), *(demonstrations or [])]
    policy = step(sft, "sft_first", through="model", model=model, instructions=gold)
    policy = distil_policy(policy, teacher, tasks, gold, compared=compared)
    other = step(sft, "sft_lora", default=SftConfig(method="lora"), model=policy, instructions=gold)
    evaluation = step(evaluate, "evaluate_sft", field="evaluate", model=policy, prompts=tasks)
    state = State(policy, other, tuple(gold), tuple(judged or []), evaluation, judged=tuple(judged or []))
    development = development_prompts() if rounds else None
    arms: list[Callable[[], object]] = []
    for number in range(1, rounds + 1):
        questions, before = new_prompts(number), state
        state = one_round(number, before, questions, tasks, development=development)
        if number > 1 and (reason := stop_reason(number, before, state, tasks)):
            tell(f"stop: round {number} {reason}; the policy of round {number - 1} is kept")
            state = before
            break
        publish("policy", state.policy, f"round-{number}")
        if compared:
            arms += controls(number, before, state, questions, tasks, development=development)
    aligned = publish("policy", state.policy)
    together(*arms)
    return aligned
