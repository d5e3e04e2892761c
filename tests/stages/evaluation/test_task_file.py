"""Task files: which are read, which are refused with a clear error, and limits for untrusted programs in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from puna.stages.contract import External
from puna.stages.evaluation.task_file import load_task, read_task, task_files
from puna.stages.evaluation.task_programs import matching, render, run_filter
from puna.storage import PunaError

GOOD = {
    "task": "t", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "a.jsonl"}}, "test_split": "test", "doc_to_text": "q",
    "doc_to_target": "a",
}  # fmt: skip


def text(**keys: Any) -> bytes:
    return yaml.safe_dump(GOOD | keys).encode()


def loaded(external: External, limit: int | None = None, shots: int | None = None) -> Any:
    ((file, spec),) = task_files(external)
    return load_task(external, file, spec, limit, shots)


@pytest.mark.parametrize(("given", "message"), [
    (text(process_docs="f"), "t.yaml: the key 'process_docs' is not supported; use task, dataset_path"),
    (b"task: t\nprocess_docs: !function utils.docs\n", "t.yaml: !function utils.docs names a Python function, which is not run"),
    (text(dataset_path="gsm8k"), "dataset_path: Input should be 'json', 'parquet' or 'csv'"),
    (text(fewshot_config={"sampler": "default"}), "fewshot_config.sampler: Input should be 'first_n'"),
    (text(metric_list=[{"metric": "f1"}]), "metric_list: 'f1' is not supported for generate_until; use one of exact_match"),
    (text(metric_list=[{"metric": "exact_match", "aggregation": "median"}]), "the aggregation 'median' is not supported, only mean"),
    (text(metric_list=[{"metric": "exact_match", "hf_evaluate": True}]), "hf_evaluate: no such field"),
    (text(filter_list=[{"name": "x", "filter": [{"function": "custom"}]}]), "the function 'custom' is not supported"),
    (text(filter_list=[{"name": "x", "filter": [{"function": "take_first", "k": 2}]}]), "take_first: the setting 'k' is not supported"),
    (text(generation_kwargs={"num_beams": 4}), "generation_kwargs.num_beams: no such field"),
    (text(output_type="multiple_choice"), "multiple_choice needs doc_to_choice"),
    (text(output_type="loglikelihood"), "output_type: Input should be 'multiple_choice'"),
    (b"task: [", "t.yaml is not YAML"),
    (b"- 1", "t.yaml is not a task file: it has no keys"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(given: bytes, message: str) -> None:
    with pytest.raises(PunaError) as refused:
        read_task(given, "t.yaml")
    assert message in str(refused.value) and str(refused.value).startswith("t.yaml")


def test_keys_that_change_no_score_and_other_names_of_lengths_are_read() -> None:
    spec = read_task(text(tag="x", should_decontaminate=True, generation_kwargs={"until": "\n", "max_new_tokens": 7}), "t.yaml")
    assert spec.generation_kwargs.until == ("\n",) and spec.generation_kwargs.max_gen_toks == 7
    assert [one.metric for one in spec.metrics] == ["exact_match"] and spec.filters[0].name == "none"


def test_fields_are_columns_or_templates(task: Callable[..., External]) -> None:
    rows = [{"q": "2 + 2?", "options": ["3", "4"], "right": 1}, {"q": "1 + 1?", "options": ["2", "3"], "right": 0, "note": "x"}]
    choice = {"output_type": "multiple_choice", "doc_to_choice": "options"}
    one = loaded(task(rows, doc_to_text="Question: {{q}}\n", doc_to_target="{{right}}", **choice))
    assert [(d.text, d.target, d.choices) for d in one.documents] == [
        ("Question: 2 + 2?\n", 1, ("3", "4")), ("Question: 1 + 1?\n", 0, ("2", "3")),
    ]  # fmt: skip
    assert one.documents[0].row["note"] is None  # every row has every column
    other = loaded(task(rows, doc_to_text="q", doc_to_target="{{options[right]}}", output_type="multiple_choice", doc_to_choice='{{["a", q, "b", "c", "d"]}}'), 1)
    assert [(d.text, d.target, d.choices) for d in other.documents] == [("2 + 2?", 4, ("a", "2 + 2?", "b", "c", "d"))]
    assert one.documents[0].id != one.documents[1].id and one.digest != other.digest


def test_examples_are_fixed_and_never_the_question(task: Callable[..., External]) -> None:
    rows = [{"q": f"q{n}", "a": f"a{n}"} for n in range(4)]
    keys = {"doc_to_text": "q", "doc_to_target": "a", "num_fewshot": 2}
    own = loaded(task(rows, fewshot_split="test", fewshot_config={"sampler": "first_n"}, **keys))
    assert [[shot.text for shot in own.examples(document)] for document in own.documents[:3]] == [["q1", "q2"], ["q0", "q2"], ["q0", "q1"]]
    # Another split that holds the same rows does not give the answer away either.
    same = loaded(task(rows, rows[1:], fewshot_split="train", fewshot_config={"sampler": "first_n"}, **keys))
    assert [[shot.text for shot in same.examples(document)] for document in same.documents[:3]] == [["q1", "q2"], ["q2", "q3"], ["q1", "q3"]]
    twice = loaded(task([rows[0], *rows], fewshot_split="test", fewshot_config={"sampler": "first_n"}, **keys))
    assert [shot.text for shot in twice.examples(twice.documents[0])] == ["q1", "q2"]
    given = loaded(task(rows, fewshot_config={"sampler": "first_n", "samples": [{"q": "x", "a": "y"}] * 2}, **keys))
    assert [shot.target for shot in given.examples(given.documents[0])] == ["y", "y"]
    with pytest.raises(PunaError, match=r"num_fewshot is 2: give fewshot_config samples, or a fewshot_split"):
        loaded(task(rows, **keys))
    with pytest.raises(PunaError, match="num_fewshot is 3, but there are only 2 examples"):
        loaded(task(rows[:3], fewshot_split="test", fewshot_config={"sampler": "first_n"}, **keys), shots=3)


def test_verifiers_are_filled_from_the_row(task: Callable[..., External]) -> None:
    rows = [{"name": "code", "tests": ["assert f() == 1"], "head": "def f():\n", "word": "so"}]
    spec = {"name": "code", "tests": "tests", "prefix": "{{head}}"}
    (text_,) = loaded(task(rows, doc_to_text="head", doc_to_target="word", verifier=spec)).verifiers
    assert yaml.safe_load(text_) == {"name": "code", "tests": ["assert f() == 1"], "prefix": "def f():\n"}


@pytest.mark.parametrize(("template", "message"), [
    ("{{missing}}", "doc_to_text, row 1: 'missing' is undefined"),
    ("{{q.__class__.__mro__}}", "doc_to_text, row 1: access to attribute '__class__' of 'str' object is unsafe"),
    ("{% for n in range(90000) %}{% for m in range(90000) %}{% endfor %}{% endfor %}", "are stopped: it takes more than 5 s of CPU time"),
    ("{{ 'x' * 10**12 }}", "are stopped"),
    ("{% if %}", "doc_to_text, row 1: Expected an expression"),
])  # fmt: skip
def test_a_template_cannot_leave_its_bounds(template: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "range" in template:
        monkeypatch.setattr("puna.stages.evaluation.task_programs.SECONDS", 0.2)
        message = message.replace("5 s", "0.2 s")
    with pytest.raises(PunaError) as stopped:
        render({"doc_to_text": template}, [{"q": "a"}], False, "t.yaml")
    assert str(stopped.value).startswith("t.yaml: ") and message in str(stopped.value)


def test_filters_are_the_harnesss() -> None:
    answers = [["so 12 or 13", "14"], ["none", " x "]]
    pattern = {"function": "regex", "regex_pattern": r"(\d+)|(z)", "group_select": -1}
    assert run_filter(answers, [pattern], "t") == [["13", "14"], ["[invalid]", "[invalid]"]]
    assert run_filter(answers, [pattern | {"fallback": "?"}, {"function": "take_first"}], "t") == [["13"], ["?"]]
    assert run_filter([["a", "b", "b "]], [{"function": "remove_whitespace"}, {"function": "majority_vote"}], "t") == [["b"]]


def test_matching_ignores_what_it_is_told_to() -> None:
    assert matching([("A 1!", "a2"), ("A", "b")], {"ignore_case": True, "ignore_punctuation": True, "ignore_numbers": True}, "t") == [False, False]
    settings = {"ignore_case": True, "ignore_punctuation": True, "ignore_numbers": True, "regexes_to_ignore": (" ",)}
    assert matching([("A 1!", "a2"), ("A", "b")], settings, "t") == [True, False]


def test_a_pattern_cannot_run_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.stages.evaluation.task_programs.SECONDS", 0.2)
    with pytest.raises(PunaError, match="t: its templates or patterns are stopped: it takes more than"):
        run_filter([["a" * 40 + "b"]], [{"function": "regex", "regex_pattern": "(a+)+$"}], "t")


FIVE = {"q": "é 天?", "options": ["red", "blue", "é", "black", "white"], "right": 4, "note": None}
CHOICES = {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "options", "doc_to_target": "right"}
ANSWERS = {"doc_to_text": "q", "doc_to_target": "{{right}}"}


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ({"right": 5}, CHOICES, "doc_to_target, row 2: '5' is none of the 5 options of 'é 天"),
        ({"right": -1}, CHOICES, "doc_to_target, row 2: '-1' is none of the 5 options"),
        ({"right": "B"}, CHOICES, "doc_to_target, row 2: 'B' is none of the 5 options"),
        ({"right": None}, CHOICES, "doc_to_target, row 2: 'None' is none of the 5 options"),
        ({"right": []}, CHOICES, "doc_to_target, row 2: no right one among 5 options"),
        ({"options": []}, CHOICES, "doc_to_target, row 2: no right one among 0 options"),
        ({"options": ["é"], "right": 0}, CHOICES, "doc_to_target, row 2: no right one among 1 options"),
        ({"options": ["a", ""]}, CHOICES, "doc_to_choice, row 2: not a list of texts"),
        ({"options": None}, CHOICES, "doc_to_choice, row 2: not a list of texts: None"),
        ({"q": None}, CHOICES, "doc_to_text, row 2: the template produces a null; it has no q, note"),
        ({}, CHOICES | {"doc_to_choice": "{{options[0]}}"}, "doc_to_choice, row 1: does not produce a list: 'red'"),
        ({}, CHOICES | {"num_fewshot": 1, "fewshot_config": {"samples": [FIVE | {"right": 9}]}}, "doc_to_target, row 1: '9' is none of the 5"),
        ({}, ANSWERS | {"filter_list": [{"name": "x", "filter": [{"function": "regex", "regex_pattern": "("}]}]}, "filter x: missing \\)"),
        ({"right": "x"}, ANSWERS | {"verifier": "numeric"}, "verifier, row 2: prompt .* its reference 'x' contains no number"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused_before_a_model_is_asked(
    task: Callable[..., External], change: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(PunaError, match=f"task.yaml: {message}"):
        loaded(task([FIVE, FIVE | change], **keys))
    assert loaded(task([FIVE], **CHOICES)).documents[0].right == (4,)
