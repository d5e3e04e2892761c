"""Decontamination by hand, and compared with plain Python."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.text.fuzzy_match import build_fuzzy, fuzzy_match
from puna.kernels.text.grams import may_hold, word_hashes
from puna.stages.contract import execute
from puna.stages.conversations import asking
from puna.stages.curate.decontaminate import DecontaminateConfig, build_index, decontaminate, match
from puna.storage import PunaError, Store

QUESTION = "A train leaves the old station at nine and meets another one at noon, where do they meet?"


def row(identity, prompt, reference="x", task="trains", split="heldout"):
    return {"id": identity, "task": task, "split": split, "messages": asking(prompt), "tools": None, "reference": reference, "verifier": None}


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
    # 18 words and the answer's give 7 n-grams of 13; the last contains the answer, which is not in the document.
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


def test_a_tolerated_overlap_contaminates_no_prompt(tmp_path, make_documents):
    """A document that contains one prompt completely, and the beginning of another, is dropped only for the first."""
    store, other = Store.open(tmp_path), " ".join([*QUESTION.split()[:14], *(f"word{i}" for i in range(40))])
    docs = make_documents(store, [("dirty", "web", QUESTION)])
    prompts = store.import_table("prompts", pa.Table.from_pylist([row("p1", QUESTION, "midway"), row("p2", other, "no")]))
    for bound, contaminated in ((0.0, 2), (0.5, 1)):
        made = execute(decontaminate, DecontaminateConfig(max_overlap=bound), {"documents": docs, "prompts": [prompts]}, store)
        assert made.rows() == 0 and made.manifest.metrics["contaminated_trains"] == contaminated


def test_short_questions_count_as_a_whole():
    index, unmatchable = build_index([row("p", "Which llama is the fastest of all?", "Pepe")], DecontaminateConfig())
    assert not unmatchable["trains"]
    assert match(word_hashes("they ask: which LLAMA is the fastest, of all!"), index).overlap == 1
    assert match(word_hashes("which llama is the slowest of all"), index) is None
    index, unmatchable = build_index([row("p", "What is 3 + 4?", "7")], DecontaminateConfig())
    assert unmatchable["trains"] == 1
    assert match(word_hashes("what is 3 + 4"), index) is None


def test_numbers_count():
    index, _ = build_index([row("p", "What is the sum of 17 and 25, please?", "42")], DecontaminateConfig())
    assert match(word_hashes("what is the sum of 17 and 25 please"), index) is not None
    assert match(word_hashes("what is the sum of 18 and 25 please"), index) is None


LONG = (
    "Ravi has seven jars with nineteen marbles each and gives four marbles from every jar to his sister Mira, who puts them "
    "into three bags of equal size; how many marbles are then in one of her bags, and how many are left with Ravi?"
)


def test_a_prompt_with_changes_is_found(tmp_path, make_documents):
    store = Store.open(tmp_path)
    changed = LONG.replace("Mira", "Anna").replace("marbles each", "stones each")
    other = "Ravi has seven jars with nineteen marbles each. " + "The weather was fine and everybody went to the lake to swim. " * 3
    scattered = " ".join(f"{word} {'and' if n % 3 == 0 else ''}" for n, word in enumerate(LONG.split()))
    docs = make_documents(store, [("changed", "web", f"Hello. {changed} Bye."), ("other", "web", other), ("scattered", "web", scattered)])
    prompts = store.import_table("prompts", pa.Table.from_pylist([row("p1", LONG, "9"), row("p2", QUESTION)]))
    config = DecontaminateConfig(n=40, fuzzy_overlap=0.6)
    made = execute(decontaminate, config, {"documents": docs, "prompts": [prompts]}, store)
    assert made.read()["id"].to_pylist() == ["other", "scattered"]
    (gone,) = made.read("dropped").to_pylist()
    # 45 words make 41 n-grams of 5; a changed word breaks five of them, two such words far apart ten
    words = LONG.split()
    assert len(words) == 45
    assert gone["value"] == pytest.approx(31 / 41)
    assert (gone["id"], gone["rule"]) == ("changed", "decontaminate.fuzzy")
    assert gone["detail"].startswith("trains prompt p1: ravi has seven jars")
    (example,) = made.read("examples").to_pylist()
    assert (example["id"], example["prompt"]) == ("trains prompt p1", LONG)
    assert made.manifest.metrics["contaminated_trains"] == 1


def test_what_many_prompts_share_weighs_little():
    common = "which of the following is the best answer to the question about the town of"
    texts = [f"{common} {' '.join(f'name{n}x{k}' for k in range(12))}" for n in range(50)]
    index = build_fuzzy(texts, 5, 1, 3, 10)
    found = fuzzy_match(word_hashes(f"{common} something else that nobody asked for in any of these"), index)
    # 15 of 27 words are common: unweighted that would be 11 of 23 n-grams
    assert found is not None and found.share < 0.2
    assert fuzzy_match(word_hashes(texts[7]), index).share == pytest.approx(1)
    assert fuzzy_match(word_hashes(texts[7]), index).prompt == 7


WORDS = st.lists(st.sampled_from(["ab", "cd", "ef", "gh"]), max_size=30)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(["ab", "cd", "ef", "gh"]), min_size=4, max_size=9), min_size=1, max_size=4), WORDS)
def test_against_plain_python(prompts, text):
    n = 4
    index, _ = build_index([row(str(i), " ".join(p), "") for i, p in enumerate(prompts)], DecontaminateConfig(n=n))
    found = match(word_hashes(" ".join(text)), index)
    inside = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
    shares = []
    for prompt in prompts:
        grams = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
        shares.append(len(grams & inside) / len(grams))
    # Every second run of three words is looked up for changed prompts; the last text's lower case is that of `str.lower`.
    near = build_fuzzy([" ".join(p) for p in prompts], 3, 2, 0, 3)
    threes = {tuple(p[i : i + 3]) for p in prompts for i in range(len(p) - 2)}
    likely = any(shares) or any(tuple(text[i : i + 3]) in threes for i in range(0, len(text) - 2, 2))
    assert may_hold(pa.array(["", " ".join(text).upper(), "\u0130"]), index.with_fuzzy(near)).tolist() == [False, likely, True]
    if not any(shares):
        assert found is None
        return
    assert found.overlap == max(shares)
    assert found.prompt == shares.index(max(shares))
    assert found.shares == {i: share for i, share in enumerate(shares) if share}
    assert tuple(found.text.split()) in inside


def test_texts_and_splits_are_looked_for(tmp_path, make_documents):
    store = Store.open(tmp_path)
    essay = "Llamas of the high grassland carry salt over the passes in spring, and their wool is spun by night in every village."
    other = "The second essay is about the colour of rivers after rain and about bridges of grass that are woven anew each June."
    docs = make_documents(store, [("a", "web", f"Blog: {essay}"), ("b", "web", f"Copied: {QUESTION}"), ("c", "web", other), ("d", "web", "Nothing to see. " * 9)])
    exam = make_documents(store, [("e1", "exam", essay), ("e2", "exam", "An exam text that no page holds, of words enough to be matched by thirteen of them in a row.")])
    prompts = store.import_table("prompts", pa.Table.from_pylist([row("p1", QUESTION, split="train"), row("p2", other)]))

    def dropped(inputs, **settings):
        made = execute(decontaminate, DecontaminateConfig(**settings), {"documents": docs, **inputs}, store)
        return {r["id"]: r["detail"].partition(": ")[0] for r in made.read("dropped").to_pylist()}, made.manifest.metrics

    found, metrics = dropped({"texts": [exam]})
    assert found == {"a": "exam prompt e1"} and (metrics["prompts_exam"], metrics["contaminated_exam"]) == (2, 1)
    assert dropped({"prompts": [prompts]})[0] == {"c": "trains prompt p2"}
    assert dropped({"prompts": [prompts]}, splits=("train",))[0] == {"b": "trains prompt p1"}
    everything = {"a": "exam prompt e1", "b": "trains prompt p1", "c": "trains prompt p2"}
    assert dropped({"prompts": [prompts], "texts": [exam]}, splits=("heldout", "train"))[0] == everything
    # A list of evaluations has no split: none is held out, so all are looked for.
    mine = store.import_table("prompts", pa.Table.from_pylist([row("p1", QUESTION, split="train")]))
    assert dropped({"prompts": [prompts, mine]})[0] == {"b": "trains prompt p1", "c": "trains prompt p2"}
    with pytest.raises(PunaError, match="has no prompts in the splits train to search for"):
        dropped({"prompts": [store.import_table("prompts", pa.Table.from_pylist([row("p2", other)]))]}, splits=("train",))
    with pytest.raises(PunaError, match="there is nothing to search for; give prompts or texts"):
        dropped({})
