"""Suspects: artifacts whose content is not established, because something that they were made from was found damaged.

A stage of today compares every byte of its inputs after it has read them, and its manifest says so (`inputs_compared`): damage that is
found later touches none of its results. Suspect is, until it is made anew or trusted by a person:

- what was made from an artifact before its damage was found, by a stage that did not compare its inputs;
- what was made from a suspect, whether that is still there or was made anew with other content.

Nothing of this is written into an artifact. It is derived from the manifests and from a journal of what was found, a line each.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Literal

from puna.storage import index
from puna.storage.files import Files

JOURNAL = "quarantine/journal.jsonl"
FIELDS = {"time", "kind", "key", "what"}
Finding = Literal["damaged", "suspect", "trusted"]
"""`damaged`: bytes were wrong. `suspect`: it was set aside to be made anew. `trusted`: a person took its content as right."""


def note(files: Files, kind: str, key: str, what: Finding) -> None:
    """Add to the journal what was found about an artifact."""
    line = {"time": datetime.now(UTC).isoformat(), "kind": kind, "key": key, "what": what}
    with contextlib.suppress(OSError):  # a store may be mounted so that nothing can be written
        files.append(JOURNAL, index.line(line))


def suspects(files: Files) -> dict[str, str]:
    """Return by key why artifacts are suspect, a clause for people each; empty where nothing was ever damaged."""
    noted, _ = index.journal(files, JOURNAL, FIELDS)
    if not noted:
        return {}
    entries = {one["key"]: one for one in index.entries(files)}
    found: dict[str, str | None] = {}

    def why(key: str) -> str | None:
        if key not in found:
            found[key] = None
            found[key] = _why(key)
        return found[key]

    def _why(key: str) -> str | None:
        one = entries[key]
        later = [event for event in noted if event["time"] > one["created_at"]]
        if any(event["key"] == key and event["what"] == "trusted" for event in later):
            return None
        for given in one["inputs"]:
            name, present = f"{given['kind']}/{given['input'][:12]}", entries.get(given["input"])
            read = {given["input"], *(present["sources"] if present else ())}
            events = {event["what"]: event["time"][:10] for event in later if event["key"] in read}
            if "damaged" in events and not one.get("inputs_compared"):
                return f"it was made from {name}, which was found damaged on {events['damaged']}"
            if "suspect" in events and (present is None or present["data_digest"] != given["data_digest"]):
                return f"it was made from {name}, which was suspect and {'is gone' if present is None else 'has other content now'}"
            if present is not None and why(given["input"]):
                return f"it was made from {name}, which is suspect"
        return None

    return {key: clause for key in entries if (clause := why(key)) is not None}
