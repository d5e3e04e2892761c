"""Known benchmarks: detected by their columns in every format, judged by their own checker, and no column lost silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from puna.stages.conversations import messages_of
from puna.stages.io.benchmarks import BENCHMARKS as KNOWN
from puna.stages.io.imports import ImportPromptsConfig
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.combinations import Combination
from puna.stages.verifiers.registry import from_text
from puna.storage import PunaError
from tests.stages.io.benchmark_rows import BENCHMARKS, FOUR
from tests.stages.io.samples import made, written


def score(row: dict[str, Any], answer: str) -> float | None:
    verifier = from_text(row["verifier"])
    question = Question(row["id"], row["task"], "", row["reference"])
    if isinstance(verifier, Combination):
        return verifier.combine([one.score(question, answer) for one in verifier.parts()]).value
    return verifier.score(question, answer).value


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_recognized_and_judged_by_its_checker(tmp_path: Path, name: str) -> None:
    layout, row, verifier, right, wrong, left = BENCHMARKS[name]
    rows = []
    for format in ("jsonl", "parquet", "csv"):
        artifact = made(tmp_path, "prompts", written(tmp_path / format, [row], format))
        metrics = artifact.manifest.metrics
        assert metrics["layout_data"] == layout and metrics["prompts_without_verifier"] == 0
        assert set(str(metrics.get("columns_not_taken_data", "")).split(", ")) - {""} == left, format
        rows += artifact.read().to_pylist()
    assert rows[0] == rows[1] == rows[2]
    assert json.loads(rows[0]["verifier"])["name"] == verifier
    assert [score(rows[0], answer) for answer in right] == [1.0] * len(right)
    assert [score(rows[0], answer) for answer in wrong] == [0.0] * len(wrong)


def test_options_stand_in_the_question_and_in_the_verifier(tmp_path: Path) -> None:
    (row,) = made(tmp_path, "prompts", written(tmp_path / "in", [BENCHMARKS["MMLU"][1]], "jsonl")).read().to_pylist()
    assert messages_of(row)[0]["content"] == (
        "Sky?\n\nA. red\nB. blue\nC. green\nD. black\n\nAnswer with the letter of the right option alone."
    )
    assert json.loads(row["verifier"]) == {"name": "choice", "options": ["red", "blue", "green", "black"], "right": [1]}
    assert (row["task"], row["reference"]) == ("physics", "B")


def test_a_right_option_that_always_comes_first_is_moved(tmp_path: Path) -> None:
    rows = [{"sentence_good": f"Cat {n} sleeps.", "sentence_bad": f"Cat {n} sleep."} for n in range(40)]
    found = made(tmp_path, "prompts", written(tmp_path / "in", rows, "jsonl")).read().to_pylist()
    assert 8 < sum(row["reference"] == "A" for row in found) < 32  # 20 on average, sd 3.2
    assert all(json.loads(row["verifier"])["options"]["AB".index(row["reference"])].endswith("sleeps.") for row in found)


def test_options_may_lie_in_columns_of_other_names(tmp_path: Path) -> None:
    row = {"q": "Sky?", "picks": ["red", "blue"], "gold": "blue"}
    columns = {"question": "q", "choices": "picks", "answer": "gold"}
    artifact = made(tmp_path, "prompts", written(tmp_path / "in", [row], "jsonl"), columns=columns, layout="mmlu")
    assert artifact.read()["reference"].to_pylist() == ["B"] and "columns_not_taken_data" not in artifact.manifest.metrics
    with pytest.raises(PunaError, match=r"\(q, picks, gold\) are not those of mmlu, which needs question \(question\), choices"):
        made(tmp_path, "prompts", written(tmp_path / "in", [row], "jsonl"), layout="mmlu")


@pytest.mark.parametrize(
    ("name", "change", "field", "reason"),
    [
        ("HellaSwag", {"label": ""}, "label", "none of the 4 options; test splits often hide the answers"),
        ("PIQA", {"label": -1}, "label", "none of the 2 options"),
        ("ARC", {"answerKey": "5"}, "answerKey", "none of the 4 options"),
        (
            "IFEval",
            {"instruction_id_list": ["punctuation:no_coma", "punctuation:no_comma"]},
            "verifier",
            "did you mean punctuation:no_comma",
        ),
        ("MMLU", {"choices": ["red"], "answer": 0}, "options", "are 1; a question has 2 to 26"),
        ("MMLU", {"choices": []}, "choices", "is an empty list"),
        ("MMLU", {"answer": 4}, "answer", "none of the 4 options"),
        ("MMLU", {"choices": ["2", "3", "4"], "answer": "2"}, "answer", "is the text of one option and the number of another"),
        ("ARC", {"choices": {"text": FOUR, "label": ["A", "B", "C", "D"]}}, "answerKey", "contains '2', which is none of the 4 options"),
        ("BLiMP", {"sentence_bad": "Cats sleep."}, "options", "are all correct, so there is nothing to choose"),
        ("WinoGrande", {"sentence": "Ann helped."}, "sentence", "has no blank _ to fill"),
        ("HellaSwag", {"activity_label": {"a": 1}}, "activity_label", "contains an object, not text"),
        ("HumanEval", {"canonical_solution": ["a"], "task_id": "b"}, "canonical_solution", "contains a list, not text"),
        ("MBPP", {"test_setup_code": 7, "task_id": 4}, "test_setup_code", "contains a number, not text"),
        ("GSM8K", {"answer": "Ω"}, "answer", "has no line with #### and a number"),
        ("BoolQ", {"answer": "perhaps"}, "answer", "not true or false"),
    ],
)
def test_a_row_without_an_answer_is_set_aside_with_the_reason(
    tmp_path: Path, name: str, change: dict[str, Any], field: str, reason: str
) -> None:
    row = BENCHMARKS[name][1]
    bad = row | change | ({"key": 8} if name == "IFEval" else {})
    bad |= {"id": "A2"} if name == "ARC" else {}
    further = [row | {"question": "another"}] if name in ("GSM8K", "BoolQ") else []  # the majority of rows identifies these
    artifact = made(tmp_path, "prompts", written(tmp_path / "in", [row, *further, bad], "jsonl"))
    (dropped,) = artifact.read("dropped").to_pylist()
    assert f"row {2 + len(further)}, field {field}:" in dropped["detail"] and reason in dropped["detail"]


def test_one_verifier_for_rows_that_have_none(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": None}]
    file = written(tmp_path / "in", rows, "jsonl")
    assert made(tmp_path, "prompts", file).manifest.metrics["prompts_without_verifier"] == 2
    artifact = made(tmp_path, "prompts", file, verifier="numeric")
    (row,), (dropped,) = artifact.read().to_pylist(), artifact.read("dropped").to_pylist()
    assert row["verifier"] == '{"name": "numeric"}' and score(row, "So 2.") == 1.0 and score(row, "3") == 0.0
    assert "needs `answer`, since the prompt has no reference" in dropped["detail"]
    assert made(tmp_path, "prompts", file, verifier='{"name": "numeric", "answer": 4}').manifest.metrics["prompts_without_verifier"] == 0
    with pytest.raises(PunaError, match="there is no verifier 'numerik'; did you mean numeric"):
        made(tmp_path, "prompts", file, verifier="numerik")
    own = [{"question": "1 + 1?", "answer": "2", "verifier": {"name": "exact"}}]
    kept = made(tmp_path, "prompts", written(tmp_path / "own", own, "jsonl"), verifier="numeric").read()["verifier"].to_pylist()
    assert kept == ['{"name": "exact"}']


def test_tests_of_an_unknown_layout_are_refused_with_the_remedy(tmp_path: Path) -> None:
    file = written(tmp_path / "in", [{"question": "Add.", "answer": "2", "test_cases": ["x"]}], "jsonl")
    with pytest.raises(PunaError, match="column 'test_cases' contains tests of a program, and no known benchmark .*--verifier exact"):
        made(tmp_path, "prompts", file)
    assert made(tmp_path, "prompts", file, verifier="exact").manifest.metrics["columns_not_taken_data"] == "test_cases"


@pytest.mark.parametrize(
    ("kind", "row"),
    [("instructions", {"prompt": "a", "completion": "b"}), ("documents", {"text": "A text"}), ("prompts", {"prompt": "a"}),
     ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c"})],
)  # fmt: skip
def test_every_import_names_the_columns_that_no_field_takes(tmp_path: Path, kind: str, row: dict[str, Any]) -> None:
    rows = [row, row | {"prompt" if "prompt" in row else "text": "z", "mood": "sad", "blank": "", "zero": 0, "a": {"b": 1}}]
    artifact = made(tmp_path, kind, written(tmp_path / "in", rows, "jsonl"))
    assert artifact.manifest.metrics["columns_not_taken_data"] == "a, mood, zero"


def test_every_benchmark_can_be_declared() -> None:
    for name in KNOWN:
        assert ImportPromptsConfig(layout=name).layout == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "layout", "reference", "options"),
    [
        ({"id": "M", "question": {"stem": "Sky?", "choices": [{"text": t, "label": n} for t, n in zip(FOUR, "ABCD", strict=True)]}, "answerKey": "B"},
         "arc", "B", FOUR),
        ({"question": "Sky?", "choices": {"label": list("ABCDE"), "text": [*FOUR, "é"]}, "answerKey": "E"}, "arc", "E", [*FOUR, "é"]),
        ({"question": "1 + 2?", "choices": [3, 4, 5], "answer": 0}, "mmlu", "A", ["3", "4", "5"]),
        ({"question": "1 + 3?", "choices": ["3", "4", "5"], "answer": "4"}, "mmlu", "B", ["3", "4", "5"]),
        ({"question": "天は？", "choices": ["赤", "青"], "answer": "赤"}, "mmlu", "A", ["赤", "青"]),
        ({"article": "It rains.", "question": "Sky?", "options": FOUR, "answer": "C"}, "mmlu_pro", "C", FOUR),
        ({"passage": "Grass.", "question": "is it green", "answer": "yes"}, "boolq", "yes", ["yes", "no"]),
    ],
)  # fmt: skip
def test_other_forms_of_known_benchmarks(tmp_path: Path, row: dict[str, Any], layout: str, reference: str, options: list[str]) -> None:
    artifact = made(tmp_path, "prompts", written(tmp_path / "in", [row], "jsonl"))
    (found,) = artifact.read().to_pylist()
    verifier = json.loads(found["verifier"])
    assert (artifact.manifest.metrics["layout_data"], found["reference"], verifier["options"]) == (layout, reference, options)
    assert "columns_not_taken_data" not in artifact.manifest.metrics
    assert ("article" not in row) or messages_of(found)[0]["content"].startswith("It rains.\n\nSky?")


def test_options_that_read_alike_are_right_together(tmp_path: Path) -> None:
    row = {"question": "Sky?", "choices": ["blue", "red", "blue"], "answer": 2}
    (found,) = made(tmp_path, "prompts", written(tmp_path / "in", [row], "jsonl")).read().to_pylist()
    assert json.loads(found["verifier"])["right"] == [0, 2] and score(found, "C") == score(found, "A") == 1.0


@pytest.mark.parametrize("column", ["A", "distractor1", "article", "context"])
def test_a_question_does_not_lose_its_options_or_its_text(tmp_path: Path, column: str) -> None:
    file = written(tmp_path / "in", [{"question": "Sky?", "answer": "B", column: "blue"}], "jsonl")
    with pytest.raises(PunaError, match=f"column '{column}' contains .*--columns instruction=QUESTION,input=COLUMN"):
        made(tmp_path, "prompts", file)
    made(tmp_path, "prompts", file, columns={"instruction": "question", "input": column})


def test_the_context_of_dolly_is_its_input(tmp_path: Path) -> None:
    row = {"instruction": "Sum up.", "context": "It rains.", "response": "Rain.", "category": "summarization"}
    for kind in ("prompts", "instructions"):
        (found,) = made(tmp_path / kind, kind, written(tmp_path / "in", [row], "jsonl")).read().to_pylist()
        assert messages_of(found)[0]["content"] == "Sum up.\n\nIt rains."


def test_a_whole_file_can_be_held_out(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]
    artifact = made(tmp_path, "prompts", written(tmp_path / "in", rows, "jsonl"), verifier="numeric", heldout_fraction=1.0)
    assert artifact.read()["split"].to_pylist() == ["heldout"] * 20
