"""User-defined signals, measured by their Python definitions in a subprocess with time and memory limits per document."""

from __future__ import annotations

import base64
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc

from puna.stages.contract import Signal, StageRun
from puna.stages.contract.signals import Definition
from puna.stages.executors.subprocess_worker import Apart
from puna.storage import PunaError

FAILED = "_failed"  # column of measured parts: for each document, the signals whose definition failed, with the errors
IN_A_ROW = 16  # number of consecutive documents exceeding a definition's budget or ending its process after which the run stops


class Budget(NamedTuple):
    """Limits of a definition for one document: CPU seconds, and MiB beyond the memory that the subprocess used at its start."""

    seconds: float
    memory_mb: int


def with_own(table: pa.Table, documents: pa.Table, own: Sequence[Signal], budget: Budget) -> pa.Table:
    """Return `table` with a column for each signal in `own`, computed from `documents` (in the same row order), and the column `FAILED`.

    The value is null if a definition raises an exception, exceeds its budget or ends its process. Raise PunaError if a value does not have
    the declared type, or if `IN_A_ROW` consecutive documents exceed the budget or end the process."""
    # Rows without signals share one list, since many new lists would trigger garbage collections.
    failed: list[list[str]] = [[] for _ in range(table.num_rows)] if own else [[]] * table.num_rows
    for signal in own:
        rows = zip(*(documents[name].to_pylist() for name in signal.columns), strict=True)
        values = [_value(signal, answer, failed[at]) for at, answer in enumerate(_answers(signal, rows, budget))]
        table = table.append_column(signal.name, pa.array(values, signal.field.type))
    return table.append_column(FAILED, pa.array(failed, pa.list_(pa.string())))


def _answers(made: Signal, rows: Iterator[tuple[Any, ...]], budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield each document's `value`, or `failed` or `wrong` with the reason. Raise PunaError as in `with_own`."""
    code = base64.b64encode(cloudpickle.dumps(made.definition)).decode()
    broken = 0
    for row in rows:
        answer = process().ask({"definition": code, "row": row}, budget.seconds, budget.memory_mb)
        broken = broken + 1 if isinstance(answer, str) else 0
        if broken == IN_A_ROW:
            raise PunaError(f"signal {made.name}: for {broken} documents in a row, {answer}; fix the signal, or give it a larger budget")
        yield {"failed": answer} if isinstance(answer, str) else answer


@lru_cache(maxsize=1)
def process() -> Apart:
    return Apart(measure)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return a document's `value` (None for NaN), or why it has none: `failed` (an exception) or `wrong` (its type)."""
    try:
        value = _definition(job["definition"])(*job["row"])
    except Exception as error:  # noqa: BLE001 - any error fails only this document
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    if value is None or (isinstance(value, float) and value != value):
        return {"value": None}
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return {"wrong": f"{value!r:.100} ({type(value).__name__})"}
    return {"value": value}


@lru_cache(maxsize=64)
def _definition(code: str) -> Definition:
    result: Definition = pickle.loads(base64.b64decode(code))  # noqa: S301 - from our own parent
    return result


def _value(made: Signal, answer: dict[str, Any], failed: list[str]) -> float | int | str | None:
    if "failed" in answer:
        failed.append(f"{made.name}\t{answer['failed']}")
        return None
    value: float | int | str | None = answer.get("value")
    if "wrong" in answer or not (value is None or isinstance(value, (int, float) if made.kind is float else made.kind)):
        gave = answer.get("wrong") or f"{value!r:.100} ({type(value).__name__})"
        raise PunaError(f"signal {made.name}: its definition returned {gave} but declares {made.kind.__name__}")
    return value


def failed_in(table: pa.Table) -> list[tuple[str, str, str]]:
    """Return (signal, document id, error) for each failure of a definition in a measured part."""
    table = table.filter(pc.greater(pc.list_value_length(table[FAILED]), 0))
    rows = zip(table["id"].to_pylist(), table[FAILED].to_pylist(), strict=True)
    return [(*failure.split("\t", 1)[:1], identity, failure.split("\t", 1)[1]) for identity, failures in rows for failure in failures]


class Failures:
    """Failed measurements: their number by signal, and the first failure of each signal."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, failed: list[tuple[str, str, str]]) -> None:
        for name, identity, answer in failed:
            self.counts[name] += 1
            self.first.setdefault(name, f"document {identity}: {answer}")

    def check(self, documents: int) -> None:
        """Raise PunaError if a definition failed on all documents."""
        for name, count in self.counts.items():
            if count == documents:
                raise PunaError(f"signal {name}: its definition failed for all {count} documents; {self.first[name]}")

    def report(self, run: StageRun) -> None:
        """Record each signal's number of failures and first failure as metrics."""
        for name in sorted(self.counts):
            run.metric(f"failed_{name}", self.counts[name])
            run.metric(f"first_failure_{name}", self.first[name])
