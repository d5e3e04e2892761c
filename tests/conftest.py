"""What every test may rely on, however the suite is started."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest


def pytest_configure() -> None:
    """Let Ctrl-C act in tests of it: a shell starts a command in the background with SIGINT ignored, for its children as well.

    No test takes the power away: that files outlive its loss is not waited for, only that there is a file to save.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = _open


@pytest.fixture(scope="session")
def mode() -> Any:
    """Return the `sandbox.Mode` in which programs run here; skip the test where there are no namespaces."""
    from puna.stages.verifiers import sandbox
    from puna.storage import PunaError

    try:
        return sandbox.mode()
    except PunaError as error:
        pytest.skip(str(error))


def _open(descriptor: int) -> None:
    os.fstat(descriptor)


def pytest_collection() -> None:
    """Collect no garbage while all modules are imported: each search for it goes through millions of their objects."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker, and all tests that need the pool of ranks on one: a pool is nine processes."""
    for item in items:
        pooled = "ranks" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ranks" if pooled else item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Let later searches pass over what has been imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let libraries that count their objects at the end see those go."""
    gc.unfreeze()
