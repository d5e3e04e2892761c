"""`python`: a score by a user's function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field, JsonValue, model_validator

from puna.stages import plugins
from puna.stages.identity.modules import is_library
from puna.stages.verifiers.base import Question, Score, Verifier
from puna.stages.verifiers.registry import register


@register
class PythonFunction(Verifier):
    """Score by a function's result: True or False, a number from 0 to 1, a pair of number and detail, or a `Score`.

    It is called as `function(answer, **parameters)`, also with `prompt`, `reference`, `task` if it has parameters for them.
    It runs in a process of its own that is killed when an answer takes too long; that process is no sandbox.
    """

    name: ClassVar[str] = "python"

    function: str = Field(
        min_length=1,
        description="`module:function` of a module that --module or an installed plugin names, or a function's name in the entry points "
        "of the group puna.verifiers",
    )
    parameters: dict[str, JsonValue] = Field(default_factory=dict, description="Further arguments of the function")

    @cached_property
    def called(self) -> Callable[..., Any]:
        """Return the function; raise ValueError if it is missing, or if only the data names its module."""
        module, colon, attribute = self.function.partition(":")
        if not colon:
            found = plugins.offers("puna.verifiers").get(module)
        else:
            if not plugins.is_allowed(module):
                raise ValueError(f"function {self.function!r} {_why_not(module)}")
            try:
                found = getattr(importlib.import_module(module), attribute, None)
            except ImportError as error:
                raise ValueError(f"function {self.function!r}: {error}; set PYTHONPATH or give --module") from error
            # What an allowed module imports from elsewhere is not its own.
            if callable(found) and not plugins.is_allowed(getattr(found, "__module__", None) or ""):
                raise ValueError(f"function {self.function!r} comes from {found.__module__}, which is not allowed; --module names your own")
        if not callable(found) or isinstance(found, type):
            raise ValueError(f"function {self.function!r}: there is no such function")
        called: Callable[..., Any] = found
        return called

    @model_validator(mode="after")
    def _arguments_fit(self) -> PythonFunction:
        taken = inspect.signature(self.called).parameters
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
        if not open_ended and (unknown := sorted(set(self.parameters) - set(taken))):
            raise ValueError(f"function {self.function!r} takes no {unknown[0]!r}; it takes {', '.join(taken)}")
        return self

    def reaches(self) -> list[tuple[str, str]]:
        module, colon, attribute = self.function.partition(":")
        named = (module, attribute) if colon else (self.called.__module__, self.called.__qualname__)
        return [*super().reaches(), (named[0], named[1].split(".")[0])]

    def score(self, question: Question, answer: str) -> Score:
        known = {"prompt": question.text, "reference": question.reference, "task": question.task}
        taken = inspect.signature(self.called).parameters
        given = {name: value for name, value in known.items() if name in taken and name not in self.parameters}
        made = self.called(answer, **given, **self.parameters)
        if isinstance(made, Score):
            return made
        value, detail = made if isinstance(made, tuple) and len(made) == 2 else (made, "")
        if not isinstance(value, bool | int | float):
            raise TypeError(f"{self.function} gave {made!r}, not a number from 0 to 1")
        return Score(float(value), str(detail))


def _why_not(module: str) -> str:
    if module.split(".")[0] == "puna":
        return "is Puna's; a prompt may name Puna's verifiers by their names, and functions of modules that you allow"
    if is_library(module):
        return "is a library's; a prompt may name those of your own modules and of plugins"
    return f"is not allowed: data may not choose code. If you trust that module, allow it: --module {module}"
