"""What every test may rely on, however the suite is started."""

from __future__ import annotations

import gc
import signal


def pytest_configure() -> None:
    """Let Ctrl-C act in tests of it: a shell starts a command in the background with SIGINT ignored, for its children as well."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Collect no garbage while all modules are imported: each search for it goes through millions of their objects."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let later searches pass over what has been imported."""
    gc.collect()
    gc.freeze()
    gc.enable()
