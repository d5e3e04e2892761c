"""Accuracy of rewards on pairs of answers, and its calibration: by level, by length, and beside length as the judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from puna.stages.contract import Figure, StageRun
from puna.stages.training.rankings import Ranked
from puna.stages.verifiers.reward_model import sigmoid

BINS = ((-0.5, "half or less"), (-0.1, "shorter"), (0.1, "about as long"), (0.5, "longer"), (1.0, "twice or more"))
"""Upper ends of the chosen answer's length less the rejected one's, as a share of the longer."""


STEPS = 10
"""Parts of the range of probabilities in which claimed and seen accuracy are compared."""


class Pair(NamedTuple):
    """A chosen and a rejected answer.

    right        1 if the rewards order them rightly, one half for a tie
    longer       the same for length as the judge
    difference   of lengths, as a share of the longer
    margin       difference of rewards"""

    level: str | None
    right: float
    longer: float
    difference: float
    margin: float


def pairs(found: Sequence[Ranked], numbers: Sequence[Sequence[float]]) -> tuple[list[Pair], list[float]]:
    """Return the pair of each preference by its answers' rewards; and the order of each edit and its chosen answer."""
    ordered: list[Pair] = []
    edits: list[float] = []
    for one, values in zip(found, numbers, strict=True):
        lengths = [len(answer) for answer in one.example.answers]
        for row, tiers in zip(one.rows, one.example.groups, strict=True):
            if row["edited"] is not None:
                edits.append(_order(values[tiers[0][0]], values[tiers[1][0]]))
            better, worse = tiers[row["edited"] is not None][0], tiers[-1][-1]
            a, b = lengths[better], lengths[worse]
            margin, order = values[better] - values[worse], _order(values[better], values[worse])
            ordered.append(Pair(row["level"], order, _order(a, b), (a - b) / max(a, b), margin))
    return ordered, edits


def report(ordered: Sequence[Pair], edits: Sequence[float], split: str, run: StageRun) -> None:
    """Report the metrics of a split; of held-out pairs also by level, with a figure by length."""
    if edits:
        run.metric(f"{split}_edit_accuracy", _mean(edits))
    if not ordered:
        return
    run.metric(f"{split}_accuracy", _mean([pair.right for pair in ordered]))
    run.metric(f"{split}_longer_accuracy", _mean([pair.longer for pair in ordered]))
    if split != "heldout":
        return
    levels = sorted({pair.level for pair in ordered if pair.level is not None})
    for level in levels:
        run.metric(f"{split}_accuracy_{level}", _mean([pair.right for pair in ordered if pair.level == level]))
    run.metric(f"{split}_calibration_error", calibration_error(ordered))
    bars: list[tuple[Any, float]] = []
    low = -1.1
    for high, name in BINS:
        if inside := [pair.right for pair in ordered if low < pair.difference <= high]:
            bars.append((f"{name} ({len(inside)})", _mean(inside)))
        low = high
    figure = Figure(
        title="Reward model by length",
        x="the chosen answer beside the rejected one (pairs)",
        y="held-out pairs in the right order",
        kind="bar",
        series={"accuracy": bars},
        lines={"the longer answer": _mean([pair.longer for pair in ordered])},
        note="A model that judges by length is right on one side and wrong on the other.",
    )
    run.figure("length", figure)


def calibration_error(ordered: Sequence[Pair]) -> float:
    """Return the expected calibration error (Guo et al. 2017) of Bradley-Terry's probabilities over parts of one half to 1."""
    parts: dict[int, list[Pair]] = {}
    for pair in ordered:
        parts.setdefault(min(STEPS - 1, int((sigmoid(abs(pair.margin)) - 0.5) * 2 * STEPS)), []).append(pair)
    gaps = [abs(sum(pair.right - sigmoid(abs(pair.margin)) for pair in some)) for some in parts.values()]
    return sum(gaps) / len(ordered)


def _order(better: float, worse: float) -> float:
    """Return 1 for the right order, one half for a tie."""
    return float(better > worse) + 0.5 * float(better == worse)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
