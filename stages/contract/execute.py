"""Running a stage: find its artifact, or make it."""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from puna.stages.contract import code
from puna.stages.contract.config import StageConfig
from puna.stages.contract.declaration import Stage, Value
from puna.stages.contract.external import External
from puna.stages.contract.measure import Meter
from puna.stages.contract.run import Listener, StageRun
from puna.storage import Artifact, Identity, InputRecord, PunaError, Store, Work
from puna.storage.artifact import PART_ROWS
from puna.storage.tables import imbalance

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
    found = _accepted(stage, identity, store)
    if found is None:
        with store.work(identity.key) as work:
            found = store.find(stage.kind, identity.key)
            if found is None or found.damage():
                if found is not None:
                    store.set_aside(found.kind, found.key)
                taken = stage.check(given)
                for spec in stage.inputs:
                    for item in taken[spec.name]:
                        if isinstance(item, Artifact):
                            store.checked(item, spec.reads)
                if on_start:
                    on_start(identity)
                work.uses(identity.inputs)
                made = _make(stage, config, given, StageRun(stage.name, stage.kind, config, work, executor, listener, part_rows), work)
                artifact = work.commit(stage.kind, identity.key, identity, run=run, **made)
                return Outcome(artifact, False, time.perf_counter() - started)
            work.discard()
    return Outcome(found, True, time.perf_counter() - started)


def _accepted(stage: Stage, identity: Identity, store: Store) -> Artifact | None:
    """The whole artifact of this identity, or an older one that was declared equivalent; damage is left in place."""
    for key in dict.fromkeys((store.accepted(identity.key), identity.key)):
        found = store.find(stage.kind, key)
        if found is not None and not found.damage():
            return found
    return None


def _make(stage: Stage, config: StageConfig, given: dict[str, Value], run: StageRun, work: Work) -> dict[str, Any]:
    """Call the stage's function; returns what the manifest says about the making."""
    arguments: list[Any] = []
    for spec in stage.inputs:
        items = stage.check(given)[spec.name]
        arguments.append(items if spec.many else (items[0] if items else None))
    with Meter() as meter:
        stage.function(*arguments, config, run)
    try:
        for item in chain.from_iterable(stage.check(given).values()):
            if isinstance(item, External):
                item.check_unchanged()
    except PunaError:
        work.discard()  # its parts are of other content than its key says
        raise
    filtered = stage.check(given)[stage.filters] if stage.filters else []
    sources = [item for item in filtered if isinstance(item, Artifact)]
    for item in sources:
        run.count_input(item.rows())
    if run.input_rows is not None:
        work.declare("dropped")
        _check_rows(stage, run.input_rows, sources, work)
    return {
        "metrics": run.metrics,
        "figures": {name: figure.to_json() for name, figure in run.figures.items()},
        "timings": {"seconds": meter.seconds, "cpu_seconds": meter.cpu_seconds},
        "peak_memory_bytes": meter.peak_bytes,
        "libraries": _libraries(),
        "seed": getattr(config, "seed", None),
    }


def _check_rows(stage: Stage, came: int, sources: list[Artifact], work: Work) -> None:
    """PunaError unless every row that came in is kept or dropped, once: by number, and by id where the input has ids."""
    kept, dropped = work.rows(stage.kind), work.rows("dropped")
    said = f"stage {stage.name}: {came} rows came in, but {kept} were kept and {dropped} dropped"
    if kept + dropped != came and not sources:
        raise PunaError(f"{said}; {came - kept - dropped} are lost")
    if sources:
        went = work.files(stage.kind) + work.files("dropped")
        if wrong := imbalance([a.path(f"{a.kind}.parquet") for a in sources], went, work.scratch):
            shown = "; ".join(f"{i} is lost" if n > 0 else f"{i} is there {-n} times too often" for i, n in wrong)
            raise PunaError(f"{said}; {came - kept - dropped} are lost: {shown}")


@functools.cache
def _libraries() -> dict[str, str]:
    """Versions of the libraries that results may depend on; a process has one of each."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
