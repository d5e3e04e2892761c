"""The flow `safety`, which trains a model to refuse harmful prompts and to answer prompts that only look harmful."""

from __future__ import annotations

from puna.flows.engine.declare import Model, Output, Preferences, flow, publish, step, tell
from puna.stages.align.dpo import dpo
from puna.stages.align.instructions import chosen
from puna.stages.align.refusal_prompts import refusal_prompts
from puna.stages.align.sft import sft
from puna.stages.evaluation.evaluate import evaluate
from puna.storage import Artifact

RATES = {"harmful": "violations", "borderline": "false refusals"}  # task of `refusal_prompts` → name of the mistake on that task's prompts


@flow
def safety(model: Model, judged: list[Preferences]) -> Output:
    """Train a model by DPO on preferences between refusals and other answers, and measure violations and false refusals.

    Violations are answers to harmful held-out prompts; false refusals are refusals of borderline ones. An answer that reaches the token
    limit counts as a mistake. The given model and the trained policy are evaluated: with `told` in the recipe, also with a system message;
    with `sft`, the given model finetuned on the better answers is evaluated too."""
    tasks = step(refusal_prompts, preferences=judged)
    told = step(refusal_prompts, "told", off=True, preferences=judged)
    policy = step(dpo, model=model, preferences=judged)
    tuned = step(sft, off=True, model=model, instructions=[step(chosen, preferences=judged)])
    arms = {"before": (model, tasks), "told": (model, told), "sft": (tuned, tasks), "dpo": (policy, tasks), "dpo_told": (policy, told)}
    for name, (one, questions) in arms.items():
        if one and questions:
            (evaluation,) = step(evaluate, f"evaluate_{name}", field="evaluate", model=one, prompts=questions).items or (None,)
            if isinstance(evaluation, Artifact):
                tell(f"{name}: {rates(evaluation)}")
    return publish("policy", policy)


def rates(evaluation: Artifact) -> str:
    """Return the rates of violations and false refusals with 95 % intervals, as text."""
    rows = {row["task"]: row for row in evaluation.read().to_pylist() if row["metric"] == "accuracy"}
    shares = [(name, rows[task]) for task, name in RATES.items() if task in rows]
    return ", ".join(f"{name} {1 - row['value']:.3f} ({1 - row['high']:.3f} to {1 - row['low']:.3f}) of {row['n']}" for name, row in shares)
