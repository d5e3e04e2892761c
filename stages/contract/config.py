"""Stage configuration: frozen pydantic models in which every field has a description and bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from puna.models.settings import Settings, problems
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
        raise PunaError("\n".join(problems(error, where, kind))) from error
