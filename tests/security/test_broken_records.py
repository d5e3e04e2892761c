"""Broken records of JSON: the time that they take grows with the file, whatever stands before them or around them."""

from __future__ import annotations

import io
import json
import random
import time

import pytest

from puna.stages.reading.rows import Fault, Row, read_rows
from puna.storage import PunaError

SECONDS = 5  # of the processor


def records(text: str) -> list[Row | Fault]:
    return list(read_rows(io.BytesIO(text.encode()), "x.jsonl", "json", 1 << 24))


def test_broken_records_after_a_long_one_are_read_in_linear_time() -> None:
    long, lines = "x" * 1_200_000, 200_000
    start = time.process_time()
    first, *others = records(json.dumps({"a": long}) + "\n" + "{x\n" * lines)
    assert time.process_time() - start < SECONDS
    assert first == Row(1, {"a": long}) and all(isinstance(one, Fault) for one in others)
    assert [one.number for one in others] == list(range(2, lines + 2))
    assert isinstance(others[-2], Fault) and others[-2].reason.startswith("is no JSON: Expecting property name")
    assert f"at line {lines}, column 2" in others[-2].reason
