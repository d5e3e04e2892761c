"""Packing of a part in the driver, and its computation in a worker of any executor."""

from __future__ import annotations

import functools
import os
import pickle
import platform
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from puna.stages import plugins
from puna.stages.identity import libraries, sources
from puna.stages.identity.modules import GROUPS
from puna.storage import PunaError


@dataclass(frozen=True)
class Fingerprint:
    """The versions of everything that a process computes with: Python, Puna's sources, plugins, libraries."""

    python: str
    code: str
    plugins: dict[str, str]
    libraries: dict[str, str]

    def differences(self, other: Fingerprint) -> list[str]:
        """Return one phrase for each version that differs in `other`."""
        phrases = [] if self.python == other.python else [f"Python {other.python} instead of {self.python}"]
        phrases += [] if self.code == other.code else ["other source files of Puna"]
        for title, mine, theirs in (("plugin ", self.plugins, other.plugins), ("", self.libraries, other.libraries)):
            different = sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name))
            phrases += [f"{title}{name} {theirs.get(name, 'missing')} instead of {mine.get(name, 'none')}" for name in different]
        return phrases


def fingerprint() -> Fingerprint:
    files = {name: sources.source_digest(Path(file)) for name, file in plugins.added_modules().items() if file}
    return Fingerprint(platform.python_version(), sources.whole(), files | _packages(), libraries.library_versions())


@functools.cache
def _packages() -> dict[str, str]:
    dists = [entry.dist for group in GROUPS for entry in entry_points(group=group) if entry.dist is not None]
    return {dist.name: dist.version for dist in dists}


@dataclass(frozen=True)
class Answer:
    """The outcome of a part: its pickled result or error, its cost, or the reason why the worker refused it."""

    result: bytes = b""
    error: bytes = b""
    refused: str = ""
    cpu_seconds: float = 0.0
    resident_bytes: int = 0

    def value(self) -> Any:
        if self.refused:
            raise PunaError(self.refused)
        if self.error:
            raise pickle.loads(self.error)  # noqa: S301 - from our own worker
        return pickle.loads(self.result)  # noqa: S301


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    call = cloudpickle.dumps((function, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    return pickle.dumps((asdict(fingerprint()), plugins.added_modules(), call), protocol=pickle.HIGHEST_PROTOCOL)


def compute(payload: bytes) -> Answer:
    """Return a part's result, its error, or the reason why this worker refuses it. Returned errors are treated alike by all executors."""
    driver, modules, call = pickle.loads(payload)  # noqa: S301 - from the driver
    try:
        if refused := _refusal(Fingerprint(**driver), modules):
            return Answer(refused=refused)
        start_time = time.process_time()
        function, args, kwargs = pickle.loads(call)  # noqa: S301
        result = cloudpickle.dumps(function(*args, **kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - it is raised again in the driver
        return Answer(error=_portable(error))
    return Answer(result, cpu_seconds=time.process_time() - start_time, resident_bytes=psutil.Process().memory_info().rss)


def _refusal(driver: Fingerprint, modules: dict[str, str]) -> str:
    """Import the driver's `modules`. Return why this worker must not compute for it, or "". Raise PunaError if an import fails."""
    here = f"the worker on {socket.gethostname()} (process {os.getpid()})"
    for name, file in modules.items():
        if name not in plugins.added_modules():
            if file and not Path(file).is_file():
                return f"{here} has no file {file}, which --module names; share its folder with the workers, or install it as a package"
            plugins.add(file or name)
    mine = fingerprint()
    # Ignore modules that another driver added.
    mine = replace(mine, plugins={name: digest for name, digest in mine.plugins.items() if name in driver.plugins or name in _packages()})
    if differences := driver.differences(mine):
        return f"{here} was refused: it has {'; '.join(differences)}. Install the driver's versions there, and restart it"
    return ""


def _portable(error: Exception) -> bytes:
    """Return an error that the driver can unpickle, with the worker's traceback as a note."""
    note = f"in a worker on {socket.gethostname()}:\n" + "".join(traceback.format_exception(error)).rstrip()
    error.add_note(note)
    try:
        packed: bytes = cloudpickle.dumps(error)
        pickle.loads(packed)  # noqa: S301 - classes whose constructor takes other arguments fail only here
    except Exception:  # noqa: BLE001 - the error's class may raise anything here
        plain = RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
        plain.add_note(note)
        packed = cloudpickle.dumps(plain)
    return packed
