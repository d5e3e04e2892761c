"""Good words lost to the shipped recipes, by the committed table: below their limits, and measured with the current rules."""

from __future__ import annotations

import csv

import pytest

from puna.flows.engine.recipe import shipped_recipes
from tests.benchmarks.evidence import ALL_RULES, TABLE, conditions, digest

BARS = {"article": 0.03, "documentation": 0.03, "forum": 0.04}
"""Type of page → maximum share of its annotated words that the rules of a recipe may drop."""
AGAIN = "make the table again, with the annotated pages: tests/benchmarks/evidence.py --part rules --write"


def rows() -> dict[str, dict[str, str]]:
    """Return the rows of the committed table by rule."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["rule"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_shipped_recipe_loses_few_good_words(recipe: str) -> None:
    row = rows()[f"{ALL_RULES} {recipe}"]
    assert row["drops"] == digest(recipe), AGAIN
    assert {name: share for name in BARS if (share := float(row[name])) > BARS[name]} == {}


def test_the_table_names_the_thresholds_of_today() -> None:
    today = conditions("clean")
    measured = {name: row["drops"] for name, row in rows().items() if name in today}
    assert len(measured) > 30 and measured == {name: today[name] for name in measured}, AGAIN


@pytest.mark.parametrize(
    "change",
    [
        "select.fineweb.max_newline_ratio=0.2", "select.gopher_quality.max_words=null", "select_model.quality.min_quality=0.11",
        "select.lines.min_words=29", "select.c4.exempt_sources=[]", "select.code_reasoning.min_code_lines=9", "select.sql={few: words < 60}",
    ],
)  # fmt: skip
def test_a_changed_rule_asks_for_a_new_table(change: str) -> None:
    assert digest("clean", [change]) != digest("clean")
