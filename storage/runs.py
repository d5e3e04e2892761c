"""The log of a run: the steps that ended with an artifact, and how the run itself ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Made:
    """A step that has its artifact: made in the run in `seconds`, or reused from before."""

    step: str
    stage: str
    kind: str
    key: str
    reused: bool
    seconds: float

    def event(self) -> dict[str, Any]:
        """What the log says."""
        return asdict(self)


def started(flow: str) -> dict[str, Any]:
    """The event that opens a log: a run of `flow`, which is a flow or a stage alone."""
    return {"event": "started", "flow": flow}


def finished() -> dict[str, Any]:
    """The event that closes the log of a run that went to its end."""
    return {"event": "finished"}


def failed(error: str) -> dict[str, Any]:
    """The event that closes the log of a run that an error ended."""
    return {"event": "failed", "error": error}


def said(text: str) -> dict[str, Any]:
    """The event of a sentence for people on what became of a flow."""
    return {"event": "said", "text": text}


@dataclass(frozen=True)
class RunLog:
    """What is known of a run. `state`: `finished`, `failed`, `at work`, or `stopped` where it was killed or interrupted.

    `opened` and `closed`: times of the first and the last event.
    """

    name: str
    flow: str
    state: str
    error: str
    made: tuple[Made, ...]
    opened: datetime | None
    closed: datetime | None

    @classmethod
    def of(cls, name: str, events: Iterable[dict[str, Any]], *, at_work: bool) -> RunLog:
        """The log in some events; one that this version does not know is left out."""
        known = {field.name for field in fields(Made)}
        found, made, times = {}, [], []
        for event in events:
            if "event" in event:
                found[str(event["event"])] = event
            elif known <= set(event):
                made.append(Made(**{field: event[field] for field in known}))
            if "time" in event:
                times.append(datetime.fromisoformat(str(event["time"])))
        ends = [state for state in ("finished", "failed") if state in found]
        state = ends[0] if ends else "at work" if at_work else "stopped"
        flow, error = (str(found.get(event, {}).get(field, "")) for event, field in (("started", "flow"), ("failed", "error")))
        return cls(name, flow, state, error, tuple(made), times[0] if times else None, times[-1] if times else None)
