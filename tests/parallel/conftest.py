from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parallel.pool import Pool

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Run]:
    """Run a job on the first ranks of the session's pool; a pool that a failure ended is started anew."""
    pools: list[Pool] = []

    def run(job: str, count: int, **given: Any) -> list[Any]:
        if not pools or pools[-1].parent.poll() is not None:
            pools.append(Pool())
        return pools[-1].run(job, count, **given)

    yield run
    for pool in pools:
        pool.close()
