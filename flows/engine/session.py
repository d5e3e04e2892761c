"""The state shared by the stages of a run: the store, the executor, the listeners and the run's log."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from puna.flows.engine.console import Console, reason, saved_work, tee_stderr
from puna.flows.report import place, write, written_before
from puna.flows.server.client import from_environment, server_of
from puna.flows.server.reporter import Reporter
from puna.models.training import state as training_state
from puna.stages.contract import Outcome, Stage, StageConfig, Value, perform
from puna.stages.executors import PROCESSES, PartExecutor, connect, ranks
from puna.stages.identity.libraries import library_versions
from puna.storage import Artifact, Identity, PunaError, Store, database, runs

ROOT = Path(__file__).resolve().parents[2]
COMPILES = {"extract": 70, "heuristics": 52}  # stage → CPU seconds to compile its loops for a new processor


StepRunner = Callable[[Stage, StageConfig, Mapping[str, list[Artifact]], str, Callable[[str], Outcome]], Outcome]
"""A function that runs a step, for example as a Prefect task: it calls its last argument with the task's id."""
step_runners: list[Callable[[], StepRunner | None]] = []  # return a session's step runner or None; if all do, steps run directly


@dataclass
class Session:
    store: Store
    console: Console
    executor: Executor | None
    run: str
    reporter: Reporter
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    step_runner: StepRunner | None = field(default_factory=lambda: next((runner for one in step_runners if (runner := one())), None))
    unfinished: dict[str, str] = field(default_factory=dict)
    """Step → key of its future artifact, for steps that have begun and not finished."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def slots(self) -> int:
        """Return how many stages may run at once: the executor's slots if its workers are child processes, else 1; 1 with several ranks."""
        if ranks.count() > 1:
            return 1
        return self.executor.slots if isinstance(self.executor, PartExecutor) and self.executor.below else 1

    def perform(self, stage: Stage, config: StageConfig, given: dict[str, Value], step: str, sources: runs.Sources = None) -> Outcome:
        """Run a stage or reuse its artifact, as a Prefect task if Prefect started the run. Report to terminal, run log and server."""
        inputs = {name: [item for item in items if isinstance(item, Artifact)] for name, items in stage.check(given).items()}

        def work(task: str | None = None) -> Outcome:
            return self._perform(stage, config, given, step, inputs, task, sources)

        return work() if self.step_runner is None else self.step_runner(stage, config, inputs, step, work)

    def _perform(
        self, stage: Stage, config: StageConfig, given: dict[str, Value], step: str, inputs: dict[str, list[Artifact]], task: str | None,
        sources: runs.Sources,
    ) -> Outcome:
        uncompiled = _compile_mark(stage)

        def on_start(identity: Identity) -> None:
            suspects = self.store.suspects()
            warnings = [(one, "it is used nevertheless") for items in inputs.values() for one in items if one.key in suspects]
            earlier = self.store.find(stage.kind, identity.key)
            warnings += [(earlier, "it is computed again")] if earlier is not None and earlier.key in suspects else []
            with self._lock:
                self.unfinished[step] = identity.key
                for one, what in warnings:
                    line = f"{step}: {one.id} is suspect: {suspects[one.key]}; {what}"
                    self.console.say(line)
                    self.reporter.log(line, logging.WARNING)
                note = reason(self.store, identity, step)
                self.console.start_step(step, note)
                if uncompiled is not None:
                    self.console.say(f"{step}: compiling the loops of {stage.name}, only once: about {COMPILES[stage.name]} s on one core")
                if note:
                    self.reporter.log(f"{step} {note}")

        with self._lock:
            notice = self.reporter.start_step(step, stage.name, inputs, task)
        how: dict[str, Any] = {"executor": self.executor, "listener": self, "run": self.run, "apart": APART.get()}
        try:
            outcome = perform(stage, config, given, self.store, on_start=on_start, **how)
        except BaseException as error:
            with self._lock:
                self._hear()
                self.console.fail_step(step)
                self.reporter.fail_step(notice, error)
            raise
        artifact = outcome.artifact
        if uncompiled is not None and not outcome.reused and artifact.rows():
            uncompiled.touch()
        with self._lock:
            self._hear()
            made = runs.Made(step, stage.name, artifact.kind, artifact.key, outcome.reused, outcome.seconds, sources)
            self.store.record(self.run, made.event())
            self.outcomes.append((step, outcome))
            self.unfinished.pop(step, None)
            self.console.finish_step(step, outcome)
            self.reporter.finish_step(notice, outcome)
        return outcome

    def _hear(self) -> None:
        """Copy the lines that other ranks wrote to standard error to the run's log and to the server."""
        for line in ranks.lines_of_ranks():
            self.reporter.log(line, logging.WARNING)
            self.store.record(self.run, runs.event("line", text=line))

    def refresh(self) -> None:
        """Update the store's `puna.duckdb`; a failure does not fail the finished run."""
        try:
            database.write(self.store)
        except PunaError as error:
            self.console.say(f"{database.FILE} was not updated: {error}")

    def progress(self, stage: str, done: float, total: float, note: str) -> None:
        self.console.progress(stage, done, total, note)
        self.reporter.progress(stage, done, total, note)


APART: ContextVar[bool] = ContextVar("apart", default=False)  # true if each stage runs in one worker
_CURRENT: ContextVar[Session | None] = ContextVar("session", default=None)


def current() -> Session:
    """Return the session of the run in progress. Raise PunaError if there is none."""
    session = _CURRENT.get()
    if session is None:
        raise PunaError("no run is in progress: call this from a flow, inside `session(store, flow=…)`")
    return session


@contextlib.contextmanager
def session(
    store: Store, *, flow: str, workers: int | None = None, executor: str = PROCESSES, json: bool = False, title: str = "",
    parameters: Mapping[str, Any] | None = None, report: bool = False,
) -> Iterator[Session]:  # fmt: skip
    """Open a session. Workers start when first needed and stop at the end. `executor`: see `connect`. `title`, `parameters`: describe the
    run on a server and in the run's log. `report`: write the run's page after success or, if all artifacts were reused, name the page that
    the current code wrote for an earlier run with the same artifacts."""
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{flow}-{uuid.uuid4().hex[:6]}"
    # In a process that Prefect started, the flow run exists already, and Prefect reports its end.
    flow_run = os.environ.get("PREFECT__FLOW_RUN_ID")
    server = from_environment() if flow_run else server_of(store)
    engine = connect(executor, workers)
    with Console(json=json) as console, store.at_work(run), ended_in_order():
        reporter = Reporter(store, run, flow, server, flow_run=flow_run, parameters=parameters, title=title)
        opened = Session(store, console, engine, run, reporter)
        token = _CURRENT.set(opened)
        ending: tuple[str, str | None] = ("CANCELLED", "stopped; finished steps are kept")
        page = None
        listening = contextlib.ExitStack()
        if flow_run:  # nobody sees the process's terminal
            listening.enter_context(tee_stderr(lambda line: reporter.log(line, logging.WARNING)))
        try:
            about = {**(parameters or {}), "title": title or flow, "project": store.project} | ({"flow_run": flow_run} if flow_run else {})
            store.record(run, runs.event("started", flow=flow, **about, commit=commit(), versions=dict(versions())))
            yield opened
            opened._hear()
            store.record(run, runs.event("finished"))
            ending = ("COMPLETED", None)
            if report:
                page = _report(opened)
                console.say(f"report: {page}")
        except Exception as error:
            ending = ("FAILED", str(error) or type(error).__name__)
            # On a full disk, this line cannot be written either; the run then counts as crashed.
            with contextlib.suppress(OSError, PunaError):
                store.record(run, runs.event("failed", error=str(error) or type(error).__name__))
            raise
        except BaseException:  # Ctrl-C, or the signal by which a server's worker ends a run
            with contextlib.suppress(OSError, PunaError):
                store.record(run, runs.event("stopped"))
            if engine is not None:
                engine.stop()  # training runs in workers save their state first
            _tell_saved(opened, flow_run is not None)
            raise
        finally:
            _CURRENT.reset(token)
            if engine is not None:
                engine.shutdown(cancel_futures=True)
            listening.close()
            reporter.end(*ending, report=page)


def _compile_mark(stage: Stage) -> Path | None:
    """Return the file that marks a stage's loops as compiled for this processor; None if nothing is left to compile."""
    if stage.name not in COMPILES:
        return None
    from puna.kernels.cpu import numba_cache

    digest = numba_cache.source_digest(stage.function.__module__)[:16]
    mark = numba_cache.folder(numba_cache.ROOT) / f"{stage.name}-{numba_cache.processor()}-{digest}.compiled"
    shipped = numba_cache.shipped_folder()
    there = mark.exists() or (shipped is not None and (shipped / f"{stage.name}-{shipped.name}-{digest}.compiled").exists())
    return None if there else mark


class Stopped(BaseException):
    """A signal that is sent again if it is dropped, as Python drops errors in callbacks of imports and of the garbage collector."""

    arrived = False

    def __del__(self, state: ModuleType = training_state) -> None:
        if state.announce is not None and not self.arrived:  # inside `ended_in_order`
            number = signal.SIGINT if isinstance(self, KeyboardInterrupt) else signal.SIGTERM
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


class Interrupted(Stopped, KeyboardInterrupt):
    """Ctrl-C."""


class Terminated(Stopped, SystemExit):
    """SIGTERM."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted if number == signal.SIGINT else Terminated(128 + number)


def _announce() -> None:
    with contextlib.suppress(OSError):  # of a closed terminal
        os.write(2, b"\nstopping: the step in progress is finished and saved; Ctrl-C again stops at once\n")


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop the run, inside the `with` block, unless they have other handlers. A training step in progress is
    finished first. Dropped interrupts are sent again."""
    outside, training_state.announce = training_state.announce, _announce
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _stop) for number, one in usual.items() if main and signal.getsignal(number) is one}
    try:
        yield
    except Stopped as error:
        error.arrived = True
        raise
    finally:
        training_state.announce = outside
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_saved(session: Session, in_server: bool) -> None:
    """Report the saved work of stopped steps, and how to continue the run, on the terminal and to the server."""
    program, *words = sys.argv
    again = "Go on: start the same run again" if in_server else "Go on with the same call"
    if ranks.number("SLURM_STEP_NUM_TASKS", 1) > 1:
        again = "Go on: submit the same job again"
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        again = "Go on: start the same torchrun command on each machine again"
    elif Path(program).name in ("puna", "main.py"):
        again = f"Go on with: {shlex.join(['puna', *words])}"
    with contextlib.suppress(OSError, PunaError):
        text = message(session.store, session.unfinished, again)
        session.console.say(text)
        session.reporter.log(text)


def _report(session: Session) -> str:
    """Return the path of the run's page: an earlier run's with the same artifacts, else a new one, written by a worker if any step ran."""
    store, run = session.store, session.run
    if (page := written_before(store, run)) is None:
        if session.executor is None or all(outcome.reused for _, outcome in session.outcomes):
            page = write(store, run, None)
        else:
            page = store.files.local(session.executor.submit(_write_page, store.uri, run).result())
    return str(page)


def _write_page(address: str, run: str) -> str:
    write(Store.open(address), run, None)
    return place(run)


@functools.cache
def commit(root: Path = ROOT) -> str | None:
    """Return the Git commit of the checkout that the program runs from, with `-dirty` if files differ from it; None without a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        # `--exclude *` ignores tags.
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of Puna (if installed), Python, the system, and the libraries that affect a stage's output."""
    try:
        own = {"puna": importlib.metadata.version("puna")}
    except importlib.metadata.PackageNotFoundError:  # run from a checkout without an install
        own = {}
    return tuple({**own, "python": platform.python_version(), "system": platform.platform(terse=True), **library_versions()}.items())


def message(store: Store, keys: Mapping[str, str], go_on: str) -> str:
    """Return the message for a stopped run: each unfinished step's saved work (`keys`: label → artifact key), then `go_on`."""
    steps = [f"{label}: {saved_work(store, key) or 'nothing is saved yet'}" for label, key in keys.items()]
    return f"Stopped. {'; '.join(steps) or 'Every step that started is finished'}. {go_on}"
