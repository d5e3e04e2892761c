"""Independent parts of a flow: workers run them in parallel, with the same results as one after the other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from puna.flows.engine import session as sessions
from puna.flows.engine.declare import Flow, step, together
from puna.flows.engine.perform import Performer
from puna.flows.engine.recipe import Recipe
from puna.flows.engine.session import session
from puna.stages.align.instructions import instructions
from puna.stages.executors import PartExecutor, parts
from puna.stages.executors.worker import compute
from puna.stages.prompts.prompts import prompts
from puna.storage import PunaError, Store

RECIPE = {"prompts": {"tasks": [{"task": "digits"}], "train": 5, "heldout": 2, "draws": 300}}


class Threads(PartExecutor):
    """An executor with two workers, here threads; with `meet`, neither starts before the other has a part, too."""

    slots = 2

    def __init__(self, meet: bool) -> None:
        super().__init__()
        self._barrier = threading.Barrier(2) if meet else None

    def _begin(self, part: parts.Part) -> None:
        def work() -> None:
            if self._barrier is not None:
                self._barrier.wait(120)
            self._deliver(part, compute(part.payload))

        threading.Thread(target=work).start()

    def _close(self) -> None:
        pass


def run(store: Store, *jobs: Callable[[], None]) -> list[str]:
    """Return the artifacts of a flow with these parts, by step."""
    with session(store, flow="both") as now:
        Performer(Recipe("tiny", values=RECIPE)).walk(Flow("both", lambda: together(*jobs), ()), {})
        assert len(store.events(now.run)) == len(now.outcomes) + 1
        return sorted(f"{name} {outcome.artifact.key}" for name, outcome in now.outcomes)


def arm(number: int) -> Callable[[], None]:
    """Return a chain of two steps."""

    def made() -> None:
        asked = step(prompts, f"prompts_{number}", field="prompts", number=number)
        step(instructions, f"instructions_{number}", field="instructions", prompts=asked)

    return made


def broken() -> None:
    raise PunaError("this arm fails")


def test_parts_are_made_at_one_time_and_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "connect", lambda *_: None)
    expected = run(Store.open(tmp_path / "one"), arm(1), arm(2))
    assert len(expected) == 4
    monkeypatch.setattr(sessions, "connect", lambda *_: Threads(meet=True))
    assert run(Store.open(tmp_path / "two"), arm(1), arm(2)) == expected
    # Reused parts are not sent to a worker: two parts that wait for each other would wait forever.
    assert run(Store.open(tmp_path / "two"), arm(2)) == [name for name in expected if "_2" in name]


def test_parts_that_may_train_in_all_processes_are_made_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "connect", lambda *_: Threads(meet=False))
    monkeypatch.setattr(sys.modules["puna.stages.contract.execute"], "_on_worker", lambda *_: pytest.fail("a stage went to a worker, which has joined no other process"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(run(Store.open(tmp_path), arm(1), arm(2))) == 4


def test_a_part_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "connect", lambda *_: Threads(meet=False))
    store = Store.open(tmp_path)
    with pytest.raises(PunaError, match="this arm fails"):
        run(store, arm(1), broken)
    (name,) = store.runs()
    assert store.log(name).state == "failed" and store.log(name).error == "this arm fails"
    # The part that ran beside the failing one is finished and kept.
    assert {artifact.kind for artifact in store.artifacts()} == {"prompts", "instructions"}
