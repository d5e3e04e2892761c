"""The means of verifiers: the stage's workers, time limits, and judge models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from puna.stages.contract import StageRun
from puna.stages.verifiers.judges import Judges
from puna.stages.verifiers.settings import ScoringConfig
from puna.storage import Artifact

T = TypeVar("T")


class Tools:
    """The argument of `Verifier.prepare` and `Verifier.score_many`."""

    def __init__(self, config: ScoringConfig, run: StageRun, judges: Sequence[Artifact] = ()) -> None:
        self.config = config
        self.run = run
        self.judges = Judges(judges)


def chunks(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` items."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
