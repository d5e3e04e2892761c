"""A judge's grades of instructions, compared with transformers, and in the stage that filters by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.align.data_quality import UNUSED_JUDGE, DataQualityConfig, data_quality
from puna.stages.contract import execute
from puna.stages.conversations import dump
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]
CODE = "Here:\n```python\nprint(1)\n```"


def conversation(name: str, *turns: str, score: float | None = 0.0) -> dict[str, Any]:
    messages = [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]
    about = {"id": name, "prompt_id": name, "task": "t", "split": "train", "tools": None, "source": "s", "score": score}
    return about | {"messages": dump(messages)}


def instructions(store: Store, rows: list[dict[str, Any]]) -> Artifact:
    return store.import_table("instructions", pa.Table.from_pylist(rows, schema=table_schema("instructions").schema))


def asked(request: str, answer: str, code: bool, most: int) -> dict[str, tuple[str, int]]:
    """Return the three questions about an instruction and their highest grades, written out."""
    lines, top = ("- no bug\n- as meant", 2) if code else ("- right\n- follows\n- tone", 3)
    points = (
        f"Grade the answer to a request with a number from 0 to {top} by this rubric.\n\nRubric:\nBegin with 0 and add one point for each "
        f"line that is true of the answer:\n{lines}\n\nThe request:\n<<<\n{request}\n>>>\n\nThe answer to grade:\n<<<\n{answer}\n>>>\n\n"
        f"Reply with the grade alone, one digit from 0 to {top}."
    )
    difficulty = (
        "How difficult is it to answer the request below well?\n0: easy, anybody could.\n1: it takes care, knowledge or several steps.\n"
        f"2: hard, an expert would have to think.\n\nThe request:\n<<<\n{request}\n>>>\n\nReply with the level alone, one digit from 0 to 2."
    )
    intentions = (
        "How many different things does the request below ask for? Count each task, each condition that the answer must meet and each "
        f"form that it must have.\n\nThe request:\n<<<\n{request}\n>>>\n\nReply with the number alone, one digit from 0 to {most}; {most} "
        "also stands for more."
    )
    return {"points": (points, top), "difficulty": (difficulty, 2), "intentions": (intentions, most)}


def test_grades_are_those_that_transformers_gives(tmp_path: Path, tiny_model: Tiny) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    store = Store.open(tmp_path)
    rows = [
        conversation("plain", "say {1}", "1"), conversation("code", "write code", CODE),
        conversation("turns", "say 2", "2", "and 3", "3", score=None),
    ]  # fmt: skip
    texts = {
        "plain": ("say {1}", "assistant: 1"), "code": ("write code", f"assistant: {CODE}"),
        "turns": ("user: say 2\n\nassistant: 2\n\nuser: and 3", "assistant: 3"),
    }  # fmt: skip
    judge = {"points": ["right", "follows", "tone"], "code_points": ["no bug", "as meant"], "max_intentions": 4, "below_full": 1.7}
    config = DataQualityConfig(judge=judge, semantic={"max_similarity": 1.0}, reward_quantile=0.5)
    model = tiny_model(store, 1)
    made = execute(data_quality, config, {"instructions": instructions(store, rows), "model": model}, store)
    network = AutoModelForCausalLM.from_pretrained(model.path(), dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(model.path())
    wanted, said, full = {}, [], set()
    for name, (request, answer) in texts.items():
        for kind, (question, top) in asked(request, answer, name == "code", 4).items():
            ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=False)
            with torch.no_grad():
                logits = network(ids).logits[0, -1]
            digits = [tokenizer(str(digit), add_special_tokens=False).input_ids[0] for digit in range(top + 1)]
            wanted[name, kind] = float(logits[digits].softmax(-1) @ torch.arange(top + 1, dtype=torch.float64))
            said.append(float(logits.softmax(-1)[digits].sum()))
            if kind == "points" and wanted[name, kind] >= top - 1.7:
                full.add(name)
    found = {(r["id"], r["name"]): r["value"] for r in made.read("scores").to_pylist()}
    assert found == pytest.approx(wanted, abs=2e-4) and len({round(value, 3) for value in found.values()}) == 9
    metrics = made.manifest.metrics
    assert metrics["judge_answers"] == pytest.approx(sum(said) / 9, abs=2e-4) and metrics["unjudged"] == 0
    # Both rewards are 0, so both are in the top half; the demonstration without a reward needs the judge.
    assert set(made.read()["id"].to_pylist()) == {"plain", "code"} | full
    assert (metrics["reward_and_judge"], metrics["reward_only"]) == (len(full - {"turns"}), 2 - len(full - {"turns"}))
    assert full == {"code"}
    hardness = {name: (wanted[name, "difficulty"] / 2 + wanted[name, "intentions"] / 4) / 2 for name in texts}
    assert metrics["given_medium"] == sum(1 / 3 <= value < 2 / 3 for value in hardness.values())
    assert metrics["given_easy"] == sum(value < 1 / 3 for value in hardness.values())


def test_the_judge_is_the_one_that_was_given(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"instructions": instructions(store, [conversation(str(i), f"say {i}", str(i)) for i in range(4)]), "model": tiny_model(store)}
    config = DataQualityConfig(judge={"difficulty": False}, reward_quantile=0)
    own, same, other = (
        execute(data_quality, config, {**given, **judge}, store)
        for judge in ({}, {"judge": given["model"]}, {"judge": tiny_model(store, 1)})
    )
    points = [{row["id"]: row["value"] for row in made.read("scores").to_pylist()} for made in (own, same, other)]
    assert points[0] == points[1] and points[0] != points[2] and len(points[2]) == 4


def test_what_the_judge_cannot_read_is_left_to_the_reward(tmp_path: Path, tiny_model: Tiny) -> None:
    store, long = Store.open(tmp_path), "1 + 2 - 3 " * 300
    rows = [conversation("good", long, "1", score=1.0), conversation("bad", long, "2", score=0.0), conversation("demo", long, "3", score=None)]
    model = tiny_model(store)
    assert len(Tokenizer.load(model.path()).encode(long)) > 2048
    config = DataQualityConfig(judge={}, micro_batch_tokens=1 << 14, reward_quantile=0.75, semantic={"clusters": 1, "max_similarity": 1.0})
    made = execute(data_quality, config, {"instructions": instructions(store, rows), "model": model}, store)
    assert set(made.read()["id"].to_pylist()) == {"good", "demo"} and made.manifest.metrics["unjudged"] == 3
    assert made.rows("scores") == 0 and "judge_answers" not in made.manifest.metrics


def test_a_judge_that_nobody_asks_is_refused(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"instructions": instructions(store, [conversation("a", "say 1", "1")]), "model": tiny_model(store)}
    with pytest.raises(PunaError, match=UNUSED_JUDGE.split("{")[0]):
        execute(data_quality, DataQualityConfig(), {**given, "judge": given["model"]}, store)
