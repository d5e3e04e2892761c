"""The traversal of a flow that computes its steps in the current session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context

from puna.flows.engine.declare import Output, Walk, values
from puna.flows.engine.recipe import Step
from puna.flows.engine.session import APART, current
from puna.stages.contract import StageConfig
from puna.storage import Artifact, Store, runs


class Performer(Walk):
    """A traversal of a flow that computes each step in the current session."""

    performs = True

    def make(self, step: Step, label: str, config: StageConfig | None, inputs: dict[str, list[Output]]) -> Output:
        assert config is not None  # only a trace of every possible step has no configurations
        every = (pair for some in inputs.values() for one in some for pair in zip(one.labels, one.items, strict=False))
        sources = tuple((name, item.kind, item.key) for name, item in every if isinstance(item, Artifact))
        artifact = current().perform(step.stage, config, values(step.stage, inputs), label, sources).artifact
        return Output(artifact.kind, (label,), (artifact,))

    def together(self, parts: Sequence[Callable[[], object]]) -> None:
        """Run the parts in parallel, one per worker; with one worker, in order. After an error, start no further part, and raise it."""
        slots = current().slots
        if slots < 2:
            return super().together(parts)
        pool = ThreadPoolExecutor(slots)
        contexts = [copy_context() for _ in parts]
        for context in contexts:
            context.run(APART.set, True)
        try:
            futures = [pool.submit(context.run, part) for context, part in zip(contexts, parts, strict=True)]
            for one in wait(futures, return_when=FIRST_EXCEPTION).done:
                one.result()
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def publish(self, name: str, output: Output) -> None:
        """Point alias `name` at the output's artifact; do nothing if it has several. If the name is taken, report the alias set instead."""
        artifact = output.items[0] if len(output.items) == 1 else None
        if isinstance(artifact, Artifact) and (alias := current().store.set_alias(name, artifact)) != name:
            self.tell(f"{name} names an earlier artifact; the new one is {alias}")

    def store(self) -> Store:
        return current().store

    def alone(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """Return a context manager that yields True if it holds the lock `name` of the store's project, False if another process does."""
        store = current().store
        return store.lock(store.own(name), wait=False)

    def tell(self, text: str) -> None:
        """Report a message on the terminal, in the run's log and on the Prefect server."""
        now = current()
        now.console.say(text)
        now.store.record(now.run, runs.event("said", text=text))
        now.reporter.log(text)
