"""Packing compared with a token-by-token loop; splits, repeats, order and resumption."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.contract import StageRun, execute
from puna.stages.pretrain import tokenize as module
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.token_rows import pack
from puna.storage import PunaError, Store

from .conftest import sentences

TEXTS = [sentences(i, 5 + 9 * i) for i in range(25)]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=12), sequence_length=st.integers(1, 25))
def test_pack_equals_a_loop(lengths: list[int], sequence_length: int) -> None:
    documents, next_ = [], 0
    for n in lengths:
        documents.append(list(range(next_, next_ + n)))
        next_ += n
    names = [f"d{i}" for i in range(len(documents))]
    rows: list[tuple[list[int], list[int], list[str]]] = []
    for name, tokens in zip(names, documents, strict=True):
        for position, token in enumerate(tokens):
            if not rows or len(rows[-1][0]) == sequence_length:
                rows.append(([], [], []))
            row = rows[-1]
            if position == 0 or not row[0]:
                row[1].append(0)
                row[2].append(name)
            row[0].append(token)
            row[1][-1] += 1
    found = pack(pa.array(documents, pa.list_(pa.int32())), names, sequence_length)
    assert list(zip(*(found[c].to_pylist() for c in ("tokens", "lengths", "documents")), strict=True)) == rows


def read(artifact, sequence_length: int) -> dict[str, list[list[int]]]:
    """Return whole documents by id, joined from their pieces."""
    glued: dict[str, list[list[int]]] = {}
    rows = artifact.read().to_pylist()
    assert [row["row"] for row in rows] == list(range(len(rows)))
    open_ = False
    for index, row in enumerate(rows):
        assert sum(row["lengths"]) == len(row["tokens"]) == (sequence_length if index < len(rows) - 1 else len(row["tokens"]))
        start = 0
        for number, (length, id_) in enumerate(zip(row["lengths"], row["documents"], strict=True)):
            piece = row["tokens"][start : start + length]
            start += length
            if number == 0 and open_:
                glued[id_][-1] += piece
            else:
                glued.setdefault(id_, []).append(list(piece))
            open_ = glued[id_][-1][-1] != 1  # <|end_of_text|>
    return glued


def test_rows_hold_the_training_documents_framed_and_repeated(store, documents, mixture, small_tokenizer) -> None:
    docs = documents(TEXTS)
    rows = [(i, "a" if i % 2 else "b", "heldout" if i % 5 == 0 else "train", (1, 1, 2, 3, 0)[i % 5]) for i in range(25)]
    given_ = {"documents": docs, "mixture": mixture(rows), "tokenizer": small_tokenizer}
    made = execute(tokenize, TokenizeConfig(sequence_length=32), given_, store)
    vocabulary = Tokenizer.load(small_tokenizer.path())
    assert (vocabulary.bos, vocabulary.eos) == (0, 1)
    glued = read(made, 32)
    expected = {f"{i:032x}": [vocabulary.document(TEXTS[i])] * r for i, _, split, r in rows if split == "train" and r}
    assert glued == expected
    metrics = made.manifest.metrics
    assert metrics["tokens"] == sum(len(copy) for copies in expected.values() for copy in copies)
    assert metrics["documents"] == len(expected) and metrics["copies"] == sum(map(len, expected.values()))
    assert metrics["bytes"] == sum(len(TEXTS[i]) * r for i, _, split, r in rows if split == "train")
    # Copies of one document are shuffled separately, and the seed determines the order.
    other = execute(tokenize, TokenizeConfig(sequence_length=32, seed=1), given_, store)
    assert read(other, 32) == expected and other.read()["documents"] != made.read()["documents"]


def test_without_a_mixture_every_document_is_read_once(store, documents, small_tokenizer) -> None:
    made = execute(tokenize, TokenizeConfig(sequence_length=16), {"documents": documents(TEXTS), "tokenizer": small_tokenizer}, store)
    assert {id_: len(copies) for id_, copies in read(made, 16).items()} == {f"{i:032x}": 1 for i in range(25)}


@pytest.mark.parametrize("bucket", [10, 1000])
def test_same_bytes_for_any_parts_and_workers(
    tmp_path: Path, documents, mixture, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    """1, 2 and 4 workers (separate processes where noted), and shards inside buckets, across them, and covering all."""
    monkeypatch.setattr(module, "BUCKET_DOCUMENTS", bucket)
    found = set()
    threads, processes = ThreadPoolExecutor, lambda n: ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn"))
    cases = [(4, None), (1000, None), (7, threads(2)), (5, threads(4))]
    if bucket == 10:
        cases.append((3, processes(2)))
    for index, (rows, executor) in enumerate(cases):
        store = Store.open(tmp_path / str(index))
        docs = documents(TEXTS, store)
        vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": docs}, store)
        mixed = mixture([(i, "a", "heldout" if i % 7 == 3 else "train", 1 + i % 3) for i in range(25)], store)
        given_ = {"documents": docs, "mixture": mixed, "tokenizer": vocabulary}
        made = execute(tokenize, TokenizeConfig(sequence_length=32), given_, store, part_rows=rows, executor=executor)
        found.add((made.path("tokens.parquet").read_bytes(), made.data_digest))
        short = sum(len(row) < 32 for row in made.read()["tokens"].to_pylist())
        assert short == (3 if bucket == 10 else 1)  # one at each bucket's end
        if executor is not None:
            executor.shutdown()
    assert len(found) == 1


def test_rows_do_not_pass_through_the_driver_and_are_read_once(
    store, documents, small_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUCKET_DOCUMENTS", 5)
    packed: list[int] = []
    original = module._pack

    def spy(job, sequence_length):
        packed.append(len(job[0].runs))
        return original(job, sequence_length)

    monkeypatch.setattr(module, "_pack", spy)
    monkeypatch.setattr(StageRun, "write", None)
    given_ = {"documents": documents(TEXTS), "tokenizer": small_tokenizer}
    execute(tokenize, TokenizeConfig(sequence_length=32), given_, store, part_rows=2)
    assert packed == [1] * 5  # here a bucket is a fraction of the documents, and each bucket is read once


def test_a_second_attempt_keeps_what_was_encoded(store, documents, small_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    given_ = {"documents": documents(TEXTS), "tokenizer": small_tokenizer}
    config = TokenizeConfig(sequence_length=32)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_pack", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            execute(tokenize, config, given_, store, part_rows=4)
    encodings = []
    with monkeypatch.context() as patch:
        original = Tokenizer.encode_batch
        patch.setattr(Tokenizer, "encode_batch", lambda self, texts: encodings.append(len(texts)) or original(self, texts))
        made = execute(tokenize, config, given_, store, part_rows=4)
    assert not encodings
    whole = execute(tokenize, config, {**given_, "documents": documents(TEXTS, Store.open(store.root.parent / "b"))}, Store.open(store.root.parent / "b"))
    assert made.path("tokens.parquet").read_bytes() == whole.path("tokens.parquet").read_bytes()
    assert made.manifest.metrics == whole.manifest.metrics


def test_nothing_to_tokenize_is_an_error(store, documents, mixture, small_tokenizer) -> None:
    with pytest.raises(PunaError, match="in this mixture to tokenize"):
        given_ = {"documents": documents(TEXTS[:1]), "mixture": mixture([(0, "a", "heldout", 1)]), "tokenizer": small_tokenizer}
        execute(tokenize, TokenizeConfig(), given_, store)
