"""The table at the end of a run: documents and tokens after each stage, and what the models can do."""

from __future__ import annotations

from rich.table import Table

from puna.flows.session import Session
from puna.storage import Artifact

EVALUATIONS = ("bits_per_byte", "gzip_bits_per_byte", "accuracy")


def closing_table(now: Session) -> None:
    """Print the funnel and the evaluations of the run in progress."""
    funnel = Table("after", "documents", "dropped", "characters", "tokens", box=None, header_style="bold")
    for step, outcome in now.outcomes:
        made = outcome.artifact
        if made.kind in ("pages", "documents"):
            dropped = f"{made.rows('dropped'):,}" if "dropped" in made.tables else ""
            characters = f"{_characters(made):,}" if made.kind == "documents" else ""
            funnel.add_row(step, f"{made.rows():,}", dropped, characters, "")
        elif made.kind == "tokens":
            count = made.manifest.metrics.get("tokens")
            funnel.add_row(step, "", "", "", f"{count:,}" if isinstance(count, int) else "")
    if funnel.row_count:
        now.console.show(funnel)
    measured = Table("evaluation", "task", "metric", "value", "95 % interval", "n", box=None, header_style="bold")
    for step, outcome in now.outcomes:
        if outcome.artifact.kind == "evaluation":
            for row in outcome.artifact.read().to_pylist():
                interval = f"{row['low']:.3f} to {row['high']:.3f}" if row["low"] is not None else ""
                measured.add_row(step, row["task"], row["metric"], f"{row['value']:.4g}", interval, f"{row['n']:,}")
    if measured.row_count:
        now.console.show(measured)
    reused = sum(outcome.reused for _, outcome in now.outcomes)
    seconds = sum(outcome.seconds for _, outcome in now.outcomes)
    now.console.say(f"{len(now.outcomes)} artifacts, {reused} reused, {seconds:.1f} s; run {now.run}")


def _characters(documents: Artifact) -> int:
    import pyarrow.compute as pc

    return sum(pc.sum(pc.utf8_length(batch.column(0))).as_py() or 0 for batch in documents.batches(columns=["text"]))
