"""Rejection sampling: a reward model or another rule picks, from the K answers to a prompt, those to train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from puna.models.training.packing import batch_by_size
from puna.stages.align.instructions import answer_message, instruction
from puna.stages.align.reward_model import score_answers
from puna.stages.align.sample import read_answers
from puna.stages.contract import Answers, Facts, Figure, Model, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import as_text, messages_of
from puna.stages.draws import hash_of, identifier
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.rewards import ENSEMBLE, Ensemble, combine
from puna.stages.training.train import Example, check_one_tokenizer, load_model, render
from puna.stages.training.vocabulary import tokenizer_of
from puna.stages.verifiers.base import is_correct
from puna.storage import Artifact, PunaError

Pick = Literal["reward_model", "random", "majority", "verifier"]

Row = dict[str, Any]
NO_REWARD_MODEL = "pick=reward_model needs a reward_model; give one, or set another pick"


class RewardedConfig(BadRowsConfig):
    """Settings for scoring answers with reward models."""

    micro_batch_tokens: int = Field(
        4096, ge=16, description="Maximum tokens per forward pass; a prompt that is longer with one answer (a pair: with both) is dropped"
    )
    ensemble: Ensemble = Field("mean", description=ENSEMBLE)


class RejectionSampleConfig(RewardedConfig, SeededConfig):
    pick: Pick = Field("reward_model", description="The answer to pick: highest reward, random, most frequent text, or random right answer")
    correct: bool = Field(False, description="Choose only among answers that the prompt's verifier scores as right")
    most: int = Field(1, ge=1, description="Maximum number of different answers per prompt, in order of choice")
    source: str = Field("rejection_sampling", min_length=1, description="Name of the source in the instructions table")


def needs(config: RejectionSampleConfig, facts: Facts) -> list[str]:
    """Return an error message if `pick` uses a reward model and none is given."""
    return [] if config.pick != "reward_model" or "reward_model" in facts.inputs else [NO_REWARD_MODEL]


@stage(kind="instructions", needs=needs)
def rejection_sample(
    answers: Answers, reward_model: list[Model] | None, prompts: Prompts, config: RejectionSampleConfig, run: StageRun
) -> None:
    """Choose finished answers for each prompt, by default the one with the highest reward (Llama 3, section 4.2.2); see `pick` and `most`.

    The side table `scores` has each instruction's `agreement`: the share of finished answers with the same text. If the reward model picks,
    `scores` also has the `reward` of each finished answer. `dropped` has prompts whose answers were all truncated (`unfinished`), that lack
    a required right answer (`none_right`), or that cannot be scored; see `bad_rows`. If all answers have gold scores, metrics compare the
    gold accuracy of the picked, the average and the best answer."""
    questions, groups = read_answers(answers, prompts)
    finished = {key: [a for a in group if a["finished"]] for key, group in groups.items()}
    candidates = {key: finished[key] for key in sorted(finished) if finished[key]}
    bad = BadRows(config, "rejection_sample")
    if config.pick == "reward_model":
        if not reward_model:
            raise PunaError(f"rejection_sample: {NO_REWARD_MODEL}")
        candidates = add_rewards(candidates, questions, reward_model, config, bad, run)
    picked = {key: some for key, group in candidates.items() if (some := _pick(key, group, config))}
    rows: list[Row] = []
    scores: list[Row] = []
    for key, best in ((key, one) for key, some in picked.items() for one in some):
        text = best["text"].strip()
        name, answer = identifier(config.source, key, *([text] if config.most > 1 else [])), answer_message(text)
        row = instruction(name, key, questions[key], answer, config.source, best.get("reward"))
        texts = Counter(a["text"].strip() for a in candidates[key])
        agreement = texts[best["text"].strip()] / len(candidates[key])
        rows.append(row)
        scores.append({"id": row["id"], "name": "agreement", "value": agreement})
        if config.pick == "reward_model":
            scores.append({"id": row["id"], "name": "reward", "value": best["reward"]})
    if config.pick == "reward_model":
        scores += [{"id": a["id"], "name": "reward", "value": a["reward"]} for key in picked for a in candidates[key]]
    dropped = bad.dropped
    for key in sorted(set(groups) - set(picked) - {row["id"] for row in dropped}):
        rule, count = ("none_right", len(finished[key])) if finished[key] else ("unfinished", len(groups[key]))
        dropped.append({"id": key, "rule": rule, "value": float(count), "threshold": None, "detail": as_text(messages_of(questions[key]))})
    # If several answers to a prompt are picked, each counts as an input row.
    run.count_input(len(rows) + len(dropped))
    run.write_rows(rows)
    run.write_rows(scores, "scores")
    run.write_rows(dropped, "dropped")
    _report(candidates, {key: some[0] for key, some in picked.items()}, run)


def _pick(key: str, group: list[Row], config: RejectionSampleConfig) -> list[Row]:
    """Return the chosen answers to a prompt, without repeated texts; none if only right answers may be chosen and there are none."""
    if config.pick == "verifier" or config.correct:
        group = [a for a in group if is_correct(a["gold"])]
    if config.pick == "majority":
        texts = Counter(a["text"].strip() for a in group)
        group = [a for a in group if texts[a["text"].strip()] == max(texts.values())]
    if config.pick == "reward_model":
        ranked = sorted(group, key=lambda a: (a["reward"], a["id"]), reverse=True)
    else:
        ranked = sorted(group, key=lambda a: hash_of(config.seed, "pick", key, a["id"]))
    by_text: dict[str, Row] = {}
    for answer in ranked:
        by_text.setdefault(answer["text"].strip(), answer)
    return list(by_text.values())[: config.most]


def add_rewards(
    candidates: dict[str, list[Row]], asked: dict[str, Row], reward_models: Sequence[Artifact], config: RewardedConfig, bad: BadRows,
    run: StageRun,
) -> dict[str, list[Row]]:  # fmt: skip
    """Return prompt id → answers with their `reward`. Prompts that cannot be rendered or are too long go to `bad`."""
    check_one_tokenizer(reward_models, "the reward models of an ensemble need the same tokenizer")
    tokenizer = tokenizer_of(reward_models[0])
    texts = {key: sorted({a["text"].strip() for a in group}) for key, group in candidates.items()}

    def render_candidates(row: Row) -> Example:
        return render(tokenizer, row, [[[answer_message(text) for text in texts[row["id"]]]]])

    limit = Limit(config.micro_batch_tokens, "micro_batch_tokens", "the prompt with its longest answer")
    rows = [asked[key] for key in candidates]
    rendered = bad.examples(rows, render_candidates, lambda one: len(one.prompt) + max(map(len, one.answers)), limit)
    if candidates:
        bad.check_left(len(rendered), f"{len(candidates)} prompts with answers")
    members = [load_model(one, "scalar", frozen=True)[0] for one in reward_models]
    pieces = [
        Example(one.prompt, some, [[True] * len(answer) for answer in some], [])
        for _, one in rendered for some in batch_by_size(one.answers, len, limit.tokens - len(one.prompt))
    ]  # fmt: skip
    numbers = [chain.from_iterable(score_answers(one, pieces, limit.tokens, run.progress)) for one in members]
    combined = (combine(some, config.ensemble) for some in zip(*numbers, strict=True))
    reward_of = {}
    for row, _ in rendered:
        by_text = dict(zip(texts[row["id"]], combined, strict=False))
        reward_of[row["id"]] = [{**a, "reward": by_text[a["text"].strip()]} for a in candidates[row["id"]]]
    return reward_of


def _report(candidates: dict[str, list[Row]], picked: dict[str, Row], run: StageRun) -> None:
    """Report the gold accuracy of the picked, the average and the best answer; nothing if any answer lacks a gold score."""
    if not picked or any(a["gold"] is None for group in candidates.values() for a in group):
        return
    mean = fmean([fmean([float(is_correct(a["gold"])) for a in group]) for group in candidates.values()])
    best = fmean([float(any(is_correct(a["gold"]) for a in group)) for group in candidates.values()])
    pick = fmean([float(is_correct(a["gold"])) for a in picked.values()])
    bars: list[tuple[Any, float]] = [("mean answer", mean), ("picked", pick), ("best of K", best)]
    for name, value in zip(("mean_accuracy", "picked_accuracy", "best_accuracy"), (mean, pick, best), strict=True):
        run.metric(name, value)
    run.figure("accuracy", Figure(title="Rejection sampling", x="answers", y="gold accuracy", kind="bar", series={"accuracy": bars}))
