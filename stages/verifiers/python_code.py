"""`code`: a Python program that must pass tests in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from puna.stages.verifiers import sandbox
from puna.stages.verifiers.base import Item, Question, Score, ScoringConfig, Verifier
from puna.stages.verifiers.judges import Tools, chunks
from puna.stages.verifiers.registry import register

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
PYTHON = ("python", "python3", "py")
AT_ONCE = 4


@register
class Code(Verifier):
    """Score 1 if the program passes all tests, else 0; with `partial` the share of the tests that it passes.

    The program is `prefix` and the answer's code: its fenced blocks marked as Python, else its last fenced block, else all of it.
    Tests are pieces of Python that use the program's names and fail by an exception, like HumanEval's `check(candidate)` and MBPP's
    assertions. They run in another process, which the program cannot read or write: its results reach them as plain data. A program
    that ends before its tests or exceeds its limits passes none. Only the standard library can be imported.
    """

    name: ClassVar[str] = "code"

    tests: tuple[str, ...] = Field(
        min_length=1, max_length=1000, description="Tests, each a piece of Python that raises where the program is wrong"
    )
    prefix: str = Field("", description="Code before the answer's: imports, or the beginning of a function that the answer goes on with")
    seconds: float | None = Field(None, gt=0, description="Time for the program and its tests, at most what the stage allows; null: that")
    partial: bool = Field(False, description="The score is the share of tests that are passed")

    @classmethod
    def prepare(cls, verifiers: Sequence[Verifier], tools: Tools) -> None:
        """Raise PunaError if programs cannot be isolated."""
        sandbox.mode()

    @classmethod
    def score_many(cls, items: Sequence[Item], tools: Tools) -> list[Score]:
        jobs = [(item.verifier, item.answer) for item in items if isinstance(item.verifier, Code)]
        return [score for scores in tools.run.map(_run_chunk, chunks(jobs, AT_ONCE), tools.config) for score in scores]

    def score(self, question: Question, answer: str) -> Score:
        """Return the score of one answer, within the default limits."""
        return _run_chunk([(self, answer)], ScoringConfig())[0]


def _run_chunk(jobs: list[tuple[Code, str]], config: ScoringConfig) -> list[Score]:
    return [_run(*job, config) for job in jobs]


def _run(code: Code, answer: str, config: ScoringConfig) -> Score:
    limits = sandbox.Limits(min(code.seconds or config.seconds, config.seconds), config.memory_mb, config.disk_mb, config.processes)
    outcome = sandbox.run(program(answer), code.tests, limits, sandbox.mode(), f"{code.prefix}\n")
    if outcome.refused:
        return Score(None, f"code was not run: {outcome.refused}")
    if outcome.results is None or outcome.ended:
        return Score(0.0, f"the program did not come through its tests: {outcome.ended or 'it left early'}")
    passed, count = sum(fault is None for fault in outcome.results), len(code.tests)
    first = next((fault for fault in outcome.results if fault is not None), "")
    value = passed / count if code.partial else float(passed == count)
    return Score(value, f"{passed} of {count} tests passed" + (f"; {first}" if first else ""))


def program(answer: str) -> str:
    blocks = FENCE.findall(answer)
    marked = [text for language, text in blocks if language.lower() in PYTHON]
    if marked:
        return "\n".join(marked)
    return blocks[-1][1] if blocks else answer
