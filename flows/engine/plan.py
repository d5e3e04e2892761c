"""The plan of a flow: steps that are reused, run or wait for others, with costs estimated from earlier runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from puna.flows.engine.console import reason
from puna.flows.engine.declare import Item, Output, Walk, given_as, name_of, values
from puna.flows.engine.recipe import Recipe, Step
from puna.flows.html.markup import disk_size, duration, size
from puna.stages.contract import External, Stage, StageConfig, Value, identify, reusable
from puna.storage import Artifact, Store
from puna.storage.explain import flat

BEGINS = ("model", "size", "tasks")  # inputs of a training stage that determine its cost
STATES = {"reused": "reused", "runs": "run", "after": "wait for these"}
GROWTH = {"seconds": 0.7, "bytes": 0.9, "memory": 0.2, "rows": 1.0}  # exponents: a cost grows as this power of the input's size
LARGEST, FARTHEST = 1e30, 10  # upper bound of an estimate; largest ratio of integers (steps, widths) between comparable configurations


@dataclass(frozen=True)
class Size:
    """The size of an artifact or of files. `rows`: rows of the artifact's main table; 0 for files or without that table."""

    rows: float
    bytes: float

    @classmethod
    def of(cls, item: Artifact | External) -> Size:
        if isinstance(item, External):
            return cls(0, sum(file.bytes for file in item.files))
        return cls(item.rows() if item.kind in item.tables else 0, disk_size(item))


@dataclass(frozen=True)
class Expected:
    """A cost estimate for a step: seconds, bytes on disk, peak bytes of memory, output rows."""

    seconds: float
    bytes: float
    memory: float
    rows: float

    @property
    def size(self) -> Size:
        return Size(self.rows, self.bytes)

    def __str__(self) -> str:
        return f"about {duration(self.seconds)}, {size(self.bytes)} of disk, {size(self.memory)} of memory"


class Experience:
    """Measurements of each stage's earlier runs in a store, and cost estimates from them."""

    def __init__(self, store: Store) -> None:
        sizes: dict[str, Size] = {}
        self._past: defaultdict[str, list[tuple[Size, dict[str, Any], dict[str, float]]]] = defaultdict(list)
        for artifact in store.artifacts():
            m = artifact.manifest
            own = sizes[artifact.key] = Size.of(artifact)
            if "seconds" in m.timings:
                came = together([sizes[item.key] for item in m.inputs if item.key in sizes])
                gave = {"seconds": m.timings["seconds"], "bytes": own.bytes, "memory": m.peak_memory_bytes, "rows": own.rows}
                self._past[m.stage].append((came, flat(dict(m.config)), gave))

    def expect(self, stage: str, config: Mapping[str, Any], sizes: Sequence[Size]) -> Expected | None:
        """Estimate a stage's cost on inputs of these sizes; return None without a comparable earlier run in the store. The estimate scales
        the newest of the runs whose configurations differ in the fewest fields; seeds do not count."""
        configuration, now = flat(dict(config)), together(sizes)
        if not (past := [one for one in self._past.get(stage, []) if _near(one[1], configuration)]):
            return None

        def differing(one: tuple[Size, dict[str, Any], dict[str, float]]) -> int:
            return sum(one[1].get(name) != configuration.get(name) for name in {*one[1], *configuration} - {"seed"})

        before, _, gave = min(reversed(past), key=differing)
        parts = (now.rows, before.rows) if now.rows and before.rows else (now.bytes, before.bytes)
        ratio = parts[0] / parts[1] if parts[1] else 1.0
        seconds, stored, memory, rows = (min(gave[name] * ratio**power, LARGEST) for name, power in GROWTH.items())
        return Expected(seconds, stored, memory, round(rows))


def _near(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = [(one[name], other[name]) for name in one.keys() & other.keys() - {"seed"}]
    return all(max(a, b) <= FARTHEST * min(a, b) for a, b in pairs if type(a) is type(b) is int and min(a, b) > 0)


def together(sizes: Sequence[Size]) -> Size:
    return Size(sum(one.rows for one in sizes), sum(one.bytes for one in sizes))


@dataclass(frozen=True)
class PlannedStep:
    """A step of a plan. `state`: reused (`why` is its artifact), runs (`why` lists changes), or after (`why` names steps to wait for).
    `expected`: the cost estimate; None if the step is reused or no earlier run is comparable. `begins`: for training, name → artifact id
    (of files: their URIs) of each input in `BEGINS`; an id is empty if an earlier step has yet to make the artifact."""

    label: str
    stage: str
    state: str
    why: str
    expected: Expected | None = None
    begins: Mapping[str, str] = field(default_factory=dict)


class Planner(Walk):
    """A traversal that looks up the artifacts of a flow's steps and makes none. `experience`: estimates the costs of new steps."""

    def __init__(self, recipe: Recipe, store: Store, experience: Experience | None = None) -> None:
        super().__init__(recipe)
        self.steps: list[PlannedStep] = []
        self._store, self._experience = store, experience
        self._sizes: dict[str, Size] = {}

    def make(self, step: Step, label: str, config: StageConfig | None, inputs: dict[str, list[Output]]) -> Output:
        assert config is not None  # only a trace of every possible step has no configurations
        before = dict.fromkeys(name for group in inputs.values() for output in group if not output.items for name in output.labels)
        items: tuple[Item, ...] = ()
        state, why = "runs", "never ran"
        if before:
            state, why = "after", ", ".join(before)
        else:
            identity = identify(step.stage, config, values(step.stage, inputs))
            if (artifact := reusable(step.stage, identity, self._store)) is not None:
                state, why, items = "reused", artifact.id, (artifact,)
            else:
                why = reason(self._store, identity, label).removeprefix("runs again: ") or why
        expected = None if items else self._estimate(step.stage, label, config, inputs)
        begins = {name: "".join(name_of(item) for output in inputs[name] for item in output.items) for name in BEGINS if inputs.get(name)}
        self.steps.append(PlannedStep(label, step.stage.name, state, why, expected, begins))
        return Output(step.stage.kind, (label,), items)

    def _estimate(self, stage: Stage, label: str, config: StageConfig, inputs: dict[str, list[Output]]) -> Expected | None:
        """Estimate a step that must run, and remember its output size for later steps. Return None without an estimate."""
        if self._experience is None or inputs.get("size"):  # the cost depends on the chosen size, which is in no configuration
            return None
        sizes = [Size.of(item) for estimate in inputs.values() for output in estimate for item in output.items]
        waited = [name for estimate in inputs.values() for output in estimate if not output.items for name in output.labels]
        sizes += [self._sizes[name] for name in waited if name in self._sizes]
        estimate = self._experience.expect(stage.name, config.model_dump(mode="json"), sizes)
        if estimate is not None:
            self._sizes[label] = estimate.size
        return estimate

    def publish(self, name: str, output: Output) -> None:
        """Do nothing: a plan sets no alias."""

    def store(self) -> Store:
        return self._store


def plan_stage(stage: Stage, config: StageConfig, given: Mapping[str, Value], store: Store) -> PlannedStep:
    planner = Planner(Recipe(stage.name), store, Experience(store))
    inputs = {name: [given_as(item, {}) for item in items] for name, items in stage.check(dict(given)).items()}
    planner.make(Step(stage.name, stage.name, stage), stage.name, config, inputs)
    return planner.steps[0]
