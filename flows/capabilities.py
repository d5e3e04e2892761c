"""The flow `capabilities`: finetuning on a mixture of instructions, and the gain from each source of the mixture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import fmean

from puna.flows.engine.declare import Documents, Instructions, Model, Output, Prompts, current_walk, flow, publish, step, tell
from puna.flows.engine.recipe import Step
from puna.flows.report.arms import scores_of
from puna.flows.rounds import replace_field
from puna.stages.align.checked_prompts import long_prompts, system_prompts
from puna.stages.align.instructions import MixInstructionsConfig, instructions, mix_instructions
from puna.stages.align.rejection_sample import RejectionSampleConfig, rejection_sample
from puna.stages.align.sample import sample
from puna.stages.align.sft import sft
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.training.intervals import paired_difference
from puna.storage import Artifact

MIX = Step("mix_instructions", "mix_instructions", mix_instructions)


@flow
def capabilities(
    model: Model, asked: Prompts | None = None, documents: Documents | None = None,
    demonstrations: list[Instructions] | None = None, tasks: list[Prompts] | None = None,
) -> Output:  # fmt: skip
    """Finetune a model on a mixture of instructions, and measure each source's gain over a mixture without that source.

    The recipe gives each source a share. `asked`: prompts for answers that obey a rule. The model answers with the rule in the user's
    message; answers that obey it are learned with the rule in the system message (`rejection_sample.source`). `documents`: texts for
    questions about long contexts (`instructions.source`). `demonstrations`: your own instructions, for example in other languages; their
    source is the name given at import. Each source with a share has a control arm: as many updates on a mixture without that source.
    `tasks`: further prompts; each arm answers their held-out part."""
    sets = {f"tasks_{number}" if number > 1 else "tasks": one for number, one in enumerate(tasks or [], 1)}
    data = list(demonstrations or [])
    if asked:
        rules = step(system_prompts, prompts=asked)
        stated = step(system_prompts, "stated", field="system_prompts", adapt=replace_field("place", "user"), prompts=asked)
        bare = step(system_prompts, "bare", field="system_prompts", adapt=replace_field("place", "none"), prompts=asked)
        answers = step(sample, models=[model], prompts=stated)
        obeying = RejectionSampleConfig(pick="verifier", source="rules")
        data.append(step(rejection_sample, default=obeying, answers=answers, prompts=rules))
        sets |= {"rules": rules, "by_chance": bare}
    if documents:
        sets["long"] = step(long_prompts, documents=documents)
        data.append(step(instructions, prompts=sets["long"]))
    mix = step(mix_instructions, instructions=data)
    policy = publish("policy", step(sft, model=model, instructions=[mix]))
    arms = {"before": model, "mix": policy}
    configs = [config for config in current_walk().configs(MIX) if isinstance(config, MixInstructionsConfig)]
    for source in (name for config in configs for name, share in config.shares.items() if 0 < share < 1):
        adapt = partial(_without, source)
        other = step(mix_instructions, f"mix_without_{source}", field="mix_instructions", adapt=adapt, instructions=data)
        arms[f"without_{source}"] = step(sft, f"sft_without_{source}", field="sft", model=model, instructions=[other])
    for name, questions in sets.items():
        outcomes = {
            arm: step(evaluate, f"evaluate_{name}_{arm}", field="evaluate", model=one, prompts=questions) for arm, one in arms.items()
        }
        results = {arm: item for arm, output in outcomes.items() for item in output.items if isinstance(item, Artifact)}
        for sentence in (one for item in questions.items if isinstance(item, Artifact) for one in compare_arms(results, item)):
            tell(f"{name}: {sentence}")
    return policy


def _without(source: str, config: MixInstructionsConfig) -> MixInstructionsConfig:
    """Return the mixture's configuration without `source`; the other sources divide its share in proportion to their own."""
    rest = 1 - config.shares[source]
    return config.model_copy(update={"shares": {name: 0.0 if name == source else share / rest for name, share in config.shares.items()}})


def right_answers(evaluations: Mapping[str, Artifact], prompts: Artifact) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by task, arm and prompt id, 1 if the arm's answer is right, else 0."""
    task_of = {row["id"]: row["task"] for row in prompts.read(columns=["id", "task"]).to_pylist()}
    right: dict[str, dict[str, dict[str, float]]] = {}
    for arm, evaluation in evaluations.items():
        for key, value in scores_of(evaluation).get("accuracy", {}).items():
            right.setdefault(task_of[key], {}).setdefault(arm, {})[key] = value
    return right


def compare_arms(evaluations: Mapping[str, Artifact], prompts: Artifact) -> Iterator[str]:
    """Yield a sentence per task: each arm's accuracy, and the gain of `mix` over each other arm (95 % interval, paired by prompt)."""
    for task, by_arm in sorted(right_answers(evaluations, prompts).items()):
        mix = by_arm.pop("mix", {})
        others = ", ".join(
            f"{arm} {fmean(values.values()):.3f} (gain of mix {difference.value:+.3f}, {difference.low:+.3f} to {difference.high:+.3f})"
            for arm, values in by_arm.items() if mix.keys() & values.keys()
            for difference in [paired_difference(mix, values)]
        )  # fmt: skip
        if others:
            yield f"{task}, {len(mix)} prompts: mix {fmean(mix.values()):.3f}, {others}"
