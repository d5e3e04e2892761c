"""`code` and `python`: a Python program that must pass tests in a sandbox, and a score from a user's function."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field, JsonValue, model_validator

from puna.models import progress
from puna.models.untrusted.bounded_process import CLOCK
from puna.stages import plugins
from puna.stages.identity.modules import is_library
from puna.stages.verifiers import sandbox
from puna.stages.verifiers.base import Item, Question, Score, ScoringConfig, Verifier
from puna.stages.verifiers.judges import Tools, chunks
from puna.stages.verifiers.registry import register

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
PYTHON = ("python", "python3", "py")
AT_ONCE = 4


@register
class Code(Verifier):
    """Score 1 if the program passes all tests, else 0; with `partial`, the share of the tests that it passes.

    The program is `prefix` plus the answer's code: its fenced blocks marked as Python, else its last fenced block, else the whole answer.
    A block without a closing fence counts only if there is no closed block of its kind. Tests are pieces of Python that use the program's
    names and fail by an exception, like HumanEval's `check(candidate)` and MBPP's assertions. They run in another process, which the
    program cannot read or write; results of the program reach it as plain data. A program that ends before its tests or exceeds its limits
    passes none. Only the standard library can be imported."""

    name: ClassVar[str] = "code"

    tests: tuple[str, ...] = Field(min_length=1, max_length=1000, description="Tests: pieces of Python that raise if the program is wrong")
    prefix: str = Field("", description="Code before the answer's: imports, or the beginning of a function that the answer continues")
    seconds: float | None = Field(None, gt=0, description="CPU seconds of program and tests, at most the stage's limit; null: that limit")
    partial: bool = Field(False, description="Score the share of passed tests")

    @classmethod
    def prepare(cls, verifiers: Sequence[Verifier], tools: Tools) -> None:
        sandbox.mode()

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score]:
        jobs = [(item.verifier, item.answer) for item in items if isinstance(item.verifier, Code)]
        return [score for scores in tools.run.map(_run_chunk, chunks(jobs, AT_ONCE), tools.config) for score in scores]

    def score(self, question: Question, answer: str) -> Score:
        return _run_chunk([(self, answer)], ScoringConfig())[0]


def _run_chunk(jobs: list[tuple[Code, str]], config: ScoringConfig) -> list[Score]:
    return [_run(*job, config) for job in jobs]


def _run(code: Code, answer: str, config: ScoringConfig) -> Score:
    limits = sandbox.Limits(min(code.seconds or config.seconds, config.seconds), config.memory_mb, config.disk_mb, config.processes)
    progress.advance(CLOCK * config.seconds)
    outcome = sandbox.run(program(answer), code.tests, limits, sandbox.mode(), f"{code.prefix}\n")
    if outcome.refused:
        return Score(None, f"code was not run: {outcome.refused}")
    if outcome.results is None or outcome.ended:
        return Score(0.0, f"the program did not finish its tests: {outcome.ended or 'it left early'}")
    passes, count = sum(fault is None for fault in outcome.results), len(code.tests)
    first = next((fault for fault in outcome.results if fault is not None), "")
    value = passes / count if code.partial else float(passes == count)
    return Score(value, f"{passes} of {count} tests passed" + (f"; {first}" if first else ""))


def program(answer: str) -> str:
    closed, opened = FENCE.findall(answer), FENCE.findall(f"{answer}\n```")
    for blocks in (closed, opened):  # a truncated block, which may not be a program, counts only without a closed one
        if sources := [text for language, text in blocks if language.lower() in PYTHON]:
            return "\n".join(sources)
    return str((closed or opened or [("", answer)])[-1][1])


@register
class PythonFunction(Verifier):
    """Score by a function's result: True or False, a number from 0 to 1, a pair of number and detail, or a `Score`.

    The function is called as `function(answer, **parameters)`, plus `prompt`, `reference` and `task` if it has these parameters. It runs in
    a separate process, which is killed if an answer takes too long but is not a sandbox."""

    name: ClassVar[str] = "python"

    function: str = Field(
        min_length=1, description="`module:function` in a module given by --module or an installed plugin, or a function's name in the "
        "entry points of the group puna.verifiers",
    )  # fmt: skip
    parameters: dict[str, JsonValue] = Field(default_factory=dict, description="Additional arguments of the function")

    @cached_property
    def implementation(self) -> Callable[..., Any]:
        """Return the function. Raise ValueError if it is missing, or if data may not name its module (`plugins.is_allowed`)."""
        module, colon, attribute = self.function.partition(":")
        if not colon:
            value = plugins.offers("puna.verifiers").get(module)
        else:
            if not plugins.is_allowed(module):
                raise ValueError(f"function {self.function!r} {_why_not(module)}")
            try:
                value = getattr(importlib.import_module(module), attribute, None)
            except ImportError as error:
                raise ValueError(f"function {self.function!r}: {error}; set PYTHONPATH or give --module") from error
            # A function that an allowed module only imports does not belong to it.
            if callable(value) and not plugins.is_allowed(getattr(value, "__module__", None) or ""):
                raise ValueError(f"function {self.function!r} comes from {value.__module__}, which is not allowed; --module names your own")
        if not callable(value) or isinstance(value, type):
            raise ValueError(f"function {self.function!r}: there is no such function")
        function: Callable[..., Any] = value
        return function

    @model_validator(mode="after")
    def _arguments_fit(self) -> PythonFunction:
        parameters = inspect.signature(self.implementation).parameters
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if not open_ended and (unknown := sorted(set(self.parameters) - set(parameters))):
            raise ValueError(f"function {self.function!r} takes no {unknown[0]!r}; it takes {', '.join(parameters)}")
        return self

    def reaches(self) -> list[tuple[str, str]]:
        module, colon, attribute = self.function.partition(":")
        place = (module, attribute) if colon else (self.implementation.__module__, self.implementation.__qualname__)
        return [*super().reaches(), (place[0], place[1].split(".")[0])]

    def score(self, question: Question, answer: str) -> Score:
        inputs = {"prompt": question.text, "reference": question.reference, "task": question.task}
        names = inspect.signature(self.implementation).parameters
        arguments = {name: value for name, value in inputs.items() if name in names and name not in self.parameters}
        result = self.implementation(answer, **arguments, **self.parameters)
        if isinstance(result, Score):
            return result
        value, detail = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
        if not isinstance(value, bool | int | float):
            raise TypeError(f"{self.function} returned {result!r}, not a number from 0 to 1")
        return Score(float(value), str(detail))


def _why_not(module: str) -> str:
    if module.split(".")[0] == "puna":
        return "is Puna's own; a prompt may name Puna's verifiers by their names, and functions of modules that you allow"
    if is_library(module):
        return "is a library's; a prompt may only name functions of your own modules and of plugins"
    return f"is not allowed: data may not choose code. If you trust that module, allow it: --module {module}"
