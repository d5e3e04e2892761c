"""Decontamination: by hand, and against plain Python."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.stages.contract import execute
from puna.stages.curate.decontaminate import DecontaminateConfig, build_index, decontaminate, match
from puna.storage import Store

QUESTION = "A train leaves the old station at nine and meets another one at noon, where do they meet?"


def row(identity, prompt, reference="x", task="trains", split="heldout"):
    return {"id": identity, "task": task, "split": split, "prompt": prompt, "reference": reference, "entry": "{}"}


def test_the_stage_names_prompt_and_ngram(tmp_path, make_documents):
    store = Store.open(tmp_path)
    clean = "Clean text about llamas in the high grassland of the Andes and of their wool. " * 3
    near = "A train leaves the old station at ten and meets nobody at all, today or on any day."
    docs = make_documents(
        store, [("clean", "web", clean), ("dirty", "web", f"A blog post. {QUESTION.upper()} In the town."), ("near", "web", near)]
    )
    prompts = store.import_table(
        "prompts", pa.Table.from_pylist([row("p1", QUESTION, "midway"), row("p2", clean, split="train"), row("p3", "1 + 1", "2", "sums")])
    )
    made = execute(decontaminate, DecontaminateConfig(), {"documents": docs, "prompts": [prompts]}, store)
    assert made.read()["id"].to_pylist() == ["clean", "near"]
    # 18 words and the answer's make 7 n-grams of 13; the last holds the answer, which is not in the document.
    assert made.read("dropped").to_pylist() == [{
        "id": "dirty", "rule": "decontaminate.ngram", "value": 6 / 7, "threshold": 0.0,
        "detail": "trains prompt p1: a train leaves the old station at nine and meets another one at",
    }]  # fmt: skip
    metrics = made.manifest.metrics
    assert {k: metrics[k] for k in ("prompts_trains", "contaminated_trains", "unmatchable_trains")} == {
        "prompts_trains": 1,
        "contaminated_trains": 1,
        "unmatchable_trains": 0,
    }
    assert {k: metrics[k] for k in ("prompts_sums", "contaminated_sums", "unmatchable_sums")} == {
        "prompts_sums": 1,
        "contaminated_sums": 0,
        "unmatchable_sums": 1,
    }


def test_a_tolerated_overlap_keeps_the_document(tmp_path, make_documents):
    store = Store.open(tmp_path)
    docs = make_documents(store, [("dirty", "web", QUESTION)])
    prompts = store.import_table("prompts", pa.Table.from_pylist([row("p1", QUESTION, "midway")]))
    made = execute(decontaminate, DecontaminateConfig(max_overlap=0.9), {"documents": docs, "prompts": [prompts]}, store)
    assert made.rows() == 1
    assert made.read("dropped").num_rows == 0


def test_short_questions_count_as_a_whole():
    index, unmatchable = build_index([row("p", "Which llama is the fastest of all?", "Pepe")], DecontaminateConfig())
    assert not unmatchable["trains"]
    assert match("they ask: which LLAMA is the fastest, of all!", index).overlap == 1
    assert match("which llama is the slowest of all", index) is None
    index, unmatchable = build_index([row("p", "What is 3 + 4?", "7")], DecontaminateConfig())
    assert unmatchable["trains"] == 1
    assert match("what is 3 + 4", index) is None


def test_numbers_count():
    index, _ = build_index([row("p", "What is the sum of 17 and 25, please?", "42")], DecontaminateConfig())
    assert match("what is the sum of 17 and 25 please", index) is not None
    assert match("what is the sum of 18 and 25 please", index) is None


WORDS = st.lists(st.sampled_from(["ab", "cd", "ef", "gh"]), max_size=30)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(["ab", "cd", "ef", "gh"]), min_size=4, max_size=9), min_size=1, max_size=4), WORDS)
def test_against_plain_python(prompts, text):
    n = 4
    index, _ = build_index([row(str(i), " ".join(p), "") for i, p in enumerate(prompts)], DecontaminateConfig(n=n))
    found = match(" ".join(text), index)
    inside = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
    shares = []
    for prompt in prompts:
        grams = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
        shares.append(len(grams & inside) / len(grams))
    if not any(shares):
        assert found is None
        return
    assert found.overlap == max(shares)
    assert found.prompt == shares.index(max(shares))
    assert found.seen == {i for i, share in enumerate(shares) if share}
    assert tuple(found.text.split()) in inside
