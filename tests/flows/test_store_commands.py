"""The commands that inspect a store, on a small one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.cli.sql import _statements
from puna.flows.engine import cost
from puna.flows.engine.launch import target_named
from puna.flows.engine.plan import Expected, PlannedStep
from puna.storage import Identity, InputRecord, PunaError, Store, runs
from puna.storage.files import LocalFiles

RUNNER = CliRunner()
ID = "ab" * 16
AT = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "store")
    text = {"id": [ID], "url": ["https://x.org/a"], "fetched_at": [AT], "source": ["web"]}
    pages = store.import_table("pages", pa.table({**text, "content_type": ["text/html"], "charset": ["utf-8"], "body": [b"<p>"]}))
    documents = store.import_table("documents", pa.table({**text, "title": ["A [bold] title"], "text": ["five words of text here"]}))
    store.import_table("signals", pa.table({"id": [ID], "words": [5]}))
    for most in (1, 2):
        record = InputRecord("documents", "documents", documents.key, documents.data_digest, "import")
        identity = Identity("select", config={"words": {"most": most}}, inputs=[record])
        with store.work(identity.key) as work:
            dropped = {"id": [ID], "rule": ["words"], "value": [5.0], "threshold": [float(most)], "detail": pa.array([None], pa.string())}
            work.add("dropped", pa.table(dropped), "all")
            work.commit("documents", identity.key, identity, metrics={"kept": 0})
    store.record("first-run", runs.event("started", flow="curate", command="puna run curate --recipe clean", recipe="clean", commit="abc"))
    store.record("first-run", runs.Made("ingest", "import", "pages", pages.key, False, 1.0).event())
    return store


def run(store: Store, *words: str, code: int = 0) -> str:
    result = RUNNER.invoke(app, [words[0], "--store", str(store.root), *words[1:]])
    if isinstance(result.exception, PunaError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def objects(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def selected(store: Store) -> list[str]:
    return [a.id for a in store.artifacts() if a.manifest.stage == "select"]


def test_list_and_show(store: Store) -> None:
    listed = objects(run(store, "list", "--json"))
    assert [row["kind"] for row in listed] == ["pages", "documents", "signals", "documents", "documents"]
    assert [row["rows"] for row in objects(run(store, "list", "signals", "--json"))] == [{"signals": 1}]
    (told,) = objects(run(store, "list", "--runs", "--json"))
    told = {name: value for name, value in told.items() if name not in ("opened", "closed", "changes", "versions")}
    begun = {"flow": "curate", "recipe": "clean", "command": "puna run curate --recipe clean", "commit": "abc"}
    assert told == {"run": "first-run", "state": "crashed", "artifacts": 1, "reused": 0, "error": runs.CRASHED, "project": "default", **begun}
    assert "puna run curate --recipe clean" in run(store, "list", "--runs")
    assert listed[0]["id"] in run(store, "list")
    shown = json.loads(run(store, "show", selected(store)[0], "--json"))
    assert shown["config"] == {"words": {"most": 1}} and shown["metrics"] == {"characters": 0, "kept": 0}
    told = run(store, "show", selected(store)[0])
    for line in ("words.most +1", "documents +documents/[0-9a-f]{12} import", "dropped +1 rows: id, rule", r"dropped.parquet +[\d,]+ bytes", "kept +0"):
        assert re.search(rf"^  {line}", told, re.MULTILINE), line


def test_every_alias_of_an_artifact_is_listed(store: Store) -> None:
    store.set_alias("best@latest", store.resolve(selected(store)[0]))
    store.set_alias("best@first", store.resolve(selected(store)[0]))
    named = {row["id"]: row["aliases"] for row in objects(run(store, "list", "documents", "--json")) if row["aliases"]}
    assert named == {selected(store)[0]: ["best@first", "best@latest"]}
    assert "best@first, best@latest" in run(store, "list") and "best@first, best@latest" in run(store, "show", "best@first")


def test_lineage_goes_back_to_the_inputs(store: Store) -> None:
    rows = objects(run(store, "lineage", selected(store)[1], "--json"))
    assert [(row["depth"], row["stage"]) for row in rows] == [(0, "select"), (1, "import")]


def test_explain_names_the_field(store: Store) -> None:
    assert "config words.most: 1 → 2" in run(store, "explain", selected(store)[1])
    assert json.loads(run(store, "explain", selected(store)[1], "--json"))["changes"] == [
        {"what": "config", "name": "words.most", "before": 1, "now": 2}
    ]
    assert "the first artifact" in run(store, "explain", selected(store)[0])


def test_accepting_makes_an_old_artifact_stand_for_a_new_key(store: Store) -> None:
    old = store.resolve(selected(store)[0])
    identity = Identity("select", code_version="f" * 64, config=old.manifest.config, inputs=old.manifest.inputs)
    with store.work(identity.key) as work:
        new = work.commit("documents", identity.key, identity)
    run(store, "accept", old.id, new.id)
    assert store.accepted_key(new.key) == old.key
    with pytest.raises(PunaError, match="cannot be equivalent"):
        run(store, "accept", old.id, next(a.id for a in store.artifacts() if a.kind == "pages"))


STAGE = """
from puna.stages.contract import StageConfig, StageRun, stage

def {helper}(text):
    return text.upper()

class RenamedConfig(StageConfig):
    pass

@stage(kind="lists")
def renamed_stage(config: RenamedConfig, run: StageRun) -> None:
    '''Write nothing.'''
    {helper}("a")
    run.write_rows([dict(kind="word", entry="a", rule="b")])
"""
PERFORM = """
import sys
sys.path.insert(0, sys.argv[1])
from renamed_stage import renamed_stage, RenamedConfig
from puna.stages.contract.execute import perform
from puna.storage import Store
done = perform(renamed_stage, RenamedConfig(), {}, Store.open(sys.argv[1] + "/store"))
print(done.artifact.id, done.reused)
"""


def test_a_refactoring_is_accepted_before_anything_is_made_again(tmp_path: Path) -> None:
    def process(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def accept(name: str) -> list[str]:
        return ["-m", "puna.flows.cli.main", "accept", name, "--module", str(module), "--store", str(tmp_path / "store")]

    module = tmp_path / "renamed_stage.py"
    module.write_text(STAGE.format(helper="shout"))
    name, reused = process("-c", PERFORM, str(tmp_path)).split()
    assert reused == "False"
    refused = subprocess.run([sys.executable, *accept(name)], capture_output=True, text=True)
    assert refused.returncode != 0 and "is what the current code makes: there is nothing to declare" in refused.stderr
    module.write_text(STAGE.format(helper="loud"))
    message = process(*accept(name))
    assert "code renamed_stage.loud new" in message and "code renamed_stage.shout no longer reached" in message
    assert process("-c", PERFORM, str(tmp_path)).split() == [name, "True"]
    field = "most: int = Field(3, ge=1, description='A setting that the old code lacked')"
    module.write_text("from pydantic import Field\n" + STAGE.format(helper="loud").replace("pass", field))
    assert "config most: None → 3" in process(*accept(name))
    assert process("-c", PERFORM, str(tmp_path)).split() == [name, "True"]


def test_other_work_is_not_accepted(store: Store) -> None:
    with pytest.raises(PunaError, match=r"differ in more than code \(config words.most: 1 → 2\)"):
        run(store, "accept", *selected(store))


@pytest.mark.parametrize("name", [ID, ID[:6], "https://x.org/a"])
def test_why_tells_the_fate_of_a_document(store: Store, name: str) -> None:
    rows = objects(run(store, "why", name, "--json"))
    assert [row["verb"] for row in rows] == ["kept", "kept", "scored", "dropped", "dropped"]
    assert rows[3]["values"] == {"rule": "words", "value": 5.0, "threshold": 1.0}
    assert "dropped: rule=words, value=5, threshold=1" in run(store, "why", name)


def test_why_names_steps_and_what_was_not_scored(store: Store) -> None:
    signals = store.import_table("signals", pa.table({"id": [ID], "harm_hate": pa.array([None], pa.float64())}))
    made = next(artifact for artifact in store.artifacts() if artifact.manifest.stage == "select")
    assert not made.manifest.run and objects(run(store, "why", ID, "--json"))[4]["step"] == "select"
    identity = Identity("select", config={"words": {"most": 3}})
    with store.work(identity.key) as work:
        dropped = {"id": [ID], "rule": ["words"], "value": [5.0], "threshold": [3.0], "detail": pa.array([None], pa.string())}
        work.add("dropped", pa.table(dropped), "all")
        work.commit("documents", identity.key, identity, run="first-run")
    store.record("first-run", runs.Made("select_model", "select", "documents", identity.key, False, 1.0).event())
    rows = {row["artifact"]: row for row in objects(run(store, "why", ID, "--json"))}
    assert rows[signals.key]["what"] == "not scored" and (rows[identity.key]["stage"], rows[identity.key]["step"]) == ("select", "select_model")
    assert "select_model" in run(store, "why", ID)


def test_why_of_an_unknown_document(store: Store) -> None:
    with pytest.raises(PunaError, match="no page or document has this id or URL"):
        run(store, "why", "ffff")


def test_sql(store: Store) -> None:
    assert objects(run(store, "sql", "select rule, count(*) as n from dropped group by 1", "--json")) == [{"rule": "words", "n": 2}]
    assert "words" in run(store, "sql", "select rule, count(*) from dropped group by 1")
    with pytest.raises(PunaError, match="read-only"):
        run(store, "sql", "drop table artifacts")


def piped(store: Store, text: str, *words: str, code: int = 0) -> tuple[str, str]:
    result = RUNNER.invoke(app, ["sql", "--store", str(store.root), *words], input=text)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_sql_from_a_pipe(store: Store) -> None:
    out, err = piped(store, "select 40 +\n2 as answer;\nselec;\n.exit\nselect 7 as never;\n", code=1)
    assert "42" in out and "error: Parser Error" in err and "7" not in out


def test_ctrl_c_forgets_a_statement_and_keeps_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["select 'half", KeyboardInterrupt(), "select 1;", KeyboardInterrupt(), EOFError()])

    def typing(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typing)
    assert list(_statements(True)) == ["select 1;"]


@pytest.mark.parametrize("text", ["select 1 as a;\nselect 2\nas a", "select 1 as a; select 2 as a;", "select 1 as a;select 2 as a\n\n"])
def test_a_pipe_needs_no_last_semicolon(store: Store, text: str) -> None:
    assert objects(piped(store, text, "--json")[0]) == [{"a": 1}, {"a": 2}]


def test_columns_of_one_name_are_all_shown(store: Store) -> None:
    text = "select 1 as n, 2 as n, 3 as n_1, 4 as n"
    assert objects(run(store, "sql", text, "--json")) == [{"n": 1, "n_2": 2, "n_1": 3, "n_3": 4}]
    assert run(store, "sql", text).split() == ["n", "n_2", "n_1", "n_3", "1", "2", "3", "4"]


def test_a_misspelt_kind_is_an_error(store: Store) -> None:
    with pytest.raises(PunaError, match=r"'document' is not a kind of artifact; did you mean documents\? The kinds are pages, "):
        run(store, "list", "document")
    with pytest.raises(PunaError, match="did you mean signals"):
        run(store, "show", "signal/abcd")


def test_a_store_may_be_named_by_uri(store: Store) -> None:
    moved = store.root.rename(store.root.with_name("mein Speicher ü"))
    expected = RUNNER.invoke(app, ["list", "--json", "--store", str(moved)]).stdout
    assert len(objects(expected)) == 5
    for uri in (moved.as_uri(), f"file://{moved}"):
        assert RUNNER.invoke(app, ["list", "--json", "--store", uri]).stdout == expected


def test_verify_names_damage_and_sets_it_aside(store: Store) -> None:
    assert "5 artifacts, 0 damaged" in run(store, "verify")
    artifact = store.resolve(selected(store)[0])
    artifact.path("dropped.parquet").write_bytes(b"x")
    assert "dropped.parquet has 1 bytes" in run(store, "verify", "--quarantine", code=1)
    assert "4 artifacts, 0 damaged" in run(store, "verify")


def test_gc_says_before_it_removes(store: Store) -> None:
    store.holding.release()  # as if the process that made all this had ended
    before = objects(run(store, "gc", "--json"))
    assert len(before) == 4 and not any(row["removed"] for row in before)
    assert len(store.artifacts()) == 5
    run(store, "gc", "--yes")
    assert [a.kind for a in store.artifacts()] == ["pages"]


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["list", "--store", str(tmp_path / "none")])
    assert isinstance(result.exception, PunaError) and "not found" in str(result.exception)
    assert not (tmp_path / "none").exists()


def test_verify_names_an_alias_that_was_deleted(store: Store) -> None:
    artifact = store.artifacts()[0]
    for version in ("round-1", "latest"):
        store.set_alias(f"policy@{version}", artifact)
    store.set_alias("policy@latest", artifact)
    assert "0 damaged" in run(store, "verify")
    (store.root / "refs/policy/round-1.json").unlink()
    said = run(store, "verify", code=1)
    assert f"policy@round-1: was set (to {artifact.id} at first) and is gone" in said and "policy@latest" not in said
    store.set_alias("policy@round-1", artifact)
    assert "0 damaged" in run(store, "verify")
    (store.root / "refs/policy/latest.json").write_text("{}")
    assert "policy/latest.json: is damaged" in run(store, "verify", code=1)


def test_sums_are_numbers_and_odd_columns_are_shown(store: Store) -> None:
    rows = sum(artifact.rows() for artifact in store.artifacts())
    assert objects(run(store, "sql", "select sum(rows) as n, 1.5::decimal(4, 2) as d from artifacts", "--json")) == [{"n": rows, "d": 1.5}]
    unknown = "select 'nan'::double as n, ['inf'::double, 1.5] as l, {'x': '-inf'::double} as s"
    assert objects(run(store, "sql", unknown, "--json")) == [{"n": None, "l": [None, 1.5], "s": {"x": None}}]
    assert run(store, "sql", "select sum(rows) as n, '12:00'::time as t from artifacts").split() == ["n", "t", str(rows), "12:00:00"]
    assert run(store, "sql", "select 1 as \"b[/]c\"").split() == ["b[/]c", "1"]
    with pytest.raises(PunaError, match="a value cannot be shown; cast its column to varchar"):
        run(store, "sql", "select 'infinity'::timestamp as t")


@pytest.mark.parametrize("text", ["select 1 as a -- a comment", "select 1 as a; -- a comment", "select 1 as a;\n"])
def test_a_comment_may_end_the_query_of_a_file(store: Store, tmp_path: Path, text: str) -> None:
    run(store, "sql", text, "-o", str(tmp_path / "rows.csv"))
    assert (tmp_path / "rows.csv").read_text() == "a\n1\n"


def test_aliases_with_capitals_are_views(store: Store) -> None:
    artifact = store.artifacts("documents")[0]
    store.set_alias("News@latest", artifact)
    count = f"{artifact.rows()}"
    assert run(store, "sql", 'select count(*) as n from "News@latest"').split() == ["n", count]
    store.set_alias("news@latest", artifact)  # SQL cannot tell the two apart, so neither is a view
    assert "News@latest" not in run(store, "sql", "show tables")
    assert run(store, "sql", "select count(*) as n from documents where artifact = key_of('news@latest')").split() == ["n", count]
    assert run(store, "sql", "--file").strip().endswith("puna.duckdb")


def test_results_that_cannot_be_written_are_one_error(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PunaError, match="export: .*file/out: .*(Not a directory|File exists)"):
        run(store, "export", store.artifacts("documents")[0].id, str(tmp_path / "file" / "out"))
    with pytest.raises(PunaError, match="--output .*: there is no folder .*missing"):  # before hours of evaluation
        run(store, "evaluate", "model@latest", "--tasks", "task.yaml", "--output", str(tmp_path / "missing" / "scores.json"))


def test_a_report_makes_no_store(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["report", "--store", str(tmp_path / "none")])
    assert isinstance(result.exception, PunaError) and "not found" in str(result.exception)
    assert not (tmp_path / "none").exists()


def test_a_run_whose_end_is_recorded_is_not_asked_whether_it_is_at_work(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(LocalFiles, "is_held", lambda files, name: asked.append(name) is None)
    for name, end in (("done", runs.event("finished")), ("wrong", runs.event("failed", error="x")), ("stopped", runs.event("stopped")), ("open", None)):
        for event in (runs.event("started", flow="curate"), *([end] if end else [])):
            store.record(name, event)
    assert [store.log(name).state for name in ("done", "wrong", "stopped", "open")] == ["finished", "failed", "stopped", "at work"]
    assert asked == ["run-open"]


@pytest.mark.parametrize("name", ["a" * 300, "ü" * 150, "a/b", "a@b", "a b", ""])
def test_a_name_that_cannot_be_an_alias_is_refused_before_the_run(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(PunaError, match="--as .*: a name has letters, digits, _, - and . only, and 200 bytes at most"):
        run(store, "run", "ingest", "--input", str(tmp_path), "--as", name)


def test_an_alias_too_long_for_a_file_is_refused(store: Store) -> None:
    with pytest.raises(PunaError, match="no such alias; one is .*200 bytes at most"):
        store.set_alias(f"{'a' * 300}@latest", store.artifacts()[0])


def test_a_number_that_json_lacks_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = PlannedStep("pii", "pii", "runs", "never ran", Expected(float("nan"), float("inf"), 1.0, 1.0))
    monkeypatch.setattr(cost, "steps_of", lambda request, place, *more: (target_named("stage:pii"), [planned]))
    told = json.loads(RUNNER.invoke(app, ["plan", "pii", "--json"]).stdout, parse_constant=lambda name: name)
    expected = {"seconds": None, "bytes": None, "memory": 1.0, "rows": 1.0}
    assert told["steps"][0]["expected"] == expected and told["expected"]["seconds"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sql", "select 1", "-o", "rows.csv", "--json"), "--json prints rows"),
        (("sql", "--file", "--json"), "--json prints rows"),
        (("list", "pages", "--runs"), "runs have no kind"),
        (("plan", "ingest", "--gpus", "2"), "--gpus 2: only pretraining and the stage sample are planned for GPUs, and ingest is neither"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(store: Store, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(PunaError, match=message):
        run(store, *words)
