"""Flow declarations. A flow is a plain function that calls `step`; calling it lists, plans or runs the flow's steps.

    @flow
    def curate(inputs: list[Files]) -> None:
        \"\"\"Pages to clean documents.\"\"\"
        documents = step(extract, pages=step(ingest, inputs=inputs))
        publish("documents", step(url_dedup, documents=documents))

A `Walk` is one traversal of a flow. Its class defines what `step` does: `trace.Tracer` records the step, `plan.Planner`
looks up the step's artifact in the store, `perform.Performer` computes the artifact."""

from __future__ import annotations

import contextlib
import inspect
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from puna.flows.engine.recipe import Added, Recipe, Setting, Step
from puna.stages.contract import REGISTRY, External, Kind, SeededConfig, Stage, StageConfig, Value, did_you_mean
from puna.stages.contract.declaration import InputSpec, input_spec
from puna.storage import Artifact, PunaError, Store

Item = Artifact | External


@dataclass(frozen=True)
class Output:
    """The output of a step, or an input of a flow. `items`: its artifacts or files; empty while they do not exist, as in a trace. `labels`:
    the steps (or inputs of the flow) that it comes from. `left_out`: the step's field, if the recipe omits the step; the output is then
    falsy. `source`: a new source name for the rows of an input; empty: the rows keep their source names."""

    kind: str
    labels: tuple[str, ...]
    items: tuple[Item, ...] = ()
    left_out: str = ""
    source: str = ""

    def __bool__(self) -> bool:
        return not self.left_out


Given = Output | Sequence[Output] | None
Files = Annotated[Output, Kind("external")]
Model = Annotated[Output, Kind("model")]
Documents = Annotated[Output, Kind("documents")]
Sourced = Annotated[Output, Kind("documents", sources=True)]
Prompts = Annotated[Output, Kind("prompts")]
Instructions = Annotated[Output, Kind("instructions")]
Preferences = Annotated[Output, Kind("preferences")]
Signals = Annotated[Output, Kind("signals")]
Classifier = Annotated[Output, Kind("classifier")]  # annotations of a flow's inputs; with `Sourced`, the user may name the source


def first_sentence(doc: str) -> str:
    """Return the first whole sentence of a docstring on one line. A sentence may span lines and contain colons. It ends at a period,
    question mark or exclamation mark before a capital or a backtick."""
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", " ".join(doc.partition("\n\n")[0].split()), maxsplit=1)[0]


@dataclass(frozen=True)
class Flow:
    """A declared flow. Call it inside another flow, or run it with `Walk.walk`."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[InputSpec, ...]
    doc: str = field(default="", compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def takes_files(self) -> bool:
        """True if the flow's first input takes files. A run of such a flow without inputs reads the sample."""
        return self.inputs[0].kind == "external" if self.inputs else False

    def by_kind(
        self, items: Sequence[Item], named: Mapping[str, Sequence[Artifact]] | None = None, sources: Mapping[str, str] | None = None,
        missing: Mapping[str, Given] | None = None,
    ) -> dict[str, Given]:  # fmt: skip
        """Return each input's value: for an input in `named`, the artifacts given there; for every other, the items of its kind, in order.
        `sources`: artifact key → new source name of its rows. `missing`: values of required inputs that are not given. Raise PunaError if
        a required input has no value or an item fits no input."""
        inputs: dict[str, Given] = {}
        fitting = assign(f"flow {self.name}", self.inputs, items, named or {})
        for spec in self.inputs:
            outputs = [given_as(item, sources or {}) for item in fitting[spec.name]]
            if not outputs and not spec.optional and missing:
                inputs[spec.name] = missing[spec.name]
                continue
            if not outputs and not spec.optional:
                raise PunaError(f"flow {self.name} needs the input {spec.name!r} ({input_kind(spec)}): --input {example(spec)}")
            inputs[spec.name] = outputs if spec.many else (outputs[0] if outputs else None)
        return inputs

    def placeholders(self, *, everything: bool = False) -> dict[str, Given]:
        """Return placeholder inputs, without items, for a trace. `everything`: include document inputs even if the flow takes files."""
        inputs: dict[str, Given] = {}
        for spec in self.inputs:
            if spec.sources and self.takes_files and not everything:
                continue
            output = Output(spec.kind, (f"input {spec.name}",))
            inputs[spec.name] = [output] if spec.many else output
        return inputs


def assign(what: str, specs: Sequence[InputSpec], items: Sequence[Item], named: Mapping[str, Sequence[Artifact]]) -> dict[str, list[Item]]:
    """Assign items to inputs: those in `named`, else the items of the input's kind, in order. Raise PunaError if an item fits none."""
    left, result = list(items), dict[str, list[Item]]()
    for spec in specs:
        result[spec.name] = list(named.get(spec.name, ()))
        if spec.name not in named:
            result[spec.name] = [item for item in left if kind_of(item) == spec.kind][: None if spec.many else 1]
            left = [item for item in left if not any(item is match for match in result[spec.name])]
        if wrong := next((item for item in result[spec.name] if kind_of(item) != spec.kind), None):
            raise PunaError(f"{what}: input {spec.name!r} takes {spec.kind}, but {name_of(wrong)} is of kind {kind_of(wrong)}")
        if not spec.many and len(result[spec.name]) > 1:
            raise PunaError(f"{what}: input {spec.name!r} takes one artifact, {len(result[spec.name])} were given")
    if left:
        inputs = ", ".join(f"{spec.name} ({input_kind(spec)})" for spec in specs) or "none"
        raise PunaError(f"{what} has no input for {name_of(left[0])}; its inputs are {inputs}; name one: --input NAME=ARTIFACT")
    return result


def given_as(item: Item, sources: Mapping[str, str]) -> Output:
    """Wrap an artifact or files as the `Output` that a flow takes as input; `sources`: as in `Flow.by_kind`."""
    own = sources.get(item.key, "") if isinstance(item, Artifact) else ""
    return Output(kind_of(item), (f"input {item.name if isinstance(item, External) else item.id}",), (item,), source=own)


def kind_of(item: Item) -> str:
    return item.kind if isinstance(item, Artifact) else "external"


def name_of(item: Item) -> str:
    return item.id if isinstance(item, Artifact) else item.uri


def input_kind(spec: InputSpec) -> str:
    return "files or folders" if spec.kind == "external" else spec.kind


def example(spec: InputSpec) -> str:
    return "[NAME=]URI" if spec.kind == "external" else f"{spec.kind}/ID or NAME@latest"


FLOWS: dict[str, Flow] = {}


def flow(function: Callable[..., Any]) -> Flow:
    """Turn a function that calls `step` into a flow. Raise TypeError unless its parameters are outputs, annotated like a stage's inputs."""
    name, doc = function.__name__, inspect.getdoc(function)
    if not doc:
        raise TypeError(f"flow {name}: needs a docstring")
    if name in FLOWS and FLOWS[name].function.__module__ != function.__module__:
        raise TypeError(f"flow {name} is declared twice")
    hints = typing.get_type_hints(function, include_extras=True)
    specs = tuple(input_spec(f"flow {name}", parameter, hints[parameter]) for parameter in inspect.signature(function).parameters)
    FLOWS[name] = declared = Flow(name, function, specs, doc)
    return declared


def step(
    stage: Stage, label: str = "", /, *, field: str = "", default: StageConfig | None = None, off: bool = False, through: str | None = None,
    number: int | None = None, adapt: Callable[[Any], StageConfig] | None = None, serves: str = "", **inputs: Given,
) -> Output:  # fmt: skip
    """Add a step to the current flow and return its output: `stage` on `inputs`, configured by the recipe's values in `field`.

    `field`: by default the label, else the stage's name. `default`: the configuration that the recipe's values update. `off`: omit the step
    unless the recipe names it. `through`: the input returned as output of an omitted step (default in documents stages: the documents).
    `number`: the round, which changes the default label and the seed. `adapt`: applied to the final configuration. `serves`: the field of
    the only step that uses the output; if the recipe omits that step and does not name this one, both are omitted. Calls with the same
    label and inputs share one step."""
    if through is None and stage.kind == "documents":
        through = next((spec.name for spec in stage.inputs if spec.kind == "documents" and not spec.many), None)
    own = field or label or stage.name
    title = label or (f"{own}_{number}" if number is not None else own)
    return current_walk().step(Step(title, own, stage, default, off, through, number, adapt, serves), inputs)


def setting(name: str, default: int, *, minimum: int, maximum: int, description: str) -> int:
    return current_walk().setting(Setting(name, default, minimum, maximum, description))


def switch(name: str, default: bool, *, description: str) -> bool:
    """Return a boolean setting of the recipe that decides which steps exist."""
    return bool(current_walk().setting(Setting(name, default, False, True, description)))


def together(*parts: Callable[[], object]) -> None:
    """Run independent parts of the current flow, possibly in parallel."""
    current_walk().together(parts)


def publish(name: str, output: Output, version: str = "latest") -> Output:
    """Point the alias `name@version` at the output of a step, unless the step is omitted, and return the output."""
    if output:
        current_walk().publish(f"{name}@{version}", output)
    return output


def tell(text: str) -> None:
    """Report the flow's outcome to the user in one sentence."""
    current_walk().tell(text)


_WALK: ContextVar[Walk | None] = ContextVar("walk", default=None)


def current_walk() -> Walk:
    walk = _WALK.get()
    if walk is None:
        raise PunaError("step: no flow is in progress; run a flow with `puna run` or `puna.run`, a single stage with `puna.run(stage, …)`")
    return walk


class Walk(ABC):
    """One traversal of a flow with a recipe. Subclasses define what happens at each step."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._done: dict[str, tuple[dict[str, tuple[str, ...]], Output]] = {}

    def walk(self, flow: Flow, given: Mapping[str, Given]) -> Any:
        token = _WALK.set(self)
        try:
            return flow.function(**given)
        finally:
            _WALK.reset(token)

    @abstractmethod
    def make(self, step: Step, label: str, config: StageConfig | None, inputs: dict[str, list[Output]]) -> Output:
        """Return the output of a step, whose inputs were already checked; `config` is None in a trace of every possible step."""

    @abstractmethod
    def publish(self, name: str, output: Output) -> None:
        """Point an alias at an output."""

    def together(self, parts: Sequence[Callable[[], object]]) -> None:
        """Run independent parts of the flow; by default one after another."""
        for part in parts:
            part()

    performs: ClassVar[bool] = False  # true if the walk computes the steps and may change the store

    def store(self) -> Store | None:
        """Return the store that the flow may read; None in a trace."""
        return None

    def alone(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """Return a context manager that yields True if it holds the lock `name`, False if another run does; in this class, always True."""
        return contextlib.nullcontext(True)

    def tell(self, text: str) -> None:  # noqa: B027  only a walk that performs has listeners
        """Report the flow's outcome; in this class, do nothing."""

    def wrong(self, message: str) -> None:
        raise PunaError(message)

    def setting(self, wanted: Setting) -> int:
        return self.recipe.number(wanted)

    def configs(self, step: Step) -> list[StageConfig | None]:
        """Return the configurations of a step: none if the recipe leaves the step out, several if the recipe repeats the step."""
        return list(self.recipe.configs(step))

    def step(self, step: Step, inputs: Mapping[str, Given]) -> Output:
        """Return the output of a step; see the function `step`. Raise PunaError if an earlier step has the label but other inputs."""
        by_input = {name: outputs(value) for name, value in inputs.items()}
        labels = {name: tuple(label for output in items for label in output.labels) for name, items in by_input.items() if items}
        if step.label in self._done:
            before, output = self._done[step.label]
            if before != labels:
                raise PunaError(f"flow: two steps are called {step.label!r}; give one of them a label of its own")
            return output
        for label, extra in self.recipe.added_steps("into", step):
            self._join(step, by_input, self._add(label, extra, list(by_input.values()), None), label)
        output = self._repeat(step, by_input)
        for label, extra in self.recipe.added_steps("after", step):
            outcome = self._add(label, extra, list(by_input.values()), output)
            output = outcome if outcome.kind == output.kind else output
        if output or not step.off:  # a step that is off here may be on elsewhere
            self._done[step.label] = (labels, output)
        return output

    def _repeat(self, step: Step, given: dict[str, list[Output]]) -> Output:
        configs = self.configs(step)
        if not configs:
            inputs = given.get(step.through, []) if step.through else []
            return inputs[-1] if inputs else Output(step.stage.kind, (), (), step.field)
        results: list[Output] = []
        for count, config in enumerate(configs, 1):
            label = step.label if count == 1 else f"{step.label}.{count}"
            seeded = config if config is None or step.number is None else in_round(config, step.number)
            final = step.adapt(seeded) if step.adapt and seeded is not None else seeded
            results.append(self.make(step, label, final, self._check_inputs(step, label, given)))
            if step.through:
                given = {**given, step.through: [*given[step.through][:-1], results[-1]]}
        return results[-1] if step.through else join(results)

    def _check_inputs(self, step: Step, label: str, given: dict[str, list[Output]]) -> dict[str, list[Output]]:
        """Return the inputs that exist; call `wrong` for missing or repeated ones. Raise PunaError for an unknown name or a wrong kind."""
        stage = step.stage
        accepted: dict[str, list[Output]] = {}
        if unknown := set(given) - {spec.name for spec in stage.inputs}:
            raise PunaError(f"step {label}: stage {stage.name} has no input {sorted(unknown)[0]!r}")
        for spec in stage.inputs:
            # An omitted step passes its input on, so one output may arrive twice.
            there = list({output.labels: output for output in given.get(spec.name, []) if output}.values())
            omissions = [output.left_out for output in given.get(spec.name, []) if not output]
            if not there and not spec.optional:
                why, remedy = "", f"give it, --input {example(spec)}"
                if omissions:
                    why = f", the output of {omissions[0]}, which the recipe leaves out"
                    remedy = f"keep {omissions[0]}, or leave out {step.field} too: --set {step.field}=null"
                self.wrong(f"{label} needs {spec.name} ({input_kind(spec)}){why}; {remedy}")
            if not spec.many and sum(len(output.labels) for output in there) > 1:
                self.wrong(f"{label}: takes one {spec.name}, but {there[0].labels[0]} is repeated; give it one configuration")
            if wrong := next((output for output in there if output.kind != spec.kind), None):
                raise PunaError(f"step {label}: input {spec.name!r} takes {spec.kind}, but {wrong.labels[0]} gives {wrong.kind}")
            accepted[spec.name] = there
        return accepted

    def _add(self, label: str, extra: Added, near: list[list[Output]], output: Output | None) -> Output:
        """Add a step from the recipe. Inputs not named in `extra.inputs` are taken by kind from `near` and `output` if required."""
        stage = REGISTRY[extra.stage or label]
        around = ([output] if output else []) + [item for items in near for item in items]
        inputs: dict[str, Given] = {}
        for spec in stage.inputs:
            if spec.name in extra.inputs:
                origin = extra.inputs[spec.name]
                if origin not in self._done:
                    raise PunaError(f"add.{label}.inputs.{spec.name}: {origin} is not an earlier step{did_you_mean(origin, self._done)}")
                inputs[spec.name] = self._done[origin][1]
            else:
                fitting = [item for item in around if item.kind == spec.kind and item]
                if fitting and (spec.many or not spec.optional):
                    inputs[spec.name] = fitting if spec.many else fitting[0]
        return self.step(Step(label, label, stage), inputs)

    def _join(self, step: Step, given: dict[str, list[Output]], made: Output, label: str) -> None:
        """Pass the output of an added step to the input of its kind in `given`; replace a single input. Raise PunaError if none fits."""
        takers = [spec for spec in step.stage.inputs if spec.kind == made.kind]
        if not takers:
            raise PunaError(f"add.{label}.into: {step.label} takes no {made.kind}; choose another step, or `after`")
        taker = next((spec for spec in takers if spec.many), takers[0])
        given[taker.name] = [*given.get(taker.name, []), made] if taker.many else [made]


def values(stage: Stage, inputs: Mapping[str, Sequence[Output]]) -> dict[str, Value]:
    """Return the outputs' items as inputs of a stage: a list or a single item, None if there are none."""
    arguments: dict[str, Value] = {}
    for spec in stage.inputs:
        items: list[Any] = [item for output in inputs[spec.name] for item in output.items]
        arguments[spec.name] = (items or None) if spec.many else (items[0] if items else None)
    return arguments


def outputs(value: Given) -> list[Output]:
    return [] if value is None else [value] if isinstance(value, Output) else list(value)


def join(made: list[Output]) -> Output:
    return Output(made[0].kind, tuple(n for m in made for n in m.labels), tuple(i for m in made for i in m.items))


def in_round(config: StageConfig, number: int) -> StageConfig:
    """Return the configuration of a step in round `number` (1-based), with another seed in each round; unchanged if it has no seed."""
    if not isinstance(config, SeededConfig):
        return config
    return config.model_copy(update={"seed": (config.seed + 1_000_003 * number) % 2**31})
