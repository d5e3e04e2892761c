"""Signals of a user's own: measured by their definitions, document after document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from puna.stages.contract import Signal, StageRun
from puna.storage import PunaError

FAILED = "_failed"
"""Column of measured parts: per document the signals whose definition failed, and how."""


def with_own(table: pa.Table, documents: pa.Table, own: Sequence[Signal]) -> pa.Table:
    """`table` with a column for each signal, of the documents in the same order, and the column `FAILED`.

    A definition that raises an exception leaves the value null. PunaError where one gives a value of another type than it
    declares: that is wrong for all documents.
    """
    failed: list[list[str]] = [[] for _ in range(table.num_rows)]
    for made in own:
        columns = [documents[name].to_pylist() for name in made.columns]
        values = [_value(made, row, failed[at]) for at, row in enumerate(zip(*columns, strict=True))]
        table = table.append_column(made.name, pa.array(values, made.field.type))
    return table.append_column(FAILED, pa.array(failed, pa.list_(pa.string())))


def _value(made: Signal, row: tuple[object, ...], failed: list[str]) -> float | int | str | None:
    assert made.definition is not None
    try:
        value = made.definition(*row)
    except Exception as error:  # noqa: BLE001 - a definition may fail in any way, and the other documents go on
        failed.append(f"{made.name}\t{type(error).__name__}: {error}")
        return None
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if made.kind is float else made.kind):
        raise PunaError(f"signal {made.name}: its definition gave {value!r} ({type(value).__name__}) and declares {made.kind.__name__}")
    return value


def failed_in(table: pa.Table) -> list[tuple[str, str, str]]:
    """Signal, document and what went wrong, for every value of a measured part that a definition failed to give."""
    rows = zip(table["id"].to_pylist(), table[FAILED].to_pylist(), strict=True)
    return [(*failure.split("\t", 1)[:1], identity, failure.split("\t", 1)[1]) for identity, failures in rows for failure in failures]


class Failures:
    """What the definitions failed to give: how often each did, and the first time."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, failed: list[tuple[str, str, str]]) -> None:
        """Count those of one part."""
        for name, identity, said in failed:
            self.counts[name] += 1
            self.first.setdefault(name, f"document {identity}: {said}")

    def report(self, run: StageRun) -> None:
        """Record them as metrics."""
        for name in sorted(self.counts):
            run.metric(f"failed_{name}", self.counts[name])
            run.metric(f"first_failure_{name}", self.first[name])
