"""The basis of a run's alignment figures: its annotator, its tasks, and the distance of held-out questions to training ones."""

from __future__ import annotations

import json
from collections import Counter

from puna.flows.html.markup import Content, Html, part, table, tag
from puna.flows.report.run import Run
from puna.stages.prompts.lookups import answers_without_model
from puna.stages.training.intervals import wilson


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
        for name, right in answers_without_model(prompts).items():
            share = wilson(round(sum(right.values())), len(right))
            rows.append([f"no model: {name}", f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f}) right"])
    note = (
        "The rows without a model answer held-out questions from the gold answers of training questions: with that of the nearest one, "
        "repeated or with the differing tokens replaced, or with the most frequent one. An arm that is no better has shown nothing that "
        "the training questions did not hold."
    )
    return part("What this was measured on", table(["what", "in this run"], rows), tag("p", note, class_="note")) if rows else None
