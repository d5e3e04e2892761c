"""The child process that answers questions of the web pages; see `bounded`."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from puna.flows.engine.cost import Total, steps_of
from puna.flows.engine.launch import Request
from puna.flows.engine.plan import STATES, PlannedStep
from puna.flows.engine.trace import add_served_modules
from puna.flows.html.markup import Content, Html, details, duration, section, size, table, tag
from puna.flows.web import questions
from puna.flows.web.bounded import IDLE_SECONDS, MEMORY_BYTES
from puna.flows.web.forms import offer_of, request_of
from puna.flows.web.frame import note, problem
from puna.storage import PunaError, Store

COSTS = ("time", "disk", "memory")


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    store = Store.existing(question["store"])
    try:
        add_served_modules()
        if question["question"] == "sql":
            return {"html": str(questions.answer(store, question["q"]))}
        request = request_of(offer_of(question["name"]), question["asked"])
        if question["question"] == "plan":
            return {"html": str(plan_view(store, request))}
        steps_of(request, store.uri)
        return {"html": ""}
    except PunaError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"stopped: it needs more than {MEMORY_BYTES >> 20:,} MB of memory", "last": True}
    except Exception as error:  # noqa: BLE001  the page that asked reports the error
        return {"broken": f"{type(error).__name__}: {error}", "last": True}


def plan_view(store: Store, request: Request) -> Html:
    """Return a view of a run's plan (for each step: reused or not, why, cost), or of the error that makes planning impossible."""
    try:
        _, steps = steps_of(request, store.uri)
    except PunaError as error:
        return tag("div", problem(str(error)))
    summary = ", ".join(f"{count} {words}" for state, words in STATES.items() if (count := sum(step.state == state for step in steps)))
    free = store.files.free()
    estimated = any(step.expected for step in steps)
    rows = [_row(step, estimated) for step in steps if step.state != "reused"]
    reused: list[list[Content]] = [[tag("b", step.label), tag("span", step.why, class_="id")] for step in steps if step.state == "reused"]
    total = str(Total.of(steps))
    return tag("div",
        section("plan", total[0].upper() + total[1:], f"{summary}{f'; {size(free)} of disk are free' if free is not None else ''}",
            table(["step", *(COSTS if estimated else ()), "because"], rows, numeric=(1, 2, 3) if estimated else ()) if rows else None,
            details(f"{len(reused)} reused", table(["step", "artifact"], reused), class_="more") if reused else None,
            None if steps else note("The flow has no steps for these inputs.")),
        note("On the command line: ", tag("code", request.command(store))),
    )  # fmt: skip


def _row(step: PlannedStep, estimated: bool) -> list[Content]:
    one = step.expected
    cost: list[Content] = ["?" for _ in COSTS if estimated] if one is None else [duration(one.seconds), size(one.bytes), size(one.memory)]
    waits = f"after {step.why}" if step.state == "after" else step.why
    return [tag("b", step.label), *cost, tag("small", waits)]


def main() -> None:
    """Limit this process's memory and priority; answer questions on standard input until it closes or is silent for `IDLE_SECONDS`."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries' output must not mix with answers
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/statm")  # only on Linux; its sixth number counts the pages of the data and stack segments
    most = MEMORY_BYTES + (int(status.read_text().split()[5]) * resource.getpagesize() if status.is_file() else 0)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    answers.write(b"{}\n")
    answers.flush()
    while select.select([0], [], [], IDLE_SECONDS)[0] and (line := sys.stdin.buffer.readline()):
        question = json.loads(line)
        # If the process that asked is killed, only this alarm ends a long answer.
        signal.alarm(int(question["seconds"]) + 5)
        answers.write(json.dumps(_answer(question)).encode() + b"\n")
        answers.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main()
