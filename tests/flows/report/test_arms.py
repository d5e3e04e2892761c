"""What a round earned over its control arms: the strongest one counts, prompt by prompt."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest

from puna.flows.report import arms
from puna.storage import Artifact


class Evaluation:
    """Stands for an artifact: 100 prompts, of which those from `first` on, `right` of them, are answered rightly."""

    def __init__(self, right: int, first: int = 0, liked: int | None = None) -> None:
        rows: list[dict[str, Any]] = [{"id": f"{i}", "name": "score", "value": 1.0 if first <= i < first + right else 0.3} for i in range(100)]
        if liked is not None:
            rows += [{"id": f"{i}", "name": "liked", "value": float(i < liked)} for i in range(100)]
        self.tables, self._rows = {"scores": None}, rows

    def read(self, table: str) -> pa.Table:
        return pa.Table.from_pylist(self._rows)


def found(**evaluations: Evaluation) -> list[arms.Arms]:
    return arms.rounds((name, cast(Artifact, one)) for name, one in evaluations.items())


def test_the_strongest_control_counts_and_arms_of_a_round_stay_together() -> None:
    first, second = found(
        evaluate_sft=Evaluation(20), evaluate_round_1=Evaluation(60), evaluate_round_2=Evaluation(70),
        control_gold_1=Evaluation(30), control_chosen_1=Evaluation(45), control_no_rl_1=Evaluation(50),
        control_no_reward_model_1=Evaluation(55), control_dpo_instead_1=Evaluation(30),
        control_gold_2=Evaluation(65, first=30), evaluate_base=Evaluation(0),
    )  # fmt: skip
    assert list(first.scores) == ["before", "gold", "chosen", "dpo_instead", "no_rl", "no_reward_model", "round"]
    assert list(second.scores) == ["before", "gold", "round"]
    claims = {claim.name: claim for claim in first.claims()}
    whole = claims["the round over its strongest control"]
    # The round's own finetuning counts among its controls; RL without the reward model is one of RL on the taste alone.
    assert whole.control == "no_rl" and whole.gain.value == pytest.approx(0.1) and whole.verdict == "earned"
    assert claims["RL"].control == "no_rl" and claims["RL"].gain.value == pytest.approx(0.1)
    taste = claims["RL on the taste over its strongest control"]
    assert taste.control == "no_reward_model" and taste.gain.value == pytest.approx(0.05)
    assert claims["DPO in place of RL over its strongest control"].gain.value == pytest.approx(-0.2)
    assert "DPO before RL" not in claims and "the reward model's pick over a random one" not in claims
    # Round 2 against gold: .70 against .65, but on other prompts: 30 won, 25 lost, 45 alike.
    (late,) = [claim for claim in second.claims() if claim.name == "the round over its strongest control"]
    assert late.control == "gold" and late.gain.value == pytest.approx(0.05) and late.verdict == "earned nothing"
    half = 1.984217 * ((55 - 100 * 0.05**2) / 99 / 100) ** 0.5
    assert (late.gain.low, late.gain.high) == pytest.approx((0.05 - half, 0.05 + half), abs=1e-6)


def test_a_part_that_costs_is_told_and_metrics_are_those_of_all_arms() -> None:
    (one,) = found(
        evaluate_round_1=Evaluation(40, liked=30), control_no_dpo_1=Evaluation(60, liked=30), control_gold_1=Evaluation(10, liked=0)
    )
    told = {(claim.name, claim.metric): claim.verdict for claim in one.claims()}
    assert told["DPO before RL", "accuracy"] == "cost" and told["DPO before RL", "liked"] == "earned nothing"
    assert told["the round over its strongest control", "liked"] == "earned"
    (mixed,) = found(evaluate_round_1=Evaluation(40), control_gold_1=Evaluation(10, liked=0))
    assert mixed.metrics == ["accuracy"]
    assert found(evaluate_round_1=Evaluation(40)) == []
