"""`constraints`: a check of instructions that a program can verify, as in IFEval."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from pydantic import Field, JsonValue, model_validator

from puna.stages.contract import did_you_mean
from puna.stages.verifiers.base import BoundedVerifier, Question, Score
from puna.stages.verifiers.instruction_kinds import AT_LEAST, KINDS, LESS_THAN
from puna.stages.verifiers.registry import register


@register
class Constraints(BoundedVerifier):
    """Score 1 if the answer follows all instructions, else 0; with `partial` the share that it follows.

    `instruction_id_list` and `kwargs` are IFEval's (Zhou et al., arXiv 2311.07911), unchanged from a row of its file.
    An empty answer follows nothing. The authors use NLTK for sentences and langdetect for languages; here rules and fastText's
    classifier are used, so that single answers may differ.
    """

    name: ClassVar[str] = "constraints"

    instruction_id_list: tuple[str, ...] = Field(
        min_length=1, max_length=100, description="Ids of the instructions; a language before them (en:) is left out"
    )
    kwargs: tuple[dict[str, JsonValue], ...] = Field(description="Arguments of each instruction; those that are null are left out")
    loose: bool = Field(
        False, description="Judge also without asterisks, the first line and the last line, and take the best (IFEval's loose accuracy)"
    )
    partial: bool = Field(False, description="The score is the share of instructions that are followed")

    @model_validator(mode="after")
    def _instructions_are_known(self) -> Constraints:
        if len(self.kwargs) != len(self.instruction_id_list):
            raise ValueError(f"{len(self.instruction_id_list)} instructions, but {len(self.kwargs)} kwargs")
        for full, given in zip(self.instruction_id_list, self.kwargs, strict=True):
            name = _bare(full)
            if name not in KINDS:
                raise ValueError(f"there is no instruction {full!r}{did_you_mean(name, sorted(KINDS))}")
            _check_arguments(name, _arguments(given))
        return self

    def score(self, question: Question, answer: str) -> Score:
        """Return 1, 0 or the share."""
        texts = _variants(answer) if self.loose else [answer]
        missed = []
        for full, given in zip(self.instruction_id_list, self.kwargs, strict=True):
            check, arguments = KINDS[_bare(full)], _arguments(given)
            if not any(text.strip() and check(text, **arguments) for text in texts):
                missed.append(_bare(full))
        total = len(self.instruction_id_list)
        value = (total - len(missed)) / total if self.partial else float(not missed)
        return Score(value, f"not followed: {', '.join(missed)}" if missed else "")


def _bare(name: str) -> str:
    """Return an id without its language: en:punctuation:no_comma gives punctuation:no_comma."""
    return name.partition(":")[2] if name.count(":") == 2 else name


def _arguments(arguments: dict[str, JsonValue]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _check_arguments(name: str, given: dict[str, Any]) -> None:
    """Raise ValueError unless these are the arguments of an instruction, of their types."""
    wanted = {p.name: str(p.annotation) for p in inspect.signature(KINDS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if wrong := sorted(set(wanted) ^ set(given)):
        raise ValueError(f"instruction {name}: {'unknown' if wrong[0] in given else 'missing'} argument {wrong[0]!r}")
    for argument, value in given.items():
        kinds = {"int": int, "str": str, "list[str]": list}[wanted[argument]]
        if not isinstance(value, kinds) or isinstance(value, bool) or not value or not all(isinstance(v, str) for v in _members(value)):
            raise ValueError(f"instruction {name}: {argument}={value!r} is no {wanted[argument]}")
        if argument.endswith("relation") and value not in (AT_LEAST, LESS_THAN):
            raise ValueError(f"instruction {name}: {argument}={value!r}; write {AT_LEAST!r} or {LESS_THAN!r}")


def _members(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _variants(answer: str) -> list[str]:
    """Return the answer with and without asterisks, first line and last line: eight texts (section 4.2 of the paper)."""
    lines = answer.split("\n")
    cut = [answer, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return [*cut, *(text.replace("*", "") for text in cut)]
