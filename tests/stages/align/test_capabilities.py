"""Prompts with rules in the system message, prompts with long texts, mixes of instructions with given shares, and the flow that joins
them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.flows.capabilities import compare_arms
from puna.flows.engine.trace import flow_named, load, trace
from puna.stages.align.checked_prompts import LongPromptsConfig, SystemPromptsConfig, add_rule, long_prompts, system_prompts
from puna.stages.align.instructions import MixInstructionsConfig, mix_instructions, row_counts
from puna.stages.contract import execute
from puna.stages.conversations import asking, content_of, dump, messages_of
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.registry import from_text
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema


def table(store: Store, kind: str, rows: list[dict[str, Any]]) -> Artifact:
    schema = table_schema(kind).schema
    return store.import_table(kind, pa.Table.from_pylist([dict.fromkeys(schema.names) | row for row in rows], schema=schema))


def rule(text: str, pattern: str, heldout: bool = False) -> dict[str, Any]:
    return {"text": text, "verifier": {"name": "regex", "pattern": pattern}, "heldout": heldout}


RULES = [rule("Say a.", "a"), rule("Say b.", "b"), rule("Say c.", "c", heldout=True)]


@pytest.fixture
def questions(tmp_path: Path) -> Artifact:
    rows = [
        {"id": str(i), "task": "t", "split": "heldout" if i % 2 else "train", "messages": asking(f"{i}?"), "reference": "r"} for i in range(60)
    ]
    return table(Store.open(tmp_path), "prompts", rows)


def test_each_prompt_has_a_rule_and_its_verifier(questions: Artifact, tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    places = {
        place: execute(system_prompts, SystemPromptsConfig(rules=RULES, place=place), {"prompts": questions}, store).read().to_pylist()
        for place in ("system", "user", "none")
    }
    assert len({tuple(sorted(row["id"] for row in rows)) for rows in places.values()}) == 1
    seen = Counter((row["split"], row["task"]) for row in places["system"])
    assert seen["train", "trained_rules"] == 30 and seen["heldout", "trained_rules"] + seen["heldout", "new_rules"] == 30
    assert min(seen["heldout", "trained_rules"], seen["heldout", "new_rules"]) > 0
    for rows in zip(*(sorted(rows, key=lambda row: str(row["id"])) for rows in places.values()), strict=True):
        system, user, none = map(messages_of, rows)
        stated = content_of(system[0])
        assert [message["role"] for message in system] == ["system", "user"]
        assert user == [{"role": "user", "content": f"{content_of(none[0])} {stated}"}]
        assert system[1:] == none
        letter, other = stated[4], "b" if stated[4] == "a" else "a"
        verifier = from_text(rows[0]["verifier"])
        assert [verifier.score(Question("", "", "", None), text).value for text in (letter, other)] == [1.0, 0.0]
        assert rows[0]["task"] == ("new_rules" if letter == "c" else "trained_rules") and rows[0]["reference"] is None


def test_a_rule_joins_the_message_that_is_there() -> None:
    turns = [{"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "2?"}]
    assert add_rule(turns, "Say a.", "system") == [{"role": "system", "content": "Be kind.\nSay a."}, *turns[1:]]
    assert add_rule(turns, "Say a.", "user") == [*turns[:3], {"role": "user", "content": "2? Say a."}]
    assert add_rule(turns, "Say a.", "none") == turns


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([RULES[2]], "all rules are held out"),
        ([RULES[0], RULES[0]], "two rules have the same text"),
        ([{"text": "x", "verifier": {"name": "regexp"}}], "there is no verifier 'regexp'"),
        ([{"text": "x", "verifier": {}}], "a verifier is a JSON object"),
    ],
)
def test_wrong_rules_are_refused(rules: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SystemPromptsConfig(rules=rules)


@pytest.fixture
def texts(tmp_path: Path) -> Artifact:
    rows = [{"id": f"{i:02}", "text": "\n".join(f"line {line} of document {i:02}" for line in range(20)), "source": "s", "url": "u", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC)} for i in range(30)]
    return table(Store.open(tmp_path), "documents", [*rows, {"id": "99", "text": "The number of the bridge is 5.", "source": "s", "url": "u", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC)}])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_long_text_holds_the_number_asked_for(texts: Artifact, tmp_path: Path, seed: int) -> None:
    config = LongPromptsConfig(seed=seed, train=40, heldout=20, characters=900, passages=3)
    rows = execute(long_prompts, config, {"documents": texts}, Store.open(tmp_path)).read().to_pylist()
    sides: dict[str, tuple[set[str], set[str]]] = {"train": (set(), set()), "heldout": (set(), set())}
    for row in rows:
        text = content_of(messages_of(row)[0])
        lines = text.split("\n")
        passages = [line for line in lines if line.startswith("The number of the ")]
        key = text.rpartition("number of the ")[2].partition("?")[0]
        assert len(passages) == 3 and f"The number of the {key} is {row['reference']}." in passages
        assert 880 < len("\n".join(line for line in lines[:-2] if line not in passages)) <= 900
        keys, documents = sides[row["split"]]
        keys.update(passage.split()[4] for passage in passages)
        documents.update(line[-2:] for line in lines if " of document " in line and line[-2:].isdigit())
        verifier = from_text(row["verifier"])
        wrong = str(100 + (int(row["reference"]) - 99) % 900)
        graded = {answer: verifier.score(Question("", "", "", None), answer).value for answer in (row["reference"], f"It is {row['reference']}.", wrong, f"{row['reference']} or {wrong}")}
        assert list(graded.values()) == [1.0, 1.0, 0.0, 0.0]
    assert Counter(row["split"] for row in rows) == {"train": 40, "heldout": 20}
    assert not sides["train"][0] & sides["heldout"][0] and not sides["train"][1] & sides["heldout"][1]
    assert len({row["reference"] for row in rows}) > 40


def test_long_prompts_begin_at_lines_all_over_a_long_text(tmp_path: Path) -> None:
    long = "\n".join(f"line {line:03}" for line in range(400))
    rows = [{"id": f"{i:02}", "text": long, "source": "s", "url": "u", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC)} for i in range(8)]
    documents = table(Store.open(tmp_path), "documents", rows)
    config = LongPromptsConfig(train=30, heldout=10, characters=900, passages=1, passage="{key}: {value}")
    begins = []
    for row in execute(long_prompts, config, {"documents": documents}, Store.open(tmp_path)).read().to_pylist():
        lines = [line for line in content_of(messages_of(row)[0]).split("\n") if line.startswith("line ")]
        assert lines == [f"line {number:03}" for number in range(int(lines[0][5:]), int(lines[0][5:]) + len(lines))] and len(lines) == 100
        begins.append(int(lines[0][5:]))
    assert len(set(begins)) > 25 and min(begins) < 100 and max(begins) > 200


def test_braces_in_a_passage_stay_as_they_are(texts: Artifact, tmp_path: Path) -> None:
    config = LongPromptsConfig(train=1, heldout=0, characters=200, passages=1, passage='{"{key}": {value}}', question="Which {number} has {key}?")
    (row,) = execute(long_prompts, config, {"documents": texts}, Store.open(tmp_path)).read().to_pylist()
    text = content_of(messages_of(row)[0])
    assert f'": {row["reference"]}}}' in text and text.partition("Which {number} has ")[2].rstrip("?") in text.partition("Which")[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"passage": "The {key}."}, "passage has no {value}"), ({"question": "What?"}, "question has no {key}"),
        ({"keys": ["a", "b", "c"], "passages": 2}, "2 passages need 4 different keys"), ({"train": 0, "heldout": 0}, "set at least one of them above 0"),
    ],
)  # fmt: skip
def test_wrong_passages_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongPromptsConfig(**values)


def instructions(store: Store, source: str, count: int, split: str = "train") -> Artifact:
    rows = [
        {"id": f"{source}{i}", "prompt_id": f"{source}{i}", "task": "t", "split": split, "messages": dump([{"role": "user", "content": "q"}]), "source": source}
        for i in range(count)
    ]
    return table(store, "instructions", rows)


def test_a_mix_has_the_shares_that_it_was_asked_for(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    sets = [instructions(store, "long", 30), instructions(store, "chat", 90), instructions(store, "code", 10), instructions(store, "later", 5, "heldout")]
    mixed = execute(mix_instructions, MixInstructionsConfig(shares={"long": 0.5}, repeats=1), {"instructions": sets}, store)
    assert Counter(mixed.read()["source"].to_pylist()) == {"long": 30, "chat": 27, "code": 3}
    assert mixed.read("dropped").num_rows == 70
    again = execute(mix_instructions, MixInstructionsConfig(shares={"long": 0.5}, repeats=1), {"instructions": sets[::-1]}, store)
    assert again.data_digest == mixed.data_digest
    # The 100 other rows are half of a mix of 200, to which the 30 long ones contribute at most 2 x 30 / .5.
    twice = execute(mix_instructions, MixInstructionsConfig(shares={"long": 0.5}, repeats=2), {"instructions": sets}, store)
    assert Counter(twice.read()["source"].to_pylist()) == {"long": 60, "chat": 54, "code": 6}
    often = execute(mix_instructions, MixInstructionsConfig(shares={"long": 0.5}), {"instructions": sets}, store).read().to_pylist()
    assert Counter(row["source"] for row in often) == {"long": 100, "chat": 90, "code": 10}
    assert sorted(Counter(row["prompt_id"] for row in often if row["source"] == "long").values()) == [3] * 20 + [4] * 10
    without = execute(mix_instructions, MixInstructionsConfig(shares={"long": 0.0}), {"instructions": sets}, store)
    assert Counter(without.read()["source"].to_pylist()) == {"chat": 90, "code": 10}
    with pytest.raises(PunaError, match=r"no training instruction has the source 'lang'.*long"):
        execute(mix_instructions, MixInstructionsConfig(shares={"lang": 0.5}), {"instructions": sets}, store)
    with pytest.raises(PunaError, match="add up to 0.5, and no other source can fill the rest"):
        execute(mix_instructions, MixInstructionsConfig(shares={"long": 0.5}), {"instructions": sets[:1]}, store)
    with pytest.raises(ValueError, match="more than 1"):
        MixInstructionsConfig(shares={"a": 0.6, "b": 0.6})


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 2000), min_size=2), st.lists(st.integers(0, 40), max_size=2), st.integers(1, 5))
def test_no_larger_mix_has_the_shares(rows: dict[str, int], percents: list[int], repeats: int) -> None:
    shares = {name: percent / 100 for name, percent in zip(sorted(rows)[:-1], percents, strict=False)}
    counts = row_counts(rows, shares, repeats)
    total = sum(counts.values())
    assert all(0 <= counts[name] <= repeats * rows[name] for name in rows)
    rest = sum(count for name, count in rows.items() if name not in shares)
    for name in rows:
        wanted = shares.get(name, (1 - sum(shares.values())) * rows[name] / rest)
        assert abs(counts[name] - wanted * total) <= len(rows)
    # Either some source is used up, or the largest one is used once.
    used = [name for name in rows if counts[name]]
    assert any(counts[name] == repeats * rows[name] for name in used) or all(counts[name] >= rows[name] for name in used)


def test_the_flow_has_a_control_for_each_share() -> None:
    def labels(*changes: str) -> list[str]:
        return [one.label for one in trace(flow_named("capabilities"), load("capabilities", list(changes), flow="capabilities")).steps]

    assert [one for one in labels() if one.startswith("sft")] == ["sft", "sft_without_rules", "sft_without_long"]
    assert [one for one in labels("mix_instructions.shares.long=1", "mix_instructions.shares.rules=0") if one.startswith(("sft", "mix"))] == ["mix_instructions", "sft"]
    sets = {one.removesuffix("_without_long") for one in labels() if one.endswith("_without_long") and one.startswith("evaluate")}
    assert sets == {"evaluate_tasks", "evaluate_rules", "evaluate_by_chance", "evaluate_long"}


def test_arms_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    prompts = table(store, "prompts", [{"id": str(i), "task": "even" if i % 2 == 0 else "odd", "split": "heldout", "messages": asking("q")} for i in range(8)])

    def evaluation(*right: int) -> Artifact:
        rows = [{"id": str(i), "name": "score", "value": float(i in right)} for i in range(8)] + [{"id": "0", "name": "liked", "value": 0.0}]
        scores = pa.Table.from_pylist(rows, schema=table_schema("scores").schema)
        main = pa.Table.from_pylist([{"task": "all", "metric": "score", "value": len(right) / 8, "n": 8}], schema=table_schema("evaluation").schema)
        return store.import_table("evaluation", main, scores=scores)

    # Of the even ones, mix has 4 right and the other arm 2: differences 0, 0, 1, 1, with standard error sqrt(1/3 / 4); t(3) = 3.1824.
    arms = {"before": evaluation(0, 2, 1), "mix": evaluation(0, 2, 4, 6)}
    assert list(compare_arms(arms, prompts)) == [
        "even, 4 prompts: mix 1.000, before 0.500 (gain of mix +0.500, -0.419 to +1.419)",
        "odd, 4 prompts: mix 0.000, before 0.250 (gain of mix -0.250, -1.046 to +0.546)",
    ]
