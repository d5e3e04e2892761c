"""The base class of all settings: frozen pydantic models in which every field has a description.

Code, the validation of recipes and the web forms share these classes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, model_validator

NO_RESULT: dict[str, JsonValue] = {"changes_result": False}  # `json_schema_extra` of a field that affects no result: cache keys omit it


class Settings(BaseModel):
    """The base class of settings: frozen; unknown names are errors. A nested group's missing values come from the default of its field."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=())

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError if a field has no description: forms, help and schemas show descriptions."""
        for name, field in cls.model_fields.items():
            if not field.description:
                raise TypeError(f"{cls.__name__}.{name}: a configuration field needs a description")

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults_of_groups(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        defaults = {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}
        return {name: _over(defaults.get(name), value) for name, value in values.items()}

    def identity(self) -> dict[str, Any]:
        """Return the JSON value of all fields that affect results: fields not declared with `NO_RESULT`."""
        value: dict[str, Any] = self.model_dump(mode="json")
        _forget(self, value)
        return value

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with the values in `changes`. A mapping for a group changes the group's default, not its value."""
        return type(self).model_validate(dict(self) | changes)

    def refuse_unused(self, why: str, *names: str, group: str = "") -> Self:
        """Return self. Raise ValueError if a named field differs from its default: it has no effect: `why`. `group`: self's own field."""
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].get_default(call_default_factory=True):
                shown = value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, BaseModel) else value
                raise ValueError(f"{group}{name} {shown} has no effect: {why}; leave it out")
        return self


def _forget(settings: object, value: Any) -> None:
    """Remove from `value`, in place, the fields that do not affect results. `value`: JSON value of the settings or list of settings."""
    if isinstance(settings, list | tuple):
        for item, own in zip(settings, value, strict=True):
            _forget(item, own)
    elif isinstance(settings, Settings):
        for name, field in type(settings).model_fields.items():
            if field.json_schema_extra == NO_RESULT:
                value.pop(name)
            else:
                _forget(getattr(settings, name), value.get(name))


def _over(default: object, value: Any) -> Any:
    """Return a default group of settings, overridden at every level by the mapping `value`. Return `value` if either is no group."""
    if not isinstance(default, Settings) or not isinstance(value, Mapping):
        return value
    values = dict(default)
    return values | {name: _over(values.get(name), item) for name, item in value.items()}


def did_you_mean(wrong: str, names: Iterable[str], exact: Sequence[str] = ()) -> str:
    """Return the end of an error message about an unknown name: up to three of `exact`, else the closest name, else all names."""
    candidates = list(names)
    near = exact[:3] or difflib.get_close_matches(wrong, candidates, 1)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(candidates)}" if candidates else "; there are none"


def problems(error: ValidationError, where: str = "", kind: type[BaseModel] | None = None) -> list[str]:
    """Return a line `field: problem` for each wrong value; pydantic's own problems add `(got value)`. `where`: a prefix of the names.
    `kind`: the class of settings, whose fields are suggested for unknown names."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in (where, *item["loc"]) if part != "")
        if item["type"] == "value_error":  # Puna's own check, whose text names the value
            message = str(item["ctx"]["error"])
        elif item["type"] in ("missing", "extra_forbidden"):
            message = "is missing; set it" if item["type"] == "missing" else "no such field" + _suggestion(kind, *map(str, item["loc"]))
        else:
            value = repr(item["input"])
            message = f"{item['msg']} (got {value if len(value) <= 80 else value[:77] + '…'})"
        lines.append(f"{name}: {message}" if name else message)
    return lines


def _suggestion(kind: type[BaseModel] | None, *path: str) -> str:
    for part in path[:-1]:
        if not part.isdecimal():
            field = kind.model_fields.get(part) if kind else None
            groups = _groups(field.annotation) if field else []
            kind = groups[0] if len(groups) == 1 else None  # of several alternatives, it is unknown which one was meant
    fields = {name: field.annotation for name, field in kind.model_fields.items()} if kind else {}
    return did_you_mean(path[-1], fields, deeper(path[-1], fields)) if kind else ""


def takes_text(fields: Mapping[str, Any], path: str) -> bool:
    """True if the field at a dotted path is a string. `fields`: name → type, which may be a class of settings."""
    return any(name == re.sub(r"\.\d+\.", ".0.", path) and kind in (str, str | None) for name, kind in _paths(fields))


def deeper(wrong: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the dotted paths of the fields called `wrong` inside `fields` (name → type), the shortest first."""
    return sorted((path for path, _ in _paths(fields) if path.endswith(f".{wrong}")), key=lambda path: path.count("."))


def _paths(fields: Mapping[str, Any], *above: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Yield (path, type) for the fields and all fields of groups inside them; a list of groups has the item 0."""
    for name, kind in fields.items():
        yield name, kind
        prefix = f"{name}.0" if get_origin(kind) in (list, tuple) else name
        for group in dict.fromkeys(one for one in _groups(kind) if one not in above and get_origin(kind) is not dict):
            inside = {inner: field.annotation for inner, field in group.model_fields.items()}
            yield from ((f"{prefix}.{path}", one) for path, one in _paths(inside, *above, group))


def _groups(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for argument in get_args(annotation) for group in _groups(argument)]
