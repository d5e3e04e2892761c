"""Stage configuration: frozen pydantic models in which every field has a description and bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError

from puna.models.settings import Settings, did_you_mean
from puna.storage import PunaError


class StageConfig(Settings):
    """The base class of every stage configuration and of its nested groups."""

    def reaches(self) -> list[tuple[str, str]]:
        """Return (module, symbol) of each function and class that the settings name. Their code enters the artifact's key."""
        return sorted({(one.__module__, one.__qualname__) for one in _named_by(self)})


class SeededConfig(StageConfig):
    """The base class of configurations of stages that draw random numbers."""

    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of all random numbers in the stage")


def _named_by(settings: object) -> Iterator[Any]:
    """Yield the functions and classes that settings and their nested settings return from a method `implementations`."""
    if isinstance(settings, list | tuple):
        for item in settings:
            yield from _named_by(item)
    elif isinstance(settings, Settings):
        yield from settings.implementations() if hasattr(settings, "implementations") else ()
        for name in type(settings).model_fields:
            yield from _named_by(getattr(settings, name))


C = TypeVar("C", bound="StageConfig")


def parse(kind: type[C], values: dict[str, Any], where: str) -> C:
    """Return `values` as a configuration. Raise one PunaError with a line per wrong field; each line begins with `where`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise PunaError(describe(error, where, kind)) from error


def describe(error: ValidationError, where: str, kind: type[BaseModel]) -> str:
    """Return one line `field: message` for each wrong value of a configuration of class `kind`."""
    lines = []
    for item in error.errors():
        *path, last = item["loc"] or ("",)
        name = ".".join(str(part) for part in (where, *path, last) if part != "")
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: no such field{_suggestion(str(last), kind, path)}")
        elif item["type"] == "missing":
            lines.append(f"{name}: is missing; set it")
        else:
            lines.append(f"{name}: {item['msg'].removeprefix('Value error, ')} (got {_short(item['input'])})")
    return "\n".join(lines)


def _suggestion(wrong: str, kind: type[BaseModel], path: Iterable[int | str]) -> str:
    for part in path:
        if isinstance(part, str):
            field = kind.model_fields.get(part)
            groups = _groups(field.annotation) if field else []
            if len(groups) != 1:  # the field has several alternatives, and it is unknown which one was meant
                return ""
            kind = groups[0]
    return did_you_mean(wrong, kind.model_fields)


def _groups(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for argument in get_args(annotation) for group in _groups(argument)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
