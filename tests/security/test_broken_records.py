"""Broken JSON records: the time that they take grows linearly with the file, whatever precedes or surrounds them."""

from __future__ import annotations

import io
import json
import random
import re

import pytest

from puna.stages.reading.rows import Fault, Row, read_rows
from puna.storage import PunaError
from tests.linear import stopped_if_quadratic


def records(text: str) -> list[Row | Fault]:
    return list(read_rows(io.BytesIO(text.encode()), "x.jsonl", "json", 1 << 24))


def test_broken_records_after_a_long_one_are_read_in_linear_time() -> None:
    long, lines = "x" * 1_200_000, 50_000
    with stopped_if_quadratic():  # quadratic work takes minutes
        first, *others = records(json.dumps({"a": long}) + "\n" + "{x\n" * lines)
    assert first == Row(1, {"a": long}) and all(isinstance(one, Fault) for one in others)
    assert [one.number for one in others] == list(range(2, lines + 2))
    assert isinstance(others[-2], Fault) and others[-2].reason.startswith("is not JSON: Expecting property name")
    assert f"at line {lines}, column 2" in others[-2].reason


@pytest.mark.parametrize("text", [("[" + "1," * 500 + "\n") * 5000, ('{"a":[\n' * 300 + "1," * 500_000 + "x\n") * 4], ids=["deep", "far"])
def test_lines_that_open_what_no_line_ends_are_not_decoded_from_each_line_again(text: str) -> None:
    with stopped_if_quadratic(), pytest.raises(PunaError, match=r"x\.jsonl: its [\d,]+ bytes unpack to [\d,]+ and more"):
        records(text)


@pytest.mark.parametrize("line", ["[\n", "[1,\n", '{"[[]":[\n', '{"\\"[":[1,{},\n'])
def test_lines_of_open_brackets_are_passed_over_as_deep_as_they_were_decoded(line: str) -> None:
    """The last lines, which the decoder reads to the end, are reported one by one, and rows after them are read."""
    lines = 400_000 // len(line)
    with stopped_if_quadratic():
        *faults, row, last = records("0\n" + line * lines + '{"n": 1}\n{"n": 2}\n')
    assert [row, last] == [Row(lines + 2, {"n": 1}), Row(lines + 3, {"n": 2})] and all(isinstance(one, Fault) for one in faults)
    deep = [one for one in faults if isinstance(one, Fault) and "recursion" in one.reason]
    assert re.search("; (124|249|250|499|500) lines are skipped$", deep[0].reason)
    assert lines // 500 - 2 <= len(deep) <= lines // 200 and len(faults) - len(deep) <= 1000


@pytest.mark.parametrize("record", ['{"a": [%s]}', '{"a": {"b": "[[", "c": "\\\\", "d": [1.5e5, %s]}}'])
def test_an_integer_too_long_for_python_is_a_fault_of_its_own_line(record: str) -> None:
    first, fault, last = records(record % 1 + "\n" + record % ("9" * 5000) + "\n" + record % 2 + "\n")
    assert isinstance(first, Row) and isinstance(last, Row) and (first.number, last.number) == (1, 3)
    assert isinstance(fault, Fault) and fault.number == 2 and "at line 2, column 1" in fault.reason


def test_broken_rows_of_any_kind_leave_the_rows_around_them() -> None:
    """Lines cut at any character, nested too deeply, or with too long an integer; each between two valid rows."""
    draw = random.Random(3)
    whole = json.dumps({"a": [1, {"b": "x]"}], "é": "\\\"", "c": {"d": [[2.5, None]]}})
    lines = [whole[: draw.randrange(1, len(whole))] for _ in range(200)] + ['{"a":' * 5000, "[" * 3000 + "]" * 3000, '{"a": -' + "1" * 4301 + "}"]
    draw.shuffle(lines)
    rows = records("".join(f'{{"n": {n}}}\n{line}\n{{"m": {n}}}\n' for n, line in enumerate(lines)))
    expected = [Row(3 * n + 1, {"n": n}) for n in range(len(lines))]
    assert [row for row in rows if isinstance(row, Row) and "n" in row.fields] == expected
