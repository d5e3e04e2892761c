"""Signals: numbers and words that describe a document. Each is declared once, with name, type, unit and meaning.

`declare_signal` declares a signal that a stage computes itself. `@signal` declares a Python function of one document as a signal, which
`heuristics` measures; compiled code may replace the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, get_args, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from puna.stages import plugins
from puna.storage import Artifact, PunaError, errors_at

Value = float | int | str | None
Definition = Callable[..., Value]
F = TypeVar("F", bound=Definition)
TYPES: dict[type, pa.DataType] = {float: pa.float64(), int: pa.int64(), str: pa.string()}
COLUMNS = ("text", "title", "url", "source")  # columns of a document that a signal's function may take as parameters


@dataclass(frozen=True)
class Signal:
    """A number or word that describes a document.

    `kind`: float, int or str. `optional`: may be null for every document of a corpus. `definition`: Python function whose parameters name
    columns of the document. `compiled`: name of the compiled measurement that computes the signal; empty for none."""

    name: str
    kind: type
    unit: str
    meaning: str
    module: str
    optional: bool = False
    definition: Definition | None = None
    compiled: str = ""

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, TYPES[self.kind], metadata={"meaning": self.meaning, "unit": self.unit})

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of `documents` that the definition takes."""
        return tuple(inspect.signature(self.definition).parameters) if self.definition else ()


SIGNALS: dict[str, Signal] = plugins.registry({}, lambda signal: signal.module)
FAILURE = "failure"
"""Name of the signal with the reason why a document was not measured; null for measured documents."""


def declare_signal(name: str, kind: type, unit: str, meaning: str, *, optional: bool = False) -> Signal:
    """Declare a signal that a stage computes itself. Raise TypeError for an invalid name or type, or a name declared by another module."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_globals["__name__"] if frame and frame.f_back else ""
    return _register(Signal(name, kind, unit, meaning, caller, optional))


def signal(*, unit: str, name: str = "", meaning: str = "", optional: bool = False, compiled: str = "") -> Callable[[F], F]:
    """Declare a function as the definition of a signal.

    Its parameters are columns of a document (text, title, url, source). Its return annotation is the type: float, int or str, with `| None`
    if the signal may be missing for a document. Name and meaning default to the function's name and the first paragraph of its docstring.
    Raise TypeError for a function that does not fit."""

    def declare(function: F) -> F:
        label = name or function.__name__
        text = meaning or " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()).rstrip(".")
        if not text:
            raise TypeError(f"signal {label}: needs a docstring that says what it means")
        returned = get_type_hints(function).get("return")
        kinds = [kind for kind in (get_args(returned) or (returned,)) if kind is not type(None)]
        if len(kinds) != 1 or kinds[0] not in TYPES:
            raise TypeError(f"signal {label}: its definition returns {returned}; annotate float, int or str, or one of them with | None")
        wrong = [parameter for parameter in inspect.signature(function).parameters if parameter not in COLUMNS]
        if wrong or not inspect.signature(function).parameters:
            raise TypeError(f"signal {label}: its definition takes {wrong or 'nothing'}; it may take {', '.join(COLUMNS)}")
        _register(Signal(label, kinds[0], unit, text, function.__module__, optional, function, compiled))
        return function

    return declare


def _register(new: Signal) -> Signal:
    if not new.name.isidentifier() or new.name == "id":
        raise TypeError(f"signal {new.name!r}: a name consists of letters, digits and underscores, and is not 'id'")
    if new.kind not in TYPES:
        raise TypeError(f"signal {new.name}: its type is {new.kind}; it must be float, int or str")
    before = SIGNALS.get(new.name)
    if before is not None and before.module != new.module:
        raise TypeError(f"signal {new.name} is declared twice, in {before.module} and in {new.module}; rename one")
    SIGNALS[new.name] = new
    return new


def with_meanings(name_of_table: str, table: pa.Table) -> pa.Table:
    """Return the table `signals` with the declared types, units and meanings, and any other table unchanged. Raise PunaError for a signal
    that is not declared or has another type."""
    for at, name in enumerate(table.schema.names if name_of_table == "signals" else ()):
        if name == "id":
            continue
        if name not in SIGNALS:
            raise PunaError(f"signal {name!r} is not declared; declare it with `signal` or `declare_signal` of puna.stages.contract")
        field = SIGNALS[name].field
        with errors_at(f"signal {name} must have its declared type {field.type}", pa.ArrowInvalid, pa.ArrowNotImplementedError):
            table = table.set_column(at, field, table.column(at).cast(field.type))
    return table


def check_measured(rows: int, values: dict[str, int]) -> None:
    """Raise PunaError if a signal that is not optional is null in all measured rows. `values`: signal → number of non-null values."""
    for name, count in values.items():
        if rows > values.get(FAILURE, 0) and not count and not SIGNALS[name].optional:
            raise PunaError(f"signal {name} ({SIGNALS[name].meaning}) is null for all {rows} documents, so its measurement failed. "
                "Fix it, or declare the signal optional if a corpus may have none")  # fmt: skip


def signals_of(artifact: Artifact, ids: pa.ChunkedArray, columns: list[str]) -> pa.Table:
    """Return `columns` of the documents' signals, one row per id in `ids` (sorted). Raise PunaError if a document has no row."""
    if len(ids) == 0:
        return artifact.schema().empty_table().select(columns)
    rows = artifact.between(ids[0].as_py(), ids[-1].as_py(), columns=["id", *columns])
    return align_signals(rows, ids, label_of(artifact)).select(columns)


def label_of(artifact: Artifact) -> str:
    """Return an artifact's name in errors: its id and stage."""
    return f"{artifact.id} ({artifact.manifest.stage})"


def align_signals(signals: pa.Table, ids: pa.ChunkedArray, label: str) -> pa.Table:
    """Return the rows of `signals` in the order of `ids`. Raise PunaError, naming the artifact by `label`, if a document has no row."""
    where = pc.index_in(ids, signals["id"].combine_chunks())
    if where.null_count:
        missing = ids.filter(pc.is_null(where))[0].as_py()
        raise PunaError(f"document {missing} has no signals in {label}; give signals that cover all documents")
    return signals.take(where)
