"""Projects in commands and flows: two corpora and two model lines in one store, each with separate aliases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from puna.flows import round
from puna.flows.cli.main import app
from puna.flows.engine import launch, trace
from puna.flows.engine import plan as planning
from puna.flows.engine.cost import steps_of
from puna.flows.engine.inputs import latest
from puna.flows.engine.trace import flow_named, load
from puna.stages.contract import Stage, StageConfig, identify
from puna.storage import Artifact, Identity, PunaError, Store, catalog

from .test_clean import prose
from .test_round import World, pretend

PLAIN = "base: clean\nminhash_dedup: null\nline_dedup: null\nselect: {gopher_repetition: null, divergence: null, ngram_coverage: null}\n"


def pages(folder: Path, name: str, count: int) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"url": f"https://{name}.org/{n}", "text": prose(n)}) + "\n" for n in range(count)))
    return file


def puna(*words: str) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a folder and store with three corpora: news by `--project`, law by its recipe, and one without a project."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "plain.yaml").write_text(PLAIN)
    (folder / "law.yaml").write_text(f"project: law\n{PLAIN}")
    store = str(folder / "store")
    columns = ("--columns", "text=text,url=url", "--workers", "1", "--json", "--store", store)
    puna("run", "curate", "--recipe", folder / "plain.yaml", "--input", pages(folder, "home", 1), *columns)
    puna("run", "curate", "--recipe", folder / "plain.yaml", "--input", pages(folder, "news", 4), *columns, "--project", "news")
    puna("run", "curate", "--recipe", folder / "law.yaml", "--input", pages(folder, "law", 2), *columns)
    return folder, store


def test_a_second_corpus_leaves_the_first_ones_alias(corpora: tuple[Path, str]) -> None:
    store = Store.open(corpora[1])
    rows = {alias: store.alias(alias).rows() for alias in store.aliases() if "documents@" in alias}
    assert rows == {"documents@latest": 1, "news/documents@latest": 4, "law/documents@latest": 2}
    logs = [store.log(run) for run in store.runs()]
    assert [log.project for log in logs] == ["default", "news", "law"] and "--project news" in logs[1].about["command"]
    made = {project: store.alias(f"{project}/documents@latest").manifest for project in ("default", "news", "law")}
    assert {project: manifest.project for project, manifest in made.items()} == {"default": "", "news": "news", "law": "law"}
    found = catalog.query(store, "select distinct project from artifacts order by 1").to_pylist()
    assert [row["project"] for row in found] == ["default", "law", "news"]


def test_a_plan_and_a_run_read_the_aliases_of_their_project(
    corpora: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, pretrain = Store.open(corpora[1]), flow_named("pretrain")
    read: list[Artifact] = []

    def identified(stage: Stage, config: StageConfig, given: dict[str, Any]) -> Identity:
        read.extend([given["documents"]] if stage.name == "split" else [])
        return identify(stage, config, given)

    monkeypatch.setattr(planning, "identify", identified)
    (corpora[0] / "law-model.yaml").write_text("base: demo\nproject: law\n")
    for number, (project, recipe) in enumerate((("default", "demo"), ("news", "demo"), ("law", str(corpora[0] / "law-model.yaml")))):
        within = store.within(project)
        within.set_alias("domains@latest", store.import_table("signals", pa.table({"id": [f"{number}"], "words": [number]})))
        _, steps = steps_of(launch.Request("pretrain", recipe, project="news" if project == "news" else ""), store.uri)
        assert read and all(item == within.alias("documents@latest") for item in read) and steps[0].label == "split"
        read.clear()
        latest(pretrain.inputs, within, quiet=False)
        called = "documents@latest" if project == "default" else f"{project}/documents@latest"
        assert f"input documents: {called}, {within.alias('documents@latest').id}" in capsys.readouterr().out


def test_a_stage_reads_and_sets_the_aliases_of_its_project(corpora: tuple[Path, str]) -> None:
    words = ("run", "language", "--input", "documents@latest", "--as", "tongues", "--workers", "1", "--store", corpora[1])
    said = {project: puna(*words, "--project", project) for project in ("news", "law")}
    store = Store.open(corpora[1])
    for project, text in said.items():
        signals = store.alias(f"{project}/tongues@latest")
        assert signals.manifest.inputs[0].key == store.alias(f"{project}/documents@latest").key
        assert f"{signals.id} is {project}/tongues@latest" in text
    assert "tongues@latest" not in store.aliases()
    # The same work in another project is reused: a project is part of no key.
    runs = len(store.runs())
    puna(*words[:3], store.alias("news/documents@latest").id, *words[4:], "--project", "sport")
    assert Store.open(corpora[1]).alias("sport/tongues@latest") == store.alias("news/tongues@latest")
    assert len(store.runs()) == runs + 1 and store.log(store.runs()[-1]).made[0].reused


@pytest.mark.parametrize("command", [["list"], ["run", "extract"], ["clean", "x", "-o", "out"], ["show", "documents@latest"]])
def test_an_empty_name_of_a_project_is_refused(command: list[str]) -> None:
    outcome = CliRunner().invoke(app, [*command, "--project", ""])
    assert outcome.exit_code and "a project's name has only letters, digits" in str(outcome.exception or outcome.output)



def test_lists_show_all_aliases_or_those_of_one_project(corpora: tuple[Path, str]) -> None:
    rows = [json.loads(line) for line in puna("list", "documents", "--json", "--store", corpora[1]).splitlines()]
    assert sorted(alias for row in rows for alias in row["aliases"] if "documents@" in alias) == ["documents@latest", "law/documents@latest", "news/documents@latest"]
    news = [json.loads(line) for line in puna("list", "documents", "--json", "--project", "news", "--store", corpora[1]).splitlines()]
    assert [alias for row in news for alias in row["aliases"] if "documents@" in alias] == ["documents@latest"]
    assert {row["key"] for row in news} < {row["key"] for row in rows}
    assert "news/documents@latest" in puna("list", "--store", corpora[1])
    assert json.loads(puna("list", "--runs", "--json", "--project", "law", "--store", corpora[1]).splitlines()[0])["project"] == "law"
    assert "law" in puna("list", "--runs", "--store", corpora[1])


def test_each_command_that_reads_an_alias_reads_that_of_the_project(corpora: tuple[Path, str], tmp_path: Path) -> None:
    key = Store.open(corpora[1]).alias("law/documents@latest").key
    place = ("--project", "law", "--store", corpora[1])
    assert json.loads(puna("show", "documents@latest", "--json", *place))["key"] == key
    assert json.loads(puna("lineage", "documents@latest", "--json", *place).splitlines()[0])["key"] == key
    assert json.loads(puna("explain", "documents@latest", "--json", *place))["id"] == f"documents/{key[:12]}"
    assert json.loads(puna("verify", "documents@latest", "--json", *place))["key"] == key
    assert json.loads(puna("sql", 'select distinct artifact from "documents@latest"', "--json", *place))["artifact"] == key
    puna("export", "documents@latest", tmp_path / "out", "--format", "jsonl", *place)
    assert sum(len(file.read_text().splitlines()) for file in (tmp_path / "out").rglob("*.jsonl")) == 2
    assert key[:12] in puna("near", corpora[0] / "plain.yaml", "documents@latest", *place)
    with pytest.raises(PunaError, match=f"documents/{key[:12]} is what the current code makes"):
        puna("accept", "documents@latest", *place)


@pytest.mark.parametrize("words", [("list",), ("list", "--runs"), ("show", "documents@latest"), ("verify", "x@latest"), ("sql", "select 1"), ("chat", "policy@latest"), ("plan", "pretrain"), ("run", "pretrain"), ("run", "tokenizer", "--input", "documents@latest")])
def test_a_typo_is_told_what_there_is_and_makes_no_project(corpora: tuple[Path, str], words: tuple[str, ...]) -> None:
    with pytest.raises(PunaError, match=r"project newz: .* has no such project; it has default, law, news"):
        puna(*words, "--project", "newz", "--store", corpora[1])
    assert "newz" not in Store.open(corpora[1]).projects()


def test_a_wrong_name_is_a_wrong_field_of_the_recipe() -> None:
    for wrong in ("a/b", '""', "[x]"):
        with pytest.raises(PunaError, match="a project's name has only letters, digits, - and _"):
            load("demo", [f"project={wrong}"], "curate")
    assert load("demo", flow="curate").project == "" and "project" not in load("demo", ["project=x"], "curate").values


def test_two_model_lines_count_their_rounds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    world = World(tmp_path)
    whole, model, pool = world.store, world.model(), world.pool(train=30)
    for project, number in (("news", 1), ("law", 1), ("news", 2)):
        world.store = whole.within(project)
        assert world.fire(model, pool).startswith(f"round {number}: its candidate is the policy")
    # The first rounds were the same work: the second project reuses it, and applies its result as well.
    gates = [artifact for artifact in whole.artifacts() if artifact.manifest.stage == "gate"]
    assert len(gates) == 2
    assert whole.alias("news/policy@round-1") == whole.alias("law/policy@round-1") == whole.alias("law/policy@latest")
    assert whole.alias("news/policy@round-2") == whole.alias("news/policy@latest") != whole.alias("law/policy@latest")
    assert whole.alias(f"law/gate@{gates[0].key[:16]}") == gates[0] and "policy@latest" not in whole.aliases()
    trace.everything.cache_clear()


def test_rounds_of_two_projects_are_made_at_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    world, said = World(tmp_path), []
    whole, model, pool = world.store, world.model(), world.pool(train=30)
    made = round.one_round

    def fired(*given: object, **named: object) -> object:
        if world.store.project == "news" and round.current_walk().performs:
            world.store = whole.within("law")
            said.append(world.fire(model, pool))
        return made(*given, **named)

    monkeypatch.setattr(round, "one_round", fired)
    world.store = whole.within("news")
    world.fire(model, pool)
    assert said[0].startswith("round 1: its candidate is the policy")
    assert whole.alias("law/policy@latest") == whole.alias("news/policy@latest")
    trace.everything.cache_clear()


def test_what_is_cleaned_or_imported_is_named_in_the_project(corpora: tuple[Path, str], tmp_path: Path) -> None:
    store = corpora[1]
    off = [word for name in ("minhash_dedup", "line_dedup", "select.gopher_repetition", "select.divergence", "select.ngram_coverage") for word in ("--set", f"{name}=null")]
    before = Store.open(store).aliases()
    puna("clean", pages(tmp_path, "own", 3), "-o", tmp_path / "out.jsonl", *off, "--workers", "1", "--project", "own", "--store", store)
    said = puna("import", "documents", tmp_path / "out.jsonl", "--as", "mine", "--project", "own", "--store", store)
    opened = Store.open(store)
    assert opened.alias("own/documents@latest").rows() == opened.alias("own/mine@latest").rows() == 3 and "is own/mine@latest" in said
    assert {alias: key for alias, key in opened.aliases().items() if not alias.startswith("own/")} == before
    assert 'project="own"' in opened.log(opened.runs()[-2]).about["command"]
