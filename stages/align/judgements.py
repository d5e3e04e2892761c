"""Preferences from people's judgements of pairs of answers, and the agreement between judges."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from puna.stages.align.preferences import draw_pairs
from puna.stages.align.sample import read_answers
from puna.stages.contract import Answers, External, Figure, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import LEVELS, Level, answering, asking
from puna.stages.draws import fraction, identifier
from puna.storage import PunaError

Row = dict[str, Any]
STEPS = len(LEVELS)
ALIAS = "judged@latest"


class Judgement(BaseModel):
    """A person's judgement of a pair of answers: one line of the file from `puna annotate`. A person's last judgement of a pair counts."""

    model_config = ConfigDict(extra="forbid")
    pair: str = Field(min_length=1, description="Id of the pair")
    by: str = Field(min_length=1, max_length=100, description="Name of the judge")
    better: Literal["first", "second"] | None = Field(None, description="The better answer; null: the pair was skipped")
    level: Level | None = Field(None, description="Level of the difference; null: the pair was skipped")
    edited: str | None = Field(None, max_length=100_000, description="An edited version of the better answer")
    prompt: str | None = Field(None, max_length=100_000, description="An edited version of the prompt")

    @property
    def worth(self) -> int:
        """Return the signed level: 4 (significantly) to 1 (marginally) if the first answer is better, -4 to -1 if the second is; else 0."""
        if self.better is None or self.level is None:
            return 0
        size = STEPS - LEVELS.index(self.level)
        return size if self.better == "first" else -size


class JudgementsConfig(SeededConfig):
    pairs_per_prompt: int = Field(1, ge=1, description="Maximum number of pairs per prompt")
    heldout_fraction: float = Field(0.1, ge=0, lt=1, description="Share of prompts held out from training, to measure the reward model")


def pairs_to_judge(answers: Mapping[str, Sequence[Row]], config: JudgementsConfig) -> dict[str, tuple[Row, Row]]:
    """Return pair id → two finished, different answers to a prompt, in seeded random order; at most `pairs_per_prompt` pairs per prompt."""
    import numpy as np

    pairs = {}
    for prompt_id in sorted(answers):
        texts = {answer["text"].strip(): answer for answer in answers[prompt_id] if answer["finished"]}
        if len(texts) < 2:
            continue
        generator = np.random.default_rng(int(fraction("judged", config.seed, prompt_id) * 2**53))
        for one, other in draw_pairs(list(texts.values()), generator, config.pairs_per_prompt):
            first, second = sorted((one, other), key=lambda answer: str(answer["id"]))
            pairs[identifier("pair", first["id"], second["id"])] = (first, second)
    return dict(sorted(pairs.items(), key=lambda item: fraction("order", config.seed, item[0])))


def agreement(judged: Iterable[Sequence[str]]) -> tuple[float | None, float | None]:
    """Return the share of pairs of judges that chose the same answer, and Krippendorff's alpha. `judged`: the judges' choices per pair.

    Alpha (Krippendorff 2004, nominal data) is 1 for full agreement and 0 for chance. Both are None if no pair of answers has two judges;
    alpha is also None if all choices are the same."""
    several = [Counter(sides) for sides in judged if len(sides) > 1]
    if not several:
        return None, None
    couples = agreeing = observed = 0.0
    totals: Counter[str] = Counter()
    for counts in several:
        m = sum(counts.values())
        same = sum(c * (c - 1) for c in counts.values())
        couples, agreeing = couples + m * (m - 1), agreeing + same
        observed += (m * (m - 1) - same) / (m - 1)
        totals.update(counts)
    n = sum(totals.values())
    expected = (n * n - sum(c * c for c in totals.values())) / (n - 1)
    return agreeing / couples, 1 - observed / expected if expected else None


@stage(kind="preferences")
def judgements(answers: Answers, prompts: Prompts, judged: list[External], config: JudgementsConfig, run: StageRun) -> None:
    """Make preferences from people's judgements (Llama 3, section 4.2.1): edited > chosen > rejected, at one of four levels.

    `judged`: JSON Lines files with one `Judgement` per line. If several people judged a pair, the mean of their signed levels decides.
    `dropped` has pairs that all judges skipped (`skipped`) or whose levels cancel out (`no_majority`). If a judge edited the prompt, the
    conversation is the edited prompt with both answers. Metrics: `judges`; if two people judged the same pair, `agreement` and `alpha`."""
    questions, by_prompt = read_answers(answers, prompts)
    pairs = pairs_to_judge(by_prompt, config)
    by_pair: dict[str, dict[str, Judgement]] = defaultdict(dict)
    for number, line, name in _lines(judged):
        judgement = _parse(line, f"{name}, line {number}")
        if judgement.pair not in pairs:
            raise PunaError(f"{name}, line {number}: {answers.id} has no pair {judgement.pair} with this configuration")
        by_pair[judgement.pair][judgement.by] = judgement
    rows, dropped = [], []
    for pair, people in sorted(by_pair.items()):
        verdicts = [people[name] for name in sorted(people)]
        row, rule = _preference(pair, *pairs[pair], verdicts, questions)
        if row is not None:
            split = "heldout" if fraction(config.seed, row["prompt_id"]) < config.heldout_fraction else "train"
            rows.append({**row, "split": split})
        else:
            detail = "; ".join(f"{one.by}: {one.better} {one.level}" for one in verdicts)
            dropped.append({"id": pair, "rule": rule, "value": None, "threshold": None, "detail": detail})
    run.count_input(len(by_pair))
    run.write_rows(rows)
    run.write_rows(dropped, "dropped")
    run.metric("pairs", len(rows))
    run.metric("judges", len({name for people in by_pair.values() for name in people}))
    share, alpha = agreement([[one.better for one in people.values() if one.better] for people in by_pair.values()])
    for name, value in (("agreement", share), ("alpha", alpha)):
        if value is not None:
            run.metric(name, value)
    counts = Counter(row["level"] for row in rows)
    bars: list[tuple[Any, float]] = [(level.replace("_", " "), float(counts[level])) for level in LEVELS]
    run.figure("levels", Figure(title="Judged pairs", x="level", y="pairs", kind="bar", series={"pairs": bars}))


def _preference(pair: str, first: Row, second: Row, verdicts: Sequence[Judgement], asked: Mapping[str, Row]) -> tuple[Row | None, str]:
    """Return (row of the preferences table without `split`, ""), or (None, the rule that drops the pair)."""
    judged = [one for one in verdicts if one.worth]
    if not judged:
        return None, "skipped"
    worth = sum(one.worth for one in judged) / len(judged)
    if not worth:
        return None, "no_majority"
    better, worse = (first, second) if worth > 0 else (second, first)
    side = "first" if worth > 0 else "second"
    edits = [one.edited for one in judged if one.better == side and one.edited and one.edited.strip() != better["text"].strip()]
    rewritten = [one.prompt for one in judged if one.prompt]
    prompt = asked[better["prompt_id"]]
    level = LEVELS[STEPS - max(1, round(abs(worth)))]
    return {
        "id": pair, "prompt_id": prompt["id"], "task": prompt["task"], "tools": prompt["tools"],
        "messages": asking(rewritten[-1]) if rewritten else prompt["messages"],
        "chosen": answering(better["text"].strip()), "rejected": answering(worse["text"].strip()),
        "edited": answering(edits[-1].strip()) if edits else None, "others": None, "level": level, "margin": None,
        "chosen_model": better["model"], "rejected_model": worse["model"],
    }, ""  # fmt: skip


def _lines(judged: Sequence[External]) -> Iterable[tuple[int, str, str]]:
    for source in judged:
        for file in source.files:
            with file.open() as handle:
                text = handle.read().decode("utf-8", errors="replace")
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield number, line, file.location


def _parse(line: str, where: str) -> Judgement:
    try:
        return Judgement.model_validate(json.loads(line))
    except (ValueError, ValidationError) as error:
        raise PunaError(f"{where}: not a valid judgement ({error}); lines must come from `puna annotate`") from error
