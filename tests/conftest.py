"""What every test may rely on, however the suite is started."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

RANKS = "tests/parallel/"
# A test asserts no time: on a busy machine an example may be slow, and so may be its making.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, keep all tests of ranks on one worker, as those of a file: a pool of ranks is nine processes."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return RANKS if nodeid.startswith(RANKS) else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Let later searches pass over what has been imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let libraries that count their objects at the end see those go."""
    gc.unfreeze()
