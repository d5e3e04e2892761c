"""Terminal output of a flow: a line per stage, a progress bar while a stage runs, tables at the end, and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from puna.flows.report import arms
from puna.models.training.state import load_record
from puna.stages.contract import Outcome
from puna.storage import Artifact, Identity, Store
from puna.storage.explain import Change, against
from puna.storage.runs import Made

EVERY_SECONDS = 15.0  # minimum seconds between two lines on a step's progress
OURS = (" | Flow run ", " | Task run ")  # markers of Prefect's own log lines, which the Prefect server already has
LAST_SECONDS = 1.0  # maximum seconds that the last lines of standard error are waited for
BITS = {
    "document_bits_per_byte": "bits per byte", "ngram_bits_per_byte": "n-grams", "ngram_page_bits_per_byte": "n-grams + page's",
    "dictionary_bits_per_byte": "zstd, dictionary",
}  # fmt: skip


class Console:
    """Progress display for stages: bars on a terminal, else lines. `json`: write messages to standard error and JSON to standard output."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._terminal = Terminal(stderr=json, highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._step, self._said = "", 0.0

    def __enter__(self) -> Console:
        if self._terminal.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._terminal, transient=True)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # of a closed terminal; it must not replace the run's own error
            if self._bar is not None:
                self._bar.stop()

    def say(self, text: str | Table, *, styled: bool = False) -> None:
        (self._bar.console if self._bar else self._terminal).print(text, markup=styled)

    def start_step(self, step: str, note: str = "") -> None:
        """Announce a stage that starts to compute, with a note if there is one."""
        if note:
            self.say(f"[yellow]{step:24s}[/] [dim]{escape(note)}[/]", styled=True)
        if self._bar is not None:
            self._tasks[step] = self._bar.add_task(step, total=None, note="")
        self._step, self._said = step, time.monotonic()

    def progress(self, stage: str, done: float, total: float, note: str) -> None:
        """Show the progress (`done` of `total`) of the stage that started last, in a bar or as a line at most every `EVERY_SECONDS`."""
        if self._bar is not None and self._step in self._tasks:
            self._bar.update(self._tasks[self._step], completed=done, total=total, note=note)
        elif time.monotonic() - self._said > EVERY_SECONDS:
            self._said = time.monotonic()
            self.say(f"[dim]{self._step:24s} {100 * done / max(total, 1):3.0f} % {escape(note)}[/]", styled=True)

    def remove_bar(self, step: str) -> None:
        if self._bar is not None and step in self._tasks:
            self._bar.remove_task(self._tasks.pop(step))

    def fail_step(self, step: str) -> None:
        with contextlib.suppress(OSError):  # of a closed terminal; it must not replace the step's own error
            self.remove_bar(step)
            self.say(f"{escape(step):24s} [red]not finished[/]", styled=True)

    def finish_step(self, step: str, outcome: Outcome) -> None:
        self.remove_bar(step)
        artifact = outcome.artifact
        if self.json:
            print(json_text(summary(artifact, step=step, reused=outcome.reused, seconds=round(outcome.seconds, 3))), flush=True)
        state = "[green]reused[/]" if outcome.reused else f"{outcome.seconds:5.1f} s"
        rows = f"{artifact.rows():>9,} rows" if artifact.kind in artifact.tables else ""
        dropped = f", {artifact.rows('dropped'):,} dropped" if "dropped" in artifact.tables else ""
        self.say(f"{escape(step):24s} {artifact.id:26s} {state:>8s} {(rows + dropped).removeprefix(', ')}", styled=True)


def closing_table(console: Console, run: str, outcomes: Sequence[tuple[str, Outcome]], made: Sequence[Made]) -> None:
    """Print a run's closing tables (funnel, evaluations, control arms, reward models), and the number of its artifacts. `made`: see
    `arms.rounds`."""
    artifacts = [(step, outcome.artifact) for step, outcome in outcomes]
    tables = [(step, artifact.read().to_pylist()) for step, artifact in artifacts if artifact.kind == "evaluation"]
    evaluations = [(step, {(row["task"], row["metric"]): row for row in rows}) for step, rows in tables]
    rounds = arms.rounds(artifacts, made)
    compared = [table for arms_of_round in rounds for table in (_arms(arms_of_round), _claims(arms_of_round))]
    for table in (_funnel(artifacts), _compression(evaluations), _accuracy(evaluations), *compared, _rewards(artifacts)):
        if table.row_count:
            console.say(table)
            console.say("")
    reused, seconds = sum(outcome.reused for _, outcome in outcomes), sum(outcome.seconds for _, outcome in outcomes)
    console.say(f"{len(outcomes)} artifacts, {reused} reused, {seconds:.1f} s; run {run}")


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]] = ()) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*row)
    return table


def _funnel(artifacts: list[tuple[str, Artifact]]) -> Table:
    table = _table(("after", "documents", "dropped", "characters", "tokens"))
    for step, artifact in artifacts:
        if artifact.kind in ("pages", "documents"):
            dropped = f"{artifact.rows('dropped'):,}" if "dropped" in artifact.tables else ""
            table.add_row(step, f"{artifact.rows():,}", dropped, _count(artifact, "characters"), "")
        elif artifact.kind == "tokens":
            table.add_row(step, "", "", "", _count(artifact, "tokens"))
    return table


def _count(artifact: Artifact, metric: str) -> str:
    count = artifact.manifest.metrics.get(metric)
    return f"{count:,}" if isinstance(count, int) else ""


def _compression(evaluations: list[tuple[str, dict[tuple[str, str], dict[str, Any]]]]) -> Table:
    """Return a table of bits per byte on held-out documents: of the model, of n-gram models and of zstd."""
    lines = []
    for step, rows in evaluations:
        if bits := rows.get(("pages", "document_bits_per_byte")):
            values = (f"{row['value']:.3f}" if row else "" for row in (rows.get(("pages", metric)) for metric in BITS))
            lines.append((step.removeprefix("evaluate_"), *values, f"{bits['n']:,}"))
    return _table(("held-out pages", *BITS.values(), "documents"), lines)


def _accuracy(evaluations: list[tuple[str, dict[tuple[str, str], dict[str, Any]]]]) -> Table:
    """Return a table of accuracy on held-out prompts: a row per task except `choice/…`, a column per evaluation, without control arms."""
    results = [(step, rows) for step, rows in evaluations if not arms.CONTROL.fullmatch(step)]
    tests = [(step, rows) for step, rows in results if any(metric == "accuracy" for _, metric in rows)]
    tasks = {task for _, rows in tests for task, metric in rows if metric == "accuracy" and not task.startswith("choice/")}
    table = _table(("accuracy", *(step.removeprefix("evaluate_") for step, _ in tests)))
    for task in sorted(tasks, key=lambda task: (task == "all", task)):
        values = [rows.get((task, "accuracy")) for _, rows in tests]
        table.add_row(task, *(f"{row['value']:.3f}" if row else "" for row in values))
    overall = [rows.get(("all", "accuracy")) or {} for _, rows in tests]
    if any(row.get("low") is not None for row in overall):
        bounds = (f"{row['low']:.3f}-{row['high']:.3f}" if row.get("low") is not None else "" for row in overall)
        table.add_row("all, 95 % interval", *bounds)
    return table


def _arms(arms_of_round: arms.Arms) -> Table:
    shares = {arm: [f"{arms_of_round.share(arm, metric).value:.3f}" for metric in arms_of_round.metrics] for arm in arms_of_round.scores}
    columns = (f"round {arms_of_round.number} and its control arms", *(arms.METRICS[metric] for metric in arms_of_round.metrics))
    return _table(columns, ((arms.NAMES.get(arm, arm), *values) for arm, values in shares.items()))


def _claims(arms_of_round: arms.Arms) -> Table:
    gains = [(one, f"{one.gain.value:+.3f} ({one.gain.low:+.3f} to {one.gain.high:+.3f})") for one in arms_of_round.claims()]
    rows = ((one.name, arms.METRICS[one.metric], gain, one.verdict) for one, gain in gains)
    return _table((f"in round {arms_of_round.number}", "of", "gain", ""), rows)


def _rewards(artifacts: list[tuple[str, Artifact]]) -> Table:
    models = [(step, artifact.manifest.metrics) for step, artifact in artifacts if artifact.kind == "model"]
    rows = [(step, f"{m['heldout_accuracy']:.3f}", f"{m['heldout_pairs']:,}") for step, m in models if "heldout_accuracy" in m]
    return _table(("reward model", "held-out accuracy", "pairs"), rows)


def json_text(value: Any, *, ascii: bool = True) -> str:
    """Return a value as JSON on one line; NaN and infinities, which JSON lacks, become null. `ascii`: escape all other characters."""
    line = json.dumps(value, default=_json_value, ensure_ascii=ascii)
    if "NaN" in line or "Infinity" in line:
        line = json.dumps(json.loads(line, parse_constant=lambda _: None), ensure_ascii=ascii)
    return line


def _json_value(value: Any) -> str | int | float:
    if isinstance(value, Decimal):  # DuckDB's sum of whole numbers, among others
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, datetime) else value.hex() if isinstance(value, bytes) else str(value)


def summary(artifact: Artifact, **more: Any) -> dict[str, Any]:
    m = artifact.manifest
    return {
        "id": artifact.id, "kind": artifact.kind, "key": artifact.key, "stage": m.stage, "data_digest": m.data_digest,
        "rows": {name: record.rows for name, record in m.tables.items()}, "metrics": m.metrics, "created_at": m.created_at, **more,
    }  # fmt: skip


def fail(message: str) -> None:
    Terminal(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(f"[red]error:[/] {escape(message)}")
    sys.exit(1)


def in_short(changes: Sequence[Change]) -> str:
    """Return the first three changes as text, with the number of further changes."""
    return "; ".join(str(change) for change in changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")


def reason(store: Store, identity: Identity, step: str) -> str:
    """Describe the saved work from which a step goes on, else the changes since its last run; empty if there are none."""
    if saved := saved_work(store, identity.key):
        return f"goes on: {saved}"
    why = against(store, identity, step)
    return f"runs again: {in_short(why)}" if why else ""


def saved_work(store: Store, key: str) -> str:
    """Describe the saved work that the next attempt at an artifact reuses: training states, fits, small runs and parts; empty if none."""
    if not any(store.files.list(f"work/{key}")):
        return ""
    scratch = store.files.scratch(f"work/{key}/scratch")
    fits, trials = (sum(1 for _ in scratch.glob(f"{name}-*.json")) for name in ("fit", "trial"))
    parts = sum(name.endswith(".json") for name in store.files.list(f"work/{key}/parts"))
    trainings = _trainings(scratch)
    counts = ((fits, "fit"), (trials, "small run"), (parts, "finished part"))
    phrases = [*trainings, *(f"{number:,} {what}{'s' if number > 1 else ''}" for number, what in counts if number)]
    one = len(phrases) == 1 and (trainings or fits + trials + parts == 1)
    return f"{', '.join(phrases)} {'is' if one else 'are'} saved" if phrases else ""


def _trainings(scratch: Path) -> list[str]:
    """Describe the progress of each training run with a saved state in the scratch folder."""
    folders = sorted({path.parent for path in scratch.rglob("step-*")})
    found = [(f"{one.name} " if len(folders) > 1 else "", record) for one in folders if (record := load_record(one))]
    return [f"{name}{one['unit']} {one['done']:,} of {one['of']:,} ({one['seconds']:,.0f} s of work)" for name, one in found]


@contextlib.contextmanager
def tee_stderr(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with each line that this process or a child writes to standard error within the context, and pass the line on. Prefect's
    own log lines, and lines that a child writes after the context ends, are only passed on."""
    sys.stderr.flush()
    before = os.dup(2)
    out, into = os.pipe()
    os.dup2(into, 2)
    os.close(into)
    listening = threading.Event()
    listening.set()

    def listen() -> None:
        rest = b""
        while data := os.read(out, 65536):
            with contextlib.suppress(OSError):
                os.write(before, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace").rstrip()
                if text and listening.is_set() and not any(word in text for word in OURS):
                    tell(text)

    thread = threading.Thread(target=listen, name="echo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        thread.join(LAST_SECONDS)
        listening.clear()
