"""Running a stage: look up its artifact, or make it."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from puna.stages.contract import rank_jobs
from puna.stages.contract.config import StageConfig, parse
from puna.stages.contract.declaration import REGISTRY, Stage, Value
from puna.stages.contract.external import External
from puna.stages.contract.measure import CPU_FILE, Meter
from puna.stages.contract.run import Listener, StageRun
from puna.stages.contract.signals import check_measured
from puna.stages.executors import PartExecutor, ranks
from puna.stages.identity import code, libraries
from puna.storage import Artifact, Identity, InputRecord, PunaError, Store, Work
from puna.storage.damage import set_aside
from puna.storage.manifest import code_version
from puna.storage.tables import Balance, imbalance


@dataclass(frozen=True)
class Outcome:
    """The result of running a stage: the artifact, whether it was reused, and the time in seconds."""

    artifact: Artifact
    reused: bool
    seconds: float


def identify(stage: Stage, config: StageConfig, given: dict[str, Value]) -> Identity:
    """Return the identity that determines an artifact's key: stage, code, configuration, inputs. Raise PunaError if one is invalid."""
    if not isinstance(config, stage.config):
        raise PunaError(f"stage {stage.name} takes a {stage.config.__name__}, not a {type(config).__name__}")
    records = [
        InputRecord(name, item.kind, item.key, item.data_digest, item.manifest.stage) if isinstance(item, Artifact)
        else InputRecord(f"{name}:{item.name}", "external", item.uri, item.data_digest)
        for name, items in stage.check(given).items() for item in items
    ]  # fmt: skip
    symbols = code.symbols(stage, stage.reaches(config, given))
    return Identity(stage.name, code_version(symbols), symbols, config.identity(), records)


def by_todays_code(artifact: Artifact, store: Store) -> Identity:
    """Return the identity that `artifact` has under today's code. Raise PunaError if its stage, a setting or an input no longer exists."""
    manifest = artifact.manifest
    stage = REGISTRY.get(manifest.stage)
    if stage is None:
        raise PunaError(f"{artifact.id} was made by {manifest.stage}, a stage that the current code does not have")
    config = parse(stage.config, manifest.config, stage.name)
    inputs: dict[str, list[Any]] = {spec.name: [] for spec in stage.inputs}
    for record in manifest.inputs:
        if record.kind != "external":
            source = store.find(record.kind, record.key)
            if source is None:
                raise PunaError(f"{artifact.id} was made from {record.kind}/{record.key[:12]}, which is no longer in the store")
            inputs.setdefault(record.name, []).append(source)
    symbols = code.symbols(stage, [*config.reaches(), *(stage.named(inputs) if stage.named else ())])
    return Identity(stage.name, code_version(symbols), symbols, config.identity(), manifest.inputs)


def execute(stage: Stage, config: StageConfig, given: dict[str, Value], store: Store, **how: Any) -> Artifact:
    """Return the artifact of `stage`: an existing intact one, or else a new one. `how`: see `perform`."""
    return perform(stage, config, given, store, **how).artifact


def perform(
    stage: Stage, config: StageConfig, given: dict[str, Value], store: Store, *, executor: Executor | None = None,
    listener: Listener | None = None, run: str = "", part_rows: int | None = None, on_start: Callable[[Identity], None] | None = None,
    apart: bool = False,
) -> Outcome:  # fmt: skip
    """Run `stage`, or reuse its artifact.

    A damaged or suspect artifact is made again, and set aside once the new one is ready. Raise PunaError for a damaged input. A stage
    declared with `device=True` runs as a whole on a worker of `executor` that has an accelerator, if there is one. `apart`: run any stage
    as a whole on a worker, so that several can run at once; such a worker reports no progress to `listener`. `on_start` is called before
    the function runs, but not for a reused artifact. `part_rows`: maximum rows per part."""
    start = time.perf_counter()
    identity = identify(stage, config, given)
    store.holding.add(identity.key, *(one.key for one in identity.inputs if one.kind != "external"))
    artifact = reusable(stage, identity, store)
    # A stage that runs in several processes takes no worker's accelerator.
    wants_device = stage.device and not (stage.ranks and ranks.count() > 1)
    if artifact is None and isinstance(executor, PartExecutor) and ((on_device := wants_device and executor.has_device()) or apart):
        if on_start:
            on_start(identity)
        submit = executor.submit_to_device if on_device else executor.submit
        new, reused = _on_worker(stage, config, given, store, submit, run, part_rows)
        return Outcome(new, reused, time.perf_counter() - start)
    if artifact is None:
        with store.work(identity.key) as work:
            artifact = _good(store.find(stage.kind, identity.key), store)
            if artifact is None:
                inputs = stage.check(given)
                _check_inputs(stage, inputs, store, quick=not stage.device)
                if on_start:
                    on_start(identity)
                work.uses(identity.inputs)
                work.cut = _cut(stage, inputs)
                own = StageRun(stage.name, stage.kind, config, work, executor, listener, part_rows)
                try:
                    about = _make(stage, config, given, own, work, executor, store)
                except Exception as error:
                    _check_after(stage, inputs, store, work, error)
                    raise
                _check_after(stage, inputs, store, work)
                if (before := store.find(stage.kind, identity.key)) is not None:
                    set_aside(store.files, before.kind, before.key, damaged=bool(before.damage(quick=True)))
                new = work.commit(stage.kind, identity.key, identity, run=run, inputs_compared=True, **about)
                return Outcome(new, False, time.perf_counter() - start)
            work.discard()
    return Outcome(artifact, True, time.perf_counter() - start)


def _check_inputs(stage: Stage, inputs: dict[str, list[Artifact] | list[External]], store: Store, *, quick: bool = False) -> None:
    """Verify the files that a stage reads. Raise PunaError if an artifact is damaged. `quick`: compare only sizes and modification times.

    Checksums are always verified after the run, and before the run only for `device` stages: they cost about 3 % of a curation run."""
    for spec in stage.inputs:
        for item in inputs[spec.name]:
            if isinstance(item, Artifact):
                store.check(item, spec.reads, whole=not quick)


def _check_after(
    stage: Stage, inputs: dict[str, list[Artifact] | list[External]], store: Store, work: Work, error: Exception | None = None
) -> None:
    try:
        _check_inputs(stage, inputs, store)
    except PunaError as damage:
        work.discard()
        raise damage from error


def _on_worker(
    stage: Stage, config: StageConfig, given: dict[str, Value], store: Store, submit: Callable[..., Future[tuple[str, str, bool]]],
    run: str, part_rows: int | None,
) -> tuple[Artifact, bool]:  # fmt: skip
    """Run the stage on a worker; return its artifact, and True if it was reused. Raise PunaError if the worker cannot import the stage, or
    uses another store."""
    module, root = stage.function.__module__, store.uri
    if module == "__main__":
        raise PunaError(f"stage {stage.name} runs on another worker, which cannot import it from `__main__`; declare it in a module")
    inputs = rank_jobs.to_json(stage, given)
    call = submit(_perform_there, module, stage.name, config, inputs, root, store.project, run=run, part_rows=part_rows)
    kind, key, reused = call.result()
    artifact = store.find(kind, key)
    if artifact is None:
        raise PunaError(f"stage {stage.name}: the worker wrote to another store, {root}; give both processes a shared folder")
    return artifact, reused


def _perform_there(
    module: str, name: str, config: StageConfig, sent: dict[str, list[Any]], root: str, project: str, **how: Any
) -> tuple[str, str, bool]:
    importlib.import_module(module)
    stage, store = REGISTRY[name], Store.open(root, project)
    values = rank_jobs.from_json(stage, sent, store)
    outcome = perform(stage, config, values, store, **how)
    return outcome.artifact.kind, outcome.artifact.key, outcome.reused


def reusable(stage: Stage, identity: Identity, store: Store) -> Artifact | None:
    """Return the artifact that `puna accept` declared equivalent, else that of this identity; None if neither is intact and trusted."""
    keys = dict.fromkeys((store.accepted_key(identity.key), identity.key))
    return next((artifact for key in keys if (artifact := _good(store.find(stage.kind, key), store)) is not None), None)


def _good(artifact: Artifact | None, store: Store) -> Artifact | None:
    return None if artifact is None or artifact.damage(quick=True) or artifact.key in store.suspects() else artifact


@contextlib.contextmanager
def _same_threads() -> Iterator[None]:
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    try:
        yield
    finally:
        if before is not None:
            sys.modules["torch"].set_num_threads(before)


def _cut(stage: Stage, inputs: dict[str, list[Artifact] | list[External]]) -> int:
    """Return the number of shards of the filtered input, else of the first input of pages or documents; 0 without one."""
    names = [stage.filters, *inputs] if stage.filters else [*inputs]
    corpora = [i for name in names for i in inputs[name] if isinstance(i, Artifact) and i.kind in ("pages", "documents")]
    return corpora[0].record().cut if corpora else 0


def _make(
    stage: Stage, config: StageConfig, given: dict[str, Value], run: StageRun, work: Work, executor: Executor | None, store: Store
) -> dict[str, Any]:
    arguments: list[Any] = []
    for spec in stage.inputs:
        items = stage.check(given)[spec.name]
        arguments.append(items if spec.many else (items[0] if items else None))
    # Earlier attempts count if this one continues from their work.
    counts = {file for file in work.scratch.iterdir() if CPU_FILE in file.name}
    if counts == {*work.scratch.iterdir()} and not [*work.files.list(work.staging.folder)]:
        for file in counts:
            file.unlink(missing_ok=True)
    with Meter(executor, work.scratch / CPU_FILE) as meter, _same_threads():
        others = rank_jobs.call(stage, arguments, config, given, run, store)
    try:
        code.check_unedited(stage, stage.reaches(config, given))
        for item in chain.from_iterable(stage.check(given).values()):
            if isinstance(item, External):
                item.check_unchanged()
    except PunaError:
        work.discard()  # the code or the inputs are no longer those that the key was computed from
        raise
    filtered = stage.check(given)[stage.filters] if stage.filters else []
    if stage.kind == "signals":
        check_measured(work.rows("signals"), {name: count for name, count in work.values("signals").items() if name != "id"})
    sources = [item for item in filtered if isinstance(item, Artifact)]
    for item in sources:
        run.count_input(item.rows())
    if run.input_rows is not None:
        work.declare("dropped")
        _check_rows(stage, run.input_rows, sources, work)
    return {
        "metrics": run.metrics, "figures": {name: asdict(figure) for name, figure in run.figures.items()},
        "timings": {"seconds": meter.seconds, "cpu_seconds": meter.cpu_seconds + sum(cpu for cpu, _ in others)},
        "peak_memory_bytes": max([meter.peak_bytes, *(peak for _, peak in others)]),
        "libraries": libraries.library_versions(), "seed": getattr(config, "seed", None),
    }  # fmt: skip


def _check_rows(stage: Stage, rows: int, sources: list[Artifact], work: Work) -> None:
    """Raise PunaError unless every input row is kept or dropped exactly once. A filtered input is checked by id, others by row count."""
    kept, dropped = work.rows(stage.kind), work.rows("dropped")
    message = f"stage {stage.name}: {rows} rows came in, but {kept} were kept and {dropped} dropped"
    if kept + dropped != rows and not sources:
        raise PunaError(f"{message}; {rows - kept - dropped} are lost")
    if sources:
        output = [shard for table in (stage.kind, "dropped") for shard in work.shards(table, stage.kind)]
        came_in = [shard for artifact in sources for shard in artifact.shards()]
        if wrong := imbalance(Balance(came_in, output), max(1, work.cut), work.mapper):
            ids = "; ".join(f"{i} is lost" if n > 0 else f"{i} occurs {-n} times too often" for i, n in wrong)
            raise PunaError(f"{message}; {rows - kept - dropped} are lost: {ids}")
