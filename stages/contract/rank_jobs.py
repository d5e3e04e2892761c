"""Stages that several ranks run together: the job that rank 0 sends, and the `StageRun` of the other ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from puna.models.settings import Settings
from puna.models.training.parallel.layout import Layout
from puna.stages.contract.config import StageConfig, parse
from puna.stages.contract.declaration import REGISTRY, Stage, Value
from puna.stages.contract.external import External
from puna.stages.contract.measure import CPU_FILE, Meter
from puna.stages.contract.run import StageRun
from puna.stages.executors import ranks
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

ALONE: dict[str, Any] = {  # setting → the only value that is tested with several processes
    "turns": 1, "answers.turns": 1, "answers.search": None, "endpoints": (), "engine": "puna", "serving.engine": "puna",
    "serving.weights": "same", "serving.offload": "none", "serving.window": None,
}  # fmt: skip


def call(stage: Stage, arguments: list[Any], config: StageConfig, given: dict[str, Value], run: StageRun, store: Store) -> list[Any]:
    """Call the stage's function, on all ranks if it is declared with `ranks`; return the other ranks' CPU seconds and peak memory in bytes.
    Raise PunaError if a layout does not fit the number of ranks."""
    check(stage, config, [name for name, value in given.items() if value])
    if not stage.ranks or ranks.count() == 1:
        stage.function(*arguments, config, run)
        return []
    job = {
        "stage": stage.name, "config": config.model_dump(mode="json"), "inputs": to_json(stage, given),
        "store": store.uri, "project": store.project, "scratch": str(run.scratch),
    }  # fmt: skip
    with ranks.together(job):
        stage.function(*arguments, config, run)
        return [json.loads(text) for text in ranks.mesh().gather_texts("[0, 0]")]


def to_json(stage: Stage, given: dict[str, Value]) -> dict[str, list[Any]]:
    """Return a stage's inputs as JSON values for the other ranks: artifacts as (kind, key), external inputs as dictionaries."""
    return {
        name: [(item.kind, item.key) if isinstance(item, Artifact) else asdict(item) for item in items]
        for name, items in stage.check(given).items()
    }


def from_json(stage: Stage, inputs: dict[str, list[Any]], store: Store) -> dict[str, Any]:
    """Return the inputs that rank 0 sent. Raise PunaError if an artifact is missing from this rank's store."""
    values: dict[str, Any] = {}
    for spec in stage.inputs:
        items = [External.of(item) if isinstance(item, dict) else store.find(*item) for item in inputs[spec.name]]
        if None in items:
            kind, key = inputs[spec.name][items.index(None)]
            raise PunaError(f"stage {stage.name}: {store.uri} on this machine lacks {kind}/{key[:12]}; use a folder that all ranks share")
        values[spec.name] = items if spec.many else items[0] if items else None
    return values


def check(stage: Stage, config: StageConfig, inputs: Collection[str] = ()) -> None:
    """Raise PunaError if `config` does not fit the number of processes; see `misfits`."""
    if lines := misfits(stage, config, inputs):
        raise PunaError(f"{stage.name}: {lines[0]}")


def idle(name: str, stages: Iterable[Stage]) -> list[str]:
    """Return an error message if several processes run and none of the `stages` of a run can be divided among them."""
    line = f"{name} runs in one process, and {ranks.count()} were started: start one, without --processes, torchrun or srun"
    return [] if ranks.count() == 1 or any(stage.ranks for stage in stages) else [line]


def misfits(stage: Stage, config: StageConfig, inputs: Collection[str] = ()) -> list[str]:
    """Return an error message for each setting that does not fit the number of processes. `inputs`: names of the given inputs."""
    lines, apart, there = list[str](), getattr(config, "generate", 0), ranks.count()
    alone = [path for path, only in ALONE.items() if reduce(lambda at, name: getattr(at, name, only), path.split("."), config) != only]
    for name in [*alone, *["the input draft"] * ("draft" in inputs)] if stage.ranks and there > 1 else ():
        lines.append(f"{name} is untested with several processes: leave it out, or use one process")
    if apart >= max(there, 1):
        lines.append(f"generate = {apart} needs at least {apart + 1} processes; start with --processes, or with torchrun")
    for path, layout in layouts(config) if apart < max(there, 1) else ():
        if layout.processes > 1 and not stage.ranks:
            lines.append(f"{path} cannot be {layout}: this stage trains in one process")
        elif layout.axes and (there - apart != layout.processes if apart else layout.repeated(there).processes != there):
            needed, more = layout.processes + apart, ", or a multiple of that" if layout.repeats and not apart else ""
            lines.append(f"{path} = {layout} needs {needed} processes{more}; {there} run: start with --processes {needed} or torchrun")
    return lines


def layouts(settings: Settings, path: str = "") -> Iterator[tuple[str, Layout]]:
    for name in type(settings).model_fields:
        value, own = getattr(settings, name), f"{path}{name}"
        if isinstance(value, Layout):
            yield own, value
        elif isinstance(value, Settings):
            yield from layouts(value, f"{own}.")


class FollowerRun(StageRun):
    """The `StageRun` of a rank other than 0, which reads the same inputs as rank 0 and discards all output."""

    def __init__(self, stage: Stage, config: StageConfig, scratch: Path, folder: Path) -> None:
        super().__init__(stage.name, stage.kind, config, SimpleNamespace(output=folder, scratch=scratch))  # type: ignore[arg-type]

    def _nothing(self, *args: Any, **more: Any) -> None:
        """Do nothing: only rank 0 writes."""

    write = write_rows = rows_once = metric = figure = _nothing

    def once(self, name: str, make: Callable[[], list[dict[str, Any]]], columns: list[str]) -> pa.Table:
        """Call `make` if rank 0 also calls it, since all ranks compute together. Discard the rows and return an empty table."""
        if ranks.agree(False):
            make()
        return table_schema(self.kind).schema.empty_table().select(columns)


def do(job: dict[str, Any]) -> None:
    """Run the stage named in rank 0's job. Raise PunaError if it is not loaded here, since a message must not cause arbitrary imports."""
    if job["stage"] not in REGISTRY:
        raise PunaError(f"rank 0 runs the stage {job['stage']}, which this rank has not loaded; start all ranks with the same command line")
    stage, store = REGISTRY[job["stage"]], Store.open(job["store"], job["project"])
    config = parse(stage.config, job["config"], stage.name)
    arguments = from_json(stage, job["inputs"], store).values()
    with tempfile.TemporaryDirectory() as folder, ranks.together(None):
        with Meter(file=Path(job["scratch"]) / f"{CPU_FILE}-{ranks.number('RANK')}") as meter:
            stage.function(*arguments, config, FollowerRun(stage, config, Path(job["scratch"]), Path(folder)))
        ranks.mesh().gather_texts(json.dumps([meter.cpu_seconds, meter.peak_bytes]))
