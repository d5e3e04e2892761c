"""Common formats (layouts) of data sets: the columns that each layout needs, and the detection of an input's layout.

All layouts of a kind of table are tried. For prompts without verifiers, benchmarks come first, and the first that fits is used. If the rows
fit several layouts, or several columns fit a required field, an error lists them and how to declare one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from puna.stages.io import benchmarks, turns
from puna.stages.io.benchmarks import Fields
from puna.stages.reading.files import field_at
from puna.storage import PunaError

SINGLE_NAMED = ("instruction", "chosen", "rejected", "label", "edited", "others", "verifier", "split", "level", "margin", "title", "url")
NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question", "query"),
    "input": ("input", "context"),
    "completion": ("completion", "response", "answer", "output"),
    "output": ("output", "response", "answer", "completion"),
    "answers": ("answers", "responses", "completions"),
    "scores": ("scores", "ratings", "ranks"),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "reference": ("reference", "answer", "solution", "completion", "response", "output"),
    "chosen_score": ("chosen_score", "score_chosen", "chosen_rating"),
    "rejected_score": ("rejected_score", "score_rejected", "rejected_rating"),
    "history": ("context", "prompt", "messages"),
    "first": ("response1", "response_1"),
    "second": ("response2", "response_2"),
    "preference": ("overall_preference", "preference_strength"),
    "text": ("text", "content"),
    "task": ("task", "subset"),
    "date": ("date", "timestamp", "fetched_at"),
    "id": (),
    **{name: (name,) for name in SINGLE_NAMED},
}
"""Usual column names of each field, in order of preference. A field without usual names is read only if the user maps it."""


@dataclass(frozen=True)
class Layout:
    """A layout. `needs`: groups of fields; rows have a field of each group. `may`: optional fields; `why`: the rows' content in words."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    may: tuple[str, ...]
    why: str

    @property
    def required_fields(self) -> list[str]:
        return [field for need in self.needs for field in need]


ASIDE = ("system", "tools", "split", "task", "id")
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "preferences": (
        Layout("pairs", (("chosen",), ("rejected",)),
               ("prompt", "instruction", "input", "messages", "edited", "others", "level", "margin", "chosen_score", "rejected_score",
                *ASIDE),
               "a better and a worse answer"),
        Layout("kto", (("messages", "prompt"), ("label",)), ("completion", "input", *ASIDE), "single answers labelled good or bad"),
        Layout("ranked", (("prompt", "messages", "instruction"), ("answers",)), ("input", "scores", "edited", *ASIDE),
               "several answers with scores or ranks"),
        Layout("compared", (("history",), ("first",), ("second",), ("preference",)), ASIDE,
               "two answers and a number, below 0 where the first is better (HelpSteer)"),
    ),
    "instructions": (
        Layout("messages", (("messages",),), ASIDE, "whole conversations"),
        Layout("prompt_completion", (("prompt",), ("completion",)), ASIDE, "a prompt and its completion"),
        Layout("instruction_output", (("instruction",), ("output",)), ("input", *ASIDE), "an instruction, its input and output"),
    ),
    "prompts": (
        Layout("messages", (("messages",),), ("reference", "verifier", *ASIDE), "conversations to be continued"),
        Layout("prompt", (("prompt",),), ("reference", "verifier", *ASIDE), "one question a row"),
        Layout("instruction", (("instruction",),), ("input", "reference", "verifier", *ASIDE), "an instruction, perhaps an input"),
    ),
    "documents": (Layout("text", (("text",),), ("title", "url", "date", "id"), "one text a row"),),
}  # fmt: skip


NULL_IF_EMPTY = ("id", "task", "split", "verifier", "level", "margin", "chosen_score", "rejected_score", "edited", "others")
EMPTY: tuple[Any, ...] = (None, "", [], {}, "[]", "{}")
"""Values without content. An unused column with no other values is neither refused nor reported."""
IGNORE = "--set 'ignored_columns=[\"{}\"]'"
MEDIA = ("image", "images", "image_path", "image_url", "image_1", "video", "videos", "audio", "audios")
OTHERS = dict.fromkeys(MEDIA, "pictures or sounds") | dict.fromkeys(("system", "system_prompt"), "a system message") | {"tools": "tools"}
TEXTS = ("input", "context", "contexts", "passage", "passages", "article", "document", "documents", "paragraph", "paragraphs", "haystack")
PASSAGES = dict.fromkeys((*TEXTS, "history", "starter_code"), "a text that belongs to the question")
FIRST = ("A", "choice_a", "choice_A", "choiceA", "choice1", "option_a", "option_A", "option1", "opa", "answerA", "answer0", "ending0")
LISTS = ("choices", "options", "endings", "mc1_targets", "mc2_targets", "sol1", "distractor1", "Incorrect Answer 1")
OPTIONS = dict.fromkeys((*LISTS, *FIRST), "the answers to choose from")
TESTS = dict.fromkeys(("test", "tests", "test_list", "test_cases", "input_output"), "tests of a program")
CHECKS = TESTS | {"instruction_id_list": "instructions that a checker tests"}
"""Column → its content in known data sets. Without it, a row would be another question or, for `CHECKS`, unchecked."""


@dataclass(frozen=True)
class Plan:
    """A plan for reading an input's rows. `columns`: field → column; `why`: how the layout was detected; `declared`: the user named it, so
    labels may be 1 and 0; `unread`: column → content, for columns that the layout does not read and that must be empty in every row."""

    layout: str
    columns: dict[str, str]
    why: str
    declared: bool
    unread: Mapping[str, str]

    def get(self, row: Fields, field: str) -> Any:
        """Return a field's value in a row; None if the field has no column or the row lacks it."""
        value = field_at(row, self.columns[field]) if field in self.columns else None
        value = None if value == "" and field in NULL_IF_EMPTY else value
        # Columns of integers with missing values are often saved as floats.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def value(self, row: Fields, field: str) -> Any:
        """Return a field's value; text, such as a CSV cell, is parsed as JSON. Raise Refused if the text is not JSON."""
        value = self.get(row, field)
        return turns.parse(value, self.name(field)) if isinstance(value, str) else value

    def text(self, row: Fields, field: str) -> str:
        return turns.text(self.get(row, field), self.name(field))

    def name(self, field: str) -> str:
        """Return the name of a field's column for error messages, or the field's own name if it has no column."""
        return self.columns.get(field, field)


def plan(kind: str, rows: Sequence[Fields], where: str, layout: str, given: Mapping[str, str], verified: bool = False) -> Plan:
    """Return the plan for reading an input whose first rows are `rows`. Raise PunaError if the layout or a column is unclear or missing.

    `layout="auto"` detects the layout; `given` maps fields to columns and overrides the usual names. `verified`: the user gave a verifier
    for rows without one, so `CHECKS` columns are allowed. With "auto", benchmarks come before prompt layouts unless rows have verifiers."""
    usual = {field for one in LAYOUTS[kind] for field in (*one.required_fields, *one.may)}
    of_benchmarks = {field for one in benchmarks.BENCHMARKS.values() for field in (*one.needs, *one.may)} if kind == "prompts" else set()
    fields = sorted(usual | of_benchmarks)
    if wrong := sorted(set(given) - set(fields)):
        raise PunaError(f"columns: {wrong[0]!r} is not a field of {kind}; the fields are {', '.join(fields)}")
    for field, path in given.items():
        if all(field_at(row, path) is None for row in rows):
            there = ", ".join(dict.fromkeys(name for row in rows for name in row))
            raise PunaError(f"{where}: no row has the column {path!r} (columns.{field}); the columns are {there}")
    own = "verifier" in given or any(row.get("verifier") is not None for row in rows)
    recognized = benchmarks.find(rows, given, layout) if kind == "prompts" and not (own and layout == "auto") else None
    if recognized is not None:
        benchmark, columns = recognized
        why = f"benchmark {benchmark.name}: the rows have {' and '.join(columns[field] for field in benchmark.needs)}"
        plan_ = Plan(benchmark.name, columns, why if layout == "auto" else "declared", layout != "auto", {})
        return _checked(kind, plan_, rows, where, verified)
    if layout in benchmarks.BENCHMARKS or (surplus := sorted(set(given) - usual)):
        raise PunaError(_no_benchmark(rows, where, layout, given if layout in benchmarks.BENCHMARKS else surplus))
    fits = [one for one in LAYOUTS[kind] if layout in ("auto", one.name) and _fits(one, rows, given)]
    if len(fits) > 1 and given:  # the user mapped these fields explicitly, so drop layouts that use fewer of them
        uses = [sum(field in given for field in one.required_fields) for one in fits]
        fits = [one for one, count in zip(fits, uses, strict=True) if count == max(uses)]
    if len(fits) != 1:
        raise PunaError(_unclear(kind, rows, where, layout, fits))
    (one,) = fits
    columns = _columns(one, rows, where, given)
    needed = [columns[field] for field in one.required_fields if field in columns]
    why = f"{one.why}: the rows have {' and '.join(needed)}" + (f"; mapped: {', '.join(sorted(given))}" if given else "")
    plan_ = Plan(one.name, columns, why if layout == "auto" else "declared", layout != "auto", {})
    _check_values(plan_, rows, where)
    return _checked(kind, plan_, rows, where, verified)


def _no_benchmark(rows: Sequence[Fields], where: str, layout: str, given: Iterable[str]) -> str:
    there = ", ".join(dict.fromkeys(name for row in rows for name in row))
    if layout not in benchmarks.BENCHMARKS:
        return f"{where}: its columns ({there}) with {', '.join(given)} mapped fit no benchmark; declare one: --set layout=mmlu"
    needs = [f"{field} ({' or '.join(usual)})" for field, usual in benchmarks.BENCHMARKS[layout].needs.items()]
    remedy = f"map them with --columns {needs[0].partition(' ')[0]}=COLUMN"
    return f"{where}: its columns ({there}) are not those of {layout}, which needs {', '.join(needs)}; {remedy}"


def _checked(kind: str, plan: Plan, rows: Sequence[Fields], where: str, verified: bool) -> Plan:
    """Return the plan with its `unread` columns. Raise PunaError if a sampled row has a value in one of them."""
    known = plan.layout in benchmarks.BENCHMARKS
    meanings = {} if kind == "documents" else OTHERS | ({} if plan.layout == "messages" else PASSAGES) | ({} if known else OPTIONS)
    if kind == "prompts" and not (known or verified or "verifier" in plan.columns):
        meanings |= CHECKS
    used = {path.partition(".")[0] for path in plan.columns.values()}
    unread = {column: meaning for column, meaning in meanings.items() if column not in used}
    column = next((column for column in unread if any(row.get(column) not in EMPTY for row in rows)), None)
    if column is None:
        return replace(plan, unread=unread)
    question = "prompt" if kind == "preferences" else "instruction"
    remedies = [
        *[f"join it to the question (--columns {question}=QUESTION,input=COLUMN)"] * (column in PASSAGES or column in OPTIONS),
        *["map it to a benchmark's fields (--set layout=mmlu --columns choices=…)"] * (kind == "prompts" and column in OPTIONS),
        *["give each row a column verifier, or name one for all (--verifier exact)"] * (column in CHECKS),
        f"leave it out ({IGNORE.format(column)})",
    ]
    why = "no known benchmark has these columns" if kind == "prompts" and not known else f"layout {plan.layout} does not read it"
    problem = f"column {column!r} contains {unread[column]}, and {why}. Without it, rows lose meaning"
    raise PunaError(f"{where}: {problem}: {'; or '.join(remedies)}")


def _present(field: str, rows: Sequence[Fields], given: Mapping[str, str]) -> list[str]:
    if field in given:
        return [given[field]]
    return [name for name in NAMES[field] if any(row.get(name) is not None for row in rows) and name not in given.values()]


def _fits(one: Layout, rows: Sequence[Fields], given: Mapping[str, str]) -> bool:
    if not all(any(_present(field, rows, given) for field in need) for need in one.needs):
        return False
    if one.name == "kto":
        return bool(_present("messages", rows, given) or _present("completion", rows, given))
    if one.name == "ranked":
        return bool(_present("scores", rows, given)) or any(_has_scores(field_at(row, _present("answers", rows, given)[0])) for row in rows)
    return True


def _has_scores(answers: Any) -> bool:
    """True if `answers`, a list or a list's JSON text, has an answer with a field of `SCORES`."""
    if isinstance(answers, str):
        try:
            answers = json.loads(answers)
        except ValueError:
            return False
    return isinstance(answers, list) and any(isinstance(a, dict) and any(name in a for name in SCORES) for a in answers)


SCORES = ("score", "rating", "rank", "overall_score")


def _columns(one: Layout, rows: Sequence[Fields], where: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return field → first column that fits. Raise PunaError if several fit a required field, `reference`, or (kto, ranked) the context."""
    columns: dict[str, str] = {}
    for field in dict.fromkeys((*one.required_fields, *one.may)):
        names = [name for name in _present(field, rows, given) if name not in columns.values()]
        if len(names) > 1 and (field in one.required_fields or field == "reference"):
            raise PunaError(f"{where}: {field} may be {' or '.join(names)}; choose one, for example --columns {field}={names[0]}")
        if names:
            columns[field] = names[0]
    context = [columns[field] for field in ("prompt", "messages", "instruction") if field in columns]
    if one.name in ("kto", "ranked") and len(context) > 1:
        raise PunaError(f"{where}: the context may be {' or '.join(context)}; leave one out: {IGNORE.format(context[1])}")
    return columns


def _check_values(found: Plan, rows: Sequence[Fields], where: str) -> None:
    if found.layout == "kto" and not found.declared:
        labels = [found.get(row, "label") for row in rows]
        if not any(isinstance(label, bool) or str(label).strip().lower() in ("true", "false") for label in labels):
            values_text = ", ".join(sorted({str(label)[:20] for label in labels if label is not None})[:5])
            problem = f"{found.name('label')} contains {values_text}, not true or false: it may be a label, a class or a score"
            raise PunaError(f"{where}: {problem}. If 1 means good and 0 bad, declare it: --set layout=kto")
    if found.layout == "pairs" and not {"prompt", "instruction", "messages"} & set(found.columns):
        sides = [found.get(row, "chosen") for row in rows]
        if all(isinstance(side, str) and not turns.is_dialogue(side) and not side.lstrip().startswith(("[", "{")) for side in sides):
            problem = f"{found.name('chosen')} and {found.name('rejected')} are plain text, and no column is the prompt"
            raise PunaError(f"{where}: {problem}: name it, for example --columns prompt=COLUMN")


def _unclear(kind: str, rows: Sequence[Fields], where: str, layout: str, fits: Sequence[Layout]) -> str:
    there = ", ".join(dict.fromkeys(name for row in rows for name in row)) or "none"
    if fits:
        choices = f"{'; '.join(f'{one.name} ({one.why})' for one in fits)}. Declare one, for example --set layout={fits[0].name}"
        return f"{where}: its columns ({there}) fit several layouts of {kind}: {choices}"
    candidates = [one for one in LAYOUTS[kind] if layout in ("auto", one.name)]
    needs = "; ".join(f"{one.name} needs {' and '.join(' or '.join(need) for need in one.needs)}" for one in candidates)
    first = {"preferences": "chosen", "documents": "text"}.get(kind, "prompt")
    hint = f"Map fields to columns, for example --columns {first}=COLUMN"
    return f"{where}: its columns ({there}) fit no layout of {kind}. {needs}. {hint}"
