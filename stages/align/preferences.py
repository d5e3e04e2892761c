"""Preference pairs: two answers to a prompt, how much better the better answer is, and an edited answer.

The annotator is simulated, so that every preference can be traced to the prompt's verifier. A chosen answer that is wrong is edited into
the reference, unless the rejected answer is the reference: one text cannot be both best and worst."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field, JsonValue, model_validator

from puna.stages.align.sample import read_answers
from puna.stages.contract import Answers, Figure, Prompts, SeededConfig, StageConfig, StageRun, stage
from puna.stages.conversations import LEVELS, Level, answering
from puna.stages.draws import fraction, identifier
from puna.stages.verifiers.base import Score, ScoringConfig, is_correct, score_ending
from puna.stages.verifiers.registry import from_json
from puna.stages.verifiers.scoring import Scorer
from puna.storage import PunaError

Row = dict[str, Any]


class Thresholds(StageConfig):
    """Minimum margin of each level, as a difference of qualities (0 to 1)."""

    significantly_better: float = Field(0.6, gt=0, description="Minimum margin of `significantly_better`")
    better: float = Field(0.35, gt=0, description="Minimum margin of `better`")
    slightly_better: float = Field(0.15, gt=0, description="Minimum margin of `slightly_better`")
    marginally_better: float = Field(0.05, gt=0, description="Minimum margin of `marginally_better`; pairs below it are dropped")

    @model_validator(mode="after")
    def _falls(self) -> Thresholds:
        values = [getattr(self, level) for level in LEVELS]
        if values != sorted(set(values), reverse=True):
            raise ValueError(f"thresholds must decrease from {LEVELS[0]} to {LEVELS[-1]}, not {values}")
        return self

    def level(self, margin: float) -> Level | None:
        """Return the level for a margin, or None below all thresholds."""
        return next((level for level in LEVELS if margin >= getattr(self, level)), None)


class PreferencesConfig(SeededConfig):
    pairs_per_prompt: int = Field(2, ge=1, description="Maximum number of pairs per prompt")
    thresholds: Thresholds = Field(default_factory=Thresholds, description="Margins that separate the four levels")
    gold_weight: float = Field(0.6, ge=0, le=1, description="Weight of the verifier's score in the quality; the rest: taste or closeness")
    taste: dict[str, JsonValue] | None = Field(None, description="Verifier {name: …, …} of the annotator's taste; it replaces closeness")
    judged_fraction: float = Field(1.0, gt=0, le=1, description="Share of the prompts whose answers are judged")
    noise: float = Field(0.05, ge=0, description="Standard deviation of the annotator's noise on a margin")
    flips: float = Field(0.0, ge=0, lt=0.5, description="Share of preferences that the annotator reverses")
    unfinished: Literal["drop", "wrong"] = Field("drop", description="A truncated answer: drop its pair, or count as wrong")
    edit: bool = Field(True, description="Edit a wrong chosen answer into the reference answer")
    heldout_fraction: float = Field(0.1, ge=0, lt=1, description="Share of prompts held out from training, to measure the reward model")

    def reaches(self) -> list[tuple[str, str]]:
        return from_json(self.taste).reaches() if self.taste is not None else []

    @model_validator(mode="after")
    def _taste_is_a_verifier(self) -> PreferencesConfig:
        if self.taste is not None:
            try:
                from_json(self.taste)
            except PunaError as error:
                raise ValueError(f"taste: {error}") from error
        return self


@stage(kind="preferences")
def preferences(answers: Answers, prompts: Prompts, config: PreferencesConfig, run: StageRun) -> None:
    """Label pairs of answers with one of four preference levels and an edited answer (Llama 3, section 4.2.1).

    If several models answered, a pair compares two models. Input rows are the pairs. `dropped` has pairs with identical, similar or
    unfinished answers, and pairs with an answer that a verifier did not score (`unscored`). Raise PunaError if a prompt has none."""
    questions, by_prompt = read_answers(answers, prompts)
    if bare := [name for name in sorted(by_prompt) if questions[name]["verifier"] is None]:
        raise PunaError(f"preferences: {len(bare)} of {len(by_prompt)} prompts have no verifier to judge with, for example {bare[0]}")
    pairs: list[Row] = []
    dropped: list[Row] = []
    by_prompt = {name: some for name, some in by_prompt.items() if fraction("judged", config.seed, name) < config.judged_fraction}
    if not by_prompt:
        raise PunaError(f"preferences: judged_fraction={config.judged_fraction} selects no prompt; raise it")
    _score_taste(by_prompt, questions, config, run)
    for prompt_id in sorted(by_prompt):
        prompt = questions[prompt_id]
        generator = run.generator("pairs", prompt_id)
        split = "heldout" if fraction(config.seed, prompt_id) < config.heldout_fraction else "train"
        candidates = list(draw_pairs(by_prompt[prompt_id], generator, config.pairs_per_prompt))
        run.count_input(len(candidates))
        for first, second in candidates:
            noise, mistaken = float(generator.standard_normal()), generator.random() < config.flips
            row, rule, margin = judge(prompt, first, second, config, noise, bool(mistaken))
            if rule is None:
                pairs.append({**row, "split": split})
            else:
                threshold = config.thresholds.marginally_better if rule == "similar" else None
                detail = f"{first['text']!r} / {second['text']!r}"
                dropped.append({"id": row["id"], "rule": rule, "value": margin, "threshold": threshold, "detail": detail})
    run.write_rows(pairs)
    run.write_rows(dropped, "dropped")
    _report(pairs, dropped, run)


def _score_taste(by_prompt: dict[str, list[Row]], asked: dict[str, Row], config: PreferencesConfig, run: StageRun) -> None:
    """Set `liked` of each answer to its score from the verifier `taste`; to None if there is no `taste`."""
    answers = [answer for some in by_prompt.values() for answer in some]
    if config.taste is None:
        scores = [Score(None)] * len(answers)
    else:
        rows = {name: {**asked[name], "verifier": json.dumps(config.taste)} for name in by_prompt}
        scorer = Scorer(list(rows.values()), ScoringConfig(), run, needed="preferences")
        scores = scorer.scores([(rows[answer["prompt_id"]], answer["text"]) for answer in answers])
        scorer.report()
    for answer, score in zip(answers, scores, strict=True):
        answer["liked"] = score.value


def _report(kept: list[Row], dropped: list[Row], run: StageRun) -> None:
    levels = Counter(row["level"] for row in kept)
    run.metric("pairs", len(kept))
    run.metric("dropped_pairs", len(dropped))
    run.metric("edited_pairs", sum(row["edited"] is not None for row in kept))
    for level in LEVELS:
        run.metric(level, levels[level])
    bars = [(level.replace("_", " "), float(levels[level])) for level in LEVELS]
    bars += [(f"dropped: {rule}", float(n)) for rule, n in sorted(Counter(row["rule"] for row in dropped).items())]
    run.figure("levels", Figure(title="Preference levels", x="level", y="pairs", kind="bar", series={"pairs": bars}))


def draw_pairs(answers: list[Row], generator: np.random.Generator, most: int) -> Iterator[tuple[Row, Row]]:
    """Yield up to `most` disjoint pairs of answers in random order. If several models answered, each pair compares the two models with the
    most unpaired answers, so that few answers stay unpaired."""
    piles: dict[str, list[Row]] = defaultdict(list)
    for answer in sorted(answers, key=lambda a: (a["model"], a["sample"])):
        piles[answer["model"]].append(answer)
    for name in sorted(piles):
        order = generator.permutation(len(piles[name]))
        piles[name] = [piles[name][i] for i in order]
    if len(piles) == 1:
        (pile,) = piles.values()
        piles = defaultdict(list, {"even": pile[::2], "odd": pile[1::2]})
    for _ in range(most):
        first, second = sorted(piles, key=lambda name: (-len(piles[name]), name))[:2]
        if not piles[second]:
            return
        yield piles[first].pop(), piles[second].pop()


def judge(
    prompt: Row, first: Row, second: Row, config: PreferencesConfig, noise: float, mistaken: bool = False
) -> tuple[Row, str | None, float | None]:
    """Return (preferences row without `split`, rule that drops the pair or None, margin or None). A dropped pair's row has only its id.

    `noise` is a standard normal draw; `mistaken`: the annotator swaps the better and the worse answer."""
    row: Row = {"id": identifier("pair", *sorted((first["id"], second["id"])))}
    cut = [answer for answer in (first, second) if not answer["finished"]]
    if len(cut) == 2 or (cut and config.unfinished == "drop"):
        return row, "unfinished", None
    if None in (first["gold"], second["gold"]) or (config.taste is not None and None in (first["liked"], second["liked"])):
        return row, "unscored", None
    texts = first["text"].strip(), second["text"].strip()
    if texts[0] == texts[1]:
        return row, "identical", 0.0
    qualities = [quality(answer, prompt["reference"], config) for answer in (first, second)]
    margin = qualities[0] - qualities[1] + config.noise * noise
    chosen, rejected = (first, second) if (margin >= 0) != mistaken else (second, first)
    level = config.thresholds.level(abs(margin))
    if level is None:
        return row, "similar", abs(margin)
    if chosen in cut:  # a truncated answer may be chosen by mistake or for taste, but a model must not learn to be truncated
        return row, "unfinished", None
    # An annotator who prefers a wrong answer by mistake would not edit it into the right answer that was rejected.
    improvable = prompt["reference"] is not None and not is_correct(chosen["gold"]) and prompt["reference"].strip() not in texts
    edit = answering(prompt["reference"]) if config.edit and improvable else None
    row |= {
        "prompt_id": prompt["id"], "task": prompt["task"], "messages": prompt["messages"], "tools": prompt["tools"],
        "chosen": answering(chosen["text"].strip()), "rejected": answering(rejected["text"].strip(), rejected["finished"]),
        "edited": edit, "others": None, "level": level, "margin": abs(margin),
        "chosen_model": chosen["model"], "rejected_model": rejected["model"],
    }  # fmt: skip
    return row, None, abs(margin)


def quality(answer: Row, reference: str | None, config: PreferencesConfig) -> float:
    """Return an answer's quality, 0 to 1: the weighted mean of its gold score and its taste score, or of gold score and closeness.

    Without taste and reference, only the gold score counts. A truncated answer has gold score 0."""
    gold = float(score_ending(answer["gold"], answer["finished"]) or 0.0)
    if config.taste is not None:
        beside = float(answer["liked"])
    elif reference is not None:
        beside = closeness(answer["text"].strip(), reference.strip())
    else:
        return gold
    return config.gold_weight * gold + (1 - config.gold_weight) * beside


def closeness(text: str, reference: str) -> float:
    """Return 1 minus the edit distance divided by the longer text's length; 1 for two empty texts."""
    longer = max(len(text), len(reference))
    return 1.0 - edit_distance(text, reference) / longer if longer else 1.0


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance: the minimum number of character insertions, deletions and substitutions."""
    codes, places = np.array([*map(ord, b)], dtype=np.int64), np.arange(len(b) + 1)
    row = places
    for i, x in enumerate(a, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(x)))
        # An insertion costs 1 more than the cell before, so one running minimum handles all insertions of a row.
        row = np.minimum.accumulate(np.concatenate([[i], best]) - places) + places
    return int(row[-1])
