"""The `@stage` declaration: a plain function, the kinds of its inputs and output, its configuration, and its requirements."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from puna.stages import plugins
from puna.stages.contract.config import StageConfig
from puna.stages.contract.external import External
from puna.storage import Artifact, PunaError
from puna.storage.schemas import KINDS

TextSample = tuple[tuple[str, ...], float]
"""Texts sampled from inputs, and the sampled share of the inputs' bytes (0 to 1)."""
GLANCE, LOOK = 0.1, 0.4
"""Seconds for reading sample pages, and again for extracting their texts. `LOOK` is for a second, larger sample if the first (`GLANCE`)
suggests a problem."""


@dataclass(frozen=True)
class InputFacts:
    """Facts about one input before the run; None if unknown. `kind`: the artifact's, or `external`. `tables`: name → columns.

    `sources`: names of the external inputs that the input descends from. `bytes`: size of the stored files. `look(seconds)` reads the first
    pages and returns their texts and their share of all bytes. `model`: an existing model with the shape, tokenizer and chat template that
    the input will have."""

    kind: str
    tables: dict[str, tuple[str, ...]] | None = None
    sources: tuple[str, ...] | None = None
    bytes: int | None = None
    look: Callable[[float], TextSample] | None = None
    model: Artifact | None = None


@dataclass(frozen=True)
class Facts:
    """Facts about a run's inputs and its machine before the run. `available_memory_bytes`: None if the work runs on other hardware."""

    inputs: dict[str, tuple[InputFacts, ...]]
    available_memory_bytes: int | None


Needs = Callable[[Any, Facts], list[str]]
"""`needs(config, facts)` returns a message for each unmet need, with field and remedy. Unknown facts (None) cause no message."""


@dataclass(frozen=True)
class Kind:
    """The kind of artifact that an input takes. `sources`: rows of an input given as NAME=ARTIFACT get the source NAME."""

    name: str
    sources: bool = False


@dataclass(frozen=True)
class Reads:
    """The files (or folders, ending in /) that a stage reads from an input artifact. Checksums of other files are not verified."""

    files: tuple[str, ...]


Pages = Annotated[Artifact, Kind("pages")]
Documents = Annotated[Artifact, Kind("documents")]
Signals = Annotated[Artifact, Kind("signals")]
Classifier = Annotated[Artifact, Kind("classifier")]
Mixture = Annotated[Artifact, Kind("mixture")]
Tokenizer = Annotated[Artifact, Kind("tokenizer")]
Tokens = Annotated[Artifact, Kind("tokens")]
Model = Annotated[Artifact, Kind("model")]
Prompts = Annotated[Artifact, Kind("prompts")]
Answers = Annotated[Artifact, Kind("answers")]
Preferences = Annotated[Artifact, Kind("preferences")]
Instructions = Annotated[Artifact, Kind("instructions")]
Evaluation = Annotated[Artifact, Kind("evaluation")]
Lists = Annotated[Artifact, Kind("lists")]

Name = tuple[str, str]
Value = Artifact | External | list[Artifact] | list[External] | None
"""Possible values of a stage's input."""
CodeOfRows = Callable[[Mapping[str, Sequence[Artifact | External]]], list[Name]]
"""A function from a stage's inputs to the (module, symbol) of each function and class that the inputs' rows name."""
SignalTables = Callable[[Any], Mapping[str, tuple[str, ...]]]
"""A function from a configuration to name → columns of the signal tables that the stage writes."""


@dataclass(frozen=True)
class InputSpec:
    """A declared input of a stage. `reads`: the files that the stage reads, empty for all; see `Reads`. `sources`: see `Kind`."""

    name: str
    kind: str
    many: bool = False
    optional: bool = False
    reads: tuple[str, ...] = ()
    sources: bool = False

    def check(self, stage: str, value: Value) -> list[Artifact] | list[External]:
        """Return the values as a list, empty for an optional None. Raise PunaError for a wrong number or kind, or a repeated artifact."""
        if value is None:
            if not self.optional:
                raise PunaError(f"stage {stage} needs the input {self.name!r} ({self.kind})")
            return []
        values: list[Any] = value if isinstance(value, list) else [value]
        if not self.many and len(values) != 1:
            raise PunaError(f"stage {stage}: input {self.name!r} takes one artifact, but {len(values)} were given")
        if self.many and not values and not self.optional:
            raise PunaError(f"stage {stage}: input {self.name!r} takes at least one artifact ({self.kind})")
        for item in values:
            kind = item.kind if isinstance(item, Artifact) else "external"
            if kind != self.kind:
                name = item.id if isinstance(item, Artifact) else str(item)
                raise PunaError(f"stage {stage}: input {self.name!r} takes {self.kind}, but {name} is of kind {kind}")
        keys = [item.key for item in values if isinstance(item, Artifact)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise PunaError(f"stage {stage}: {self.kind}/{twice[:12]} is given twice as {self.name!r}; give each artifact once")
        return values


@dataclass(frozen=True)
class Stage:
    """A declared stage. `function(*inputs, config, run)` does the work; `execute` runs a stage."""

    name: str
    kind: str
    function: Callable[..., None]
    config: type[StageConfig]
    inputs: tuple[InputSpec, ...]
    filters: str | None = None
    version: str | None = None
    needs: Needs | None = None
    device: bool = False
    ranks: bool = False
    signals: tuple[str, ...] | SignalTables = ()
    named: CodeOfRows | None = None
    doc: str = field(default="", compare=False)

    def tables(self, config: StageConfig) -> dict[str, tuple[str, ...]] | None:
        """Return name → columns of the signal tables that the stage will write, or None if it does not declare them."""
        if callable(self.signals):
            return dict(self.signals(config))
        return {"signals": ("id", *self.signals)} if self.signals else None

    def unmet(self, config: StageConfig, facts: Facts) -> list[str]:
        """Return one message per requirement of the stage that these facts do not meet."""
        return [f"{self.name}: {sentence}" for sentence in self.needs(config, facts)] if self.needs else []

    def reaches(self, config: StageConfig, given: dict[str, Value]) -> list[Name]:
        """Return the functions and classes that configuration and inputs name. Their code enters the artifact's key."""
        return [*config.reaches(), *(self.named(self.check(given)) if self.named else ())]

    def check(self, given: dict[str, Value]) -> dict[str, list[Artifact] | list[External]]:
        """Return input name → artifacts or external inputs. Raise PunaError if the inputs do not fit the declaration."""
        if unknown := set(given) - {spec.name for spec in self.inputs}:
            names = ", ".join(spec.name for spec in self.inputs) or "none"
            raise PunaError(f"stage {self.name} has no input {sorted(unknown)[0]!r}; its inputs are {names}")
        return {spec.name: spec.check(self.name, given.get(spec.name)) for spec in self.inputs}


REGISTRY: dict[str, Stage] = plugins.registry({}, lambda stage: stage.function.__module__)


def stage(
    *, kind: str, filters: str | None = None, version: str | None = None, needs: Needs | None = None, device: bool = False,
    ranks: bool = False, signals: tuple[str, ...] | SignalTables = (), named: CodeOfRows | None = None,
) -> Callable[[Callable[..., None]], Stage]:  # fmt: skip
    """Declare a function as a stage.

    `kind`: the artifact's kind. `filters`: the input whose rows must each be kept or in `dropped` (checked at commit). `version`: replaces
    the code hash in the artifact's key. `needs(config, facts)`: see `Needs`; called before a run. `device`: the stage computes on an
    accelerator in one process; on a cluster, one worker with an accelerator runs the whole stage. `ranks`: all processes of a distributed
    launch run the stage. `signals`: the signals that the stage writes, or see `SignalTables`; a rule on any other signal is rejected before
    the run. `named`: see `CodeOfRows`. Raise TypeError if the function or an argument is invalid."""

    def declare(function: Callable[..., None]) -> Stage:
        name = function.__name__
        if kind not in KINDS:
            raise TypeError(f"stage {name}: {kind!r} is not a kind of artifact")
        if not function.__doc__:
            raise TypeError(f"stage {name}: needs a docstring")
        hints = get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters)
        if parameters[-2:] != ["config", "run"]:
            raise TypeError(f"stage {name}: the last parameters must be config and run")
        specs = tuple(input_spec(f"stage {name}", parameter, hints[parameter]) for parameter in parameters[:-2])
        config = hints["config"]
        if not (isinstance(config, type) and issubclass(config, StageConfig)):
            raise TypeError(f"stage {name}: config must be annotated with a StageConfig")
        if filters is not None and filters not in {spec.name for spec in specs}:
            raise TypeError(f"stage {name}: filters={filters!r} is not one of its inputs")
        if name in REGISTRY and (other := REGISTRY[name].function.__module__) != function.__module__:
            raise TypeError(f"stage {name} is declared twice, in {other} and in {function.__module__}; rename one")
        text = inspect.getdoc(function) or ""
        REGISTRY[name] = new = Stage(name, kind, function, config, specs, filters, version, needs, device, ranks, signals, named, text)
        return new

    return declare


def input_spec(where: str, name: str, hint: Any) -> InputSpec:
    optional = many = False
    if get_origin(hint) in (typing.Union, types.UnionType):
        members = [h for h in get_args(hint) if h is not type(None)]
        optional, hint = True, members[0]
    if get_origin(hint) is list:
        many, hint = True, get_args(hint)[0]
    if hint is External:
        return InputSpec(name, "external", many, optional)
    if get_origin(hint) is Annotated:
        marks = get_args(hint)[1:]
        reads = tuple(file for mark in marks if isinstance(mark, Reads) for file in mark.files)
        for mark in marks:
            if isinstance(mark, Kind):
                return InputSpec(name, mark.name, many, optional, reads, mark.sources)
    raise TypeError(f"{where}: input {name!r} is annotated {hint}; use Documents, Signals, … or External")
