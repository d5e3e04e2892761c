"""Lone surrogates, formulas of only symbols, and deep nesting affect only their own row."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.stages.reading.rows import Fault, Row, read_rows
from puna.stages.training import turns
from puna.stages.verifiers import tools
from puna.stages.verifiers.base import Item, Question, Score, ScoringConfig, attempt, check_score
from puna.stages.verifiers.registry import from_json
from puna.storage import PunaError
from tests.stages.io.samples import made

QUESTION = Question("q", "t", "x", "ref")
SIGNS = "-" * 1900 + "1"
GYM = {"name": "reasoning_gym", "generator": "countdown", "parameters": {}}


def test_a_detail_with_half_a_character_can_be_written() -> None:
    assert check_score(Score(0.0, "no \ud800 key"), "mine").detail == "no ? key"
    schema = {"name": "json_schema", "json_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    score = attempt(Item(from_json(schema), QUESTION, '{"\\ud800": 1}'))
    assert score.value == 0.0 and pa.array([score.detail]).to_pylist() == [score.detail]


def called(name: str, **arguments: str) -> str:
    call = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    (message,) = tools.results(call, tuple(tools.TOOLS), ScoringConfig())
    return str(message["content"])


def test_the_calculator_refuses_a_formula_of_signs() -> None:
    assert called("calculator", expression=SIGNS) == "Error: is nested too deeply"
    assert called("calculator", expression="--1") == "1"


def test_a_tool_s_result_can_be_written() -> None:
    for name, argument in (("python", "code"), ("calculator", "expression"), ("\ud800", "code"), ("python", "\ud800")):
        text = called(name, **{argument: "raise ValueError('\\ud800 ' + chr(0xd800))" if argument == "code" else "\ud800"})
        assert text and pa.array([text]).to_pylist() == [text], name


def test_a_reply_of_an_environment_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "environment_reply", lambda job: {"reply": "so \ud800"})
    job = turns.Job(QUESTION, [{"role": "assistant", "content": "3"}], from_json({"name": "guess", "number": 7}), ())
    assert job.reply(ScoringConfig()) == [{"role": "user", "content": "so ?"}]


def prompt(text: Any, verifier: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": json.dumps([{"role": "user", "content": text}]), "verifier": json.dumps(verifier), **columns}


EXACT = {"name": "exact", "answer": "2"}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (prompt("hi \ud800 there", EXACT), "invalid_utf8"), "verifier": (prompt("2 + 1?", {"name": "exact", "answer": "3 \ud800"}), "invalid_utf8"),
    "tools": (prompt("3 + 1?", EXACT, tools=json.dumps([{"type": "function", "function": {"name": "\ud800"}}])), "invalid_utf8"),
    "signs": (prompt("deep", GYM | {"entry": {"question": "q", "answer": SIGNS, "metadata": {}}}), "no_verifier"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_hides_what_is_no_text_is_dropped_by_name(tmp_path: Path, name: str) -> None:
    row, rule = ROWS[name]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (prompt("1 + 1?", EXACT), row, prompt("1 + 2?", EXACT))))
    found = made(tmp_path, "prompts", file, bad_rows="drop")
    assert found.rows() == 2
    (dropped,) = found.read("dropped").to_pylist()
    assert dropped["rule"] == rule and "rows.jsonl, row 2" in dropped["detail"]
    with pytest.raises(PunaError, match=r"rows\.jsonl, row 2.*: .*\. Set bad_rows=drop to drop such rows"):
        made(tmp_path, "prompts", file, bad_rows="refuse")


@pytest.mark.parametrize("nested", ["[" * 2000 + "]" * 2000, '{"a":' * 900 + "1" + "}" * 900, "[" * 50_000 + "]" * 50_000])
def test_a_record_that_is_nested_deep_is_one_fault(nested: str) -> None:
    data = f'{{"text": "one", "a": {nested}}}\n{{"text": "two"}}\n'.encode()
    first, second = read_rows(io.BytesIO(data), "x.jsonl", "json", 1 << 20)
    assert isinstance(first, Fault) and (first.number, first.rule) == (1, "invalid_json")
    assert second == Row(2, {"text": "two"})
