"""A training's state, written by one layout and read by another; a rank that is killed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from .conftest import Run

LAYOUTS = [{}, {"data": 2}, {"shard": 2}, {"tensor": 2}, {"shard": 2, "tensor": 2}, {"pipeline": 2}]


def size(layout: dict[str, int]) -> int:
    return math.prod(layout.values())


def test_every_layout_reads_the_same_bits(ranks: Run, tmp_path: Path):
    """States of each layout, after three steps: read by each, weights, moments and averages are bit for bit what one process reads."""
    for number, writer in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        ranks("trained", size(writer), layout=writer, folder=str(folder), steps=3)
        digests = {
            answer["digest"] for reader in LAYOUTS for answer in ranks("restored", size(reader), layout=reader, folder=str(folder))
        }
        assert len(digests) == 1, (writer, digests)


def test_experts_are_read_by_every_layout(ranks: Run, tmp_path: Path):
    layouts = [{}, {"expert": 2}, {"shard": 2}, {"shard": 2, "expert": 2}]
    for number, writer in enumerate(layouts):
        given = {"folder": str(tmp_path / str(number)), "variant": "moe"}
        ranks("trained", size(writer), layout=writer, steps=3, **given)
        assert len({answer["digest"] for reader in layouts for answer in ranks("restored", size(reader), layout=reader, **given)}) == 1, writer


@pytest.mark.parametrize("layout", [{"shard": 2}, {"pipeline": 2}], ids=str)
def test_a_rank_reads_little_more_than_its_pieces(ranks: Run, tmp_path: Path, layout: dict[str, int]):
    assert max(ranks("read_ratio", 2, layout=layout, folder=str(tmp_path))) <= 1.2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_moments_of_whole_weights_are_taken_by_every_layout(ranks: Run, tmp_path: Path, layout: dict[str, int]):
    ranks("trained", 1, layout={}, folder=str(tmp_path), steps=3)
    one = ranks("restored", 1, layout={}, folder=str(tmp_path))[0]["digest"]
    answers = ranks("restored", size(layout), layout=layout, folder=str(tmp_path), adopt=True)
    assert {answer["digest"] for answer in answers} == {one}


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_a_training_that_goes_on_ends_with_the_same_bits(ranks: Run, tmp_path: Path, layout: dict[str, int]):
    whole = ranks("trained", size(layout), layout=layout, folder=str(tmp_path / "whole"), steps=6)
    ranks("trained", size(layout), layout=layout, folder=str(tmp_path / "parts"), steps=2)
    assert ranks("trained", size(layout), layout=layout, folder=str(tmp_path / "parts"), steps=6) == whole


@pytest.mark.parametrize("first, second", itertools.pairwise(LAYOUTS), ids=str)
def test_a_training_goes_on_in_another_layout(ranks: Run, tmp_path: Path, first: dict[str, int], second: dict[str, int]):
    ranks("trained", size(first), layout=first, folder=str(tmp_path), steps=3)
    losses = ranks("trained", size(second), layout=second, folder=str(tmp_path), steps=6)[0]["losses"]
    one = ranks("trained", 1, layout={}, folder=str(tmp_path / "one"), steps=6)[0]["losses"]
    assert losses == pytest.approx(one, rel=1e-5)


def test_damage_is_an_error_on_all_ranks(ranks: Run, tmp_path: Path):
    ranks("trained", 2, layout={"shard": 2}, folder=str(tmp_path), steps=3)
    file = next(tmp_path.glob("step-*/rank-1.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(RuntimeError, match="the state of the training is damaged"):
        ranks("restored", 2, layout={"shard": 2}, folder=str(tmp_path))
