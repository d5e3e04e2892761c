"""A recipe: the configurations of a flow's steps, the steps to leave out, repeat or add, and the flow's own settings.

Its valid fields are derived from the steps of the flows, see `puna.flows.engine.trace`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, StrictInt, model_validator

from puna.stages.contract import SeededConfig, Stage, StageConfig, parse
from puna.storage import PunaError, errors_at

C = TypeVar("C", bound=StageConfig)
IsText = Callable[[str], bool] | None
RECIPES = Path(__file__).parents[1] / "recipes"
MAX_BYTES = 1 << 20  # maximum bytes of a recipe file
NOT_TEXT = re.compile(r"\s*|null|~|'.*'|\".*\"", re.DOTALL)
ENDINGS = (".yaml", ".yml")
BASE = "curation"  # recipe with the rules of curation, from which the shipped recipes and recipe files inherit; not meant to be run
MAX_BASES = 10  # longest chain of recipes that inherit from each other
MAX_NODES = 100_000  # maximum number of values in a recipe after its YAML aliases are expanded


@dataclass(frozen=True)
class Step:
    """One step of a flow; see `declare.step`. `field`: the recipe's field that configures the step; several steps may share a field."""

    label: str
    field: str
    stage: Stage
    default: StageConfig | None = None
    off: bool = False
    through: str | None = None
    number: int | None = None
    adapt: Callable[[Any], StageConfig] | None = None
    serves: str = ""


@dataclass(frozen=True)
class Setting:
    """A setting of the flow itself: an integer with bounds or, if the default is true or false, a switch."""

    name: str
    default: int
    minimum: int
    maximum: int
    description: str


class Added(StageConfig):
    """A step that the recipe adds, and its place in the flow."""

    stage: str | None = Field(None, description="Name of the stage; null: the step's name")
    after: str | None = Field(None, description="Step whose output the new step takes; an output of the same kind replaces it")
    into: str | None = Field(None, description="Step whose inputs the new step takes, and which then also takes the new output")
    inputs: dict[str, str] = Field(default_factory=dict, description="Input → the earlier step it comes from, if the kind is ambiguous")

    @model_validator(mode="after")
    def _one_place(self) -> Added:
        if (self.after is None) == (self.into is None):
            raise ValueError("write either after: STEP or into: STEP")
        return self


class General(StageConfig):
    """The fields of every recipe, besides the steps and settings of its flow."""

    name: str | None = Field(None, description="Name of the recipe")
    base: str | None = Field(BASE, description="Recipe to inherit from, a name or YAML file; null: none. Groups are merged, lists replaced")
    seed: StrictInt = Field(0, ge=0, lt=2**31, description="Seed of every step that does not set its own")
    project: str = Field("", description="Project of the store, whose aliases a run reads and sets")
    add: dict[str, Added] = Field(default_factory=dict, description="Steps that the recipe adds, by name")


@dataclass(frozen=True)
class Recipe:
    """A recipe: field → values, as parsed from YAML. `configs` turns the values of a step into configurations. `extra`: the added steps, by
    label. `project`: the store's project, whose aliases a run reads and sets; empty: the opened store's."""

    name: str
    seed: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Added] = field(default_factory=dict)
    project: str = ""

    def configs(self, step: Step) -> list[StageConfig]:
        """Return a step's configurations: none if it is off, several if repeated. Raise PunaError for a wrong field."""
        if step.field not in self.values:
            served = not step.serves or self.values.get(step.serves, {}) is not None
            values: Any = {} if served and not step.off else None
        else:
            values = self.values[step.field]
        if values is None:
            return []
        if isinstance(values, list):
            return [self._config(step, value, f"{step.field}.{number}") for number, value in enumerate(values)]
        return [self._config(step, values, step.field)]

    def _config(self, step: Step, values: Any, where: str) -> StageConfig:
        if not isinstance(values, dict):
            raise PunaError(f"{where}: is not a group of fields; write {{…}}, null to leave the step out, or a list to repeat it")
        kind = step.stage.config
        base = step.default.model_dump(mode="json", exclude_unset=True) if step.default is not None else {}
        if issubclass(kind, SeededConfig):
            base = {"seed": self.seed, **base}
        return parse(kind, merge(base, values), where)

    def one(self, field: str, stage: Stage, kind: type[C]) -> C:
        """Return a step's single configuration, of class `kind`. Raise PunaError if the recipe omits or repeats the step."""
        configs = self.configs(Step(field, field, stage))
        if len(configs) != 1 or not isinstance(configs[0], kind):
            raise PunaError(f"recipe {self.name}: {field} is {'repeated' if configs else 'left out'}; here one configuration is needed")
        return configs[0]

    def number(self, wanted: Setting) -> int:
        """Return the value of a setting; raise PunaError if the value has the wrong type or is out of bounds."""
        value = self.values.get(wanted.name, wanted.default)
        if isinstance(wanted.default, bool):
            if not isinstance(value, bool):
                raise PunaError(f"{wanted.name}: takes true or false (got {value!r})")
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not wanted.minimum <= value <= wanted.maximum:
            raise PunaError(f"{wanted.name}: takes a whole number from {wanted.minimum} to {wanted.maximum} (got {value!r})")
        return value

    def added_steps(self, place: Literal["after", "into"], step: Step) -> list[tuple[str, Added]]:
        return [(label, extra) for label, extra in self.extra.items() if getattr(extra, place) == step.label]


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into a copy of `base`, group by group. Where `over` has a list for a group, each item updates a copy of the group."""
    result = dict(base)
    for name, value in over.items():
        inner = result.get(name)
        if isinstance(inner, dict) and isinstance(value, list):
            result[name] = [merge(inner, item) if isinstance(item, dict) else item for item in value]
        else:
            result[name] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


@dataclass(frozen=True)
class Layer:
    """The values of one recipe file, or of `--set`. `where`: a prefix that names the layer in errors."""

    where: str
    values: Mapping[str, Any]

    def depth(self, path: list[str]) -> int:
        """Return how many leading names of a path exist in the layer."""
        inside: Any = self.values
        for depth, name in enumerate(path):
            if isinstance(inside, list) and name.isdecimal() and int(name) < len(inside):
                inside = inside[int(name)]
            elif isinstance(inside, dict) and name in inside:
                inside = inside[name]
            else:
                return depth
        return len(path)


def with_file(complaint: str, layers: list[Layer]) -> str:
    """Prefix the error `step.field: …` with the name of the user's file that sets the field, if one does."""
    path = complaint.partition(":")[0].split(".")
    return max(layers, key=lambda layer: layer.depth(path)).where + complaint


def read_values(name: str, changes: list[str], base: str = BASE, is_text: IsText = None) -> tuple[dict[str, Any], list[Layer]]:
    """Read a recipe by name or YAML file and apply `step.field=value` changes. Return its values and layers, `--set` first, bases last.
    `base`: the recipe that a file inherits from if it names none. Raise PunaError if a file or a change is wrong."""
    files = _layers(name, base, ())
    values: dict[str, Any] = {}
    for layer in reversed(files):
        for step, value in layer.values.items():
            if isinstance(value, dict) and isinstance(several := values.get(step), list):
                raise PunaError(f"{layer.where}{step}: the base repeats this step {len(several)} times; write a list of its groups")
        values = merge(values, {key: value for key, value in layer.values.items() if key != "base"} | {"name": None})
    values["name"] = files[0].values.get("name", Path(name).stem if name.endswith(ENDINGS) else name)
    changed: dict[str, Any] = {}
    for change in changes:
        overridden(values, change, is_text)
        overridden(changed, change, is_text)
    return values, [Layer("", changed), *files] if changes else files


def _layers(name: str, default: str, heirs: tuple[Path, ...]) -> list[Layer]:
    """Return the layers of a recipe and its bases, nearest first. `heirs`: the files that inherit from the recipe."""
    shipped = RECIPES / f"{name}.yaml"
    file = Path(name) if name.endswith(ENDINGS) else shipped
    if heirs and file is not shipped:
        file = heirs[-1].parent / file
    if not file.is_file():
        names = ", ".join(shipped_recipes())
        where = f"recipe {heirs[-1]}: base: " if heirs else "recipe "
        raise PunaError(f"{where}{name}: not found; recipes are {names}, or give a YAML file")
    if (file := file.resolve()) in heirs:
        raise PunaError(f"recipe {heirs[-1]}: base: {name}: a recipe cannot inherit from itself; remove `base` from one of the files")
    if len(heirs) == MAX_BASES:
        raise PunaError(f"recipe {heirs[-1]}: base: more than {MAX_BASES} recipes inherit from each other; write one base")
    values = _read(file)
    is_shipped = file == shipped.resolve()
    base = values.get("base", None if is_shipped else default)
    if base is not None and not isinstance(base, str):
        raise PunaError(f"recipe {file}: base: takes the name of a recipe, a YAML file, or null for none (got {base!r})")
    # A shipped recipe is valid, so errors come from --set: its file is not named.
    layer = Layer("" if is_shipped else f"recipe {file if heirs else name}: ", values)
    return [layer, *(_layers(base, default, (*heirs, file)) if base is not None else [])]


def _read(file: Path) -> dict[str, Any]:
    if file.stat().st_size > MAX_BYTES:
        raise PunaError(f"recipe {file}: is {file.stat().st_size:,} bytes; a recipe has at most {MAX_BYTES:,}")
    with errors_at(f"recipe {file}", yaml.YAMLError, UnicodeDecodeError, RecursionError):
        values = _parse(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise PunaError(f"recipe {file}: is not a mapping of steps")
    return unshare(values, f"recipe {file}")


@lru_cache(maxsize=16)
def _parse(text: str) -> Any:
    """Parse YAML, with a cache; callers must not change the result."""
    return _Loader(text).get_single_data()


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a field named twice in one group, since the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in names:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value} appears twice; write one group with both")
                names.add(key.value)
        return super().construct_mapping(node, deep)


def project_change(project: str | None) -> list[str]:
    return [f"project={json.dumps(project)}"] if project else []


def shipped_recipes() -> list[str]:
    return sorted(file.stem for file in RECIPES.glob("*.yaml") if file.stem != BASE)


def unshare(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a copy in which no two values are one object. Raise PunaError if expanding the YAML aliases gives too many values or levels.
    With aliases, a few lines of YAML can expand to nested lists larger than any memory, or to a list that contains itself."""
    left = MAX_NODES

    def copy(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > 50:
            raise PunaError(f"{where}: its YAML aliases expand to more than {MAX_NODES:,} values or 50 levels; use fewer aliases")
        if isinstance(value, dict):
            return {key: copy(item, depth + 1) for key, item in value.items()}
        return [copy(item, depth + 1) for item in value] if isinstance(value, list) else value

    result: dict[str, Any] = copy(values, 0)
    return result


def overridden(values: dict[str, Any], change: str, is_text: IsText = None) -> None:
    """Set `a.b=value` (YAML) in nested `values`. A number addresses a list item; groups are merged. Raise PunaError for a wrong path.
    `is_text`: True for the path of a string, which is the text itself, unless that is empty, null or quoted."""
    path, sign, text = change.partition("=")
    if not sign or not path:
        raise PunaError(f"--set {change}: write FIELD=VALUE, for example select.gopher_quality.min_words=60")
    *groups, last = path.split(".")
    inside: Any = values
    for group in groups:
        if isinstance(inside, list):
            inside = inside[_place(inside, group, change)]
            continue
        inner = inside.setdefault(group, {})
        if inner is None:
            inner = inside[group] = {}
        if not isinstance(inner, dict | list):
            raise PunaError(f"--set {change}: {group} is not a group of fields")
        inside = inner
    with errors_at(f"--set {change}", yaml.YAMLError):
        value = text if is_text is not None and not NOT_TEXT.fullmatch(text) and is_text(path) else yaml.safe_load(text)
    where: Any = _place(inside, last, change) if isinstance(inside, list) else last
    before = inside[where] if isinstance(inside, list) else inside.get(where)
    inside[where] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value


def _place(items: list[Any], text: str, change: str) -> int:
    if not text.isdecimal() or int(text) >= len(items):
        raise PunaError(f"--set {change}: {text} is not an index of a list of {len(items)} items; the first is 0")
    return int(text)


def as_yaml(value: Any) -> str:
    """Return a value as YAML: text without quotes if YAML parses this as the same text, else JSON."""
    with suppress(yaml.YAMLError):
        if isinstance(value, str) and value and yaml.safe_load(value) == value:
            return value
    return json.dumps(value, ensure_ascii=False)
