"""The base class of all settings: frozen pydantic models in which every field has a description.

Code, the validation of recipes and the web forms share these classes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

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

    def refuse_unused(self, why: str, *names: str, group: str = "") -> None:
        """Raise ValueError if a named field differs from its default: it has no effect, because `why`. `group`: these settings' field."""
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].get_default(call_default_factory=True):
                shown = value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, BaseModel) else value
                raise ValueError(f"{group}{name} {shown} has no effect: {why}; leave it out")


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


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest name, or all names if none is close."""
    candidates = list(names)
    near = difflib.get_close_matches(wrong, candidates, 1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(candidates)}" if candidates else "; there are none"


def problems(error: ValidationError) -> str:
    """Return a validation error as one line, with `field: problem` for each problem; pydantic's own problems add `(got value)`."""
    messages = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        if item["type"] == "value_error":  # Puna's own check, whose text names the value
            messages.append(f"{name}: {item['ctx']['error']}" if name else str(item["ctx"]["error"]))
        elif item["type"] in ("missing", "extra_forbidden"):
            messages.append(f"{name}: is missing" if item["type"] == "missing" else f"{name}: no such field")
        else:
            messages.append(f"{name}: {item['msg']} (got {item['input']!r:.80})")
    return "; ".join(messages)
