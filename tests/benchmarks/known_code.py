"""The easiest problems of HumanEval and MBPP, and MBPP's training problems with their solutions.

The easiest problems are those with the shortest reference solutions, in characters without blanks, whatever a model answers; of MBPP, from
the test part of its authors (task 11 to 510). Training problems are those of the training part (601 to 974).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PROBLEMS = 40
TRAINED = range(601, 975)
TESTED = range(11, 511)


def humaneval(data: Path) -> list[dict[str, Any]]:
    """Return the easiest problems of HumanEval, in its layout."""
    with gzip.open(data / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return easiest(rows, "canonical_solution")


def mbpp(data: Path) -> list[dict[str, Any]]:
    """Return the easiest problems of MBPP's test part, in its layout."""
    return easiest([row for row in _mbpp(data) if row["task_id"] in TESTED], "code")


def mbpp_training(data: Path) -> list[dict[str, Any]]:
    """Return the problems of MBPP's training part."""
    return [row for row in _mbpp(data) if row["task_id"] in TRAINED]


def _mbpp(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "mbpp" / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()]


def easiest(rows: list[dict[str, Any]], solution: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (len("".join(row[solution].split())), str(row["task_id"])))[:PROBLEMS]


def solved(row: dict[str, Any]) -> dict[str, Any]:
    """Return an imported prompt with its reference solution as a conversation."""
    program = "\n".join(row["reference"].split("\r\n")).strip().expandtabs(4)
    return {"messages": [*json.loads(row["messages"]), {"role": "assistant", "content": f"```python\n{program}\n```"}]}
