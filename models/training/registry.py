"""A registry of named entries of one kind: Puna's own, and entries of other packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from puna.models.settings import Settings, did_you_mean, problems

T = TypeVar("T")


class Registry(dict[str, T]):
    """A table of entries. `what`: the kind of entry, for messages; `group`: the entry-point group of plugins that register entries."""

    def __init__(self, what: str, group: str) -> None:
        super().__init__()
        self.what, self.group = what, group

    def register(self, name: str, entry: T) -> None:
        """Add an entry; raise ValueError if another entry has the name. A module that is imported again replaces its entries."""
        if name in self and _address(self[name]) != _address(entry):
            raise ValueError(f"there is a {self.what} {name!r} already, in {_address(self[name])[0]}")
        self[name] = entry

    def lookup(self, name: str) -> T:
        """Return the entry `name`; if it is missing, import the plugins first. Raise ValueError if it stays missing or a plugin fails."""
        for offer in () if name in self else entry_points(group=self.group):
            try:
                offer.load()
            except Exception as error:
                raise ValueError(f"plugin {offer.name} ({offer.value}) cannot be imported: {error}") from error
        if name not in self:
            raise ValueError(f"there is no {self.what} {name}{did_you_mean(name, sorted(self))}")
        return self[name]

    def __missing__(self, name: str) -> T:
        return self.lookup(name)


def own_parameters(function: Callable[..., Any], given: Mapping[str, float], name: str) -> dict[str, float]:
    """Return a function's keyword-only parameters: given values, else defaults. Raise ValueError for an unknown name or invalid value."""
    model = _settings_class(function)
    try:
        return dict(model.model_validate(given))
    except ValidationError as error:
        raise ValueError(f"{name}: {'; '.join(problems(error))}; its parameters are {', '.join(model.model_fields) or 'none'}") from error


def parameters_help(entries: Mapping[str, Callable[..., Any]]) -> str:
    """Return the descriptions and defaults of functions' keyword-only parameters, as text."""
    fields = [(name, own, field) for name, function in entries.items() for own, field in _settings_class(function).model_fields.items()]
    return "; ".join(f"{own} of {name} ({field.default}): {field.description}" for name, own, field in fields)


@cache
def _settings_class(function: Callable[..., Any]) -> type[Settings]:
    """Return a settings class whose fields are a function's keyword-only parameters."""
    fields: dict[str, Any] = {
        p.name: (p.annotation, p.default) for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    return create_model(function.__qualname__, __base__=Settings, __module__=function.__module__, **fields)


def _address(entry: object) -> tuple[str, str]:
    function: Any = getattr(entry, "function", entry)
    return function.__module__, function.__qualname__
