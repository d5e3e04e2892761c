"""`reasoning_gym`: the scorer of the question's generator, and a filter of texts that this scorer would evaluate as Python."""

from __future__ import annotations

import ast
import json
import math
import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, JsonValue, model_validator

from puna.stages.verifiers.base import Question, Score, Verifier, is_correct
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.registry import register
from puna.storage import PunaError, errors_at

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

FUNCTIONS = frozenset((
    "Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec", "sin", "sinh", "sqrt",
    "tan", "tanh",
))  # fmt: skip
MOST_CHARACTERS = 2000
MOST_BITS = 10_000.0  # maximum bits of a number that a formula may compute
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,15}")
PLAIN = (ast.Expression, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.unaryop, ast.expr_context)


class Refused(ValueError):
    """A text that must not be evaluated; the message gives the reason."""


def check_formula(text: str) -> None:
    """Raise Refused unless the text is an arithmetic expression (+ - * / **) of numbers, names and calls of `FUNCTIONS`.

    Strings, attributes, indices, other calls, numbers above `MOST_BITS` bits and texts above `MOST_CHARACTERS` are not allowed."""
    tree = _parse(text)
    if tree is None:
        raise Refused("is not a formula")
    try:
        _bits(tree.body)
    except RecursionError as error:
        raise Refused("is nested too deeply") from error


def check_literal(text: str) -> None:
    """Raise Refused for a text above `MOST_CHARACTERS`, or a Python expression with more than literals and names. Other texts pass."""
    tree = _parse(text)
    for node in () if tree is None else ast.walk(tree):
        if not isinstance(node, PLAIN):
            raise Refused(f"contains Python that is not a literal ({type(node).__name__})")


def _parse(text: str) -> ast.Expression | None:
    if len(text) > MOST_CHARACTERS:
        raise Refused(f"has more than {MOST_CHARACTERS} characters")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError) as error:
        raise Refused("is nested too deeply") from error


def _bits(node: ast.expr) -> float:
    """Return an upper bound on the bits of all numbers in an expression's value. Raise Refused beyond `MOST_BITS`, or for other syntax."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            bits = math.log2(abs(value) + 1) + 1 if math.isfinite(value) else math.inf
        case ast.Name(id=name) if NAME.fullmatch(name):
            bits = 1.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            bits = _bits(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            bits = _bits(left) + _bits(right) + 1
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            power = _bits(right)
            bits = _bits(left) * 2**power if power < 64 else math.inf
        case ast.Call(func=ast.Name(id=name), args=[*arguments], keywords=[]) if name in FUNCTIONS and 1 <= len(arguments) <= 2:
            bits = sum(_bits(argument) for argument in arguments)
        case _:
            raise Refused(f"contains more than numbers, names and operators ({type(node).__name__})")
    if bits > MOST_BITS:
        raise Refused("computes numbers that are too large")
    return bits


# Generators whose scorers evaluate the answer (with sympy's parse_expr, or with eval) or the entry's problem; none is safe by itself.
FORMULAS = frozenset(("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"))
LITERALS = frozenset(("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"))
PROBLEMS = {"bitwise_arithmetic": re.compile(r"(?:0x[0-9a-f]{1,4}|(?:<<|>>) 0x[0-3]\)|\*(?!\*)|[ ()+-])*")}


@register
class ReasoningGym(Verifier):
    """Score by the generator's scorer, run on the whole answer if that is right or marks no final answer, else on the marked final answer.

    By itself, the scorer lowers the score of long texts: "The answer is -4" would get .125 although it is right."""

    name: ClassVar[str] = "reasoning_gym"

    generator: str = Field(min_length=1, description="Name of the reasoning-gym generator")
    parameters: dict[str, JsonValue] = Field(default_factory=dict, description="The generator's own parameters")
    entry: dict[str, JsonValue] = Field(description="The entry that the generator drew")
    extract: bool = Field(True, description="Score the final answer that the text marks (answer tags, \\boxed, ####, 'the answer is')")

    @cached_property
    def dataset(self) -> ProceduralDataset:
        return generator(self.generator, json.dumps(self.parameters, sort_keys=True))

    @model_validator(mode="after")
    def _entry_is_plain(self) -> ReasoningGym:
        about = self.entry.get("metadata")
        metadata = about if isinstance(about, dict) else {}
        for text in (self.entry.get("answer"), metadata.get("integrand")):
            if isinstance(text, str) and (message := self._refusal(text)):
                raise ValueError(f"the entry {message}, and its scorer would run it: {text[:80]!r}")
        if self.generator in PROBLEMS and not PROBLEMS[self.generator].fullmatch(str(metadata.get("problem"))):
            raise ValueError(f"the entry's problem is not a formula, and its scorer would run it: {str(metadata.get('problem'))[:80]!r}")
        return self

    def score(self, question: Question, answer: str) -> Score:
        """Return the generator's score of the answer, 0 to 1; 0 for a text that its scorer must not evaluate."""
        whole = self._score(answer.strip())
        final = final_answer(answer) if self.extract and not is_correct(whole.value) else None
        if final is None:
            return whole
        second = self._score(final)
        return Score(second.value, f"final answer {final!r}" + (f", {second.detail}" if second.detail else ""))

    def _score(self, answer: str) -> Score:
        if message := self._refusal(answer):
            return Score(0.0, f"the answer {message}")
        return Score(float(self.dataset.score_answer(answer, self.entry)))

    def _refusal(self, text: str) -> str:
        try:
            if self.generator in FORMULAS:
                check_formula(text)
            elif self.generator in LITERALS:
                check_literal(text)
        except Refused as error:
            return str(error)
        return ""


@lru_cache(maxsize=256)
def generator(task: str, parameters: str, seed: int = 0, size: int = 1) -> ProceduralDataset:
    """Return reasoning-gym's generator `task` with its parameters (JSON), which draws entry i from `seed + i`.

    Raise PunaError for an unknown task, or an unknown or invalid parameter."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = [name for name in sorted(DATASETS) if task.split("_")[0] in name]
        raise PunaError(f"task {task!r}: reasoning-gym has no such generator" + (f"; close: {', '.join(close)}" if close else ""))
    values = json.loads(parameters)
    names = set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"}
    if unknown := sorted(set(values) - names):
        raise PunaError(f"task {task}: no parameter {unknown[0]!r}; it has {', '.join(sorted(names))}")
    with errors_at(f"task {task}: its parameters {parameters} are invalid", AssertionError, AttributeError, TypeError, ValueError):
        return reasoning_gym.create_dataset(task, **values, seed=seed, size=size)
