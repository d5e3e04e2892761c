"""The audit of keys finds code and data that a stage uses that are not in its key."""

from __future__ import annotations

import importlib
from pathlib import Path

import pyarrow as pa
import pytest

from puna.kernels.text import shingles
from puna.stages.contract import StageConfig, StageRun, execute, stage
from puna.stages.identity import sources
from puna.storage import Store
from tests.stages import audit


class HiddenConfig(StageConfig):
    """A configuration without fields."""


@stage(kind="signals")
def honest(config: HiddenConfig, run: StageRun) -> None:
    """Call a function by its name."""
    run.write(pa.table({"id": [shingles.normalize("A b")]}))


@stage(kind="signals")
def calls_by_name(config: HiddenConfig, run: StageRun) -> None:
    """Call a function by a name that is built at run time."""
    function = getattr(importlib.import_module("puna.kernels." + "text.shin" + "gles"), "normal" + "ize")
    run.write(pa.table({"id": [function("A b")]}))


@stage(kind="signals")
def reads_by_name(config: HiddenConfig, run: StageRun) -> None:
    """Read a file whose name is built at run time."""
    file = Path(importlib.import_module("puna.stages.curate").__file__).parent / "data" / ("stop" + "_words.txt")
    run.write(pa.table({"id": [file.read_text()[:3]]}))


@pytest.fixture(autouse=True)
def all_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WATCHED", frozenset({honest.name, calls_by_name.name, reads_by_name.name}))
    monkeypatch.setattr(audit, "watched", set())


def test_what_is_named_passes(tmp_path: Path) -> None:
    execute(honest, HiddenConfig(), {}, Store.open(tmp_path))
    assert "honest" in audit.watched


@pytest.mark.parametrize(
    ("hidden", "found"), [(calls_by_name, "puna.kernels.text.shingles.normalize"), (reads_by_name, f"{sources.ROOT}/stages/curate/data/stop_words.txt")]
)
def test_what_is_not_named_is_found(tmp_path: Path, hidden, found: str) -> None:
    with pytest.raises(AssertionError, match=f"stage {hidden.name}: not in its key: .*{found}"):
        execute(hidden, HiddenConfig(), {}, Store.open(tmp_path))
