"""The provenance of a run for its log: all that is needed to run it again."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from puna.stages.identity.libraries import installed

ROOT = Path(__file__).resolve().parents[2]


def provenance(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request (command, recipe, changes, inputs) with the program's commit, version and libraries."""
    return {**request, "commit": commit(), "versions": dict(versions())}


@functools.cache
def commit(root: Path = ROOT) -> str | None:
    """Return the commit of the checkout that the program runs from, with `-dirty` where files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        # `--exclude *` leaves tags aside.
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of Puna, Python, the system, and the libraries that decide a stage's output."""
    try:
        own = {"puna": importlib.metadata.version("puna")}
    except importlib.metadata.PackageNotFoundError:  # run from a checkout without an install
        own = {}
    return tuple({**own, "python": platform.python_version(), "system": platform.platform(terse=True), **installed()}.items())
