"""No answer can deceive its tests, which run in another process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from puna.stages.verifiers import sandbox

SPEC = importlib.util.spec_from_file_location("cases_fooled", Path(__file__).with_name("cases_fooled.py"))
assert SPEC is not None and SPEC.loader is not None
cases = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cases)


@pytest.mark.parametrize("name", cases.HOSTILE)
def test_a_hostile_answer_passes_no_test(name: str, mode: sandbox.Mode) -> None:
    assert cases.passed(name, mode) == []
