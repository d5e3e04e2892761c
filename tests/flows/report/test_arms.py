"""The gain of a round over its control arms: the strongest arm counts, prompt by prompt."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pyarrow as pa
import pytest

from puna.flows.report import arms
from puna.storage import Artifact, runs


class Made:
    """A stub of an artifact made by a stage with metrics, and of its record as an input."""

    every: ClassVar[dict[str, Made]] = {}

    def __init__(self, stage: str, inputs: tuple[Made, ...] = (), rows: int = 0, seconds: float = 0, **metrics: float) -> None:
        self.kind, self.key, self.files = "preferences" if stage == "preferences" else "model", f"{stage}{len(self.every)}", None
        self.manifest = SimpleNamespace(inputs=inputs, stage=stage, metrics=metrics, timings={"cpu_seconds": seconds})
        self._rows = rows
        self.every[self.key] = self

    def rows(self) -> int:
        return self._rows


class Evaluation:
    """A stub of an evaluation: 100 prompts, of which `right`, starting at number `first`, have right answers.

    `of`: the artifact that was evaluated.
    """

    def __init__(self, right: int, first: int = 0, liked: int | None = None, of: Made | None = None, **spent: float) -> None:
        rows: list[dict[str, Any]] = [{"id": f"{i}", "name": "score", "value": 1.0 if first <= i < first + right else 0.3} for i in range(100)]
        if liked is not None:
            rows += [{"id": f"{i}", "name": "liked", "value": float(i < liked)} for i in range(100)]
        self.tables, self._rows = {"scores": None}, rows
        self.key, self.files = str(id(self)), None
        self.kind, self.manifest = "evaluation", SimpleNamespace(inputs=[of] if of else [], stage="evaluate", metrics=spent, timings={"cpu_seconds": 5})

    def read(self, table: str) -> pa.Table:
        return pa.Table.from_pylist(self._rows)


def found(**evaluations: Evaluation) -> list[arms.Arms]:
    return arms.rounds((name, cast(Artifact, one)) for name, one in evaluations.items())


def test_dpo_in_place_of_rl_has_finetuning_at_an_equal_budget_as_a_control() -> None:
    (one,) = found(
        evaluate_sft=Evaluation(20), evaluate_round_1=Evaluation(60), control_dpo_instead_1=Evaluation(50),
        control_ranked_1=Evaluation(55), control_rl_1=Evaluation(60),
    )  # fmt: skip
    (claim,) = [claim for claim in one.claims() if claim.name == "DPO in place of RL over its strongest control"]
    assert claim.control == "ranked" and claim.gain.value == pytest.approx(-0.05) and claim.verdict == "cost"


def test_the_strongest_control_counts_and_arms_of_a_round_stay_together() -> None:
    first, second = found(
        evaluate_sft=Evaluation(20), evaluate_round_1=Evaluation(60), evaluate_round_2=Evaluation(70),
        control_gold_1=Evaluation(30), control_chosen_1=Evaluation(45), control_untaught_1=Evaluation(50),
        control_rl_1=Evaluation(45), control_dpo_instead_1=Evaluation(30),
        control_gold_2=Evaluation(65, first=30), evaluate_base=Evaluation(0),
    )  # fmt: skip
    assert list(first.scores) == ["before", "gold", "chosen", "rl", "dpo_instead", "untaught", "round"]
    assert list(second.scores) == ["before", "gold", "round"]
    claims = {claim.name: claim for claim in first.claims()}
    whole = claims["the round over its strongest control"]
    # The round without its last training step is one of its controls.
    assert whole.control == "untaught" and whole.gain.value == pytest.approx(0.1) and whole.verdict == "earned"
    assert claims["its last training"].control == "untaught" and claims["its last training"].gain.value == pytest.approx(0.1)
    assert claims["RL in its place over the strongest control"].gain.value == pytest.approx(-0.05)
    assert claims["DPO in place of RL over its strongest control"].gain.value == pytest.approx(-0.2)
    assert "the reward model's pick over a random one" not in claims
    # Round 2 against gold: .70 against .65, but on other prompts: 30 wins, 25 losses, 45 ties.
    (late,) = [claim for claim in second.claims() if claim.name == "the round over its strongest control"]
    assert late.control == "gold" and late.gain.value == pytest.approx(0.05) and late.verdict == "earned nothing"
    half = 1.984217 * ((55 - 100 * 0.05**2) / 99 / 100) ** 0.5
    assert (late.gain.low, late.gain.high) == pytest.approx((0.05 - half, 0.05 + half), abs=1e-6)


def test_a_part_that_costs_is_told_and_metrics_are_those_of_all_arms() -> None:
    (one,) = found(
        evaluate_round_1=Evaluation(40, liked=30), control_untaught_1=Evaluation(60, liked=30), control_gold_1=Evaluation(10, liked=0),
        control_synthetic_1=Evaluation(20, liked=30),
    )  # fmt: skip
    told = {(claim.name, claim.metric): claim.verdict for claim in one.claims()}
    assert told["its last training", "accuracy"] == "cost" and told["its last training", "liked"] == "earned nothing"
    assert told["synthetic data", "liked"] == "earned"
    (mixed,) = found(evaluate_round_1=Evaluation(40), control_gold_1=Evaluation(10, liked=0))
    assert mixed.metrics == ["accuracy"]
    assert found(evaluate_round_1=Evaluation(40)) == []


def test_a_gain_is_earned_only_over_a_control_with_as_large_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """RL has 100 + 900 checks, 40 labels, 5,000 + 9,000 tokens, 10 + 20 updates on 160 + 640 answers, 5 CPU seconds, through whichever
    lineage it got them."""
    monkeypatch.setattr(arms, "Artifact", lambda kind, key, files: Made.every[key])
    first = Made("sft", steps=50, trained_answers=800, seconds=9)
    sampled = Made("sample", (first,), checker_calls=100, sampled_tokens=5000)
    pairs = Made("preferences", (sampled,), rows=40)
    tuned = Made("sft", (first, pairs), steps=10, trained_answers=160, trained_tokens=70, seconds=1)
    policy = Made("grpo", (tuned, pairs), steps=5, updates=20, trained_answers=640, checker_calls=900, sampled_tokens=9000, seconds=4)

    def control(checks: int, answers: int, seconds: float = 3.5, steps: int = 20) -> Made:
        more = Made("sample", (tuned,), checker_calls=checks, sampled_tokens=9000)
        return Made("sft", (tuned, more), steps=steps, trained_answers=answers, seconds=seconds)

    def claimed(**controls: Evaluation) -> arms.Claim:
        (one,) = found(evaluate_sft=Evaluation(20, of=first), evaluate_round_1=Evaluation(60, of=policy), **controls)
        assert one.budgets["round"] == arms.Budget(1000, 40, 14000, 30, 800, 70, 5) and one.budgets["before"] == arms.Budget()
        return next(claim for claim in one.claims() if claim.name == "the round over its strongest control")

    # The strongest arm has a tenth of the checks: it is no control while another arm has all of them.
    both = claimed(control_gold_1=Evaluation(55, of=control(0, 640)), control_checked_1=Evaluation(30, of=control(900, 640)))
    assert (both.control, both.budget_ratio, both.verdict) == ("checked", 1.0, "earned")
    small = claimed(control_gold_1=Evaluation(30, of=control(0, 640)))
    assert (small.budget_ratio, small.verdict) == (0.1, "more, for a larger budget")
    # With as many checks, but a fifth fewer answers in the updates: 640 of 800.
    assert claimed(control_checked_1=Evaluation(30, of=control(900, 480))).budget_ratio == pytest.approx(0.8)
    # As many answers in twice as many updates are half as many an update: 800 / 50 against 800 / 30.
    assert claimed(control_checked_1=Evaluation(30, of=control(900, 640, steps=40))).budget_ratio == pytest.approx(0.6)
    # 4.5 of 5 CPU seconds are as many, 4.4 are fewer.
    slower = claimed(control_checked_1=Evaluation(30, of=control(900, 640, 3.4)))
    assert slower.budget_ratio == pytest.approx(0.88) and slower.verdict == "more, for a larger budget"
    # Best of n pays for the answers of its evaluation, which here takes 5 CPU seconds, too.
    best = Evaluation(50, of=control(0, 640), sampled_tokens=2000, checker_calls=900)
    (one,) = found(evaluate_sft=Evaluation(20, of=first), evaluate_round_1=Evaluation(60, of=policy), control_best_of_n_1=best)
    assert one.budgets["best_of_n"] == arms.Budget(1000, 40, 16000, 30, 800, 70, 9.5)
    unknown = claimed(control_checked_1=Evaluation(30, of=Made("sample", (first,))))
    assert (unknown.budget_ratio, unknown.verdict) == (None, "more, budgets unknown")


@pytest.mark.parametrize("recorded", [True, False])
def test_arms_with_equal_models_have_budgets_of_their_own(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their evaluation is one artifact, whose manifest names the model that was evaluated first. A run's record names each arm's model;
    runs of earlier versions have no such record."""
    monkeypatch.setattr(arms, "Artifact", lambda kind, key, files: Made.every[key])
    first = Made("sft", steps=50, trained_answers=800, seconds=9)
    sampled = Made("sample", (first,), checker_calls=100, sampled_tokens=5000)
    tuned = Made("sft", (first, sampled), steps=10, trained_answers=160, seconds=1)
    policy = Made("grpo", (tuned,), steps=5, updates=20, trained_answers=640, checker_calls=900, sampled_tokens=9000, seconds=4)
    evaluated = Evaluation(0, of=policy)
    steps = {
        "sft_first": (first, ["model"]), "evaluate_sft": (Evaluation(20, of=first), ["sft_first"]), "sample_1": (sampled, ["sft_first"]),
        "sft_1": (tuned, ["sft_first", "sample_1"]), "grpo_1": (policy, ["sft_1"]), "evaluate_round_1": (evaluated, ["grpo_1"]),
        "control_untaught_1": (evaluated, ["sft_1"]),
    }  # fmt: skip
    made = []
    for name, (one, sources) in steps.items():
        inputs = tuple((source, steps[source][0].kind, steps[source][0].key) for source in sources if source in steps)
        event = runs.Made(name, one.manifest.stage, one.kind, one.key, False, 1.0, inputs).event()
        made.append(json.loads(json.dumps(event if recorded else {key: value for key, value in event.items() if key != "inputs"})))
    log = runs.RunLog.of("run", made, at_work=False)
    (found,) = arms.rounds(((name, cast(Artifact, one)) for name, (one, _) in steps.items()), log.made)
    assert found.budgets["round"] == arms.Budget(1000, 0, 14000, 30, 800, 0, 5)
    assert found.budgets["untaught"] == (arms.Budget(100, 0, 5000, 10, 160, 0, 1) if recorded else found.budgets["round"])
