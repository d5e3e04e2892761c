"""Rejection sampling: the reward model's best of K answers becomes training data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from puna.stages.align.fitting import Example, check_lengths, load_model, render
from puna.stages.align.prompts import identifier
from puna.stages.align.reward_model import score_answers
from puna.stages.align.sample import read_answers
from puna.stages.align.scoring import is_correct
from puna.stages.contract import Answers, Figure, Model, Prompts, StageConfig, StageRun, stage


class RejectionSampleConfig(StageConfig):
    """How answers are scored."""

    models: int = Field(0, ge=0, description="Use the answers of this many of the models only, best mean reward first; 0: all")
    row_tokens: int = Field(4096, ge=16, description="Tokens of one packed row when answers are scored, tokens")
    source: str = Field("rejection_sampling", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def rejection_sample(
    answers: Answers, reward_model: Model, prompts: Prompts, config: RejectionSampleConfig, run: StageRun
) -> None:
    """The answer with the highest reward for each prompt (Llama 3, section 4.2.2).

    Side tables: `scores` holds, per instruction, `reward` and `agreement` (the share of the prompt's answers
    with the same text), and per answer its `reward`; `dropped` the prompts whose answers were all cut off
    (`unfinished`) or were finished by other models than the best `models` only (`unselected_models`).
    Metrics compare the gold accuracy of the picked answers with the mean and with the best that was there.
    """
    asked, groups = read_answers(answers, prompts)
    finished = {key: [a for a in group if a["finished"]] for key, group in groups.items()}
    candidates = {key: finished[key] for key in sorted(finished) if finished[key]}
    _score(candidates, asked, reward_model, config, run)
    candidates = _best_models(candidates, config.models)
    picked = {key: max(group, key=lambda a: (a["reward"], a["id"])) for key, group in candidates.items()}
    rows, scores = [], []
    for key, best in picked.items():
        row = _instruction(asked[key], best, config.source)
        texts = Counter(a["text"].strip() for a in candidates[key])
        agreement = texts[best["text"].strip()] / len(candidates[key])
        rows.append(row)
        scores.append({"id": row["id"], "name": "reward", "value": best["reward"]})
        scores.append({"id": row["id"], "name": "agreement", "value": agreement})
        scores += [{"id": a["id"], "name": "reward", "value": a["reward"]} for a in candidates[key]]
    dropped = []
    for key in sorted(set(groups) - set(picked)):
        # No answer came to its end; or some did, but none of the models that were chosen.
        rule, count = ("unselected_models", len(finished[key])) if finished[key] else ("unfinished", len(groups[key]))
        dropped.append({"id": key, "rule": rule, "value": float(count), "threshold": None, "detail": asked[key]["prompt"]})
    run.count_input(len(groups))
    run.write_rows(rows)
    run.write_rows(scores, "scores")
    run.write_rows(dropped, "dropped")
    _report(candidates, picked, run)


def _score(
    candidates: dict[str, list[dict[str, Any]]],
    asked: dict[str, dict[str, Any]],
    reward_model: Any,
    config: RejectionSampleConfig,
    run: StageRun,
) -> None:
    """Put `reward` into every answer; one text is scored once per prompt."""
    model, tokenizer = load_model(reward_model, "scalar")
    texts = {key: sorted({a["text"].strip() for a in group}) for key, group in candidates.items()}
    examples: list[Example] = [render(tokenizer, asked[key]["prompt"], [texts[key]]) for key in candidates]
    check_lengths(examples, [f"prompt {key} with its answers" for key in candidates], config.row_tokens)
    for number, (key, rewards) in enumerate(
        zip(candidates, score_answers(model, examples, config.row_tokens), strict=True), 1
    ):
        by_text = dict(zip(texts[key], rewards, strict=True))
        for answer in candidates[key]:
            answer["reward"] = by_text[answer["text"].strip()]
        run.progress(number, len(candidates))


def _best_models(candidates: dict[str, list[dict[str, Any]]], most: int) -> dict[str, list[dict[str, Any]]]:
    """Only the answers of the `most` models with the highest mean reward (0: of all)."""
    if not most:
        return candidates
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in candidates.values():
        for answer in group:
            rewards[answer["model"]].append(answer["reward"])
    ranked = sorted(rewards, key=lambda name: (-sum(rewards[name]) / len(rewards[name]), name))
    chosen = set(ranked[:most])
    left = {key: [a for a in group if a["model"] in chosen] for key, group in candidates.items()}
    return {key: group for key, group in left.items() if group}


def _instruction(prompt: dict[str, Any], best: dict[str, Any], source: str) -> dict[str, Any]:
    return {
        "id": identifier(source, prompt["id"]),
        "prompt_id": prompt["id"],
        "task": prompt["task"],
        "prompt": prompt["prompt"],
        "response": best["text"].strip(),
        "source": source,
        "score": best["reward"],
    }


def _report(candidates: dict[str, list[dict[str, Any]]], picked: dict[str, dict[str, Any]], run: StageRun) -> None:
    """Gold accuracy of the picked answers, of the mean answer and of the best answer there was."""
    if not picked or any(a["gold"] is None for group in candidates.values() for a in group):
        return
    mean = _mean([_mean([float(is_correct(a["gold"])) for a in group]) for group in candidates.values()])
    best = _mean([float(any(is_correct(a["gold"]) for a in group)) for group in candidates.values()])
    chosen = _mean([float(is_correct(a["gold"])) for a in picked.values()])
    bars: list[tuple[Any, float]] = [("mean answer", mean), ("picked by the reward model", chosen), ("best of K", best)]
    for name, value in zip(("mean_accuracy", "picked_accuracy", "best_accuracy"), (mean, chosen, best), strict=True):
        run.metric(name, value)
    run.figure(
        "accuracy", Figure(title="Rejection sampling", x="answers", y="gold accuracy", kind="bar", series={"accuracy": bars})
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
