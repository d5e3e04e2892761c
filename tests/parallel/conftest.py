from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.parallel.pool import Pool


class Run:
    """The session's pool of ranks, started by the first job, and restarted after a failure."""

    def __init__(self) -> None:
        self._pools: list[Pool] = []
        self._alone: dict[str, Any] = {}

    def __call__(self, job: str, count: int, **given: Any) -> list[Any]:
        """Return each rank's result of a job on the first `count` ranks."""
        if not self._pools or self._pools[-1].parent.poll() is not None:
            self._pools.append(Pool())
        return self._pools[-1].run(job, count, **given)

    def alone(self, job: str, **given: Any) -> Any:
        """Return the result of a job on one rank; the job runs once for all tests that need it."""
        key = json.dumps([job, given], sort_keys=True)
        if key not in self._alone:
            self._alone[key] = self(job, 1, layout={}, **given)[0]
        return copy.deepcopy(self._alone[key])

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools:
            pool.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Run]:
    run = Run()
    yield run
    run.close()
