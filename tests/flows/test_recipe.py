"""Recipes: every wrong field is named before anything runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from puna.flows import launch, pipeline
from puna.flows.launch import check_sources, is_artifact
from puna.flows.recipe import FLOWS, in_round, load, load_stages, overridden
from puna.stages.contract import External
from puna.storage import PunaError, Store


def test_the_demo_loads_and_its_seed_reaches_every_stage() -> None:
    recipe = load("demo", ["seed=7", "dpo.seed=3"])
    assert recipe.pretrain.seed == recipe.prompts.seed == 7 and recipe.dpo.seed == 3
    assert recipe.ppo is not None and recipe.quality is not None
    assert recipe.ppo.seed == recipe.quality.seed == 7


def test_a_name_is_a_flow_or_a_stage() -> None:
    assert not set(FLOWS) & set(load_stages())
    assert all(callable(getattr(pipeline, name)) for name in FLOWS)


@pytest.mark.parametrize(("what", "ran"), [("base", "flow base"), ("pretrain", "stage pretrain")])
def test_the_flow_of_the_base_model_and_its_stage_both_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, ran: str) -> None:
    found: list[str] = []
    monkeypatch.setattr(launch, "_run_stage", lambda stage, *_: found.append(f"stage {stage.name}"))
    monkeypatch.setattr(launch, "pages", lambda *_: found.append(f"flow {what}") or 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        launch.run(what, None, [], [], Store.open(tmp_path), 1, True)
    assert found == [ran]


def test_a_stage_that_is_left_out_stays_out() -> None:
    recipe = load("demo", ["seed=7", "ppo=null", "quality=null"])
    assert recipe.ppo is None and recipe.quality is None
    assert recipe.semantic_dedup is None and recipe.substring_dedup is None


def test_a_stage_that_is_off_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("demo", ["seed=7", "semantic_dedup={}", "substring_dedup.words=40"])
    assert recipe.semantic_dedup is not None and recipe.semantic_dedup.seed == 7
    ran: list[str] = []
    monkeypatch.setattr(pipeline, "check_inputs", lambda *_: None)
    monkeypatch.setattr(pipeline, "step", lambda stage, config, label=None, **inputs: ran.append(label or stage.name))
    pipeline.curate(load("demo"), [])
    plain, ran[:] = list(ran), []
    pipeline.curate(recipe, [])
    assert [name for name in ran if name not in plain] == ["semantic_dedup", "substring_dedup"]
    assert [name for name in ran if name in plain] == plain


def test_a_source_that_quality_learns_from_must_be_there(tmp_path: Path) -> None:
    page = tmp_path / "news.jsonl"
    page.write_text('{"text": "x"}\n')
    with pytest.raises(PunaError, match=r"positive_sources=\['wikipedia'\]: no input has such a name \(they are news\)"):
        check_sources(load("demo", []), External.resolve(str(page)))
    check_sources(load("demo", []), External.resolve(f"wikipedia={page}"))
    check_sources(load("demo", ["quality=null"]), External.resolve(str(page)))


def test_inputs_are_read_once_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "news.jsonl"
    page.write_text('{"text": "x"}\n')
    read: list[str] = []

    def resolve(text: str) -> list[External]:
        read.append(text)
        return original(text)

    def session(*_, **__):
        raise InterruptedError

    original = External.resolve
    monkeypatch.setattr(launch.External, "resolve", resolve)
    monkeypatch.setattr(launch, "session", session)
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError, match="positive_sources"):
        launch.run("curate", None, [], [str(page)], store, 1, False)
    with pytest.raises(InterruptedError):
        launch.run("curate", None, [], [f"wikipedia={page}"], store, 1, False)
    assert read == [str(page), f"wikipedia={page}"] and store.runs() == []


@pytest.mark.parametrize("text", ["documents/3f2a91", "3f2a", "policy@latest", "model/0123456789ab"])
def test_what_is_an_artifact(text: str) -> None:
    assert is_artifact(text)


@pytest.mark.parametrize("text", ["crawl/x.warc.gz", "news=/data/news", "/data/3f2a", "hf://datasets/a/b", "pages", "documents/notes"])
def test_what_is_a_file(text: str) -> None:
    assert not is_artifact(text)


def test_a_change_reaches_a_nested_field() -> None:
    assert load("demo", ["select.gopher_quality.min_words=60"]).select.gopher_quality.min_words == 60  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("select.gopher_quality.min_wrods=60", "select.gopher_quality.min_wrods: no such field; did you mean min_words"),
        ("pretrain.phases=[{stpes: 3}]", "pretrain.phases.0.stpes: no such field; did you mean steps"),
        ("url_filter.x=1", "url_filter.x: no such field; there are "),
        ("line_dedup.max_occurrences=0", "line_dedup.max_occurrences: .*greater than or equal to 1"),
        ("nosuchstage.x=1", "nosuchstage: no such field"),
        ("pretrain.seed=many", "pretrain.seed: .*integer"),
        ("line_dedup", "write FIELD=VALUE"),
        ("seed.deep=1", "seed is not a group"),
    ],
)
def test_a_wrong_change_is_named(change: str, message: str) -> None:
    with pytest.raises(PunaError, match=message):
        load("demo", [change])


def test_an_unknown_recipe_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(PunaError, match="recipes are .*demo"):
        load("nothing")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(PunaError, match="broken.yaml"):
        load(str(broken))


def test_values_are_yaml() -> None:
    values: dict = {"a": {"b": 1}}
    overridden(values, "a.c=[1, 2]")
    overridden(values, "d=null")
    assert values == {"a": {"b": 1, "c": [1, 2]}, "d": None}


def test_knowledge_types_may_be_left_out_of_curation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, dict] = {}

    def step(stage, config, /, *, label="", **inputs):
        steps[label or stage.name] = inputs
        return stage.name

    monkeypatch.setattr(pipeline, "step", step)
    monkeypatch.setattr(pipeline, "check_inputs", lambda *_: None)
    without = load("demo", ["domains=null", "quality=null"])
    assert pipeline.curate(without, []).domains is None
    assert "domains" not in steps and steps["select_model"]["signals"] == ["code_reasoning"]
    steps.clear()
    with pytest.raises(PunaError, match="domains: null is for the flow curate alone"):
        pipeline.base(without, [])
    assert steps == {}


def test_rounds_differ_in_their_seed_alone() -> None:
    first, second = (in_round(load("demo").sample, n) for n in (1, 2))
    assert first.seed != second.seed
    assert first.model_copy(update={"seed": 0}) == second.model_copy(update={"seed": 0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts: {tasks: [{task: chain_sum}]}\nminhash_dedpu: {bands: 3}", "minhash_dedpu: no such field; did you mean minhash_dedup"),
        ("rounds: 3", "prompts.tasks: is missing"),
        ("[a, b]", "is not a mapping of stages"),
        ("a: [1, 2", "expected ',' or ']'"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(PunaError, match=f"(?s)recipe {file}: .*{message}"):
        load(str(file))
