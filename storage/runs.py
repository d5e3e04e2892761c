"""The log of a run: the steps that made or reused an artifact, and how the run ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from puna.storage.aliases import DEFAULT

Sources = tuple[tuple[str, str, str], ...] | None


@dataclass(frozen=True)
class Made:
    """A step of a run with its artifact, which the run either made in `seconds` or `reused`. `inputs`: the step or the flow's input that
    each input came from, and the input's kind and key; None: not recorded. A reused artifact's manifest may name inputs of other steps."""

    step: str
    stage: str
    kind: str
    key: str
    reused: bool
    seconds: float
    inputs: Sources = None

    def event(self) -> dict[str, Any]:
        return asdict(self)


ENDS = ("finished", "failed", "stopped")


def event(name: str, **about: Any) -> dict[str, Any]:
    """Return an event of a run. `started` has `flow` and how the run started (`RunLog.about`). One of ENDS closes the run; `failed` has
    `error`. The others have `text`: `said` is a remark about the outcome, `line` is a line that another process logged."""
    return {"event": name, **about}


CRASHED = "its process ended without a message, as if killed or out of memory; the same command continues from finished work"
"""The error of a run whose log has no closing event, and which no process holds."""


@dataclass(frozen=True)
class RunLog:
    """The log of a run. `state`: `finished`, `failed`, `at work`, `stopped` by a user, or `crashed` (not at work, no end recorded).

    `opened`, `closed`: times of the first and last event. `about`: title, command, recipe, changes, inputs, project, libraries, commit.
    `lines`: standard error of all processes except the first."""

    name: str
    flow: str
    state: str
    error: str
    made: tuple[Made, ...]
    opened: datetime | None
    closed: datetime | None
    about: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    @property
    def project(self) -> str:
        """Return the project whose aliases the run reads and sets."""
        return str(self.about.get("project") or DEFAULT)

    @property
    def title(self) -> str:
        """Return the run's title in lists: flow, recipe, inputs and changes; if no title is recorded, the flow or the run's name."""
        return str(self.about.get("title") or self.flow or self.name)

    def row(self) -> dict[str, Any]:
        times = {name: None if at is None else at.isoformat() for name, at in (("opened", self.opened), ("closed", self.closed))}
        about = {name: self.about.get(name) for name in ("recipe", "command", "commit")}
        changes = json.dumps(self.about["changes"]) if "changes" in self.about else None
        about["project"] = self.project
        return {"run": self.name, "flow": self.flow, "state": self.state, "error": self.error, "changes": changes, **times, **about}

    @classmethod
    def of(cls, name: str, events: Iterable[dict[str, Any]], *, at_work: bool) -> RunLog:
        """Return the log of a run from its events, skipping unknown events. `at_work`: a process holds the run."""
        names = {one.name for one in fields(Made)} - {"inputs"}
        last, steps, times, lines = {}, [], [], []
        for event in events:
            if event.get("event") == "line":
                lines.append(str(event["text"]))
            elif "event" in event:
                last[str(event["event"])] = event
            elif names <= set(event):
                inputs = event.get("inputs")
                steps.append(Made(**{name: event[name] for name in names}, inputs=inputs and tuple(map(tuple, inputs))))
            if "time" in event:
                times.append(datetime.fromisoformat(str(event["time"])))
        ends = [state for state in ENDS if state in last]
        state = ends[0] if ends else "at work" if at_work else "crashed"
        flow, error = (str(last.get(event, {}).get(name, "")) for event, name in (("started", "flow"), ("failed", "error")))
        error = CRASHED if state == "crashed" else error
        about = {name: value for name, value in last.get("started", {}).items() if name not in ("event", "flow", "time")}
        return cls(name, flow, state, error, tuple(steps), times[0] if times else None, times[-1] if times else None, about, tuple(lines))
