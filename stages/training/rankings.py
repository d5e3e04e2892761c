"""Training examples made from preferences: a prompt with its ranked or labelled answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from puna.stages.conversations import BadRow, Message, message_of, others_of
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.train import Example, render
from puna.storage import Artifact

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer

PROMPT = ("prompt_id", "messages")  # columns that identify the prompt of a preference
Tiers = list[list[Message]]
"""Tiers of equally good answers to a prompt, best tier first."""


def read_preferences(artifacts: Sequence[Artifact], levels: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the artifacts' preferences that have one of `levels` (None: any) or no level, sorted by id. A prompt (an id, or equal
    messages) that one artifact holds out is held out in all, because they may be split by different hashes."""
    tables = [artifact.read().to_pylist() for artifact in artifacts]
    heldout = [{row[name] for row in table if row["split"] == "heldout" for name in PROMPT} for table in tables]
    for number, table in enumerate(tables):
        elsewhere = set().union(*heldout[:number], *heldout[number + 1 :])
        for row in table:
            row["split"] = row["split"] if elsewhere.isdisjoint(row[name] for name in PROMPT) else "heldout"
    rows = [row for table in tables for row in table]
    rows = [row for row in rows if levels is None or row["level"] is None or row["level"] in levels]
    return sorted(rows, key=lambda row: str(row["id"]))


def by_tier(row: dict[str, Any]) -> Tiers:
    """Return a preference's answers in tiers, best first: edited, chosen, others, rejected. Raise BadRow if a side is missing."""
    (edited, best, worst), between = _sides(row)
    if not best or not worst:
        phrase = "a good answer is" if best else "a bad answer is" if worst else "no answer is"
        raise BadRow("one_sided", f"row {row['id']}: only {phrase} known: nothing to compare; loss kto of dpo can learn from it")
    return [*([edited] if edited else []), best, *between, worst]


def by_label(row: dict[str, Any]) -> Tiers:
    """Return a preference's good (also edited) and bad answers as two tiers, without those in between. Raise BadRow if both are missing."""
    (edited, best, worst), _ = _sides(row)
    if not best and not worst:
        raise BadRow("one_sided", f"row {row['id']}: neither a good nor a bad answer is known")
    return [edited + best, worst]


def _sides(row: dict[str, Any]) -> tuple[Tiers, Tiers]:
    """Return a preference's edited, best and worst answers, and the tiers between best and worst."""
    tiers: dict[int, list[Message]] = {}
    for other in others_of(row):
        tiers.setdefault(other.pop("rank"), []).append(other)
    edited, chosen, rejected = ([] if (one := message_of(row, side)) is None else [one] for side in ("edited", "chosen", "rejected"))
    return [edited, chosen + tiers.pop(0, []), tiers.pop(-1, []) + rejected], [tiers[rank] for rank in sorted(tiers)]


class Ranked(NamedTuple):
    """A prompt with the ranked answers of its preferences. `rows`: the preferences, one per ranking (group) of the example."""

    example: Example
    rows: list[dict[str, Any]]


def render_ranked(
    tokenizer: Tokenizer, rows: Sequence[dict[str, Any]], limit: Limit, bad: BadRows, tiers_of: Callable[[dict[str, Any]], Tiers] = by_tier,
) -> list[Ranked]:  # fmt: skip
    """Return an example per prompt with its preferences' ranked answers, or several if they exceed `limit`. Unusable rows go to `bad`."""
    limit = limit._replace(what="the prompt with its answers")
    preferences = sorted(rows, key=lambda row: (row["prompt_id"], row["id"]))
    results: list[Ranked] = []
    for row, example in bad.examples(preferences, lambda row: render(tokenizer, row, [tiers_of(row)]), len, limit):
        if results and results[-1].rows[0]["prompt_id"] == row["prompt_id"] and results[-1].example.prompt == example.prompt:
            last, more = results[-1], len(example) - len(example.prompt)
            if len(last.example) + more <= limit.tokens:
                results[-1] = Ranked(_join(last.example, example), [*last.rows, row])
                continue
        results.append(Ranked(example, [row]))
    return results


def _join(one: Example, other: Example) -> Example:
    start = len(one.answers)
    shifted = [[[start + index for index in tier] for tier in tiers] for tiers in other.groups]
    return Example(one.prompt, one.answers + other.answers, one.masks + other.masks, one.groups + shifted)


def all_pairs(example: Example) -> list[tuple[int, int]]:
    """Return (better, worse) indices of answers: every answer with every answer in the worse tiers of its ranking."""
    return [
        (better, worse)
        for tiers in example.groups
        for number, tier in enumerate(tiers)
        for better in tier
        for worse in chain.from_iterable(tiers[number + 1 :])
    ]


def order(difference: float) -> float:
    """Return 1 for a pair in the right order (a difference above 0), 0.5 for a tie, else 0."""
    return float(difference > 0) + 0.5 * float(difference == 0)


def pairs_of(example: Example, pairs: str) -> list[tuple[int, int]]:
    """Return (better, worse) indices of answers: the best tier of each ranking with its worst tier (`best_worst`) or all other tiers."""
    return [
        (better, worse)
        for tiers in example.groups
        for better in tiers[0]
        for tier in (tiers[-1:] if pairs == "best_worst" else tiers[1:])
        for worse in tier
    ]
