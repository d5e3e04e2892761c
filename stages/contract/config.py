"""Configuration of a stage: frozen pydantic models whose every field is described and bounded."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from puna.storage import PunaError


class StageConfig(BaseModel):
    """Base of every stage configuration and of its nested groups: frozen, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a field without a description when the class is defined: it is the form, the help and the schema."""
        for name, field in cls.model_fields.items():
            if not field.description:
                raise TypeError(f"{cls.__name__}.{name}: a configuration field needs a description")

    def identity(self) -> dict[str, Any]:
        """The JSON value that enters the artifact's key."""
        value: dict[str, Any] = self.model_dump(mode="json")
        return value


class SeededConfig(StageConfig):
    """Configuration of a stage that draws random numbers."""

    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of every random choice of the stage")


C = TypeVar("C", bound="StageConfig")


def parse(kind: type[C], values: dict[str, Any], where: str) -> C:
    """`values` as a configuration; one PunaError names each wrong field and what it takes."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise PunaError(describe(error, where)) from error


def describe(error: ValidationError, where: str) -> str:
    """A validation error as lines of `field: what is wrong`."""
    lines = []
    for item in error.errors():
        name = ".".join([where, *(str(part) for part in item["loc"])]) if where else ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: no such field")
        else:
            lines.append(f"{name}: {item['msg']} (got {item['input']!r})")
    return "\n".join(lines)
