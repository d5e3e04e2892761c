"""A reward model of which only the head is fitted: the fit is the optimum, and all other weights stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from puna.models.formats.checkpoint import load
from puna.models.training import resumable_loop
from puna.models.transformer import Transformer
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.contract import execute
from puna.stages.contract.declaration import REGISTRY
from puna.stages.contract.rank_jobs import FollowerRun
from puna.stages.conversations import answering
from puna.stages.training.reward_head import PENALTIES, Pairs, best_penalty, bradley_terry, cross_validated
from puna.storage import Artifact, Store
from tests.stages.align.test_conversations import preference, table

Tiny = Callable[..., Artifact]


def test_the_head_is_the_minimum() -> None:
    """The gradient, by autograd, vanishes at the fit, and the penalty makes the Hessian positive definite, so the minimum is unique."""
    random = torch.Generator().manual_seed(1)
    differences = torch.randn(40, 6, generator=random, dtype=torch.float64) * 5 + 1
    weight = torch.rand(40, generator=random, dtype=torch.float64)
    for penalty in (1e-4, 0.1, 10.0):
        head = bradley_terry(differences, weight, penalty).requires_grad_()
        loss = -(weight @ torch.nn.functional.logsigmoid(differences @ head)) / weight.sum() + penalty / 2 * head @ head
        (gradient,) = torch.autograd.grad(loss, head)
        assert float(gradient.abs().max()) < 1e-9


def test_one_difference_by_hand() -> None:
    """``penalty * h = x sigmoid(-x h)``: at x = 2 and h = 0.5 the penalty is 4 sigmoid(-1)."""
    penalty = 4 / (1 + torch.e)
    assert bradley_terry(torch.tensor([[2.0]]).double(), torch.ones(1).double(), penalty).tolist() == pytest.approx([0.5], rel=1e-8)


def test_what_a_fold_alone_would_teach_is_not_known_of_it() -> None:
    """Five directions, one for each fold: a fit on the other folds does not learn a fold's own direction, a fit on all folds learns all."""
    own = torch.eye(5, dtype=torch.float64).repeat(8, 1)
    pairs = Pairs(own, torch.ones(40).double(), torch.arange(40) % 5)
    assert cross_validated(pairs) == 0.5 and bool((own @ bradley_terry(own, pairs.weight, best_penalty(pairs)) > 0).all())
    common = Pairs(own + 1, pairs.weight, pairs.fold)
    assert cross_validated(common) == 1.0 and best_penalty(common) == min(PENALTIES)


def rows(split: str, numbers: range) -> list[dict[str, object]]:
    """Return rows in which the answer that ends with `and` is preferred to the one that ends with `to`."""
    said = [(f"{n} {n % 7} and", f"{n % 5} {n} to") for n in numbers]
    return [
        preference(f"{split}{n}", f"{n}", chosen=answering(better), rejected=answering(worse)) | {"split": split}
        for n, (better, worse) in zip(numbers, said, strict=True)
    ]


def test_only_the_head_changes_and_it_orders_prompts_it_has_not_seen(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    base = tiny_model(store)
    data = table(store, "preferences", [*rows("train", range(60)), *rows("heldout", range(60, 90))])
    given = {"model": base, "preferences": [data]}
    made = execute(reward_model, RewardModelConfig(head_only=True), given, store)
    before, after = load(base.path()).state_dict(), load(made.path()).state_dict()
    shared = set(before) & set(after)
    assert set(after) - shared == {"score.weight"} and all(torch.equal(before[name], after[name]) for name in shared)
    metrics = made.manifest.metrics
    assert metrics["train_pairs"] == 60 and metrics["heldout_accuracy"] > 0.9 and metrics["penalty"] in PENALTIES
    assert metrics["cross_validated_accuracy"] > 0.9
    again = execute(reward_model, RewardModelConfig(head_only=True), given, Store.open(tmp_path / "other"))
    assert again.data_digest == made.data_digest


def test_a_rank_that_follows_fits_no_head_beside_rank_0(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise both ranks would save their hidden states in one folder."""
    store, config = Store.open(tmp_path), RewardModelConfig(head_only=True)
    data, declared = table(store, "preferences", rows("train", range(6))), REGISTRY["reward_model"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    (states := tmp_path / "scratch").mkdir()
    declared.function(tiny_model(store), [data], config, FollowerRun(declared, config, states, tmp_path / "none"))
    assert not any(states.iterdir())


@pytest.mark.parametrize("more", [{"method": "lora"}, {"engine": "trl"}, {"nll_weight": 0.1}])
def test_what_trains_layers_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="head_only trains no layer"):
        RewardModelConfig(head_only=True, **more)


@pytest.mark.parametrize("stop", [1, 4, 40])
def test_a_stopped_stage_goes_on_from_its_states_and_fits(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """Ctrl-C in the first batch of hidden states, within a fit, and after some fits: the artifact is the same, and no work is done
    twice."""
    monkeypatch.setattr(resumable_loop, "REPEATED_SECONDS", 0.0)
    calls, at = 0, stop

    def interrupted(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGINT)
            return plain(*args)

        return call

    monkeypatch.setattr(Transformer, "hidden", interrupted(Transformer.hidden))
    monkeypatch.setattr(torch.linalg, "solve", interrupted(torch.linalg.solve))
    config, made, counts = RewardModelConfig(head_only=True), [], []
    for folder in ("stopped", "stopped", "whole"):
        store = Store.open(tmp_path / folder)
        given = {"model": tiny_model(store), "preferences": [table(store, "preferences", [*rows("train", range(30)), *rows("heldout", range(60, 70))])]}
        if not counts:
            with pytest.raises(KeyboardInterrupt):
                execute(reward_model, config, given, store)
        else:
            made.append(execute(reward_model, config, given, store).data_digest)
        counts.append(calls)
        calls, at = 0, -1
    assert made[0] == made[1] and counts[0] + counts[1] == counts[2]
