"""Reports of a run: progress in a file in the store, and steps, logs and results on a Prefect server, if there is one.

A daemon thread sends each step's latest state and the last `MAX_LOGS` unsent log lines. A slow or absent server therefore delays only the
end of the run, by up to `LAST_SECONDS`; once it answers, it gets everything unsent. No error here can fail or delay a stage."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from puna.flows.html.markup import counted_rows, duration, made_at, number, short, size, stored
from puna.flows.html.plot import Plot, draw
from puna.flows.server.client import Server, Unreachable
from puna.stages.contract import Outcome
from puna.storage import Artifact, PunaError, Store
from puna.storage.files import write_bytes

EVERY_SECONDS = 3.0
SOON_SECONDS = 0.1  # pause after a request to an unreachable or busy server; doubles with each failure, up to 1 s
LAST_SECONDS = 8.0  # maximum seconds to wait at the end of a run for pending reports, if the server answered the last request
GONE_SECONDS = 1.0  # maximum seconds to wait at the end of a run for pending reports, if the server did not answer the last request
MAX_LOGS = 5000
MOST_METRICS = 30
MOST_PLOTS = 4
MADE_UP = re.compile(r"[a-z]+-[a-z]+", re.IGNORECASE)  # pattern of the random run names that Prefect generates


@dataclass
class StepRecord:
    """A step's current state, and the state that the server has received."""

    label: str
    stage: str
    inputs: Mapping[str, Sequence[str]]  # name of an input → ids of the steps of this run that made or reused its artifacts
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    own: bool = True  # true if this reporter sends the step's state; False if the step runs as a Prefect task, whose state Prefect sends
    state: str = "RUNNING"
    name: str | None = None
    message: str | None = None
    progress: tuple[float, float, str] | None = None
    began: float = field(default_factory=time.monotonic)
    outcome: Outcome | None = None
    known: str = ""
    shown: str | None = None
    drawn: object = None


class Reporter:
    """A reporter of one run. `flow_run`: id of the run's Prefect flow run, None to create it. `server` None: report only to the store."""

    def __init__(
        self, store: Store, run: str, flow: str, server: Server | None, *, flow_run: str | None = None,
        parameters: Mapping[str, Any] | None = None, title: str = "",
    ) -> None:  # fmt: skip
        self.store, self.run, self.flow, self.server = store, run, flow, server
        self.flow_run, self._own = flow_run, flow_run is None
        self._parameters, self._title = dict(parameters or {}), title or flow
        self._steps: list[StepRecord] = []
        self._made: dict[str, str] = {}
        self._logs: deque[dict[str, Any]] = deque(maxlen=MAX_LOGS)
        self._opened = False
        self._ended: tuple[str, str | None] | None = None
        self._report: str | None = None
        self._closed = False
        self._reached = server is not None
        self._wake, self._done = threading.Event(), threading.Event()
        self._file = store.root / "progress" / f"{run}.json"
        self._written: object = None
        threading.Thread(target=self._work, name="reporter", daemon=True).start()

    def start_step(self, label: str, stage: str, inputs: Mapping[str, Sequence[Artifact]], task: str | None = None) -> StepRecord:
        """Record that a step begins, and return the record. `inputs`: input name → artifacts; `task`: id of its Prefect task, if any."""
        made_by = {name: [self._made[item.key] for item in items if item.key in self._made] for name, items in inputs.items()}
        edges = {name: steps for name, steps in made_by.items() if steps}
        step = StepRecord(label, stage, edges) if task is None else StepRecord(label, stage, edges, id=task, own=False)
        self._steps.append(step)
        self._wake.set()
        return step

    def progress(self, stage: str, done: float, total: float, note: str) -> None:
        if self._steps:
            self._steps[-1].progress = (done, total, note)

    def finish_step(self, step: StepRecord, outcome: Outcome) -> None:
        artifact = outcome.artifact
        step.outcome, step.state = outcome, "COMPLETED"
        self._made[artifact.key] = step.id
        if outcome.reused:
            when = artifact.manifest.created_at[:16]
            step.name, step.message = "Cached", f"reused {artifact.id}: same code, configuration and inputs as {when}"
        else:
            step.message = headline(outcome)
        self.log(f"{step.label}: {artifact.id}, {headline(outcome)}", step=step)

    def fail_step(self, step: StepRecord, error: BaseException) -> None:
        stopped = not isinstance(error, Exception)
        step.state, step.message = ("CANCELLED", "stopped") if stopped else ("FAILED", str(error) or type(error).__name__)
        self.log(f"{step.label}: {step.message}", 40, step)

    def log(self, text: str, level: int = 20, step: StepRecord | None = None) -> None:
        when = datetime.now(UTC).isoformat()
        self._logs.append({"name": "puna", "level": level, "message": text, "timestamp": when, "task_run_id": step.id if step else None})
        self._wake.set()

    def end(self, state: str, message: str | None = None, report: str | None = None) -> None:
        """Report the run's final state (COMPLETED, FAILED, CANCELLED), waiting at most `LAST_SECONDS`, and delete the progress file."""
        self._ended, self._report, self._closed = (state, message), report, True
        self._wake.set()
        if self.server is not None:
            self._done.wait(LAST_SECONDS if self._reached else GONE_SECONDS)
        self._file.unlink(missing_ok=True)

    def _work(self) -> None:
        pause = SOON_SECONDS
        while not self._done.is_set():
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()
            closed = self._closed
            if not closed:
                with suppress(OSError):  # a full disk does not end the reports
                    self._note()
            try:
                if self.server is not None:
                    self._sync(self.server)
                self._reached, pause = True, SOON_SECONDS
            except Unreachable:
                self._reached = False
                time.sleep(pause)
                pause = min(2 * pause, EVERY_SECONDS)
                self._wake.set()  # ask again at once
                continue
            except PunaError as error:
                # The server refuses reports (an old version, or another program): stop reporting, not the run.
                print(f"the run is no longer shown on the server: {error}", flush=True)
                self.server = None
            if closed:
                self._done.set()

    def _note(self) -> None:
        """Write the progress of the last step, if it changed, to a file in the store's folder, which the web pages read."""
        if not self._steps or self._written == (now := (self._steps[-1].id, self._steps[-1].progress)):
            return
        self._written = now
        step = self._steps[-1]
        done, total, note = step.progress or (0.0, 0.0, "")
        data = {"step": step.label, "done": done, "total": total, "note": note, "seconds": time.monotonic() - step.began}
        self._file.parent.mkdir(exist_ok=True)
        write_bytes(self._file, json.dumps(data).encode(), lasting=False)

    def _sync(self, server: Server) -> None:
        if not self._opened:
            self._open(server)
        for step in list(self._steps):
            self._tell(server, step)
        self._send_logs(server)
        if self._ended is not None:
            self._close(server, *self._ended)

    def _open(self, server: Server) -> None:
        tags = ["puna", self.flow]
        if self._own:
            flow = server.ask("POST", "/flows/", {"name": self.flow})["id"]
            self.flow_run = server.ask("POST", "/flow_runs/", {
                "name": self._title, "flow_id": flow, "parameters": self._parameters, "tags": tags,
                "state": {"type": "RUNNING"}, "labels": {"puna.run": self.run}, "idempotency_key": self.run,
            })["id"]  # fmt: skip
        else:
            there = server.ask("GET", f"/flow_runs/{self.flow_run}")
            renamed = {"name": self._title} if MADE_UP.fullmatch(there["name"]) else {}
            server.ask("PATCH", f"/flow_runs/{self.flow_run}", {**renamed, "tags": sorted({*there["tags"], *tags})})
            server.ask("PATCH", f"/flow_runs/{self.flow_run}/labels", {"puna.run": self.run})
        self._opened = True

    def _tell(self, server: Server, step: StepRecord) -> None:
        state = {"type": step.state, "name": step.name, "message": step.message}
        aim = f"{step.state} {step.name}"
        if step.own and not step.known:
            inputs = {name: [{"input_type": "task_run", "id": one} for one in steps] for name, steps in step.inputs.items()}
            server.ask("POST", "/task_runs/", {
                "id": step.id, "name": step.label, "flow_run_id": self.flow_run, "task_key": step.stage, "dynamic_key": step.id,
                "task_inputs": inputs, "state": state,
            })  # fmt: skip
        elif step.own and step.known != aim:
            server.ask("POST", f"/task_runs/{step.id}/set_state", {"state": state, "force": True})
        step.known = aim
        drawn: object = step.outcome or step.progress
        if drawn is not None and drawn is not step.drawn:
            self._draw(server, step)
            step.drawn = drawn

    def _draw(self, server: Server, step: StepRecord) -> None:
        """Create or update the step's Prefect artifact, which shows the step's progress, or its output after its end."""
        if step.outcome is not None:
            description, data = headline(step.outcome), markdown(step.outcome)
        else:
            assert step.progress is not None
            description = data = progress_text(step.progress, time.monotonic() - step.began)
        if step.shown is None:
            artifact = server.ask("POST", "/artifacts/", {
                "key": slug(step.label), "type": "markdown", "description": description, "data": data,
                "flow_run_id": self.flow_run, "task_run_id": step.id,
            })  # fmt: skip
            step.shown = artifact["id"]
        else:
            server.ask("PATCH", f"/artifacts/{step.shown}", {"description": description, "data": data})

    def _send_logs(self, server: Server) -> None:
        while self._logs:
            batch = [self._logs[i] for i in range(min(100, len(self._logs)))]
            server.ask("POST", "/logs/", [{**line, "flow_run_id": self.flow_run} for line in batch])
            for _ in batch:
                self._logs.popleft()

    def _close(self, server: Server, state: str, message: str | None) -> None:
        outcomes = [(step.label, step.outcome) for step in self._steps if step.outcome is not None]
        if outcomes:
            server.ask("POST", "/artifacts/", {
                "key": f"run-{slug(self.flow)}", "type": "markdown", "flow_run_id": self.flow_run,
                "description": f"{len(outcomes)} artifacts, {sum(o.reused for _, o in outcomes)} reused",
                "data": run_markdown(self.run, outcomes, self._report),
            })  # fmt: skip
        if self._own:
            server.ask("POST", f"/flow_runs/{self.flow_run}/set_state", {"state": {"type": state, "message": message}, "force": True})
        self._ended = None


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def progress_text(progress: tuple[float, float, str], seconds: float) -> str:
    """Return a step's progress as text: percent, counts, note and, above 2 %, the estimated time left. `seconds`: time since its start."""
    done, total, note = progress
    share = done / max(total, 1e-9)
    left = f", about {duration(seconds * (1 - share) / share)} left" if 0.02 < share < 1 else ""
    return f"{100 * share:.0f} % ({done:,.0f} of {total:,.0f}{'; ' + note if note else ''}){left}"


def headline(outcome: Outcome) -> str:
    artifact = outcome.artifact
    tables = {artifact.kind: "rows", "dropped": "dropped"}
    words = [f"{count} {name}" for table, name in tables.items() if (count := counted_rows(artifact, table))]
    if not words:
        metrics = list(artifact.manifest.metrics.items())
        words = [f"{name.replace('_', ' ')} {value if isinstance(value, str) else number(value)}" for name, value in metrics[:2]]
    return ", ".join([*words, "reused" if outcome.reused else duration(outcome.seconds)])


def markdown(outcome: Outcome) -> str:
    """Return a step's output as Markdown: link, time, size, peak memory, tables, and the first metrics and plots."""
    artifact, m = outcome.artifact, outcome.artifact.manifest
    state = f"reused, made {made_at(artifact)} UTC by run {m.run}" if outcome.reused else f"made in {duration(outcome.seconds)}"
    parts = [f"[**{artifact.id}**]({page_of(artifact)}): {state}, {stored(artifact)}, peak memory {size(m.peak_memory_bytes)}"]
    if m.tables:
        rows = "\n".join(f"| {name} | {record.rows:,} |" for name, record in m.tables.items())
        parts.append(f"| table | rows |\n|---|---:|\n{rows}")
    if m.metrics:
        metrics = list(m.metrics.items())[:MOST_METRICS]
        table = "\n".join(f"| {name.replace('_', ' ')} | {_plain(value)} |" for name, value in metrics)
        parts.append(f"| measured | |\n|---|---:|\n{table}")
    plots = [Plot.of(figure) for _, figure in sorted(m.figures.items())]
    parts += [f"![{plot.title}]({picture(plot)})" for plot in plots[:MOST_PLOTS] if not plot.empty]
    return "\n\n".join(parts)


def run_markdown(run: str, outcomes: Sequence[tuple[str, Outcome]], report: str | None) -> str:
    head = f"[The run's page](/puna/run/{run}) · [its report](/puna/report/{run})"
    head += f" (`{report}`)" if report else ""
    rows = []
    for label, one in outcomes:
        counts = f"{counted_rows(one.artifact)} | {counted_rows(one.artifact, 'dropped')}"
        took = "reused" if one.reused else duration(one.seconds)
        rows.append(f"| {label} | [{one.artifact.id}]({page_of(one.artifact)}) | {counts} | {took} |")
    return head + "\n\n| step | artifact | rows | dropped | |\n|---|---|---:|---:|---:|\n" + "\n".join(rows)


def page_of(artifact: Artifact) -> str:
    return f"/puna/artifact/{artifact.kind}/{artifact.key}"


def picture(plot: Plot) -> str:
    figure = str(draw(plot))
    svg = figure[figure.index("<svg") : figure.index("</svg>") + 6]
    opened, _, inside = svg.removeprefix("<svg").partition(">")
    whole = f'<svg xmlns="http://www.w3.org/2000/svg" width="570" font-family="sans-serif"{opened}><style>{style()}</style>{inside}'
    return "data:image/svg+xml;base64," + base64.b64encode(whole.encode()).decode()


def style() -> str:
    """Return the report's CSS rules for plots in one line, with the light colours and a background."""
    sheet = (Path(__file__).parents[1] / "report" / "page.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root {") : sheet.index("}") + 1].replace(":root", "svg")
    plots = sheet[sheet.index("svg text {") : sheet.index(".lineage {")]
    return f"{colours} svg {{ background: var(--card); }} {plots}".replace("\n", " ")


def _plain(value: bool | int | float | str) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    return number(value) if abs(value) < 1e7 else short(value)
