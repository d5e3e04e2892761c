"""One round of alignment: its steps, its control arms, and the state that it passes to the next round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from puna.flows.engine.declare import Output, current_walk, publish, setting, step, switch
from puna.flows.engine.recipe import Step
from puna.stages.align.average import average
from puna.stages.align.data_quality import data_quality
from puna.stages.align.distill import distill
from puna.stages.align.dpo import dpo
from puna.stages.align.gate import gate
from puna.stages.align.instructions import chosen
from puna.stages.align.new_prompts import NewPromptsConfig
from puna.stages.align.new_prompts import new_prompts as unused_prompts
from puna.stages.align.preferences import preferences
from puna.stages.align.reinforcement import RolloutsConfig, grpo, ppo
from puna.stages.align.rejection_sample import Pick, RejectionSampleConfig, rejection_sample
from puna.stages.align.reward_model import reward_model
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.align.sft import sft
from puna.stages.align.synthesize import synthesize
from puna.stages.align.topics import topics
from puna.stages.contract import StageConfig
from puna.stages.conversations import dump
from puna.stages.evaluation.evaluate import evaluate
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.stages.training.settings import AdaptableConfig
from puna.storage import Artifact, PunaError

ITERATIONS = 3  # number of iterations of the control arm `iterated`; each one samples and finetunes with an equal share of the budget
AGAIN = Step("sft_again", "sft_again", sft, off=True)  # the step that finetunes a round's policy on its own right answers
DEVELOPMENT = NewPromptsConfig(count=30, split="heldout")  # for the search of the average's weights


@dataclass(frozen=True)
class State:
    """The state between rounds: the policy, its evaluation, and `other`, a second model that also answers prompts (falsy: none).
    `instructions`: demonstrations, used in every round. `preferences`: of all rounds so far. `judged`: given ones, from which DPO and
    `chosen` learn, too. `start`: the initial model of the reward model and of SFT; None: the policy. `made`: the outputs of the last
    round's steps, by stage."""

    policy: Output
    other: Output
    instructions: tuple[Output, ...]
    preferences: tuple[Output, ...] = ()
    evaluation: Output | None = None
    start: Output | None = None
    judged: tuple[Output, ...] = ()
    made: Mapping[str, Output] = field(default_factory=dict)


def learned_from(judged: Sequence[Output]) -> None:
    """Raise PunaError if preferences are given and no step learns from them: `reward_model`, `dpo` or `chosen`."""
    if not any(isinstance(item, Artifact) for output in judged for item in output.items):
        return
    stages = [(reward_model, False), (dpo, False), (chosen, True)]
    if not any(current_walk().configs(Step(stage.name, stage.name, stage, off=off)) for stage, off in stages):
        raise PunaError(
            "preferences were given as judged, but the recipe has no dpo and trains no reward model, so no step would learn from them: "
            "--set dpo={}, or --set reward_model.head_only=true --set grpo.reward=product, or leave them out"
        )


def unseen(pool: Output, learned: Sequence[Output]) -> None:
    """Raise PunaError if given instructions or preferences contain, among rows to train on, a prompt that `pool` holds out."""
    given = [item for output in learned for item in output.items if isinstance(item, Artifact)]
    questions = [item for item in pool.items if given and isinstance(item, Artifact)]
    held = {row["messages"] for item in questions for row in item.read().to_pylist() if row["split"] == "heldout"}
    for item in given:
        rows = [json.loads(row["messages"]) for row in item.read().to_pylist() if row["split"] == "train"]
        if count := sum(any(dump(turns[:number]) in held for number in range(1, len(turns) + 1)) for turns in rows):
            raise PunaError(f"{count} rows of {item.id} train on prompts that {questions[0].id} holds out for evaluation: import both with "
                            "the same heldout_fraction and seed, or leave these rows out")  # fmt: skip


def distil_policy(student: Output, teacher: Output | None, tasks: Output, gold: Sequence[Output], *, compared: bool) -> Output:
    """Return the student, distilled from the teacher if there is one. `compared`: also evaluate SFT on the teacher's samples.
    Raise PunaError if a teacher is given but the recipe has no step `distill`."""
    if teacher is None:
        return student
    configs = current_walk().configs(Step("distill", "distill", distill, off=True))
    if teacher.items and not configs:
        raise PunaError("a teacher was given, but the recipe has no step distill: --set distill={}, or leave it out")
    pupil = step(distill, off=True, through="student", student=student, teacher=teacher, prompts=tasks)
    if not configs:
        return pupil
    step(evaluate, "evaluate_distilled", field="evaluate", model=pupil, prompts=tasks)
    if compared:
        samples = step(sample, "sample_teacher", default=SampleConfig(answers=1), models=[teacher], prompts=tasks)
        picked = step(rejection_sample, "pick_teacher", default=RejectionSampleConfig(pick="random"), answers=samples, prompts=tasks)
        tuned = step(sft, "sft_teacher", model=student, instructions=[*gold, picked])
        step(evaluate, "evaluate_sft_teacher", field="evaluate", model=tuned, prompts=tasks)
    return pupil


def one_round(number: int, before: State, tasks: Output, heldout: Output, *, development: Output | None = None) -> State:
    """Run one round: sampling, preferences, reward model, SFT on demonstrations and sampled answers, DPO, RL, averaging, evaluation.
    `number` labels the steps and changes their seeds. Only the reward model gets an alias. `development`: prompts on which the weights of
    the average with the initial policy are searched; no training or evaluation uses them."""
    start, gold = before.start or before.policy, list(before.instructions)
    answers = step(sample, number=number, models=[before.policy, before.other], prompts=tasks)
    newest = step(preferences, number=number, answers=answers, prompts=tasks)
    pairs = (*before.preferences, newest)
    # If no verifier judges the round's answers, it has no pairs of its own and learns from earlier pairs.
    last_pairs = [newest, *before.judged] if newest else list(before.preferences)
    reward = publish("reward", step(reward_model, number=number, model=start, preferences=pairs))
    better = step(chosen, number=number, off=True, preferences=last_pairs)
    best = step(rejection_sample, number=number, answers=answers, reward_model=reward, prompts=tasks)
    good = step(data_quality, number=number, through="instructions", instructions=best, model=before.policy)
    good = step(topics, number=number, off=True, through="instructions", instructions=good, labelled=gold, model=before.policy)
    synthetic = step(synthesize, number=number, off=True, model=before.policy, prompts=tasks)
    data = [*gold, *(one for one in (better, good, synthetic) if one)]
    tuned = step(sft, number=number, through="model", model=start, instructions=data)
    preferred = step(dpo, number=number, through="model", model=tuned, preferences=last_pairs)
    again = current_walk().configs(AGAIN)
    lessons = _finetune_on_own("again", number, preferred, gold, tasks, reward, ranked=bool(reward)) if again else preferred
    trained = step(grpo, number=number, off=True, through="policy", policy=lessons, reward_model=reward, prompts=tasks)
    trained = step(ppo, number=number, off=True, through="policy", policy=trained, reward_model=reward, prompts=tasks)
    policy = _average_policy("average", number, before, trained, reward, development)
    evaluation = step(evaluate, f"evaluate_round_{number}", field="evaluate", model=policy, prompts=heldout)
    outputs = {
        "sample": answers, "reward_model": reward, "chosen": better, "synthesize": synthetic, "sft": tuned, "dpo": preferred,
        "policy": trained,
    }  # fmt: skip
    other = tuned if before.other else before.other
    return State(policy, other, before.instructions, pairs, evaluation, before.start, before.judged, outputs)


def stop_reason(number: int, before: State, after: State, heldout: Output) -> str:
    """Return why the gate does not pass the candidate; empty if it passes, or in a plan. Set an alias that marks the verdict."""
    verdict = step(
        gate, number=number, policy=before.policy, candidate=after.policy, before=before.evaluation, after=after.evaluation, prompts=heldout
    )
    (one,) = verdict.items or (None,)
    if not isinstance(one, Artifact):
        return ""
    outcome, reason = (str(one.manifest.metrics[name]) for name in ("verdict", "reason"))
    publish("waits" if outcome == "waits" else "gate", verdict, one.key[:16])
    refused = f"{'gains nothing' if reason.startswith('its gain of') else 'is refused'}: {reason}"
    return {"passed": "", "refused": refused}.get(outcome, "waits for an approval")


def _average_policy(label: str, number: int, before: State, trained: Output, reward: Output, development: Output | None) -> Output:
    """Average the policy at the start of the round with the trained policy. If the recipe omits `average`, return the trained policy."""
    return step(
        average, f"{label}_{number}", field="average", number=number, through="models", models=[before.policy, trained],
        prompts=development, reward_model=reward,
    )  # fmt: skip


def controls(
    number: int, before: State, after: State, tasks: Output, heldout: Output, *, development: Output | None = None
) -> list[Callable[[], object]]:
    """Return the control arms of round `number`. Each trains a model, averages it with the round's initial policy, and evaluates it.

    `_equal` returns the arms that replace the training after DPO at an equal budget. `ablations` adds arms with a smaller budget. SFT arms
    make as many updates as the round (updates set in epochs do not count). They learn from demonstrations alone or with other answers:
    chosen ones, synthetic ones, or one more answer per prompt for each way to pick it. `dpo_instead` in the recipe adds an arm with DPO in
    place of RL, with `sample_instead` also on pairs of the SFT model's answers, and an SFT arm on verified ones. One ends after DPO."""
    made, start, gold = after.made, before.start or before.policy, list(before.instructions)
    updates = replace_field("more_steps", _last_updates())
    base = [*gold, made["chosen"]] if made["chosen"] else gold

    def arm(name: str, trained: Output) -> Output:
        model = _average_policy(f"average_{name}", number, before, trained, made["reward_model"], development)
        step(evaluate, f"control_{name}_{number}", field="evaluate", model=model, prompts=heldout)
        return model

    def tune_arm(name: str, data: list[Output]) -> None:
        label = f"sft_{name}_{number}"
        arm(name, step(sft, label, field="sft", number=number, through="model", adapt=updates, model=start, instructions=data))

    def chosen_by(pick: Pick, answers: Output, label: str) -> Output:
        return step(
            rejection_sample, f"{label}_{number}", field="pick", number=number, adapt=replace_field("pick", pick), answers=answers,
            reward_model=made["reward_model"] if pick == "reward_model" else None, prompts=tasks,
        )  # fmt: skip

    def pick_arm(pick: Pick) -> None:
        if one := checked if pick == "verifier" else chosen_by(pick, made["sample"], f"pick_{pick}"):
            tune_arm(f"pick_{pick}", [*base, one])

    def instead() -> None:
        label, pairs = f"dpo_instead_{number}", list(after.preferences)
        answers = step(
            sample, f"sample_instead_{number}", field="sample_instead", number=number, off=True, serves="dpo_instead",
            models=[made["sft"]], prompts=tasks,
        )  # fmt: skip
        if answers:
            own = f"preferences_instead_{number}"
            pairs.append(step(preferences, own, field="preferences", number=number, answers=answers, prompts=tasks))
        policy = step(dpo, label, field="dpo_instead", number=number, off=True, model=made["sft"], preferences=pairs)
        if policy:
            arm("dpo_instead", policy)
        if answers and checked and (more := chosen_by("verifier", answers, "pick_instead")):
            tune_arm("pick_instead", [*base, checked, more])

    trains = made["policy"].labels != made["dpo"].labels
    arms = _equal(number, made, gold, tasks, heldout, arm) if trains else []
    if not switch("ablations", True, description="Also run control arms with smaller budgets, which show the gain of parts of the round"):
        return arms
    # Computed here, since two arms, which may run in parallel, learn from this output.
    checked = chosen_by("verifier", made["sample"], "pick_verifier")
    arms += [partial(tune_arm, "gold", gold), *([partial(tune_arm, "chosen", base)] if made["chosen"] else [])]
    arms += [partial(tune_arm, "synthetic", [*base, made["synthesize"]])] if made["synthesize"] else []
    arms += [partial(pick_arm, pick) for pick in get_args(Pick) if pick != "reward_model" or made["reward_model"]] + [instead]
    arms += [partial(arm, "untaught", made["dpo"])] if trains else []
    return arms


def _equal(
    number: int, made: Mapping[str, Output], gold: list[Output], tasks: Output, heldout: Output, arm: Callable[[str, Output], Output]
) -> list[Callable[[], object]]:
    """Return the arms that replace the round's training after DPO at an equal budget; none unless the recipe names `sft_equal`.

    They finetune the policy after DPO on its own right answers with the highest reward or, if the recipe names `grpo_equal`, train it by
    RL. `more_controls` adds SFT on all distinct right answers, with a best-of-n evaluation of that model (`evaluate_best`); SFT on ranked
    answers in `ITERATIONS` iterations; and, unless the round itself does both, SFT on half as many answers, then half as much RL."""
    if not current_walk().configs(Step("sft_equal", "sft_equal", sft, off=True)):
        return []
    start, reward, own = made["dpo"], made["reward_model"], current_walk().configs(AGAIN) and _of_rl()
    lessons = partial(_finetune_on_own, number=number, gold=gold, tasks=tasks, reward=reward, field="equal")

    def rl_arm(name: str, policy: Output, parts: int = 1) -> None:
        trained = step(
            grpo, f"grpo_{name}_{number}", field="grpo_equal", number=number, off=True, policy=policy, reward_model=reward, prompts=tasks,
            adapt=partial(part_of, "rollouts", 1, parts),
        )  # fmt: skip
        if trained:
            arm(name, trained)

    def sft_arm() -> None:
        # Not in parallel, since both arms learn from the same samples.
        if reward:
            arm("ranked", lessons("ranked", model=start, ranked=True, samples="equal"))
        if more or not reward:
            model = arm("checked", lessons("checked", model=start, samples="equal"))
        if more:
            step(
                evaluate, f"control_best_of_n_{number}", field="evaluate_best", off=True, model=model, prompts=heldout,
                judges=[reward] if reward else [],
            )  # fmt: skip

    def iterated_arm() -> None:
        model = start
        for part in range(1, ITERATIONS + 1):
            model = lessons(f"iterated_{part}", model=model, ranked=bool(reward), part=part, parts=ITERATIONS)
        arm("iterated", model)

    def half() -> None:
        rl_arm("half", lessons("half", model=start, ranked=bool(reward), parts=2), 2)

    more = switch("more_controls", True, description="Also run the control arms `checked`, `iterated`, `half` and `best_of_n`")
    return [sft_arm, partial(rl_arm, "rl", start), *([iterated_arm] if more else []), *([half] if more and not own else [])]


def _finetune_on_own(
    name: str, number: int, model: Output, gold: Sequence[Output], tasks: Output, reward: Output, *, ranked: bool = False,
    field: str = "again", part: int = 1, parts: int = 1, samples: str = "",
) -> Output:  # fmt: skip
    """Finetune a model on gold answers and on its own right answers to the round's prompts.

    It learns from all distinct right answers or, if `ranked`, from those with the highest reward: `most` per prompt, as the recipe's
    `pick_FIELD` says. `part`, `parts`: the share of the recipe's answers and steps, see `part_of`. `field`: FIELD in the names of the
    recipe's steps. `samples`: the name of a sampling step that arms share."""
    answers = step(
        sample, f"sample_{samples or name}_{number}", field=f"sample_{field}", number=number, off=True, models=[model], prompts=tasks,
        adapt=partial(part_of, "answers", part, parts),
    )  # fmt: skip
    ways = {"pick": "reward_model", "correct": True} if ranked else {"pick": "verifier", "most": 1000}
    picked = step(
        rejection_sample, f"pick_{name}_{number}", field=f"pick_{field}", number=number, answers=answers, prompts=tasks,
        default=RejectionSampleConfig(), adapt=lambda config: config.model_copy(update=ways), reward_model=reward if ranked else None,
    )  # fmt: skip
    return step(
        sft, f"sft_{name}_{number}", field=f"sft_{field}", number=number, off=True, through="model", model=model,
        adapt=partial(part_of, "steps", part, parts), instructions=[*gold, picked],
    )  # fmt: skip


def part_of(name: str, part: int, parts: int, config: Any) -> Any:
    """Reduce a configuration's `name` (answers, rollouts or steps; epochs without steps) to part number `part` (1-based) of `parts`.

    Sizes of parts are at least 1, differ by at most 1, larger ones first, and sum to the whole (unless it is smaller than `parts`)."""
    share = 1 / parts

    def size(whole: int) -> int:
        return max(1, math.ceil(whole * part / parts) - math.ceil(whole * (part - 1) / parts))

    if name == "steps":
        training = config.training
        shorter = {"steps": size(training.steps)} if training.steps else {"epochs": training.epochs * share}
        return config.model_copy(update={"training": training.replace(schedule=training.schedule.of_part(share), **shorter)})
    schedule = {"schedule": config.schedule.of_part(share)} if isinstance(config, RolloutsConfig) else {}
    return config.model_copy(update={name: size(getattr(config, name)), **schedule})


def _of_rl() -> list[RolloutsConfig]:
    stages = [Step(stage.name, stage.name, stage, off=True) for stage in (grpo, ppo)]
    configs = [config for one in stages for config in current_walk().configs(one)]
    return [config for config in configs if isinstance(config, RolloutsConfig)]


def _last_updates() -> int:
    """Return the number of updates after SFT: by DPO and by SFT on own answers (0 for those set in epochs), and by RL."""
    configs = [config for one in (Step("dpo", "dpo", dpo), AGAIN) for config in current_walk().configs(one)]
    steps = sum(config.training.steps or 0 for config in configs if isinstance(config, AdaptableConfig))
    return steps + sum(config.rollouts * config.epochs * config.minibatches for config in _of_rl())


def replace_field(name: str, value: object) -> Callable[[StageConfig], StageConfig]:
    return lambda config: config.model_copy(update={name: value})


def new_prompts(number: int) -> Output:
    """Return new training prompts for round `number`: the slice after the prompts of the first finetuning, development and earlier rounds.
    Seed and held-out share are those of all rounds, so no held-out question becomes a training question. The prompts have no gold answers,
    since a round learns from demonstrations and preferences, not from references that its controls lack."""
    train = new_prompts_per_round()
    return _slice(f"prompts_{number}", prompts_taken(_development()) + (number - 1) * train, train)


def development_prompts() -> Output | None:
    """Return the prompts on which an average's weights are searched; no training uses them. None if the recipe omits `average`."""
    if not (configs := _development()):
        return None
    pool = _slice("development_pool", 0, prompts_taken(configs))
    return step(unused_prompts, "development", default=DEVELOPMENT, pool=pool)


def _slice(label: str, first: int, count: int) -> Output:
    """Return `count` training prompts of each task, from offset `first` after the prompts of the first finetuning."""

    def of(config: PromptsConfig) -> PromptsConfig:
        skip = config.skip + config.train + first
        return config.model_copy(update={"train": count, "heldout": 0, "skip": skip, "references": False})

    return step(prompts, label, field="prompts", adapt=of)


def _development() -> list[StageConfig | None]:
    """Return the configurations of the step that reserves prompts for development; none if the recipe omits `average`."""
    wanted_step = Step("development", "development", unused_prompts, DEVELOPMENT)
    return current_walk().configs(wanted_step) if current_walk().configs(Step("average", "average", average)) else []


def prompts_taken(configs: Sequence[StageConfig | None]) -> int:
    """Return the number of prompts of each task that the steps with these configurations take."""
    return sum(config.count for config in configs if isinstance(config, NewPromptsConfig))


def new_prompts_per_round() -> int:
    return setting("round_prompts", 400, minimum=1, maximum=10_000_000, description="Number of new training prompts of each task per round")
