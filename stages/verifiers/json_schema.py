"""`json_schema`: a check of a JSON answer against a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from pydantic import Field, JsonValue, model_validator

from puna.stages.verifiers.base import Question, Score, Verifier
from puna.stages.verifiers.registry import register

FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


@register
class JsonSchema(Verifier):
    """Score 1 if the answer or its last code block is JSON (RFC 8259) that the schema accepts, else 0 with the first error's message.

    The draft is given by `$schema`, else 2020-12. Formats are checked. A schema with an unknown format, a keyword of another draft or a
    misspelt keyword is rejected, since it would check nothing. Nothing is fetched: a `$ref` must point into the schema or to a draft's
    schemas. A pattern that takes too long on an answer gives no score."""

    name: ClassVar[str] = "json_schema"

    json_schema: dict[str, JsonValue] | bool = Field(description="The JSON schema")
    fenced: bool = Field(True, description="If the whole answer is not JSON, use the last fenced code block")

    @cached_property
    def validator(self) -> Any:
        from jsonschema import validators
        from jsonschema_specifications import REGISTRY

        kind = validators.validator_for(self.json_schema, default=validators.Draft202012Validator)
        return kind(self.json_schema, format_checker=kind.FORMAT_CHECKER, registry=REGISTRY)

    @model_validator(mode="after")
    def _schema_is_one(self) -> JsonSchema:
        from jsonschema import validators
        from jsonschema.exceptions import SchemaError

        if isinstance(self.json_schema, dict) and not isinstance(self.json_schema.get("$schema", ""), str):
            raise ValueError("json_schema.$schema: is not text; give a draft's URL, or leave the field out")
        try:
            self.validator.check_schema(self.json_schema)
        except SchemaError as error:
            raise ValueError(f"json_schema{_place(error)}: {error.message[:300]}") from error
        if broken := _unresolved_reference(self.json_schema, self.validator):
            raise ValueError(f"json_schema: $ref {broken!r} cannot be resolved to a schema: nothing is fetched, so define it below $defs")
        every = {name for kind in vars(validators).values() for name in getattr(kind, "VALIDATORS", ())} | {*BESIDE}
        keywords, own = list(_keywords(self.json_schema, every)), {*self.validator.VALIDATORS, *BESIDE}
        for key in (key for key, _ in keywords if key not in own and not key.startswith("x-")):
            # Other unknown keywords are annotations, but the author of such a keyword expects a check.
            if close := [key] if key in every else get_close_matches(key, sorted(every), 1, 0.8):
                raise ValueError(f"json_schema: the draft has no keyword {key!r}" + (f"; did you mean {close[0]!r}?" * (close != [key])))
        checkers = self.validator.format_checker.checkers
        if unknown := sorted({value for key, value in keywords if key == "format" and isinstance(value, str)} - set(checkers)):
            raise ValueError(f"json_schema: the format {unknown[0]!r} cannot be checked; use {', '.join(sorted(checkers))}")
        return self

    def score(self, question: Question, answer: str) -> Score:
        try:
            value = self._parse(answer)
        except (ValueError, RecursionError) as error:
            return Score(0.0, f"no JSON: {error}")
        fault = next(iter(self.validator.iter_errors(value)), None)
        return Score(1.0) if fault is None else Score(0.0, f"{_place(fault) or 'the whole'}: {fault.message[:500]}")

    def _parse(self, answer: str) -> Any:
        try:
            return _json(answer)
        except ValueError:
            blocks = FENCE.findall(answer) if self.fenced else []
            if not blocks:
                raise
            return _json(blocks[-1][1])


def _json(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError for invalid JSON, and for NaN, Infinity and repeated names in an object."""
    return json.loads(text.strip(), parse_constant=_refuse, object_pairs_hook=_unique)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return value


def _place(error: Any) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)


def _unresolved_reference(schema: Any, validator: Any) -> str | None:
    """Return the first `$ref` whose target is not a schema, in `schema` or in a JSON Schema draft. Parts with an `$id` are not checked."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    resource = specification_with(validator.META_SCHEMA.get("$schema", ""), DRAFT202012).create_resource(schema)
    resolver = REGISTRY.with_resource(resource.id() or "", resource).resolver(resource.id() or "")

    def first(part: Any, inside: bool) -> str | None:
        if isinstance(part, dict):
            if inside and ("$id" in part or "id" in part):
                return None
            reference = part.get("$ref")
            if isinstance(reference, str):
                try:
                    target = resolver.lookup(reference).contents
                except Unresolvable:
                    return reference
                if not isinstance(target, dict | bool):
                    return reference
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return next((broken for value in parts if (broken := first(value, True)) is not None), None)

    return first(schema, False)


VALUES = ("enum", "const", "default", "examples")  # keywords whose values are data, not schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies")
"""Keywords whose values' keys are names."""
BESIDE = ("$defs", "definitions", "then", "else", "minContains", "maxContains", "required")
"""Keywords that affect only other keywords (`required`: in draft 3)."""


def _keywords(schema: Any, known: Container[str], named: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the keywords of a schema with their values, but not those inside unknown keywords. `named`: the keys of `schema` are names."""
    for part in schema if isinstance(schema, list) else ():
        yield from _keywords(part, known)
    for key, part in schema.items() if isinstance(schema, dict) else ():
        if not named:
            yield key, part
        if named or (key in known and key not in VALUES):
            yield from _keywords(part, known, not named and key in NAMED)
