"""A benchmark of reward models: accuracy on pairs of answers by subset, and the rewards of sampled answers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np

from puna.stages.align.rejection_sample import RewardedConfig, add_rewards
from puna.stages.align.reward_model import score_answers
from puna.stages.align.sample import read_answers
from puna.stages.contract import Answers, Figure, Model, Preferences, Prompts, StageRun, stage
from puna.stages.conversations import content_of, message_of
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.intervals import evaluation_row, mean, wilson
from puna.stages.training.rankings import order, read_preferences
from puna.stages.training.rewards import combine
from puna.stages.training.train import check_one_tokenizer, load_model, render
from puna.stages.training.vocabulary import tokenizer_of
from puna.stages.verifiers.base import is_correct
from puna.storage import Artifact, PunaError

Row = dict[str, Any]
STEPS = 20  # number of bars in the histogram of rewards


class Judged(NamedTuple):
    """A pair of answers with its subset and both rewards. `longer`: 1 if the chosen answer is longer, 0.5 for equal lengths, else 0."""

    id: str
    subset: str
    chosen: float
    rejected: float
    longer: float


@stage(kind="evaluation")
def reward_benchmark(
    reward_model: list[Model], preferences: list[Preferences] | None, answers: Answers | None, prompts: Prompts | None,
    config: RewardedConfig, run: StageRun,
) -> None:  # fmt: skip
    """Measure a reward model or an ensemble: its accuracy on the pairs of each subset, and the rewards of n answers per prompt.

    A pair is right if the chosen answer has the higher reward, as in RewardBench (Lambert et al. 2024). Each subset is a task. Metrics:
    `accuracy`; the accuracies of always choosing the longer (`always_longer`) or the shorter answer, in characters; the mean `margin`. The
    metric `subset_mean` weights all subsets equally. With `answers` and their `prompts`, means over prompts: `reward`, `spread` (standard
    deviation over a prompt's answers) and `best_reward`. If verifiers scored the answers, also the share of right answers among all
    (`right`) and among the best by reward (`right_of_best`), and of prompts with a right answer (`right_of_any`). `scores`: rewards."""
    if not preferences and answers is None:
        raise PunaError("reward_benchmark: there is nothing to score; give preferences or answers")
    if (answers is None) != (prompts is None):
        raise PunaError("reward_benchmark: answers need their prompts, and prompts their answers; give both")
    bad = BadRows(config, "reward_benchmark")
    if preferences:
        _report_pairs(_judge_pairs(preferences, reward_model, config, bad, run), run)
    if answers is not None and prompts is not None:
        _report_answers(*read_answers(answers, prompts, learned=False), reward_model, config, bad, run)
    bad.write(run)


def _judge_pairs(
    preferences: Sequence[Artifact], models: Sequence[Artifact], config: RewardedConfig, bad: BadRows, run: StageRun
) -> list[Judged]:
    """Return the pairs with their rewards. Pairs that lack an answer, cannot be rendered or are too long go to `bad`."""
    check_one_tokenizer(models, "the reward models of an ensemble need the same tokenizer")
    rows, tokenizer = read_preferences(preferences, None), tokenizer_of(models[0])
    for row in rows:
        if row["chosen"] is None or row["rejected"] is None:
            bad.drop(row, "one_sided", f"row {row['id']}: one of the two answers is missing, so there is nothing to compare")
    sides = [(row, [message_of(row, side) or {} for side in ("chosen", "rejected")]) for row in rows if row["chosen"] and row["rejected"]]
    pairs = {row["id"]: messages for row, messages in sides}
    limit = Limit(config.micro_batch_tokens, "micro_batch_tokens", "the prompt with its answers")
    questions = [row for row, _ in sides]
    examples = bad.examples(questions, lambda row: render(tokenizer, row, [[[one] for one in pairs[row["id"]]]]), len, limit)
    bad.check_left(len(examples), f"{len(rows)} pairs")
    numbers = []
    for model in models:
        network, _ = load_model(model, "scalar", frozen=True)
        numbers.append(score_answers(network, [example for _, example in examples], config.micro_batch_tokens, run.progress))
    judged = []
    for (row, _), *rewards in zip(examples, *numbers, strict=True):
        chosen, rejected = (combine(list(some), config.ensemble) for some in zip(*rewards, strict=True))
        lengths = [len(content_of(message)) for message in pairs[row["id"]]]
        judged.append(Judged(row["id"], row["task"], chosen, rejected, order(lengths[0] - lengths[1])))
    return judged


def _report_pairs(judged: Sequence[Judged], run: StageRun) -> None:
    subsets, bars = sorted({pair.subset for pair in judged}), dict[str, list[tuple[Any, float]]]()
    accuracies = []
    for name in ["all", *subsets]:
        members = [pair for pair in judged if name in ("all", pair.subset)]
        right = sum(pair.chosen > pair.rejected for pair in members)
        values = {"accuracy": wilson(right, len(members)), "always_longer": mean([pair.longer for pair in members])}
        values |= {"always_shorter": mean([1 - pair.longer for pair in members])}
        values |= {"margin": mean([pair.chosen - pair.rejected for pair in members])}
        for metric, value in values.items():
            run.write_rows([evaluation_row(name, metric, value, len(members))])
            if name == "all":
                run.metric(metric, value.value)
            elif metric != "margin":
                bars.setdefault(metric.replace("_", " the "), []).append((f"{name} ({len(members)})", value.value))
        accuracies += [values["accuracy"].value] if name != "all" else []
    run.metric("pairs", len(judged))
    run.metric("subset_mean", fmean(accuracies))
    rewards = [(pair.id, name, value) for pair in judged for name, value in (("chosen", pair.chosen), ("rejected", pair.rejected))]
    run.write_rows([{"id": id_, "name": f"{name}_reward", "value": value} for id_, name, value in rewards], "scores")
    run.figure("pairs", Figure("Pairs in the right order", "subset (pairs)", "share right", bars, kind="bar"))


def _report_answers(
    asked: dict[str, Row], groups: dict[str, list[Row]], models: Sequence[Artifact], config: RewardedConfig, bad: BadRows,
    run: StageRun,
) -> None:  # fmt: skip
    scored = add_rewards({key: groups[key] for key in sorted(groups)}, asked, models, config, bad, run)
    for task in ["all", *sorted({asked[key]["task"] for key in scored})]:
        members = [group for key, group in scored.items() if task in ("all", asked[key]["task"])]
        values = {
            "reward": [fmean([a["reward"] for a in group]) for group in members],
            "spread": [pstdev([a["reward"] for a in group]) for group in members],
            "best_reward": [max(a["reward"] for a in group) for group in members],
        }
        if checked := [group for group in members if all(a["gold"] is not None for a in group)]:
            best = [max(group, key=lambda a: (a["reward"], a["id"])) for group in checked]
            values["right"] = [fmean([float(is_correct(a["gold"])) for a in group]) for group in checked]
            values["right_of_best"] = [float(is_correct(a["gold"])) for a in best]
            values["right_of_any"] = [float(any(is_correct(a["gold"]) for a in group)) for group in checked]
        for metric, numbers in values.items():
            run.write_rows([evaluation_row(task, metric, mean(numbers), len(numbers))])
            if task == "all":
                run.metric(metric, fmean(numbers))
    each = [answer for group in scored.values() for answer in group]
    run.metric("answers", len(each))
    run.write_rows([{"id": answer["id"], "name": "reward", "value": answer["reward"]} for answer in each], "scores")
    counts, edges = np.histogram([answer["reward"] for answer in each], STEPS)
    series = {"answers": [(round(float(edge), 4), float(count)) for edge, count in zip(edges[:-1], counts, strict=True)]}
    run.figure("rewards", Figure("Rewards of the answers", "reward", "answers", series, kind="bar"))
