"""Settings of the test process that every test relies on, however the suite is started."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

RANKS = "tests/parallel/"
# No test asserts a time: on a busy machine an example, or generating it, may be slow.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Restore the default handling of SIGINT for tests of Ctrl-C: a shell starts background commands with SIGINT ignored.

    Replace `os.fsync` by a check that the file is open: no test depends on files surviving a power failure.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = _open


@pytest.fixture(scope="session")
def mode() -> Any:
    """Return the `sandbox.Mode` in which programs run here; skip the test on a machine without namespaces."""
    from puna.stages.verifiers import sandbox
    from puna.storage import PunaError

    try:
        return sandbox.mode()
    except PunaError as error:
        pytest.skip(str(error))


def _open(descriptor: int) -> None:
    os.fstat(descriptor)


def pytest_collection() -> None:
    """Switch garbage collection off while all modules are imported: each collection would visit millions of their objects."""
    gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, run all tests that start ranks on one worker, like the tests of one file: a pool of ranks has nine
    processes."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return RANKS if nodeid.startswith(RANKS) else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Exclude the imported objects from later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Unfreeze the imported objects, because some libraries count their objects at exit."""
    gc.unfreeze()
