"""The journal of aliases: every alias that was set, a line each. Lines are only added, so that an alias that is gone is noticed."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime

from puna.storage.files import Files

JOURNAL = "refs/.journal"


def note(files: Files, alias: str, artifact: str) -> None:
    """Add an alias and the artifact that it points to, unless the journal has the alias already."""
    if alias not in noted(files):
        line = {"time": datetime.now(UTC).isoformat(), "alias": alias, "artifact": artifact}
        files.append(JOURNAL, json.dumps(line).encode() + b"\n")


def noted(files: Files) -> dict[str, str]:
    """Return every alias that was ever set, with the artifact that it first pointed to. A line that cannot be read is left out."""
    found: dict[str, str] = {}
    for line in files.read(JOURNAL).splitlines() if files.stat(JOURNAL) else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            one = json.loads(line)
            found.setdefault(str(one["alias"]), str(one["artifact"]))
    return found
