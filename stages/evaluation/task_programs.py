"""Jinja templates and regular expressions of a task file, run in a separate process with limits on time and memory.

As in lm-evaluation-harness, unknown names are errors, trailing newlines are kept, and `regex_replace` is a filter."""

from __future__ import annotations

import ast
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import getitem
from typing import Any

import jinja2
import jinja2.sandbox

from puna.models.untrusted import bounded_process
from puna.models.untrusted.bounded_process import LimitError, Process
from puna.storage import PunaError, errors_at

Row = Mapping[str, Any]
ROWS = 32  # rows of one request
SECONDS = 5.0  # seconds of CPU time for one request
FAULTS = (jinja2.TemplateError, re.error, TypeError, ValueError, SyntaxError, LookupError, AttributeError, ArithmeticError, RecursionError)


def render(templates: Mapping[str, str], rows: Sequence[Row], choices: bool, where: str) -> list[dict[str, Any]]:
    """Return each row's template values. A template that is a column's name gives that column's value unchanged.

    `choices`: read an all-digit question or target as the index of a choice. Raise a PunaError that begins with `where` if a row fails."""
    return _ask("render", [dict(row) for row in rows], where, dict(templates), choices)


def run_filter(answers: Sequence[Sequence[str]], steps: Sequence[Mapping[str, Any]], where: str) -> list[list[str]]:
    """Return each question's answers after the steps of a filter (`FILTERS`). Raise a PunaError that begins with `where` on failure."""
    return _ask("filter", [list(several) for several in answers], where, [dict(step) for step in steps])


def matching(pairs: Sequence[tuple[str, str]], settings: Mapping[str, Any], where: str) -> list[bool]:
    """Return True per pair of answer and expected text that match by exact_match with these settings. Raise a PunaError that begins with
    `where` on failure."""
    return _ask("match", list(pairs), where, dict(settings))


def texts_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and value of each string inside a JSON object or list."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from [((*path, key), item)] if isinstance(item, str) else texts_of(item, (*path, key))


def verifiers_of(verifier: str | dict[str, Any], rows: Sequence[Row], where: str) -> list[str]:
    """Return each row's verifier as JSON. Strings in the task's verifier, except names, are templates or columns."""
    spec = {"name": verifier} if isinstance(verifier, str) else verifier
    texts = {path: text for path, text in texts_of(spec) if path[-1] != "name"}
    results = []
    for values in render({".".join(map(str, ("verifier", *path))): text for path, text in texts.items()}, rows, False, where):
        filled: Any = json.loads(json.dumps(spec))
        for path, value in zip(texts, values.values(), strict=True):
            reduce(getitem, path[:-1], filled)[path[-1]] = value
        results.append(json.dumps(filled, sort_keys=True, ensure_ascii=False))
    return results


_process = Process(__name__)


def _ask(work: str, rows: list[Any], where: str, *settings: Any) -> list[Any]:
    """Return the process's value for each row, `ROWS` rows per request. Raise a PunaError that begins with `where` if a row fails."""
    values: list[Any] = []
    for start in range(0, len(rows), ROWS):
        with errors_at(f"{where}: its templates or patterns are stopped", LimitError):
            answer = _process.ask((work, rows[start : start + ROWS], start, *settings), b"", None, SECONDS)
        if (message := answer.get("error")) is not None:
            raise PunaError(f"{where}: {message}")
        values += answer["values"]
    return values


def serve() -> None:
    work: dict[str, Callable[..., Any]] = {"render": _render, "filter": _filter, "match": _match}

    def answer(key: bytes, context: Any, request: Any) -> dict[str, Any]:
        try:
            return {"values": work[request[0]](*request[1:])}
        except FAULTS as error:
            return {"error": str(error) or type(error).__name__}

    bounded_process.serve(answer)


@lru_cache(maxsize=256)
def _program(text: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_printable
    )
    environment.filters["regex_replace"] = lambda text, pattern, repl, count=0: re.sub(pattern, repl, text, count=count)
    return environment.from_string(text)


def _printable(value: Any) -> Any:
    if value is None:
        raise ValueError("the template produces a null")
    return value


def _render(rows: list[dict[str, Any]], start: int, templates: dict[str, str], choices: bool) -> list[dict[str, Any]]:
    results = []
    for number, row in enumerate(rows, start + 1):
        values = {}
        for name, text in templates.items():
            try:
                values[name] = row[text] if text in row else _value(name, _program(text).render(**row), choices)
                if not isinstance(values[name], str | int | float | list | dict | None):
                    raise TypeError(f"is {type(values[name]).__name__}, not text, a number or a list")
            except FAULTS as error:
                nulls = ", ".join(column for column, value in row.items() if value is None)
                raise ValueError(f"{name}, row {number}: {error}" + (f"; it has no {nulls}" if nulls else "")) from error
        results.append(values)
    return results


def _value(name: str, text: str, choices: bool) -> Any:
    """Return a rendered field, parsed: choices as a literal, a bracketed target as a list, digits (with `choices`) as a choice's index."""
    if name == "doc_to_choice":
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"does not produce a list: {text[:60]!r}") from error
    if name in ("doc_to_text", "doc_to_target") and choices and text.isdigit():
        return int(text)
    if name == "doc_to_target" and text[:1] == "[" and text[-1:] == "]":
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
    return text


def _filter(answers: list[list[str]], start: int, steps: list[dict[str, Any]]) -> list[list[str]]:
    for step in steps:
        settings = dict(step)
        answers = [FILTERS[settings["function"]](several, settings) for several in answers]
    return answers


def _regex(answers: list[str], settings: dict[str, Any]) -> list[str]:
    pattern = re.compile(settings.get("regex_pattern", r"#### (\-?[0-9\.\,]+)"))
    fallback = settings.get("fallback", "[invalid]")
    results = []
    for text in answers:
        matches = pattern.findall(text)
        match = matches[settings.get("group_select", 0)] if matches else fallback
        if isinstance(match, tuple):
            match = next((group for group in match if group), fallback)
        results.append(match.strip() if matches else match)
    return results


FILTERS: dict[str, Callable[[list[str], dict[str, Any]], list[str]]] = {
    "regex": _regex, "remove_whitespace": lambda answers, settings: [text.strip() for text in answers],
    "majority_vote": lambda answers, settings: [Counter(answers).most_common(1)[0][0]], "take_first": lambda answers, settings: answers[:1],
}  # fmt: skip
FILTER_SETTINGS = {"regex": ("regex_pattern", "group_select", "fallback")}
MATCH_SETTINGS = ("ignore_case", "ignore_punctuation", "ignore_numbers", "regexes_to_ignore")


def _match(pairs: list[tuple[str, str]], start: int, settings: dict[str, Any]) -> list[bool]:
    gone = [string.punctuation] * bool(settings.get("ignore_punctuation")) + [string.digits] * bool(settings.get("ignore_numbers"))
    table = str.maketrans("", "", "".join(gone))

    def plain(text: str) -> str:
        for pattern in settings.get("regexes_to_ignore") or ():
            text = re.sub(pattern, "", text)
        return (text.lower() if settings.get("ignore_case") else text).translate(table)

    return [plain(answer) == plain(expected) for answer, expected in pairs]
