"""The rows that training reads: every token once, documents kept apart, joined rows complete, some documents set aside for validation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.transformer import Transformer
from puna.stages.training.token_rows import Packed, Reader, mean_loss, pack
from puna.storage import PunaError

BEGIN, END = 0, 1


def packed(folder: Path, lengths: list[int], sequence_length: int, names: list[str] | None = None) -> Packed:
    """Return documents of these lengths; each token but the first and last is unique."""
    documents, next_ = [], 2
    for n in lengths:
        documents.append([BEGIN, *range(next_, next_ + n - 2), END])
        next_ += n - 2
    names = names or [f"d{i}" for i in range(len(lengths))]
    rows = pack(pa.array(documents, pa.list_(pa.int32())), names, sequence_length)
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"row": pa.array(range(len(rows["tokens"])), pa.int64()), **rows}), folder / "tokens.parquet")
    return Packed.read(pq.read_table(folder / "tokens.parquet"))


def nothing(data: Packed) -> np.ndarray:
    return np.zeros(len(data.owners), dtype=bool)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(3, 40), min_size=1, max_size=10), join=st.integers(1, 4), rows=st.integers(1, 3))
def test_an_epoch_reads_every_token_once(tmp_path_factory, lengths: list[int], join: int, rows: int) -> None:
    data = packed(tmp_path_factory.mktemp("p"), lengths, 8)
    reader = Reader(data, nothing(data), rows, seed=3, begin=BEGIN, join=join)
    pieces = [piece for step in range(1, 200) for piece in reader.pieces(step)]
    seen: list[int] = []
    for start, stop in pieces:
        assert stop - start <= 8 * join
        seen += data.tokens[start:stop].tolist()
    # Within a number of epochs, tokens occur equally often, up to the current epoch.
    counts = Counter(t for t in seen if t > 1)
    epochs = 199 * rows / reader.epoch_rows
    assert all(int(epochs) <= counts[t] <= int(epochs) + 1 for t in range(2, sum(lengths) - 2 * len(lengths) + 2))


def test_joined_rows_make_documents_whole(tmp_path: Path) -> None:
    data = packed(tmp_path, [20, 6, 22], 8)  # six rows of 8
    assert len(data.rows) - 1 == 6
    reader = Reader(data, nothing(data), 1, seed=0, begin=BEGIN, join=6)
    assert sorted(reader.lengths(1)) == [6, 20, 22]
    halves = Reader(data, nothing(data), 2, seed=0, begin=BEGIN, join=3)
    # Two rows of 24 tokens: 20 and the first 4 of 6, then the other 2 and 22.
    assert sorted(halves.lengths(1)) == [2, 4, 20, 22]


def test_two_copies_that_meet_are_not_joined(tmp_path: Path) -> None:
    data = packed(tmp_path, [8, 8], 8, ["same", "same"])
    assert Reader(data, nothing(data), 1, seed=0, begin=BEGIN, join=2).lengths(1) == [8, 8]


def test_order_changes_with_epoch_and_seed_and_is_a_function_of_the_step(tmp_path: Path) -> None:
    data = packed(tmp_path, [8] * 12, 8)

    def order(seed: int, steps: range) -> list[tuple[int, int]]:
        reader = Reader(data, nothing(data), 1, seed, begin=BEGIN)
        return [piece for step in steps for piece in reader.pieces(step)]

    assert order(0, range(1, 13)) != order(0, range(13, 25)) and set(order(0, range(1, 13))) == set(order(0, range(13, 25)))
    assert order(0, range(1, 13)) != order(1, range(1, 13))
    assert order(0, range(5, 8)) == order(0, range(1, 25))[4:7]


def test_tokens_on_disk_are_read_as_those_in_memory(tmp_path: Path) -> None:
    """Mapped from a new file each time; from any step on, in the same order, and each token once per epoch."""
    own = packed(tmp_path / "p", [9, 30, 4, 17, 22, 6], 16)
    table = pq.read_table(tmp_path / "p" / "tokens.parquet")
    (tmp_path / "tokens.bin").write_bytes(b"half of an earlier run")
    mapped = Packed.read(table, tmp_path / "tokens.bin")
    assert isinstance(mapped.tokens, np.memmap) and not mapped.tokens.flags.writeable
    assert (tmp_path / "tokens.bin").read_bytes() == own.tokens.tobytes()
    memory, disk, later = (Reader(one, nothing(one), 2, 3, BEGIN) for one in (own, mapped, mapped))
    steps = range(1, 9)
    read = [torch.cat([batch.forest.tokens for batch in memory.batches(step, 64)]) for step in steps]
    assert all(torch.equal(ids, torch.cat([b.forest.tokens for b in disk.batches(step, 64)])) for step, ids in zip(steps, read, strict=True))
    assert torch.equal(torch.cat([b.forest.tokens for b in later.batches(7, 64)]), read[6])


def test_documents_set_aside_are_not_read(tmp_path: Path) -> None:
    names = [f"doc{i}" for i in range(30)] + ["doc3", "doc4"]
    data = packed(tmp_path, [13] * 32, 16, names)
    held = data.validation(0.1, 10_000)
    owners = {data.ids[o] for o in data.owners[held]}
    assert len(owners) == 3
    reader = Reader(data, held, 2, seed=0, begin=BEGIN)
    trained = {int(t) for step in range(1, 60) for a, b in reader.pieces(step) for t in data.tokens[a:b] if t > 1}
    pieces = data.validation_pieces(held)
    watched = {int(t) for piece in pieces for t in piece if t > 1}
    assert watched and not trained & watched
    # All copies are left out of training, one is used for validation.
    assert len(trained) + sum(11 for i, n in enumerate(names) if n in owners) == 32 * 11
    assert data.validation(0.1, 10_000).tolist() == held.tolist()
    # The token budget ends it early, after at least one document.
    assert len({data.ids[o] for o in data.owners[data.validation(0.5, 1)]}) == 1
    assert len({data.ids[o] for o in data.owners[data.validation(0.5, 26)]}) == 2


def test_copies_are_watched_once(tmp_path: Path) -> None:
    data = packed(tmp_path, [20] * 6, 16, ["a"] * 5 + ["b"])
    held = np.array([data.ids[o] == "a" for o in data.owners])
    assert sum(len(p) for p in data.validation_pieces(held)) == 20


def test_no_rows_are_an_error(tmp_path: Path) -> None:
    empty = pack(pa.array([], pa.list_(pa.int32())), [], 8)
    pq.write_table(pa.table({"row": pa.array([], pa.int64()), **empty}), tmp_path / "tokens.parquet")
    with pytest.raises(PunaError, match="has no rows to train on"):
        Packed.read(pq.read_table(tmp_path / "tokens.parquet"))


def test_one_document_cannot_be_both(tmp_path: Path) -> None:
    data = packed(tmp_path, [20], 8)
    with pytest.raises(PunaError, match="one document"):
        data.validation(0.1, 100)
    with pytest.raises(PunaError, match="all its documents are held out"):
        Reader(data, np.ones(len(data.owners), dtype=bool), 1, 0, BEGIN)


def test_passes_split_a_step_without_losing_tokens(tmp_path: Path) -> None:
    data = packed(tmp_path, [8] * 8, 8)
    reader = Reader(data, nothing(data), 8, seed=0, begin=BEGIN)
    passes = reader.batches(1, 20)
    assert [len(p) for p in passes] == [16, 16, 16, 16]
    together = np.concatenate([p.forest.tokens.numpy() for p in passes])
    assert together.tolist() == reader.batches(1, 10_000)[0].forest.tokens.tolist()


def test_mean_loss_is_the_mean_over_all_targets(tmp_path: Path) -> None:
    model = Transformer(ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3), seed=0)
    pieces = [np.array([0, 5, 6, 7]), np.array([9, 8]), np.array([0, 1, 2, 3, 4, 5, 6])]
    losses = []
    for piece in pieces:
        logprobs = torch.log_softmax(model.logits(model.hidden(Forest.pack([piece.tolist()]))).double(), -1)
        losses += [-float(logprobs[i, t].detach()) for i, t in enumerate(piece[1:])]
    for micro_batch_tokens in (4, 100):
        assert mean_loss(model, pieces, micro_batch_tokens) == pytest.approx(np.mean(losses), abs=1e-5)
