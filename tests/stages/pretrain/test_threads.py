"""The number of CPU threads on which a model runs."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from puna.stages.contract import StageConfig, StageRun, execute, stage
from puna.stages.training import train
from puna.storage import Store


def model(parameters: int) -> torch.nn.Module:
    return torch.nn.Linear(parameters, 1, bias=False, device="meta")


def test_a_small_model_has_one_thread_and_a_large_one_all_for_as_long_as_it_is_in_use(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(train, "_threads", lambda: 3)
    try:
        small = train.on_threads(model(train.SMALL - 1))
        assert torch.get_num_threads() == 1
        large = train.on_threads(model(train.SMALL))
        assert torch.get_num_threads() == 3
        train.on_threads(small)  # the reward model of a large policy
        assert torch.get_num_threads() == 3
        del large
        gc.collect()
        train.on_threads(small)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_caller_has_as_many_threads_after_a_stage_as_before(tmp_path: Path):
    @stage(kind="signals", version="1")
    def lowered(config: StageConfig, run: StageRun) -> None:
        """Run on one thread."""
        torch.set_num_threads(1)
        run.write_rows([{"id": "a"}])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        execute(lowered, StageConfig(), {}, Store.open(tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
