"""Running a stage: find its artifact, or make it."""

from __future__ import annotations

import importlib.metadata
import resource
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from puna.stages.contract import code
from puna.stages.contract.config import StageConfig
from puna.stages.contract.declaration import Stage, Value
from puna.stages.contract.run import Listener, StageRun
from puna.storage import Artifact, Identity, InputRecord, PunaError, Store, Work
from puna.storage.artifact import PART_ROWS

LIBRARIES = ("pyarrow", "duckdb", "torch", "numpy", "transformers", "trl", "peft", "fasttext", "resiliparse", "tokenizers")


@dataclass(frozen=True)
class Outcome:
    """What running a stage gave: the artifact, whether it was there before, and how long it took in seconds."""

    artifact: Artifact
    reused: bool
    seconds: float


def identify(stage: Stage, config: StageConfig, given: dict[str, Value]) -> Identity:
    """What decides the key of the artifact that `stage` makes of these inputs."""
    if not isinstance(config, stage.config):
        raise PunaError(f"stage {stage.name} takes a {stage.config.__name__}, not a {type(config).__name__}")
    records = []
    for name, items in stage.check(given).items():
        found = []
        for item in items:
            if isinstance(item, Artifact):
                found.append(InputRecord(name, item.kind, item.key, item.data_digest, item.manifest.stage))
            else:
                found.append(InputRecord(f"{name}:{item.name}", "external", item.uri, item.data_digest))
        records += found
    symbols = {} if stage.version else code.reached(stage.function.__module__, stage.function.__name__)
    return Identity(stage.name, stage.version or code.version(symbols), symbols, config.identity(), records)


def execute(stage: Stage, config: StageConfig, given: dict[str, Value], store: Store, **how: Any) -> Artifact:
    """The artifact of `stage`: found when it is there and whole, made otherwise. See `perform` for `how`."""
    return perform(stage, config, given, store, **how).artifact


def perform(
    stage: Stage,
    config: StageConfig,
    given: dict[str, Value],
    store: Store,
    *,
    executor: Executor | None = None,
    listener: Listener | None = None,
    run: str = "",
    part_rows: int = PART_ROWS,
    on_start: Callable[[Identity], None] | None = None,
) -> Outcome:
    """Run `stage`, or find what it made before.

    A found artifact's checksums are compared first; a damaged one is set aside and made again. A damaged
    input is an error.
    """
    started = time.perf_counter()
    identity = identify(stage, config, given)
    key = store.accepted(identity.key)
    found = _whole(store, stage.kind, key)
    if found is None:
        with store.work(key) as work:
            found = _whole(store, stage.kind, key)
            if found is None:
                for items in stage.check(given).values():
                    for item in items:
                        if isinstance(item, Artifact):
                            store.checked(item)
                if on_start:
                    on_start(identity)
                made = _make(stage, config, given, StageRun(stage.name, stage.kind, config, work, executor, listener, part_rows), work)
                return Outcome(work.commit(stage.kind, key, identity, run=run, **made), False, time.perf_counter() - started)
            work.discard()
    return Outcome(found, True, time.perf_counter() - started)


def _whole(store: Store, kind: str, key: str) -> Artifact | None:
    try:
        found = store.find(kind, key)
        if found is None or not found.damage():
            return found
    except PunaError:  # the manifest cannot be read
        pass
    store.set_aside(kind, key)
    return None


def _make(stage: Stage, config: StageConfig, given: dict[str, Value], run: StageRun, work: Work) -> dict[str, Any]:
    """Call the stage's function; returns what the manifest says about the making."""
    arguments: list[Any] = []
    for spec in stage.inputs:
        items = stage.check(given)[spec.name]
        arguments.append(items if spec.many else (items[0] if items else None))
    wall, cpu = time.perf_counter(), time.process_time()
    stage.function(*arguments, config, run)
    filtered = given.get(stage.filters) if stage.filters else None
    if isinstance(filtered, Artifact):
        run.count_input(filtered.rows())
    elif isinstance(filtered, list):
        for item in filtered:
            if isinstance(item, Artifact):
                run.count_input(item.rows())
    if run.input_rows is not None:
        _check_rows(stage, run.input_rows, work)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "metrics": run.metrics,
        "figures": {name: figure.to_json() for name, figure in run.figures.items()},
        "timings": {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu},
        "peak_memory_bytes": peak * 1024,
        "libraries": _libraries(),
        "seed": getattr(config, "seed", None),
    }


def _check_rows(stage: Stage, came: int, work: Work) -> None:
    kept, dropped = work.rows(stage.kind), work.rows("dropped")
    if kept + dropped != came:
        raise PunaError(
            f"stage {stage.name}: {came} rows came in, but {kept} were kept and {dropped} dropped; {came - kept - dropped} are lost"
        )


def _libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
