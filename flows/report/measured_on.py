"""What a run's alignment was measured on: its annotator, its tasks, and how near held-out questions lie to training ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from puna.flows.report.markup import Content, Html, part, table, tag
from puna.flows.report.run import Run
from puna.stages.conversations import messages_of, text_of
from puna.stages.training.intervals import Interval, wilson
from puna.stages.verifiers.base import BoundedVerifier, is_correct
from puna.stages.verifiers.question import Question
from puna.stages.verifiers.registry import from_json
from puna.storage import PunaError

MOST = 1_000
"""Held-out questions, and gold answers, that a report looks at."""


def lookup(prompts: Sequence[Mapping[str, Any]]) -> Interval | None:
    """Return the share of held-out questions that the gold answer of the nearest training question answers rightly.

    The nearest one shares most words, of equally near ones the first by id. None without gold answers, or without verifiers that
    run in linear time in this process.
    """
    gold = sorted((row for row in prompts if row["split"] == "train" and row["reference"]), key=lambda row: row["id"])[:MOST]
    known = [(Counter(text_of(messages_of(row)).split()), str(row["reference"])) for row in gold]
    right = []
    for row in sorted((row for row in prompts if row["split"] == "heldout" and row["verifier"]), key=lambda row: row["id"])[:MOST]:
        try:
            verifier = from_json(json.loads(row["verifier"]))
        except (PunaError, ValueError):
            continue
        if not known or not isinstance(verifier, BoundedVerifier):
            continue
        text = text_of(messages_of(row))
        words = Counter(text.split())
        answer = max(known, key=lambda one: (words & one[0]).total() / max(1, (words | one[0]).total()))[1]
        score = verifier.score(Question(row["id"], row["task"], text, row["reference"]), answer).value
        right.append(score is not None and is_correct(score))
    return wilson(sum(right), len(right)) if right else None


def measured_view(run: Run) -> Html | None:
    """Return what the figures of alignment are of, from the configuration and the prompts of this run."""
    rows: list[list[Content]] = []
    for step in run.kind("preferences"):
        config = step.artifact.manifest.config
        if step.stage == "preferences":
            taste = f"its taste is the check {json.dumps(config['taste'])}" if config.get("taste") else "it has no taste of its own"
            flips = f"{float(config.get('flips', 0)):.0%} of its preferences are the wrong way round"
            rows.append(["annotator", f"simulated: {taste}; {flips}"])
            break
    for step in run.kind("prompts")[:1]:
        prompts = step.artifact.read().to_pylist()
        tasks = Counter(row["task"] for row in prompts if row["split"] == "heldout")
        rows.append(["tasks", ", ".join(f"{task} ({count:,} held-out questions)" for task, count in sorted(tasks.items()))])
        if (found := lookup(prompts)) is not None:
            share = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
            rows.append(["lookup, no model", f"{share} right: the gold answer of the training question that shares most words, repeated"])
    note = "An arm that is no better than the lookup has shown nothing that the training questions did not hold."
    return part("What this was measured on", table(["what", "in this run"], rows), tag("p", note, class_="note")) if rows else None
