"""What a run of a flow shares between its stages: the store, the executor, who listens, the run's log."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from puna.flows.console import Console
from puna.flows.program import Given
from puna.stages.contract import External, Outcome, Stage, StageConfig, Value, perform
from puna.stages.contract.executors import PROCESSES, connected
from puna.storage import Artifact, Identity, PunaError, Store, runs
from puna.storage.explain import against


@dataclass
class Session:
    """One run of a flow."""

    store: Store
    console: Console
    executor: Executor | None
    run: str
    given: dict[str, Given] | None = None
    externals: dict[str, External] = field(default_factory=dict)
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)

    def perform(self, stage: Stage, config: StageConfig, given: dict[str, Value], step: str) -> Outcome:
        """Run one stage, tell the terminal and the run's log."""

        def started(identity: Identity) -> None:
            self.console.started(step, against(self.store, identity, step))

        self.console.step = step
        try:
            outcome = perform(
                stage, config, given, self.store, executor=self.executor, listener=self.console, run=self.run, on_start=started
            )
        except BaseException:
            self.console.broken(step)
            raise
        made = outcome.artifact
        self.store.record(self.run, runs.Made(step, stage.name, made.kind, made.key, outcome.reused, outcome.seconds).event())
        self.outcomes.append((step, outcome))
        self.console.finished(step, outcome)
        return outcome

    def refer(self, value: Value) -> list[str]:
        """Inputs as text that a task can be given: `kind/key` of an artifact, `name=uri` of external files."""
        items = [] if value is None else value if isinstance(value, list) else [value]
        found = []
        for item in items:
            if isinstance(item, Artifact):
                found.append(f"{item.kind}/{item.key}")
            else:
                name = f"{item.name}={item.uri}"
                self.externals[name] = item
                found.append(name)
        return found

    def parameters(self, stage: Stage, given: dict[str, Value]) -> dict[str, Any]:
        """The inputs as parameters of the flow of `stage` alone: a text where it takes one, a list where it takes several."""
        texts = {spec.name: self.refer(given.get(spec.name)) for spec in stage.inputs}
        return {spec.name: texts[spec.name] if spec.many else next(iter(texts[spec.name]), None) for spec in stage.inputs}

    def named(self, text: str, kind: str) -> Sequence[Artifact | External]:
        """What a person or a form means by the text of an input of that kind: an artifact, or files at a URI."""
        if kind == "external" and text not in self.externals:
            return External.resolve(text)
        return [self.fetch(text)]

    def fetch(self, reference: str) -> Artifact | External:
        """The input that a reference means."""
        if reference in self.externals:
            return self.externals[reference]
        return self.store.resolve(reference)


_CURRENT: ContextVar[Session | None] = ContextVar("session", default=None)


def current() -> Session | None:
    """The session of the run in progress, if any."""
    return _CURRENT.get()


@contextlib.contextmanager
def session(store: Store, *, flow: str, workers: int | None = None, executor: str = PROCESSES, json: bool = False) -> Iterator[Session]:
    """Open a session: workers are started when first needed and stopped at the end. `executor` as in `connected`."""
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{flow}-{uuid.uuid4().hex[:6]}"
    engine = connected(executor, workers)
    with Console(json=json) as console, store.at_work(run):
        made = Session(store, console, engine, run)
        token = _CURRENT.set(made)
        try:
            store.record(run, runs.started(flow))
            yield made
            store.record(run, runs.finished())
        except Exception as error:
            # A disk that is full may not hold this line either: the run then counts as stopped.
            with contextlib.suppress(OSError, PunaError):
                store.record(run, runs.failed(str(error) or type(error).__name__))
            raise
        except KeyboardInterrupt:
            console.say("stopped; what is finished is kept, and the same command goes on from there")
            # Ctrl-C ended the workers too; parts that were begun again since must not be waited for.
            if engine is not None:
                engine.stop()
            raise
        finally:
            _CURRENT.reset(token)
            if engine is not None:
                engine.shutdown(cancel_futures=True)
