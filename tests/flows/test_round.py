"""The flow `round` as state in the lineage: whether and when the alias moves, with stub training steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from puna.flows import align, rounds
from puna.flows import round as module
from puna.flows.engine import trace
from puna.flows.engine.cost import plan_flow
from puna.flows.engine.declare import FLOWS, Output, current_walk, step
from puna.flows.engine.launch import checked_inputs
from puna.flows.engine.perform import Performer
from puna.flows.engine.recipe import Recipe
from puna.flows.engine.rounds import History, settle
from puna.flows.engine.session import Session, session
from puna.flows.engine.trace import load
from puna.flows.report import write
from puna.flows.web import application
from puna.stages.align.gate import ApprovalConfig, approval
from puna.stages.contract import Answers, Model, Prompts, SeededConfig, StageRun, execute, stage
from puna.stages.conversations import answering, asking
from puna.storage import Artifact, PunaError, Store, maintenance
from puna.storage.schemas import table_schema

RECIPE = """
name: pretended
prompts: {tasks: [{task: chain_sum}], train: 1, heldout: 1}
new_prompts: {count: 3}
development: {count: 1}
"""


class PretendedConfig(SeededConfig):
    """The seed of the stub model."""


@stage(kind="model", version="1")
def pretended_model(config: PretendedConfig, run: StageRun) -> None:
    """Write a stub model: its skill, from 0 to 1."""
    (run.folder / "config.json").write_text(json.dumps({"skill": 0.1 + config.seed / 100}))


@stage(kind="answers", version="1")
def pretended_answers(model: Model, prompts: Prompts, config: PretendedConfig, run: StageRun) -> None:
    """Write one answer for each prompt."""
    run.write_rows(
        [
            {"id": f"{model.data_digest[:8]}{row['id']}", "prompt_id": row["id"], "sample": 0, "model": model.data_digest, "text": "",
             "tokens": [], "logprobs": [], "finished": True, "score": None, "gold": None, "detail": None}
            for row in prompts.read().to_pylist()
        ]
    )  # fmt: skip


@stage(kind="model", version="1")
def pretended_training(model: Model, answers: Answers, config: PretendedConfig, run: StageRun) -> None:
    """Raise the skill for each answer to a prompt, and lower it strongly for an answer to a prompt of the kind `bad`."""
    ids = answers.read()["prompt_id"].to_pylist()
    gain = sum(-0.2 if name.startswith("bad") else 0.01 for name in ids)
    skill = json.loads((model.path() / "config.json").read_text())["skill"] + gain
    (run.folder / "config.json").write_text(json.dumps({"skill": round(skill, 6), "of": sorted(ids), "seed": config.seed}))


@stage(kind="evaluation", version="1")
def pretended_examination(model: Model, prompts: Prompts, config: PretendedConfig, run: StageRun) -> None:
    """Score each held-out prompt with the skill, plus a little that depends on the prompt."""
    skill = json.loads((model.path() / "config.json").read_text())["skill"]
    rows = [row for row in prompts.read().to_pylist() if row["split"] == "heldout"]
    run.write_rows([{"task": "all", "metric": "score", "value": skill, "low": None, "high": None, "n": len(rows)}])
    run.write_rows([{"id": row["id"], "name": "score", "value": skill + n / 1000} for n, row in enumerate(rows)], "scores")


def one_round(number: int, before: rounds.State, tasks: Output, heldout: Output, **_: Any) -> rounds.State:
    """Return the state after a round: answers, training, evaluation."""
    answers = step(pretended_answers, number=number, model=before.policy, prompts=tasks)
    policy = step(pretended_training, number=number, model=before.policy, answers=answers)
    measured = step(pretended_examination, f"evaluate_round_{number}", field="evaluate", model=policy, prompts=heldout)
    return rounds.State(policy, before.other, before.instructions, before.preferences, measured)


def pretend(patch: Any) -> None:
    """Make the flow build its rounds from these stub steps."""
    trace.everything.cache_clear()
    patch.setattr(module, "one_round", one_round)
    patch.setattr(module, "evaluate", pretended_examination)


class World:
    """A store with a model and a pool of prompts, the recipe's file, and a method that runs the flow."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder / "store")
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE)

    def fire(self, *inputs: Artifact | str, changes: tuple[str, ...] = (), flow: str = "round") -> str:
        """Run the flow; return its message."""
        texts = tuple(item.id if isinstance(item, Artifact) else item for item in inputs)
        recipe = load(str(self.recipe), list(changes), flow)
        given = checked_inputs(FLOWS[flow], recipe, texts, self.store, quiet=True)
        with session(self.store, flow=flow, workers=1, json=True):
            Performer(recipe).walk(FLOWS[flow], given)
        return " | ".join(event["text"] for event in self.store.events(self.store.runs()[-1]) if event.get("event") == "said")

    def model(self, seed: int = 0) -> Artifact:
        return execute(pretended_model, PretendedConfig(seed=seed), {}, self.store)

    def pool(self, train: int, bad: int = 0) -> Artifact:
        named = [*(f"good{n:03d}" for n in range(train)), *(f"bad{n:03d}" for n in range(bad)), *(f"held{n}" for n in range(6))]
        rows = [
            {"id": name, "task": "t", "split": "heldout" if name.startswith("held") else "train", "messages": asking(name), "tools": None,
             "reference": None, "verifier": None}
            for name in named
        ]  # fmt: skip
        return self.store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))

    @property
    def policy(self) -> Artifact:
        return self.store.alias("policy@latest")

    def learned(self) -> list[str]:
        """Return the prompts that the policy's last round learned from."""
        found: list[str] = json.loads((self.policy.path() / "config.json").read_text())["of"]
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    pretend(monkeypatch)
    yield World(tmp_path)
    trace.everything.cache_clear()


def test_each_firing_is_another_round_until_nothing_is_left(world: World) -> None:
    model, pool = world.model(), world.pool(train=6)
    policies, learned = [model], []
    for number in (1, 2):
        said = world.fire(model, pool)
        assert said.startswith(f"round {number}: its candidate is the policy; its gain is +0.030")
        policies.append(world.policy)
        learned += world.learned()
        assert world.store.alias(f"policy@round-{number}").key == world.policy.key
    assert len(set(learned)) == len(learned) == 6 and all(name.startswith("good") for name in learned)
    assert len({policy.data_digest for policy in policies}) == 3
    history = History.of(world.store, model)
    assert history.roots == (model,) and history.policy == world.policy and history.number == 3
    assert sorted(name for made in history.prompts for name in made.read()["id"].to_pylist()) == sorted(learned)
    before = world.policy.key
    assert world.fire(model, pool) == "no unused prompts: the 2 earlier rounds used the whole pool; add prompts with --input pool=ID"
    assert world.policy.key == before and world.store.log(world.store.runs()[-1]).state == "finished"
    # More prompts, and no model given: it continues from the alias.
    assert world.fire("policy@latest", world.pool(train=8)).startswith("round 3: ")
    assert world.learned() == ["good006", "good007"]


def test_a_round_that_does_not_gain_is_refused_and_the_next_has_other_prompts(world: World) -> None:
    model = world.model()
    assert world.fire(model, world.pool(train=0, bad=3)).startswith("round 1: refused: the policy stays; its gain of -0.600")
    assert "policy@latest" not in world.store.aliases()
    mixed = world.pool(train=3, bad=3)
    assert world.fire(model, mixed).startswith("round 2: its candidate is the policy")
    assert all(name.startswith("good") for name in world.learned())
    # A rejected round is part of the history: its gate is kept, and its prompts count as used.
    assert not [g for g in maintenance.collect(world.store, keep_runs=0, work_days=0, remove=False) if "evaluation" in g.place and "gate" in g.reason]
    gates = [a for a in world.store.artifacts() if a.manifest.stage == "gate"]
    assert len(gates) == 2 and all(world.store.names()[gate.key] for gate in gates)


def test_several_rounds_of_one_run(world: World) -> None:
    said = world.fire(world.model(), world.pool(train=30), changes=("rounds_per_run=2",))
    page = write(world.store, world.store.runs()[-1], None).read_text(encoding="utf-8")
    assert "Gates of the rounds" in page and page.count("no task falls by more than 0.05") >= 2
    assert said.count("its candidate is the policy") == 2 and "round 2" in said
    assert json.loads((world.policy.path() / "config.json").read_text())["skill"] == pytest.approx(0.1 + 2 * 3 * 0.01)


def test_align_stops_at_the_first_later_round_that_gains_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [world.pool(train=3), world.pool(train=0, bad=2), world.pool(train=4)]
    monkeypatch.setattr(align, "one_round", one_round)
    for one in (align, rounds):
        monkeypatch.setattr(one, "evaluate", pretended_examination)
    monkeypatch.setattr(align, "controls", lambda *_, **__: [])
    monkeypatch.setattr(align, "new_prompts", lambda number: module._as_output(pools[number - 1]))
    changes = ("rounds=3", "controls=false", "sft_first=null", "sft_lora=null", "prompts.heldout=6")
    said = world.fire(world.model(), changes=changes, flow="align")
    assert said.startswith("stop: round 2 gains nothing: its gain of -0.340 ") and said.endswith("; the policy of round 1 is kept")
    aliases = world.store.aliases()
    assert aliases["policy@latest"] == aliases["policy@round-1"] and "policy@round-2" not in aliases
    assert "good002" in world.learned() and "bad000" not in world.learned()
    # The verdict is applied: the flow `round` continues with its next round.
    assert world.fire("policy@latest", world.pool(train=6)).startswith("round 2: its candidate is the policy")


@pytest.mark.parametrize(("reason", "said"), [
    ("four falls from 0.900 to 0.700, more than 0.05", "is refused"),
    ("its gain of +0.010 (-0.020 to +0.040) over 450 prompts is not above 0; four falls from 0.900 to 0.700", "gains nothing"),
])  # fmt: skip
def test_only_a_gain_that_is_not_shown_is_called_nothing(reason: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Mock(spec=Artifact, key="0" * 64)
    gate.manifest.metrics = {"verdict": "refused", "reason": reason}
    monkeypatch.setattr(rounds, "step", lambda *_, **__: Output("evaluation", (), (gate,)))
    monkeypatch.setattr(rounds, "publish", lambda *_: None)
    assert rounds.stop_reason(2, Mock(), Mock(), Mock()) == f"{said}: {reason}"


def test_the_record_of_a_run_names_the_steps_that_a_step_used(world: World) -> None:
    model = world.model()
    world.fire(model, world.pool(train=20))
    made = {one.step: one for one in world.store.log(world.store.runs()[-1]).made}
    trained, (policy, answers) = made["pretended_training_1"], made["pretended_training_1"].inputs or ()
    assert policy == (model.id, "model", model.key) and answers == ("pretended_answers_1", "answers", made["pretended_answers_1"].key)
    assert ("pretended_training_1", "model", trained.key) in (made["gate_1"].inputs or ())


def preferred(store: Store, *ids: str) -> Artifact:
    rows = [
        {"id": name, "prompt_id": name, "task": "t", "split": "train", "messages": asking(name), "tools": None, "chosen": answering("a"),
         "rejected": answering("b"), "edited": None, "others": None, "level": "better", "margin": None, "chosen_model": None, "rejected_model": None}
        for name in ids
    ]  # fmt: skip
    return store.import_table("preferences", pa.Table.from_pylist(rows, schema=table_schema("preferences").schema))


def test_a_round_waits_for_preferences_and_learns_a_grown_set_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = world.model(), world.pool(train=20)
    given = []

    def noting(number: int, before: rounds.State, *more: Any, **named: Any) -> rounds.State:
        if current_walk().performs:
            given.append([item.id for output in before.preferences for item in output.items])
        return one_round(number, before, *more, **named)

    monkeypatch.setattr(module, "one_round", noting)
    two, three, grown = (preferred(world.store, *names) for names in (("p", "q"), ("r", "s", "t"), ("p", "q", "u")))
    wait = ("min_new_preferences=3",)
    assert world.fire(model, pool, two, changes=wait) == "waiting for preferences: 2 new of 3 needed; no round is run" and not given
    assert world.fire(model, pool, two, three, changes=wait).startswith("round 1: ")
    assert given.pop() == [two.id, three.id]
    assert module._preferences([two, three], []) == ((module._as_output(two), module._as_output(three)), 0)
    assert module._preferences([two, three], [module._as_output(grown)]) == ((module._as_output(three), module._as_output(grown)), 1)
    assert module._preferences([two], [module._as_output(two)]) == ((module._as_output(two),), 0)


def test_no_demonstration_or_judgement_is_of_a_held_out_prompt(world: World) -> None:
    model, pool = world.model(), world.pool(train=20)
    schema = table_schema("instructions").schema

    def taught(*turns: str, split: str = "train") -> Artifact:
        texts = json.dumps([{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)])
        row = dict.fromkeys(schema.names) | {"id": "i", "prompt_id": "p", "task": "t", "split": split, "source": "s", "messages": texts}
        return world.store.import_table("instructions", pa.Table.from_pylist([row], schema=schema))

    for given in (taught("held3", "yes"), taught("held0", "yes", "why?", "so"), preferred(world.store, "new", "held3")):
        with pytest.raises(PunaError, match=f"1 rows of {given.id} train on prompts that {pool.id} holds out"):
            world.fire(model, pool, given)
    assert world.fire(model, pool, taught("held3", "yes", split="heldout"), taught("good003", "yes")).startswith("round 1: ")


def test_a_plan_moves_nothing(world: World) -> None:
    """A plan changes nothing, even if a round was interrupted before its verdict was applied."""
    model, pool = world.model(), world.pool(train=6)
    world.fire(model, pool)
    (gate,) = [a for a in world.store.artifacts() if a.manifest.stage == "gate"]
    world.store.set_alias("policy@latest", model)
    world.store.set_alias(f"gate@{gate.key[:16]}", model)
    before = world.store.aliases()
    recipe = load(str(world.recipe), [], "round")
    assert [one.label for one in plan_flow(FLOWS["round"], recipe, [model.id, pool.id], world.store.uri)] == []
    world.store.set_alias(f"gate@{gate.key[:16]}", gate)
    steps = plan_flow(FLOWS["round"], recipe, [model.id, pool.id], world.store.uri)
    assert [one.state for one in steps if one.label in ("new_prompts_2", "evaluate_policy_2", "gate_2")] == ["runs", "reused", "after"]
    assert world.store.aliases() == {**before, f"gate@{gate.key[:16]}": gate.key}


def test_a_person_decides(world: World) -> None:
    model, pool = world.model(), world.pool(train=20)
    person = ("gate.decision=person",)
    assert world.fire(model, pool, changes=person).startswith("round 1: waits for an approval")
    assert world.fire(model, pool, changes=person).startswith("round 1: waits for an approval") and "policy@latest" not in world.store.aliases()
    (gate,) = [a for a in world.store.artifacts() if a.manifest.stage == "gate"]
    world.store.holding.release()  # the process has ended, and a person takes weeks
    maintenance.collect(Store.open(world.store.root), keep_runs=0, work_days=0, remove=True)
    pages = TestClient(application(world.store, prefect=None, auth=""), follow_redirects=False)
    assert "Round 1 waits for your decision" in pages.get("/rounds").text
    form = pages.get("/rounds").text.partition("waits for your decision")[2].partition("</form>")[0]
    first, *deciding = re.findall(r"<button([^>]*)>", form)
    assert " disabled" in first and [" disabled" in one for one in deciding] == [False, False]  # Enter in a field presses the first button
    for wrong in ("by=&verdict=approve", "by=Ada", "by=Ada&verdict=yes"):
        assert pages.post(f"/rounds/{gate.key[:16]}", content=wrong).status_code == 404
    assert pages.post(f"/rounds/{gate.key[:16]}", content="by=Ada&verdict=approve").status_code == 303
    first = world.policy  # at once
    shown = pages.get("/rounds").text
    # A page that was opened before the decision does not overturn it, and an unknown verdict is no refusal.
    late = pages.post(f"/rounds/{gate.key[:16]}", content="by=Bo&verdict=refuse")
    assert late.status_code == 404 and "does not wait for a decision: round 1: its candidate is the policy" in late.text
    assert pages.get("/rounds").text == shown and world.policy.key == first.key
    assert "approved by Ada" in shown and "score, mean over " in shown and " held-out prompts of " in shown
    assert world.fire(model, pool, changes=person).startswith("round 2: waits")
    second = next(a for a in world.store.artifacts() if a.manifest.stage == "gate" and a.key != gate.key)
    execute(approval, ApprovalConfig(by="Bo", approved=False, reason="worse"), {"gate": second}, world.store)
    assert world.fire(model, pool) == "round 2: refused: the policy stays; refused by Bo: worse"
    assert world.policy.key == first.key
    # After a manual return to an earlier policy, an earlier approval is not applied again by itself.
    world.store.set_alias("policy@latest", model)
    assert world.fire(model, pool).startswith("round 2: its candidate is the policy")


def test_an_alias_that_was_moved_meanwhile_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, pool = world.model(), world.model(seed=7), world.pool(train=6)

    def moving(*given: Any, **named: Any) -> rounds.State:
        found = one_round(*given, **named)
        if current_walk().performs:
            world.store.set_alias("policy@latest", other)
        return found

    monkeypatch.setattr(module, "one_round", moving)
    with pytest.raises(PunaError, match=r"round 1: policy@latest was moved to model/.* while it ran, and stays there"):
        world.fire(model, pool)
    assert world.policy.key == other.key
    with pytest.raises(PunaError, match=r"which does not descend from model/.*: leave the input out .* in its own project, --project NAME"):
        world.fire(model, pool)


STEPS = ("pretended_training_1", "settle", "settled")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the aliases after one round without interruption."""
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        world = World(tmp_path_factory.mktemp("whole"))
        world.fire(world.model(), world.pool(train=9))
        return world.store.aliases()


@pytest.mark.parametrize("at", STEPS)
def test_a_round_that_is_cut_short_goes_on_to_the_same_end(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Killed before the training, before the alias moves, and before the round is marked as settled."""
    inputs = world.model(), world.pool(train=9)
    with monkeypatch.context() as patch:
        if at in ("settle", "settled"):
            original = Store.set_alias

            def killed(self: Store, name: str, *given: Any, **named: Any) -> None:
                if name.startswith("policy" if at == "settle" else "gate"):
                    raise KeyboardInterrupt
                original(self, name, *given, **named)

            patch.setattr(Store, "set_alias", killed)
        else:
            performed = Session.perform

            def stopped(self: Session, stage: Any, config: Any, given: Any, step: str, sources: Any) -> Any:
                if step == at:
                    raise KeyboardInterrupt
                return performed(self, stage, config, given, step, sources)

            patch.setattr(Session, "perform", stopped)
        with pytest.raises(KeyboardInterrupt):
            world.fire(*inputs)
    assert world.fire(*inputs).startswith("round 1: its candidate is the policy")
    # The keys are those of the same work on the same contents.
    assert world.store.aliases() == undisturbed


def test_fired_again_while_it_is_at_work_it_is_one_round(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = world.model(), world.pool(train=40)
    said = []

    def fired_again(number: int, before: rounds.State, *given: Any, **named: Any) -> rounds.State:
        if current_walk().performs and not said:
            said.append("")  # a round of the second run would get here again
            with ThreadPoolExecutor(1) as another:
                said.append(another.submit(world.fire, model, pool).result())
        return one_round(number, before, *given, **named)

    monkeypatch.setattr(module, "one_round", fired_again)
    world.fire(model, pool)
    assert said == ["", "another run is working on a round in this store; this run does nothing"]
    assert len([a for a in world.store.artifacts() if a.manifest.stage == "gate"]) == 1
    assert [world.store.log(run).state for run in world.store.runs()] == ["finished", "finished"]


def test_settling_at_the_same_moment_moves_the_alias_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loss of a lock: two runs with the same round both apply its verdict, and a third model set in between stays."""
    model, pool = world.model(), world.pool(train=40)
    world.fire(model, pool)
    first = world.policy
    done = History.of(world.store, first).rounds[-1]
    world.store.set_alias("policy@latest", model)
    settle(world.store, done)
    settle(world.store, done)
    assert world.policy.key == first.key
    original, other = Store.set_alias, world.model(seed=9)

    def overtaken(self: Store, name: str, artifact: Artifact, expected: str | None = None) -> None:
        if name == "policy@latest" and expected is not None:
            original(self, name, other)
        original(self, name, artifact, expected)

    world.store.set_alias("policy@latest", model)
    monkeypatch.setattr(Store, "set_alias", overtaken)
    with pytest.raises(PunaError, match="it was changed meanwhile"):
        settle(world.store, done)
    assert world.policy.key == other.key


def test_without_verifiers_a_round_learns_from_the_preferences_that_it_is_given() -> None:
    recipe = Recipe("people", values={"prompts": {"tasks": [{"task": "chain_sum"}]}, "preferences": None, "chosen": {}})
    found = {one.label: one.inputs for one in trace.trace(trace.flow_named("round"), recipe).steps}
    assert "preferences_1" not in found
    for label in ("reward_model_1", "dpo_1", "chosen_1"):
        assert found[label]["preferences"] == ("input judged",)


def test_a_policy_of_another_lineage_takes_the_next_free_number_and_says_so(world: World) -> None:
    """A round's mark belongs to its gate: two first rounds have two gates, so both verdicts are applied."""
    model, other, pool = world.model(), world.model(seed=9), world.pool(train=6)
    world.fire(model, pool)
    first = world.policy
    world.store.set_alias("policy@latest", other)
    said = world.fire(other, pool)
    assert said.startswith("round 1: its candidate is the policy") and said.endswith("; policy@round-1 names another model, so this one is policy@round-2")
    assert [world.store.alias(f"policy@round-{n}").key for n in (1, 2)] == [first.key, world.policy.key]
    gates = [a for a in world.store.artifacts() if a.manifest.stage == "gate"]
    assert {alias: key for alias, key in world.store.aliases().items() if alias.startswith("gate@")} == {f"gate@{g.key[:16]}": g.key for g in gates}
    assert len(gates) == 2
