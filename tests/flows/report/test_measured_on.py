"""The report says of itself which annotator, tasks and nearness of held-out questions its figures are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from puna.flows.report.measured_on import lookup, measured_view
from puna.flows.report.run import Run
from tests.flows.report.conftest import everything


def question(name: str, split: str, text: str, reference: str | None, verifier: str = "exact") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"id": name, "task": "t", "split": split, "messages": json.dumps(messages), "reference": reference, "verifier": json.dumps({"name": verifier})}


def test_a_lookup_repeats_the_answer_to_the_nearest_training_question() -> None:
    gold = [question("a", "train", "add 3 and 4", "7"), question("b", "train", "name a colour of grass", "green")]
    held = [question("c", "heldout", "add 3 and 4 now", "7"), question("d", "heldout", "name a colour of snow", "white")]
    found = lookup([*gold, *held])
    assert found is not None and found.value == pytest.approx(0.5)
    assert lookup(held) is None and lookup(gold) is None
    assert lookup([*gold, question("e", "heldout", "add", "7", "no_such_verifier")]) is None


def test_the_report_names_annotator_and_tasks(tmp_path: Path) -> None:
    built = everything(tmp_path)
    page = str(measured_view(Run.open(built.store, "latest")))
    assert "simulated" in page and "20 held-out questions" in page and "lookup" not in page.partition("</table>")[0]


def test_the_stronger_of_two_lookups_counts() -> None:
    """Numbers beside each other teach each other; words alone do not show it."""
    gold = [question(f"g{n}", "train", f"numbers between {n} and 90", str(n)) for n in (10, 30, 50)]
    held = [question(f"h{n}", "heldout", f"numbers between {n} and 90", str(n - 1)) for n in (31, 51)]
    found = lookup([*gold, *held])
    assert found is not None and found.value == 1.0
