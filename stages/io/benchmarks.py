"""Conversion of known benchmarks' rows to prompts: the columns that identify a benchmark, and its questions, references and verifiers.

Options are shuffled by a hash if a benchmark always lists the correct ones first (BLiMP, TruthfulQA)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from puna.stages.conversations import asking
from puna.stages.draws import identifier
from puna.stages.io import turns
from puna.stages.io.turns import Refused
from puna.stages.reading.files import field_at
from puna.stages.verifiers.extraction import HASHES, boxed_text
from puna.stages.verifiers.lists import LETTERS
from puna.stages.verifiers.numeric import numbers

if TYPE_CHECKING:
    from puna.stages.io.layouts import Plan

Fields = Mapping[str, Any]
Values = dict[str, Any]
Build = Callable[["Plan", Fields], Values]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's format. `needs` (required), `may` (optional): field → usual columns. `build` converts a row. `tells`: returns True if
    the rows' values in these columns look like this benchmark's."""

    name: str
    build: Build
    needs: dict[str, tuple[str, ...]]
    may: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tells: Callable[[Sequence[Fields], dict[str, str]], bool] = lambda rows, columns: True

    def columns(self, rows: Sequence[Fields], given: Mapping[str, str]) -> dict[str, str] | None:
        """Return field → column, or None if the rows do not fit this benchmark. `given`: the user's mapping of fields to columns."""
        fields = self.needs | ASIDE | self.may
        if set(given) - set(fields):
            return None
        columns = dict(given)
        for name, usual in fields.items():
            there = [column for column in usual if any(field_at(row, column) is not None for row in rows)]
            if there and name not in columns:
                columns[name] = there[0]
        return columns if set(self.needs) <= set(columns) and self.tells(rows, columns) else None


ASIDE: dict[str, tuple[str, ...]] = {"id": (), "split": ("split",), "task": ("task",), "system": ("system",)}


def find(rows: Sequence[Fields], given: Mapping[str, str], layout: str) -> tuple[Benchmark, dict[str, str]] | None:
    """Return the first benchmark that fits the rows, and its field → column; None if none fits. `layout`: its name, or "auto" for any."""
    for one in BENCHMARKS.values():
        if layout in ("auto", one.name) and (columns := one.columns(rows, given)) is not None:
            return one, columns
    return None


def _question(question: str, reference: str | None, verifier: str, **settings: Any) -> Values:
    text = json.dumps({"name": verifier, **settings}, sort_keys=True, ensure_ascii=False)
    return {"messages": asking(question), "tools": None, "reference": reference, "verifier": text}


def _optional(plan: Plan, row: Fields, name: str) -> str | None:
    return None if plan.get(row, name) in (None, "") else plan.text(row, name)


def _list(plan: Plan, row: Fields, name: str) -> list[Any]:
    value = plan.value(row, name)
    if not isinstance(value, list) or not value:
        raise Refused(plan.name(name), "wrong_type", "is an empty list" if value == [] else f"contains {turns.kind_of(value)}, not a list")
    return value


def _texts(plan: Plan, row: Fields, name: str) -> list[str]:
    """Return a field's list of texts; whole numbers become text. Raise Refused if the list is empty, or an item is blank or not text."""
    values = [str(value) if type(value) is int else value for value in _list(plan, row, name)]
    return [turns.text(value, f"{plan.name(name)}.{number}") for number, value in enumerate(values)]


def _index(plan: Plan, row: Fields, name: str, options: Sequence[str], labels: Sequence[str] = LETTERS, start: int = 0) -> int:
    """Return the index of the correct option, which the row gives as a label, as the option's text, or as a number counted from `start`
    (negative: not as a number). Raise Refused unless exactly one option fits."""
    value = plan.get(row, name)
    text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    option_labels = list(labels)[: len(options)]
    if text in option_labels:
        return option_labels.index(text)
    numbered = start >= 0 and re.fullmatch(r"\d{1,2}", text) and 0 <= int(text) - start < len(options)
    indices = {int(text) - start} if numbered else set()
    if isinstance(value, str) and text in options and not any(options[at] == text for at in indices):
        indices.add(list(options).index(text))
    if len(indices) == 1:
        return indices.pop()
    if indices:
        raise Refused(plan.name(name), "two_answers", f"{text!r} is the text of one option and the number of another; give a letter")
    problem = f"contains {str(value)[:40]!r}, which is none of the {len(options)} options; test splits often hide the answers"
    raise Refused(plan.name(name), "no_answer", problem)


def _choice(question: str, options: Sequence[str], right: Sequence[int], mixed: bool = False) -> Values:
    """Return a multiple-choice prompt. `right`: indices of correct options; `mixed`: shuffle by hash. Raise Refused unless there are 2 to
    26 options, some of them wrong."""
    if not 2 <= len(options) <= len(LETTERS):
        raise Refused("options", "wrong_number", f"are {len(options)}; a question has 2 to {len(LETTERS)}")
    order = sorted(range(len(options)), key=lambda i: identifier(question, options[i], i)) if mixed else list(range(len(options)))
    texts = [options[i] for i in order]
    places = [place for place, option in enumerate(texts) if option in {options[i] for i in right}]
    if len(places) == len(texts):
        raise Refused("options", "all_right", "are all correct, so there is nothing to choose")
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, texts, strict=False))
    text = f"{question}\n\n{lines}\n\nAnswer with the letter of the right option alone."
    return _question(text, LETTERS[places[0]], "choice", options=texts, right=places)


def _gsm8k(plan: Plan, row: Fields) -> Values:
    answer = plan.text(row, "answer")
    matches = HASHES.findall(answer)
    if not matches or not list(numbers(matches[-1])):
        raise Refused(plan.name("answer"), "no_answer", "has no line with #### and a number")
    return _question(plan.text(row, "question"), answer, "numeric", answer=str(matches[-1]).strip())


def _math(plan: Plan, row: Fields) -> Values:
    solution = plan.text(row, "solution")
    short = plan.get(row, "answer")
    answer = str(short).strip() if short is not None else (boxed_text(solution) or "").strip()
    if not answer:
        raise Refused(plan.name("solution"), "no_answer", "has no \\boxed{} with an answer")
    values = list(numbers(answer.strip("$ ")))
    question = f"{plan.text(row, 'problem')}\n\nPut the final answer into \\boxed{{}}."
    if len(values) == 1 and (values[0].start, values[0].end) == (0, len(answer.strip("$ "))):
        return _question(question, solution, "numeric", answer=answer.strip("$ "))
    return _question(question, solution, "exact", answer=answer, ignore_space=True)


def _ifeval(plan: Plan, row: Fields) -> Values:
    kwargs = [
        {key: value for key, value in one.items() if value is not None} if isinstance(one, dict) else one
        for one in _list(plan, row, "kwargs")
    ]
    instructions = _list(plan, row, "instruction_id_list")
    return _question(plan.text(row, "prompt"), None, "constraints", instruction_id_list=instructions, kwargs=kwargs)


def _humaneval(plan: Plan, row: Fields) -> Values:
    prompt, name = plan.text(row, "prompt"), plan.text(row, "entry_point")
    question = f"Complete this Python function. Answer with the whole function in a fenced block.\n\n```python\n{prompt.rstrip()}\n```"
    tests = [f"{plan.text(row, 'test')}\n\ncheck({name})\n"]
    return _question(question, _optional(plan, row, "solution"), "code", prefix=prompt, tests=tests)


def _mbpp(plan: Plan, row: Fields) -> Values:
    tests = _texts(plan, row, "tests")
    imports = _texts(plan, row, "imports") if plan.get(row, "imports") else []
    setup = "\n".join([*imports, _optional(plan, row, "setup") or ""]).strip()
    further = _texts(plan, row, "further") if plan.get(row, "further") else []
    question = f"{plan.text(row, 'prompt').strip()}\n\nAnswer with Python code that passes these tests:\n\n" + "\n".join(tests)
    prefix = {"prefix": f"{setup}\n"} if setup else {}
    return _question(question, _optional(plan, row, "solution"), "code", tests=[*tests, *further], **prefix)


def _arc(plan: Plan, row: Fields) -> Values:
    choices = plan.value(row, "choices")
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):  # the layout of the authors' own files
        choices = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
    options, labels = (choices.get("text"), choices.get("label")) if isinstance(choices, dict) else (None, None)
    if not isinstance(options, list) or not isinstance(labels, list) or len(options) != len(labels):
        raise Refused(plan.name("choices"), "wrong_type", "does not contain the lists text and label of equal length")
    right = _index(plan, row, "answer", options, [str(label) for label in labels], start=-1)
    return _choice(plan.text(row, "question"), [turns.text(option, plan.name("choices")) for option in options], [right])


def _hellaswag(plan: Plan, row: Fields) -> Values:
    endings = _texts(plan, row, "endings")
    about = _optional(plan, row, "activity")
    context = f"{about}: {plan.text(row, 'context')}" if about else plan.text(row, "context")
    return _choice(f"Which ending continues this text?\n\n{context}", endings, [_index(plan, row, "answer", endings)])


def _mmlu(plan: Plan, row: Fields) -> Values:
    options, question = _texts(plan, row, "choices"), plan.text(row, "question")
    passage = _optional(plan, row, "passage")
    return _choice(f"{passage}\n\n{question}" if passage else question, options, [_index(plan, row, "answer", options)])


def _winogrande(plan: Plan, row: Fields) -> Values:
    options = [plan.text(row, "option1"), plan.text(row, "option2")]
    sentence = plan.text(row, "sentence")
    if "_" not in sentence:
        raise Refused(plan.name("sentence"), "no_blank", "has no blank _ to fill")
    question = f"Which option fills the blank _ in this sentence?\n\n{sentence}"
    return _choice(question, options, [_index(plan, row, "answer", options, start=1)])


def _boolq(plan: Plan, row: Fields) -> Values:
    value = plan.get(row, "answer")
    value = {"yes": True, "no": False}.get(value.strip().lower(), value) if isinstance(value, str) else value
    right = turns.truth(value, plan.name("answer"), numbers=True)
    question = f"{plan.text(row, 'passage')}\n\n{plan.text(row, 'question').rstrip('?')}?\n\nAnswer yes or no."
    words = ["yes", "no"]
    return _question(question, words[not right], "choice", options=words, labels=words, right=[int(not right)])


def _piqa(plan: Plan, row: Fields) -> Values:
    options = [plan.text(row, "first"), plan.text(row, "second")]
    return _choice(f"Which way reaches this goal?\n\n{plan.text(row, 'goal')}", options, [_index(plan, row, "answer", options)])


def _blimp(plan: Plan, row: Fields) -> Values:
    options = [plan.text(row, "good"), plan.text(row, "bad")]
    return _choice("Which of these two sentences is acceptable English?", options, [0], mixed=True)


def _truthfulqa(plan: Plan, row: Fields) -> Values:
    targets = plan.value(row, "targets")
    if not isinstance(targets, dict):
        raise Refused(plan.name("targets"), "wrong_type", f"contains {turns.kind_of(targets)}, not an object")
    choices, labels = (targets.get("choices"), targets.get("labels")) if "choices" in targets else (list(targets), list(targets.values()))
    if not isinstance(choices, list) or not isinstance(labels, list) or len(choices) != len(labels):
        raise Refused(plan.name("targets"), "wrong_type", "does not contain the lists choices and labels of equal length")
    right = [number for number, label in enumerate(labels) if label == 1]
    if not right:
        raise Refused(plan.name("targets"), "no_answer", "labels no choice with 1")
    options = [turns.text(option, plan.name("targets")) for option in choices]
    return _choice(plan.text(row, "question"), options, right, mixed=True)


def _ruler(plan: Plan, row: Fields) -> Values:
    """Return a prompt scored like RULER's string_match_all, by the share of expected outputs that the answer contains, ignoring case."""
    outputs = [str(value) for value in _list(plan, row, "outputs")]
    return _contains(plan.text(row, "input"), outputs)


def _needle(plan: Plan, row: Fields) -> Values:
    expected = plan.text(row, "answer") if plan.get(row, "answer") is not None else plan.text(row, "needle")
    return _contains(f"{plan.text(row, 'context')}\n\n{plan.text(row, 'question')}", [expected])


def _contains(question: str, outputs: Sequence[str]) -> Values:
    checks = [{"name": "regex", "pattern": f"(?i){re.escape(text.strip())}"} for text in outputs]
    reference = ", ".join(text.strip() for text in outputs)
    if len(checks) == 1:
        return _question(question, reference, "regex", pattern=checks[0]["pattern"])
    return _question(question, reference, "weighted", of=checks, weights=[1.0] * len(checks))


def _with_hashes(rows: Sequence[Fields], columns: dict[str, str]) -> bool:
    return _mostly(rows, columns["answer"], lambda value: isinstance(value, str) and HASHES.search(value) is not None)


def _has_lists(rows: Sequence[Fields], columns: dict[str, str]) -> bool:
    """True if at least half of the `outputs` are lists, or JSON text of lists, and no row has a column `instruction`."""
    listed = _mostly(rows, columns["outputs"], lambda value: isinstance(value, list) or str(value).startswith("["))
    return listed and not any("instruction" in row for row in rows)


def _boolean(rows: Sequence[Fields], columns: dict[str, str]) -> bool:
    return _mostly(rows, columns["answer"], lambda value: str(value).strip().lower() in ("true", "false", "yes", "no", "0", "1", "-1"))


def _has_labels(rows: Sequence[Fields], columns: dict[str, str]) -> bool:
    """True if at least half of the rows' `choices` are objects or contain a key `label`, unlike MMLU's plain lists of texts."""
    return _mostly(rows, columns["choices"], lambda value: isinstance(value, dict) or '"label"' in json.dumps(value).replace("\\", ""))


def _mostly(rows: Sequence[Fields], column: str, is_so: Callable[[Any], bool]) -> bool:
    """True if `is_so` is true for at least half of a column's non-null values, or there are none. Other rows are refused later."""
    values = [value for row in rows if (value := field_at(row, column)) is not None]
    return 2 * sum(map(is_so, values)) >= len(values)


def _same(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in names}


QUESTION = _same("question")
PASSAGE = {"passage": ("article", "passage", "context")}
_ALL = (
    Benchmark("ifeval", _ifeval, _same("prompt", "instruction_id_list", "kwargs"), {"id": ("key",)}),
    Benchmark("humaneval", _humaneval, _same("prompt", "entry_point", "test"), {"solution": ("canonical_solution",), "id": ("task_id",)}),
    Benchmark(
        "mbpp", _mbpp, {"prompt": ("text", "prompt"), "tests": ("test_list",)},
        {"solution": ("code",), "id": ("task_id",), "imports": ("test_imports",), "setup": ("test_setup_code",),
         "further": ("challenge_test_list",)},
    ),
    Benchmark("gsm8k", _gsm8k, QUESTION | _same("answer"), tells=_with_hashes),
    Benchmark("math", _math, _same("problem", "solution"), _same("answer") | {"id": ("unique_id",), "task": ("type", "subject")}),
    Benchmark(
        "arc", _arc, {"question": ("question.stem", "question", "question_stem"), "choices": ("question.choices", "choices"),
                      "answer": ("answerKey",)}, {"id": ("id",)}, tells=_has_labels,
    ),
    Benchmark(
        "hellaswag", _hellaswag, {"context": ("ctx",), "endings": ("endings",), "answer": ("label",)}, {"activity": ("activity_label",)}
    ),
    Benchmark("winogrande", _winogrande, _same("sentence", "option1", "option2", "answer")),
    Benchmark("boolq", _boolq, QUESTION | {"passage": ("passage",), "answer": ("answer", "label")}, tells=_boolean),
    Benchmark("piqa", _piqa, {"goal": ("goal",), "first": ("sol1",), "second": ("sol2",), "answer": ("label",)}),
    Benchmark("blimp", _blimp, {"good": ("sentence_good",), "bad": ("sentence_bad",)}, {"task": ("UID",)}),
    Benchmark("truthfulqa_mc", _truthfulqa, QUESTION | {"targets": ("mc1_targets", "mc2_targets")}),
    Benchmark("mmlu_pro", _mmlu, QUESTION | {"choices": ("options",), "answer": ("answer", "answer_index")},
              {"id": ("question_id",), "task": ("category",), **PASSAGE}),
    Benchmark("mmlu", _mmlu, QUESTION | _same("choices", "answer"), {"task": ("subject",), **PASSAGE}),
    Benchmark("needle", _needle, QUESTION | {"context": ("context", "haystack"), "needle": ("needle",)}, _same("answer")),
    Benchmark("ruler", _ruler, _same("input", "outputs"), tells=_has_lists),
)  # fmt: skip
BENCHMARKS = {one.name: one for one in _ALL}  # name → benchmark, in the order in which `find` tries the benchmarks
