"""Answers that the ranks sample together: those of one process, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("layout", [{"data": 2}, {"shard": 2}, {"tensor": 2}, {"data": 2, "shard": 2}], ids=str)
def test_ranks_share_the_prompts_and_get_the_answers_of_one_process(ranks: Run, layout: dict[str, int]) -> None:
    count = 2 ** len(layout)
    one = ranks("sampled", 1, layout={})[0]
    assert one["equal"] == 1.0, "log-probs are the trainer's"
    together = ranks("sampled", count, layout=layout)
    assert all(own == one for own in together)


def test_a_training_by_rollouts_has_the_log_of_one_process(ranks: Run) -> None:
    one = ranks("sampled", 1, layout={}, again=True)[0]
    eight = ranks("sampled", 8, layout={"data": 8}, again=True)
    assert all(own == eight[0] for own in eight) and len(one["log"]) == 2
    for own, expected in zip(eight[0]["log"], one["log"], strict=True):
        assert own == pytest.approx(expected, rel=1e-5)
