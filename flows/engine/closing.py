"""The tables at the end of a run: the funnel of documents, and the models' results."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from puna.flows.engine.session import Session
from puna.flows.report import arms
from puna.storage import Artifact

BITS = {
    "document_bits_per_byte": "bits per byte", "ngram_bits_per_byte": "n-grams", "ngram_page_bits_per_byte": "with the page's",
    "dictionary_bits_per_byte": "zstd, dictionary",
}  # fmt: skip


def closing_table(now: Session) -> None:
    """Print the funnel, the evaluations and the reward models of the run in progress."""
    artifacts = [(step, outcome.artifact) for step, outcome in now.outcomes]
    evaluations = [(step, _measured(artifact)) for step, artifact in artifacts if artifact.kind == "evaluation"]
    rounds = arms.rounds((step, artifact) for step, artifact in artifacts if artifact.kind == "evaluation")
    compared = [table for arms_of_round in rounds for table in (_arms(arms_of_round), _claims(arms_of_round))]
    for table in (_funnel(artifacts), _compression(evaluations), _accuracy(evaluations), *compared, _rewards(artifacts)):
        if table.row_count:
            now.console.say(table)
            now.console.say("")
    reused = sum(outcome.reused for _, outcome in now.outcomes)
    seconds = sum(outcome.seconds for _, outcome in now.outcomes)
    now.console.say(f"{len(now.outcomes)} artifacts, {reused} reused, {seconds:.1f} s; run {now.run}")


def _measured(evaluation: Artifact) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["task"], row["metric"]): row for row in evaluation.read().to_pylist()}


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
    return table


def _funnel(artifacts: list[tuple[str, Artifact]]) -> Table:
    table = _table("after", "documents", "dropped", "characters", "tokens")
    for step, artifact in artifacts:
        if artifact.kind in ("pages", "documents"):
            dropped = f"{artifact.rows('dropped'):,}" if "dropped" in artifact.tables else ""
            table.add_row(step, f"{artifact.rows():,}", dropped, _count(artifact, "characters"), "")
        elif artifact.kind == "tokens":
            table.add_row(step, "", "", "", _count(artifact, "tokens"))
    return table


def _count(artifact: Artifact, metric: str) -> str:
    count = artifact.manifest.metrics.get(metric)
    return f"{count:,}" if isinstance(count, int) else ""


def _compression(evaluations: list[tuple[str, dict[tuple[str, str], dict[str, Any]]]]) -> Table:
    """Return bits per byte of held-out documents, for the model and for a count-based model of as much text."""
    table = _table("held-out pages", *BITS.values(), "documents")
    for step, rows in evaluations:
        if bits := rows.get(("pages", "document_bits_per_byte")):
            measurements = [rows.get(("pages", metric)) for metric in BITS]
            table.add_row(step, *(f"{row['value']:.3f}" if row else "" for row in measurements), f"{bits['n']:,}")
    return table


def _accuracy(evaluations: list[tuple[str, dict[tuple[str, str], dict[str, Any]]]]) -> Table:
    """Return the share of right answers to held-out prompts: a line per task, a column per evaluation."""
    measured = [(step, rows) for step, rows in evaluations if not arms.CONTROL.fullmatch(step)]
    tests = [(step, rows) for step, rows in measured if any(metric == "accuracy" for _, metric in rows)]
    tasks = {task for _, rows in tests for task, metric in rows if metric == "accuracy" and not task.startswith("choice/")}
    table = _table("accuracy", *(step.removeprefix("evaluate_") for step, _ in tests))
    for task in sorted(tasks, key=lambda task: (task == "all", task)):
        values = [rows.get((task, "accuracy")) for _, rows in tests]
        table.add_row(task, *(f"{row['value']:.3f}" if row else "" for row in values))
    overall = [rows.get(("all", "accuracy")) or {} for _, rows in tests]
    if any(row.get("low") is not None for row in overall):
        bounds = (f"{row['low']:.3f}-{row['high']:.3f}" if row.get("low") is not None else "" for row in overall)
        table.add_row("all, 95 % interval", *bounds)
    return table


def _arms(arms_of_round: arms.Arms) -> Table:
    table = _table(f"round {arms_of_round.number} beside other arms", *(arms.METRICS[metric] for metric in arms_of_round.metrics))
    for arm in arms_of_round.scores:
        table.add_row(arms.NAMES.get(arm, arm), *(f"{arms_of_round.share(arm, metric).value:.3f}" for metric in arms_of_round.metrics))
    return table


def _claims(arms_of_round: arms.Arms) -> Table:
    table = _table(f"in round {arms_of_round.number}", "of", "gain", "")
    for claim in arms_of_round.claims():
        gain = f"{claim.gain.value:+.3f} ({claim.gain.low:+.3f} to {claim.gain.high:+.3f})"
        table.add_row(claim.name, arms.METRICS[claim.metric], gain, claim.verdict)
    return table


def _rewards(artifacts: list[tuple[str, Artifact]]) -> Table:
    """Return the table of each reward model's accuracy on held-out pairs."""
    table = _table("reward model", "held-out accuracy", "pairs")
    for step, artifact in artifacts:
        metrics = artifact.manifest.metrics
        if "heldout_accuracy" in metrics and artifact.kind == "model":
            table.add_row(step, f"{metrics['heldout_accuracy']:.3f}", f"{metrics['heldout_pairs']:,}")
    return table
