"""`StageRun`: everything a stage may touch while it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from puna.stages.contract.config import StageConfig
from puna.stages.contract.executor import ordered
from puna.stages.contract.figure import Figure
from puna.storage import Artifact, Part, PunaError, Work
from puna.storage.artifact import PART_ROWS
from puna.storage.schemas import table_schema
from puna.storage.tables import write_part
from puna.storage.work import write_text

if TYPE_CHECKING:
    import numpy as np


class Listener(Protocol):
    """Hears how far a stage is: a progress bar, a user interface, or nobody."""

    def progress(self, stage: str, done: float, total: float, note: str) -> None:
        """`done` of `total` units of the stage are finished."""


class StageRun:
    """The one argument through which a stage reads its surroundings and writes its artifact."""

    def __init__(
        self,
        stage: str,
        kind: str,
        config: StageConfig,
        work: Work,
        executor: Executor | None = None,
        listener: Listener | None = None,
        part_rows: int = PART_ROWS,
    ) -> None:
        self.stage = stage
        self.kind = kind
        self.config = config
        self.metrics: dict[str, Any] = {}
        self.figures: dict[str, Figure] = {}
        self.input_rows: int | None = None
        self._work = work
        self._executor = executor
        self._listener = listener
        self._part_rows = part_rows
        self._written = 0
        self._transforms = 0

    # --- computing -----------------------------------------------------------------------------------

    def map(self, function: Callable[..., Any], items: Iterable[Any], *args: Any, rows: int | None = None) -> Iterator[Any]:
        """Results of `function(item, *args)` in order; `function` is module-level, args go to every call.

        `rows`: how many items there are, to show progress.
        """
        for done, result in enumerate(ordered(self._executor, function, items, args), 1):
            if rows:
                self.progress(done, rows)
            yield result

    def parts(self, artifact: Artifact, table: str | None = None, columns: list[str] | None = None) -> list[Part]:
        """The artifact's table cut into parts, for `map`."""
        return artifact.parts(table, columns, self._part_rows)

    def transform(
        self,
        function: Callable[..., pa.Table | dict[str, pa.Table]],
        artifact: Artifact,
        *args: Any,
        table: str | None = None,
        columns: list[str] | None = None,
    ) -> None:
        """Write `function(rows, *args)` for every part of a table of `artifact`.

        The function returns the main table, or tables by name. Each part is written by the worker that made it
        and is not made again after a crash.
        """
        parts = self.parts(artifact, table, columns)
        # The rows decide the name: an attempt that cuts them otherwise makes its own parts.
        names = [f"transform{self._transforms}-{part.start:012d}-{part.stop:012d}" for part in parts]
        self._transforms += 1
        self._in_workers(function, parts, names, [part.rows for part in parts], args)

    def produce(self, function: Callable[..., pa.Table | dict[str, pa.Table]], items: Sequence[Any], *args: Any) -> None:
        """Write `function(item, *args)` for every item, as `transform` does for the parts of a table.

        The rows never pass through this process. A stage must give the same items in every attempt.
        """
        names = [f"produce{self._transforms}-{index:06d}" for index in range(len(items))]
        self._transforms += 1
        self._in_workers(function, [Item(item) for item in items], names, [1] * len(items), args)

    def _in_workers(
        self, function: Callable[..., Any], items: Sequence[Part | Item], names: list[str], sizes: list[int], args: Any
    ) -> None:
        """Write each item's tables under its name, in the worker that makes them."""
        jobs = [(function, item, name, self.kind, str(self._work.parts)) for item, name in zip(items, names, strict=True)]
        done, total = 0, sum(sizes)
        for size, name, made in zip(sizes, names, ordered(self._executor, _transform_part, jobs, args), strict=True):
            for table in made:
                self._work.claim(table, name)
            done += size
            self.progress(done, total)

    # --- writing -------------------------------------------------------------------------------------

    def write(self, table: pa.Table, name: str | None = None) -> None:
        """Append rows to the main table (None) or a side table."""
        self._work.add(name or self.kind, table, f"driver-{self._written:06d}")
        self._written += 1

    def write_rows(self, rows: list[dict[str, Any]], name: str | None = None) -> None:
        """Append rows given as dicts; columns that no row names are null."""
        if rows:
            self.write(_table(rows, name or self.kind), name)
        else:
            self._work.declare(name or self.kind)

    def once(self, name: str, make: Callable[[], list[dict[str, Any]]], columns: list[str]) -> pa.Table:
        """Write the rows that `make` gives to the main table, in this process; returns these columns of them.

        After a crash they are read back, not made again. Rows of one name must be the same in every attempt.
        """
        file = self._work.part(self.kind, f"once-{name}")
        if file.exists():
            self._work.claim(self.kind, file.stem)
        else:
            self._work.add(self.kind, _table(make(), self.kind), file.stem)
        return pq.read_table(file, columns=columns)

    @property
    def folder(self) -> Path:
        """Files put here become part of the artifact."""
        return self._work.output

    @property
    def scratch(self) -> Path:
        """A folder that survives a crash and is gone after the commit."""
        return self._work.scratch

    # --- telling -------------------------------------------------------------------------------------

    def progress(self, done: float, total: float, note: str = "") -> None:
        """Tell how far the stage is."""
        if self._listener is not None:
            self._listener.progress(self.stage, done, total, note)

    def metric(self, name: str, value: float | int | str) -> None:
        """Record a named number or word in the manifest."""
        if isinstance(value, float) and not (value == value and abs(value) != float("inf")):
            raise PunaError(f"stage {self.stage}: metric {name} is {value}")
        self.metrics[name] = value

    def figure(self, name: str, figure: Figure) -> None:
        """Record a plot in the manifest."""
        self.figures[name] = figure

    def count_input(self, rows: int) -> None:
        """Say how many rows came in, where the input is not an artifact: they must all be kept or dropped."""
        self.input_rows = (self.input_rows or 0) + rows

    # --- chance --------------------------------------------------------------------------------------

    def seed(self, *names: Any) -> int:
        """A 63-bit seed that depends on the configuration's seed and the given names alone."""
        base = getattr(self.config, "seed", None)
        if base is None:
            raise PunaError(f"stage {self.stage}: its configuration has no seed; derive it from SeededConfig")
        text = "\0".join([str(base), *map(str, names)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def generator(self, *names: Any) -> np.random.Generator:
        """A random generator seeded with `seed(*names)`."""
        import numpy as np

        return np.random.default_rng(self.seed(*names))


def _table(rows: list[dict[str, Any]], name: str) -> pa.Table:
    """Rows of a table given as dicts; columns that no row names are null."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    schema = table_schema(name).schema_for(names)
    if missing := [f.name for f in schema if not f.nullable and f.name not in names]:
        raise PunaError(f"table {name}: column {missing[0]!r} is missing")
    # Nullability is checked when the part is written, with a message that names the column.
    loose = pa.schema([f.with_nullable(True) for f in schema])
    try:
        return pa.Table.from_pylist(rows, schema=loose)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise PunaError(f"table {name}: {error}") from error


class Item(NamedTuple):
    """A piece of work that is no part of a table, in the place of one."""

    value: Any

    def read(self) -> Any:
        """What the function is given."""
        return self.value


def _transform_part(job: tuple[Any, Part | Item, str, str, str], *args: Any) -> list[str]:
    """In a worker: compute one part and write its tables; the marker, with their names, is written last."""
    function, part, name, kind, folder = job
    marker = Path(folder) / f".{name}.json"
    if marker.exists():
        names: list[str] = json.loads(marker.read_text())
        return names
    result = function(part.read(), *args)
    made = result if isinstance(result, dict) else {kind: result}
    for table, rows in made.items():
        write_part(table_schema(table).conform(rows), Path(folder) / table / f"{name}.parquet")
    write_text(marker, json.dumps(list(made)))
    return list(made)
