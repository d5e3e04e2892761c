"""Answers that the ranks sample together equal those of one process bit by bit."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from puna.models.training.parallel.groups import Groups
from puna.models.training.parallel.layout import Layout
from puna.models.training.rl_settings import GrpoSettings
from puna.stages.align.reinforcement import GrpoConfig, grpo
from puna.stages.contract.rank_jobs import check
from puna.stages.executors import ranks as processes
from puna.storage import PunaError

from .conftest import Run


@pytest.mark.parametrize(
    "layout", [{"data": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"data": 2, "shard": 2}, {"data": 2, "tensor": 2},
               {"data": 2, "pipeline": 2}, {"shard": 2, "pipeline": 2}, {"pipeline": 2, "tensor": 2}], ids=str,
)  # fmt: skip
def test_ranks_share_the_prompts_and_get_the_answers_of_one_process(ranks: Run, layout: dict[str, int]) -> None:
    """Equal bit by bit; the reference's log-probs up to rounding if ranks hold parts of matrices or of rows."""
    count = 2 ** len(layout)
    one = ranks.alone("sampled")
    assert one["equal"] == 1.0 and one["reference"] == pytest.approx(one["logprobs"], abs=1e-5), "log-probs are the trainer's"
    together = ranks("sampled", count, layout=layout)
    assert all(own == together[0] for own in together)
    if layout.keys() & {"tensor", "context"}:
        assert together[0].pop("reference") == pytest.approx(one.pop("reference"), abs=1e-5)
    assert together[0] == one


@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo"])
@pytest.mark.parametrize("max_stale", [0, 1])
@pytest.mark.parametrize("generate", [1, 2])
def test_ranks_of_their_own_sample_what_one_process_does(ranks: Run, generate: int, max_stale: int, critic: bool) -> None:
    """One rank trains as one process does: log and weights have the same bits. If answers are fresh, log-probs equal the trainer's."""
    given: dict[str, Any] = {"max_stale": max_stale, "critic": critic}
    one, (trainer, *others) = ranks.alone("rolled", **given), ranks("rolled", 1 + generate, layout={}, generate=generate, **given)
    assert trainer == one and all(own["log"] == one["log"] and not own["trains"] for own in others)
    assert [row["version"] for row in one["log"]] == ([0, 0, 1] if max_stale else [0, 1, 2])
    assert [row["staleness"] for row in one["log"]] == ([0, 1, 1] if max_stale else [0, 0, 0])
    assert one["equal"] == [1.0] * 3 if not max_stale else one["equal"][0] == 1.0 > max(one["equal"][1:])


CISPO = {"surrogate": "cispo", "normalizer": "constant", "baseline": "mean", "resample": 1, "entropy_weight": 0.01}
GSPO = {"ratio": "sequence", "normalizer": "answers", "baseline": "rloo", "clip": 0.3}


@pytest.mark.parametrize("layout, generate, max_stale, more", [
    ({"data": 8}, 0, 0, {"own": CISPO}), ({"data": 2}, 1, 1, {}), ({"data": 2}, 2, 0, {"critic": True}), ({"data": 2}, 1, 0, {"variant": "lora"}),
    ({"shard": 2}, 1, 0, {}), ({"shard": 2}, 1, 1, {"variant": "lora"}), ({"shard": 2}, 0, 1, {"critic": True}),
    ({"tensor": 2}, 1, 1, {"critic": True}), ({"tensor": 2}, 1, 0, {"variant": "lora"}), ({"tensor": 2}, 0, 1, {"own": GSPO}),
    ({"pipeline": 2}, 0, 1, {"variant": "lora"}), ({"pipeline": 2}, 1, 0, {"critic": True}), ({"pipeline": 2}, 0, 0, {"critic": True}),
    ({"pipeline": 2, "virtual_stages": 2}, 0, 1, {"variant": "deep", "critic": True}), ({"context": 2}, 1, 1, {}), ({"context": 2}, 0, 0, {"critic": True}),
    ({"expert": 2}, 1, 0, {"variant": "moe"}), ({"expert": 2}, 0, 1, {"variant": "moe", "critic": True}),
], ids=str)  # fmt: skip
def test_several_ranks_train_on_the_answers_of_others(
    ranks: Run, layout: dict[str, int], generate: int, max_stale: int, more: dict[str, Any]
) -> None:
    """Each axis has fresh answers and stale ones. The log equals one process's up to rounding."""
    one = ranks.alone("rolled", max_stale=max_stale, **more)
    count = Layout(**layout).processes + generate
    all_ = ranks("rolled", count, layout=layout, generate=generate, max_stale=max_stale, **more)
    assert all(own["log"] == all_[0]["log"] for own in all_) and [own["trains"] for own in all_].count(False) == generate
    for own, expected in zip(all_[0]["log"], one["log"], strict=True):
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-5)  # explained variances are differences of near numbers
    assert max_stale or more.get("variant") == "lora" or all(own["equal"] == [1.0] * 3 for own in all_ if own["trains"])


@pytest.mark.parametrize("layout, generate, max_stale", [({}, 2, 0), ({}, 2, 1), ({"tensor": 2}, 2, 0), ({"data": 4}, 4, 0)], ids=str)
def test_ranks_that_hold_one_policy_between_them_sample_what_one_process_does(
    ranks: Run, layout: dict[str, int], generate: int, max_stale: int
) -> None:
    """The answers are the same, their log-probs and so the log's numbers up to rounding."""
    one = ranks.alone("rolled", max_stale=max_stale)
    all_ = ranks("rolled", math.prod(layout.values()) + generate, layout=layout, generate=generate, tensor=2, max_stale=max_stale)
    assert all(own["log"] == all_[0]["log"] for own in all_) and [own["trains"] for own in all_].count(False) == generate
    for own, expected in zip(all_[0]["log"], one["log"], strict=True):
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_ranks_that_score_answers_otherwise_train_on_the_first_ones_scores(ranks: Run) -> None:
    """A judge that each rank queried separately gave each rank different scores, and the ranks' weights diverged silently."""
    first, second = ranks("sampled", 2, layout={"data": 2}, wavering=True)
    assert first == second and first["scores"] == ranks.alone("sampled")["scores"]


def test_ranks_that_round_otherwise_train_on_the_first_ones_advantages(ranks: Run) -> None:
    one, two = ranks.alone("rolled"), ranks("rolled", 2, layout={"data": 2}, wavering=True)
    for own, expected in zip(two[0]["log"], one["log"], strict=True):
        kl = own.pop("kl"), expected.pop("kl")
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-5) and kl[0] == pytest.approx(kl[1])
    assert two[0]["digest"] == two[1]["digest"]


def test_all_ranks_read_the_answers_that_the_first_one_sees(ranks: Run, tmp_path: Path) -> None:
    """A shared folder's listing may be old on another machine, whose process would wait for the others to sample."""
    assert ranks("remembered", 2, folder=str(tmp_path)) == [[7, 0], [7, 0]]


def test_weights_are_sent_in_bf16(ranks: Run) -> None:
    one, (trainer, _) = ranks.alone("rolled", precision="bf16"), ranks("rolled", 2, layout={}, generate=1, precision="bf16")
    assert trainer["log"] == one["log"] and trainer["digest"] == one["digest"]


@pytest.mark.parametrize("layout, generate", [({"shard": 2}, 0), ({"shard": 2}, 1), ({"pipeline": 2}, 0), ({"pipeline": 2}, 1), ({"tensor": 2}, 0),
    ({"tensor": 2}, 1), ({"context": 2}, 0), ({"expert": 2}, 0)], ids=str)  # fmt: skip
def test_ranks_that_train_in_bf16_sample_in_bf16(ranks: Run, layout: dict[str, int], generate: int) -> None:
    """Rounded weights give the answers of one process, and the log if the ranks compute the same products. Otherwise the second rollout comes
    from weights that differ by rounding."""
    given = {"precision": "bf16", "variant": "moe" if "expert" in layout else "plain"}
    one, all_ = ranks.alone("rolled", **given), ranks("rolled", 2 + generate, layout=layout, generate=generate, **given)
    same = layout.keys() & {"shard", "pipeline"}
    names = one["log"][0] if same else ("score", "kl", "drawn_tokens", "finished", "unequal_prompts")
    for number in range(3 if same else 1):
        log, expected = ({name: own["log"][number][name] for name in names} for own in (all_[0], one))
        assert log == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert all(own["log"] == all_[0]["log"] for own in all_)


def test_a_rank_that_hangs_is_named(ranks: Run) -> None:
    assert ranks("silent", 2)[0].startswith("rank 1, which samples answers, has made no progress for ")


def test_a_rank_that_scores_for_longer_than_the_timeout_is_alive(ranks: Run) -> None:
    assert ranks("busy", 2) == ["scored", ""]


def test_ranks_meet_after_unequal_work_that_takes_longer_than_the_timeout(ranks: Run) -> None:
    assert ranks("late", 3, hangs=False) == [["0", "1", "2"]] * 3
    first, other, last = ranks("late", 3, hangs=True)
    assert first.startswith("rank 2 has made no progress for ") and last == "late"
    assert other.startswith("rank 0 has made no progress for ")


def test_each_token_and_each_micro_batch_is_progress(ranks: Run) -> None:
    assert ranks.alone("progressed") == ["_begin", "_collect", "by_group"]


def test_a_rank_that_has_failed_is_named_at_once(ranks: Run) -> None:
    assert ranks("failing", 2)[0] == "rank 1, which samples answers, has failed"


def test_weights_that_do_not_arrive_are_an_error(ranks: Run) -> None:
    assert ranks("lost_weights", 2)[1] == "rollout 1: this rank's weights are not those that the trainers sent"


def test_a_killed_rank_that_samples_starts_all_again_with_the_same_weights(ranks: Run, tmp_path: Path) -> None:
    """The rank is killed while it samples the third rollout, during the second rollout's updates."""
    given = {"layout": {}, "generate": 1, "max_stale": 1}
    command = [sys.executable, "-m", "tests.parallel.killed", str(tmp_path), json.dumps(given), json.dumps([[1, "wave", 5]])]
    assert processes.start(command, 2) == 0
    killed, whole = json.loads((tmp_path / "result.json").read_text()), ranks("rolled", 2, **given)[0]
    assert killed["log"] == whole["log"] and killed["digest"] == whole["digest"]
    assert len(whole["equal"]) == 3 > len(killed["equal"]) > 0


def test_what_no_test_proves_is_refused() -> None:
    with pytest.raises(ValueError, match="training by data 2 x shard 2 beside ranks that sample: set one axis, or generate to 0"):
        GrpoSettings(generate=1, compute={"layout": {"data": 2, "shard": 2}})
    with pytest.raises(PunaError, match="grpo: generate = 1 needs at least 2 processes; start with --processes"):
        check(grpo, GrpoConfig(generate=1))
    with pytest.raises(ValueError, match="generate 3 is not a multiple of generate_tensor 2 processes"):
        GrpoSettings(generate=3, generate_tensor=2)
    with pytest.raises(ValueError, match="generate_tensor 2 has no effect without generate: set generate to a multiple of it"):
        GrpoSettings(generate_tensor=2)
    for precision in ("bf16", "fastest"):
        with pytest.raises(ValueError, match="generate_tensor 2 is proved only in fp32: set compute.precision to fp32"):
            GrpoSettings(generate=2, generate_tensor=2, compute={"precision": precision})
    with pytest.raises(ValueError, match="generate = 1 needs 2 processes at least, and 1 run"):
        Groups(generate=1)
