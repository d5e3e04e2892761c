"""Generators whose scorers evaluate answers as code: harmless answers are scored, answers that would run code never reach the scorer."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from puna.stages.verifiers import reasoning_gym as module
from puna.stages.verifiers.base import Question, Verifier
from puna.stages.verifiers.reasoning_gym import FORMULAS, LITERALS, PROBLEMS, Refused, check_formula, check_literal, generator
from puna.stages.verifiers.registry import from_text, to_text
from puna.storage import PunaError

EVALUATES = {"eval", "exec", "compile", "parse_expr", "sympify", "S", "literal_eval"}
QUESTION = Question("q", "t", "?", None)


def drawn(name: str, index: int = 0) -> tuple[Verifier, dict[str, Any]]:
    entry = json.loads(json.dumps(generator(name, "{}", size=5)[index], default=str))
    return from_text(to_text("reasoning_gym", generator=name, entry=entry)), entry


def evaluating() -> set[str]:
    """Return the generators whose `score_answer`, or a function of its module that it reaches, calls something that evaluates text."""
    from reasoning_gym.factory import DATASETS  # the import takes seconds in each process that collects tests

    found = set()
    for name, (kind, _) in DATASETS.items():
        tree = ast.parse(inspect.getsource(inspect.getmodule(kind)))  # type: ignore[arg-type]
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        reached, todo = set[str](), {"score_answer"} & set(functions)
        while todo:
            calls = [node for node in ast.walk(functions[todo.pop()]) if isinstance(node, ast.Call)]
            new = {getattr(call.func, "id", getattr(call.func, "attr", "")) for call in calls} - reached
            reached |= new
            todo |= new & set(functions) - {"parse_expr"}  # one generator has a parser of this name, which evaluates nothing
        if reached & EVALUATES - set(functions):
            found.add(name)
    return found


def test_every_scorer_that_evaluates_is_guarded() -> None:
    assert evaluating() == FORMULAS | LITERALS | set(PROBLEMS)


@pytest.mark.parametrize("name", sorted(FORMULAS | LITERALS))
def test_an_exploit_does_not_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, _ = drawn(name)
    flag = tmp_path / "ran"
    exploits = [
        f"__import__('pathlib').Path({str(flag)!r}).touch()",
        f"[open({str(flag)!r}, 'w') for _ in '1']",
        f"(lambda: open({str(flag)!r}, 'w'))()",
        f"sqrt(\"open({str(flag)!r}, 'w')\")",
        f"1 + sympify(\"__import__('os').system('touch {flag}')\")",
        f"<answer>open({str(flag)!r}, 'w')</answer>",
    ]
    for text in exploits:
        assert (verifier.score(QUESTION, text).value or 0.0) <= 0.05 and not flag.exists()
    # Without the guard, the same texts do run: the test would notice.
    monkeypatch.setattr(module, "FORMULAS", frozenset())
    monkeypatch.setattr(module, "LITERALS", frozenset())
    if name != "number_sorting":  # number_sorting reads answers as JSON, and evaluates the entry
        verifier.score(QUESTION, exploits[0])
        assert flag.exists()


@pytest.mark.parametrize("name", sorted(FORMULAS | LITERALS))
def test_right_answers_are_right_still(name: str) -> None:
    for index in range(5):
        verifier, entry = drawn(name, index)
        right = entry["answer"] if entry["answer"] is not None else entry["metadata"]["expression"]
        assert verifier.score(QUESTION, right).value == 1.0, right
        assert verifier.score(QUESTION, f"<answer>{right}</answer>").value == 1.0


@pytest.mark.parametrize(("name", "entry"), [
    ("number_sorting", {"answer": "__import__('os').getcwd()", "metadata": {"direction": "ascending"}}),
    ("simple_integration", {"answer": "x", "metadata": {"variable": "x", "integrand": "open('a')"}}),
    *(("bitwise_arithmetic", {"answer": "0x1", "metadata": about}) for about in (
        {"problem": "__import__('os').getpid()"}, {"problem": "(0x2 ** 0x9)"}, {"problem": "(0x1 << 0xffff)"}, {"problem": "(0x1 << 0x3 * 0xffff)"}, {"problem": ["0x1"]}, {},
    )),
])  # fmt: skip
def test_an_entry_that_runs_something_is_refused(name: str, entry: dict[str, Any]) -> None:
    with pytest.raises(PunaError, match="the entry.* and its scorer would run it"):
        from_text(to_text("reasoning_gym", generator=name, entry=entry))


@pytest.mark.parametrize("difficulty", [1, 2, 5, 10])
def test_problems_of_a_generator_are_its_own_formulas(difficulty: int) -> None:
    for entry in generator("bitwise_arithmetic", json.dumps({"difficulty": difficulty}), size=40):
        verifier = from_text(to_text("reasoning_gym", generator="bitwise_arithmetic", entry=entry))
        assert verifier.score(QUESTION, entry["answer"]).value == 1.0


@pytest.mark.parametrize("text", ["1 + 2*(3 - 4)/5", "-x**2 + 3*x*y - 7", "exp(2*x)*sin(x) + C", "sqrt(3)/log(x + 1, 10)", "2**100", "1.5e3", " 7\n", "x**(n + 1)/(n + 1)"])
def test_formulas(text: str) -> None:
    check_formula(text)


@pytest.mark.parametrize("text", [
    "", "1 +", "x.y", "f(x)", "x[0]", "'1'", "f'{x}'", "lambda: 1", "[1]", "x if y else z", "sqrt(*x)", "log(x, evaluate=y)", "(y := 1)", "True", "1 and 2",
    "__import__", "x._y", "9**9**9", "((9**999)**999)**999", "9**(9*9**9)", "1e999", "exp('1')", "sqrt", "()", "1;2", "(" * 300 + "1" + ")" * 300, "1+" * 1500 + "1",
])  # fmt: skip
def test_no_formulas(text: str) -> None:
    if text == "sqrt":  # a name alone is not called
        return check_formula(text)
    with pytest.raises(Refused):
        check_formula(text)


def test_literals() -> None:
    for text in ("[[0, 1], [-1, 2]]", "['A', 'B']", "1 2 3\n4 5 6", "ABCDE", "_ _ Q _", "{'a': (1, None)}", ""):
        check_literal(text)
    for text in ("f(x)", "[x for x in y]", "x.y", "x[0]", "9**9**9", "'a' * 10", "(lambda: 1)", "f'{x}'", " open('a')", "\topen('a')"):
        with pytest.raises(Refused):
            check_literal(text)
