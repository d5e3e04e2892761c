"""The gate's paired comparison checked by hand, the slices of new prompts, and a person's approval."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from puna.stages.align.gate import ApprovalConfig, GateConfig, approval, compare, gate, objections
from puna.stages.align.new_prompts import NewPromptsConfig, new_prompts
from puna.stages.contract import Evaluation, Model, Prompts, StageConfig, StageRun, execute, stage
from puna.stages.conversations import asking
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

STUDENT = {1: 12.706204736, 2: 4.302652730, 4: 2.776445105, 9: 2.262157163}
"""97.5 % quantiles of Student's t distribution, from printed tables."""


@pytest.mark.parametrize("seed", range(4))
def test_the_paired_interval_is_students_over_the_differences(seed: int) -> None:
    draw = random.Random(seed)
    keys = [f"p{n}" for n in range(10)]
    tasks = {key: "even" if int(key[1:]) % 2 == 0 else "odd" for key in keys}
    before, after = ({key: draw.random() for key in keys} for _ in range(2))
    whole, even, odd = compare({**before, "only_here": 1.0}, after, tasks)
    assert (whole.task, even.task, odd.task) == ("all", "even", "odd") and (whole.prompts, even.prompts, odd.prompts) == (10, 5, 5)
    for one, members in ((whole, keys), (even, keys[::2]), (odd, keys[1::2])):
        differences = [after[key] - before[key] for key in members]
        half = STUDENT[len(members) - 1] * statistics.stdev(differences) / len(members) ** 0.5
        middle = statistics.fmean(differences)
        assert one.gain == pytest.approx((middle, middle - half, middle + half))
        assert one.before.value == pytest.approx(statistics.fmean(before[key] for key in members))
        assert one.after.value == pytest.approx(statistics.fmean(after[key] for key in members))


def test_pairing_shows_a_gain_that_the_prompts_own_spread_hides() -> None:
    before = {str(n): n / 10 for n in range(10)}
    after = {key: value + (0.02 if int(key) % 2 else 0.03) for key, value in before.items()}
    whole = compare(before, after, dict.fromkeys(before, "t"))[0]
    assert whole.before.high > whole.after.low and whole.gain.low > 0.02


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=30))
def test_turning_the_models_round_turns_the_gain(pairs: list[tuple[float, float]]) -> None:
    one, other = ({str(n): pair[side] for n, pair in enumerate(pairs)} for side in (0, 1))
    tasks = dict.fromkeys(one, "t")
    (forth, _), (back, _) = compare(one, other, tasks), compare(other, one, tasks)
    assert forth.gain == pytest.approx((-back.gain.value, -back.gain.high, -back.gain.low), abs=1e-9)


def test_what_the_gate_objects_to() -> None:
    tasks = {f"{task}{n}": task for task in "ab" for n in range(4)}
    before = dict.fromkeys(tasks, 0.5)
    better = {key: 0.9 if key[0] == "a" else 0.55 for key in tasks}
    worse_at_b = {key: 1.0 if key[0] == "a" else 0.4 for key in tasks}
    assert objections(compare(before, better, tasks), 0.0, 0.05) == []
    assert objections(compare(before, better, tasks), 0.1, 0.05) == ["its gain of +0.225 (+0.069 to +0.381) over 8 prompts is not above 0.1"]
    assert objections(compare(before, worse_at_b, tasks), -1.0, 0.05) == ["b falls from 0.500 to 0.400, more than 0.05"]
    # Equal is not better, whatever the bound on a decrease.
    assert len(objections(compare(before, before, tasks), 0.0, 1.0)) == 1
    with pytest.raises(ValueError, match="needs at least two prompts that both models answered, not 1"):
        compare({"a0": 1.0}, better, tasks)


class SkillConfig(StageConfig):
    """A model's skill at each task."""

    a: float = Field(0.5, description="Score of its answers to task a")
    b: float = Field(0.5, description="Score of its answers to task b")
    every: int = Field(1, description="It answers every so many prompts")


@stage(kind="model", version="1")
def skilled(config: SkillConfig, run: StageRun) -> None:
    """Write a model that consists of its skill."""
    (run.folder / "config.json").write_text(config.model_dump_json())


@stage(kind="evaluation", version="1")
def examined(model: Model, prompts: Prompts, config: StageConfig, run: StageRun) -> None:
    """Write one score for every prompt, or for some."""
    skill = SkillConfig.model_validate_json((model.path() / "config.json").read_text())
    rows = [row for row in prompts.read().to_pylist() if row["split"] == "heldout"]
    run.write_rows([{"task": "all", "metric": "score", "value": 0.0, "low": None, "high": None, "n": len(rows)}])
    scores = [{"id": row["id"], "name": "score", "value": getattr(skill, row["task"])} for row in rows[:: skill.every]]
    run.write_rows([*scores, *({**row, "name": "taste", "value": 9.0} for row in scores)], "scores")


def asked(store: Store, heldout: int = 5, train: int = 0, same: int = 0) -> Artifact:
    rows = [
        {"id": f"{task}{split}{n}", "task": task, "split": split, "messages": asking(f"{task} {split} {n if n >= same else 'same'}"),
         "tools": None, "reference": None, "verifier": None}
        for task in "ab" for split, count in (("heldout", heldout), ("train", train)) for n in range(count)
    ]  # fmt: skip
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def gated(store: Store, before: SkillConfig, after: SkillConfig, **config: object) -> Artifact:
    questions = asked(store)
    policy, candidate = (execute(skilled, one, {}, store) for one in (before, after))
    first, second = (execute(examined, StageConfig(), {"model": model, "prompts": questions}, store) for model in (policy, candidate))
    inputs = {"policy": policy, "candidate": candidate, "before": first, "after": second, "prompts": questions}
    return execute(gate, GateConfig(**config), inputs, store)  # type: ignore[arg-type]


def test_a_verdict_with_its_reason(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = gated(store, SkillConfig(), SkillConfig(a=0.7, b=0.6))
    assert made.manifest.metrics["verdict"] == "passed" and made.manifest.metrics["gain"] == pytest.approx(0.15)
    rows = {(row["task"], row["metric"]): row for row in made.read().to_pylist()}
    assert rows["a", "gain"]["value"] == pytest.approx(0.2) and rows["a", "gain"]["n"] == 5 and len(rows) == 9
    refused = gated(store, SkillConfig(), SkillConfig(a=0.9, b=0.4))
    assert refused.manifest.metrics["reason"].endswith("; b falls from 0.500 to 0.400, more than 0.05")
    assert refused.manifest.metrics["verdict"] == "refused"
    assert gated(store, SkillConfig(), SkillConfig(a=0.7), decision="person").manifest.metrics["verdict"] == "waits"
    # A missing score counts as 0: otherwise a candidate would pass by failing to answer where it is bad.
    dodging = gated(store, SkillConfig(), SkillConfig(a=0.6, b=0.6, every=2))
    assert dodging.manifest.metrics["gain"] == pytest.approx(0.6 * 5 / 10 - 0.5)
    questions, policy, other = asked(store), *(execute(skilled, SkillConfig(a=a), {}, store) for a in (0.1, 0.2))
    seen = execute(examined, StageConfig(), {"model": policy, "prompts": questions}, store)
    inputs = {"policy": policy, "candidate": other, "before": seen, "after": seen, "prompts": questions}
    with pytest.raises(PunaError, match="after, evaluation/.* is not an evaluation of model/"):
        execute(gate, GateConfig(), {**inputs, "after": seen}, store)


@stage(kind="evaluation", version="1")
def copied(gate: Evaluation, config: StageConfig, run: StageRun) -> None:
    """Write an evaluation that is not a gate."""
    run.write_rows(gate.read().to_pylist())


def test_an_approval_is_of_a_gate(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    made = gated(store, SkillConfig(), SkillConfig(a=0.4))
    said = execute(approval, ApprovalConfig(by="Ada", reason="its tone"), {"gate": made}, store)
    assert said.manifest.metrics == {"verdict": "passed", "reason": "approved by Ada: its tone"}
    assert execute(approval, ApprovalConfig(by="Ada", approved=False), {"gate": made}, store).manifest.metrics["verdict"] == "refused"
    with pytest.raises(PunaError, match="was made by copied; give the artifact of a round's gate"):
        execute(approval, ApprovalConfig(by="Ada"), {"gate": execute(copied, StageConfig(), {"gate": made}, store)}, store)


def test_slices_of_a_pool_are_disjoint_until_nothing_is_left(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    pool = asked(store, heldout=3, train=10, same=2)
    trained = {row["id"]: row for row in pool.read().to_pylist() if row["split"] == "train"}
    used: list[Artifact] = []
    sizes, left = [], []
    for number in range(4):
        made = execute(new_prompts, NewPromptsConfig(count=4, seed=number), {"pool": pool, "used": used or None}, store)
        assert all(trained[row["id"]] == row for row in made.read().to_pylist())
        used.append(made)
        sizes.append(made.rows())
        left.append(made.manifest.metrics["left"])
    # Ten for each task, two of which are one question under two ids.
    assert sizes == [8, 8, 2, 0] and left == [10, 2, 0, 0]
    ids = [row["id"] for made in used for row in made.read().to_pylist()]
    assert len(ids) == len(set(ids)) == 18
    aside = execute(new_prompts, NewPromptsConfig(count=2, split="heldout"), {"pool": pool}, store)
    assert {row["split"] for row in aside.read().to_pylist()} == {"heldout"} and aside.rows() == 4
