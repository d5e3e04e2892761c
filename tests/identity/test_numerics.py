"""Keys contain tensor operations by their reference and a declared version; the record shows when their code changed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from puna.stages.identity import code
from puna.storage.manifest import code_version
from tests.identity import numerics

STAGE = "from {0} import double_\n\ndef stage(x):\n    return double_(x)\n"
OPERATION = """
NUMERICS = {"double_": 1}
TILE = 16

def double_reference(x):
    return _twice(x)

def _twice(x):
    return 2 * x

def double_(x):
    return [2 * x for _ in range(TILE)][0]
"""
_number = itertools.count()


@pytest.fixture
def meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return meaning(old, new): the part of a stage's key for the operation above, in which `old` is replaced by `new`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(old: str = "", new: str = "") -> str:
        name = f"operation_{next(_number)}"
        (tmp_path / f"{name}.py").write_text(OPERATION.replace(old, new) if old else OPERATION)
        (tmp_path / f"user_of_{name}.py").write_text(STAGE.format(name))
        return code_version(code.reach((f"user_of_{name}", "stage")))

    return of


def test_the_code_of_an_operation_does_not_count(meaning) -> None:
    assert meaning("TILE = 16", "TILE = 32") == meaning() == meaning("[2 * x for _ in range(TILE)][0]", "x + x")


@pytest.mark.parametrize(
    ("old", "new"), [('"double_": 1', '"double_": 2'), ("return _twice(x)", "return _twice(x) + 0"), ("return 2 * x", "return x * 2")]
)
def test_its_version_and_what_its_reference_reaches_count(meaning, old: str, new: str) -> None:
    assert meaning(old, new) != meaning()


def test_the_record_is_of_todays_code() -> None:
    recorded, now = json.loads(numerics.RECORD.read_text()), numerics.code()
    changed = sorted(name for name in recorded.keys() | now if recorded.get(name) != now.get(name))
    assert not changed, (
        f"{', '.join(changed)}: the code changed. Run `PYTHONPATH=.pkg python -m tests.identity.numerics COMMIT`, "
        "which compares the bits of all operations with a commit's and writes the record"
    )


def test_every_declared_operation_is_compared() -> None:
    assert set(numerics.cases()) == {f"{file}.{name}" for file, names in numerics.declared().items() for name in names}
