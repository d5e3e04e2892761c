"""Projects: each has its own aliases in one store; artifacts are shared."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from puna.storage import Artifact, Identity, PunaError, Store, catalog, database, maintenance, runs

TEXTS = {"news": 3, "law": 2, "default": 1}


def signals(store: Store, name: str, count: int) -> Artifact:
    return store.import_table("signals", pa.table({"id": [f"{name}{i}" for i in range(count)], "words": [len(name)] * count}))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store with three corpora, each `corpus@latest` of its project."""
    store = Store.open(tmp_path)
    for project, count in TEXTS.items():
        within = store.within(project)
        within.set_alias("corpus@latest", signals(within, project, count))
    return store


def test_each_project_has_its_own_alias_and_reaches_the_others_by_full_name(store: Store) -> None:
    for project, count in TEXTS.items():
        within = Store.existing(store.uri, project)
        assert within.project == project and within.resolve("corpus@latest").rows() == count
        assert {other: within.resolve(f"{other}/corpus@latest").rows() for other in TEXTS} == TEXTS
        others = {f"{other}/corpus@latest" for other in TEXTS if other != project}
        assert set(within.aliases()) == {"corpus@latest", *others}
        assert [within.resolve(a.id) for a in store.artifacts()] == store.artifacts()
    assert store.projects() == ["default", "law", "news"]
    # The files' locations are unchanged, so an older store is the default project.
    assert (store.root / "refs/corpus/latest.json").exists()
    assert not Path(store.root, "refs/news").exists()


def test_setting_an_alias_of_another_project_by_its_full_name_leaves_ones_own(store: Store) -> None:
    own = store.alias("corpus@latest")
    law = store.alias("law/corpus@latest")
    assert store.set_alias("news/corpus@latest", law) == "news/corpus@latest"
    assert store.within("news").alias("corpus@latest") == law and store.alias("corpus@latest") == own
    with pytest.raises(PunaError, match=r"news/corpus@latest: points to .*changed meanwhile"):
        store.set_alias("news/corpus@latest", own, expected=own.key)


def test_what_is_unknown_is_told_with_what_there_is(store: Store) -> None:
    with pytest.raises(PunaError, match=r"project newz: .* has no such project; it has default, law, news"):
        Store.existing(store.uri, "newz")
    with pytest.raises(PunaError, match=r"project newz: .*it has default, law, news"):
        store.resolve("newz/corpus@latest")
    with pytest.raises(PunaError, match=r"tokens@latest: no such alias in project news of"):
        store.resolve("news/tokens@latest")
    assert store.projects() == ["default", "law", "news"]


@pytest.mark.parametrize("name", ["a/b", "../x", ".accepted", "a b", "", "é", "a.b", "-a", "a" * 101])
def test_names_of_projects_are_checked(store: Store, name: str) -> None:
    with pytest.raises(PunaError, match=r"only letters, digits, - and _|no such alias"):
        store.set_alias(f"{name}/corpus@latest", store.artifacts()[0])
    if name:
        with pytest.raises(PunaError, match="only letters, digits, - and _"):
            store.within(name)
    assert store.projects() == ["default", "law", "news"]


def test_names_that_look_like_files_of_another_project_do_not_meet(store: Store) -> None:
    one, two = store.artifacts()[:2]
    store.set_alias("news@latest", one)
    store.within("news").set_alias("latest.json@x", two)
    store.within("refs").set_alias("refs@refs", two)
    assert store.alias("news@latest") == one
    assert store.alias("news/latest.json@x") == store.alias("refs/refs@refs") == two
    assert "refs/refs@refs" in store.aliases()


def test_numbers_count_in_each_project(store: Store) -> None:
    first, second, third = store.artifacts()
    news, law = store.within("news"), store.within("law")
    assert [news.set_alias("policy@round-1", first), law.set_alias("policy@round-1", second)] == ["policy@round-1"] * 2
    assert news.set_alias("policy@round-1", third) == "policy@round-2"
    assert store.set_alias("policy@round-1", third) == "policy@round-1"
    news.files.remove("refs/.projects/news/policy/round-2.json")
    assert news.set_alias("policy@round-2", first) == "policy@round-3" and law.set_alias("policy@round-2", first) == "policy@round-2"


def test_runs_of_two_projects_at_the_same_moment_take_the_same_numbers(store: Store) -> None:
    given = [signals(store, f"text{i}", 1) for i in range(12)]
    places = [store.within(("news", "law")[i % 2]) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        taken = list(pool.map(lambda place, one: place.set_alias("policy@round-1", one), places, given))
    assert sorted(taken[::2]) == sorted(taken[1::2]) == [f"policy@round-{n}" for n in range(1, 7)]
    assert [place.alias(name) for place, name in zip(places, taken, strict=True)] == given


def test_one_alias_moved_by_many_at_once_moves_from_each_expected_key_once(store: Store) -> None:
    news, before = store.within("news"), store.within("news").alias("corpus@latest").key
    given = [signals(store, f"text{i}", 1) for i in range(8)]

    def moved(one: Artifact) -> bool:
        try:
            news.set_alias("corpus@latest", one, expected=before)
        except PunaError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(moved, given))
    assert sum(won) == 1 and news.alias("corpus@latest") == given[won.index(True)]
    assert store.alias("corpus@latest").rows() == 1


def test_gc_keeps_and_verify_watches_the_aliases_of_all_projects(store: Store) -> None:
    loose = signals(store, "loose", 1)
    store.holding.release()
    (other,) = maintenance.collect(Store.open(store.uri, "law"), keep_runs=0, work_days=7, remove=False)
    assert other.place == loose.place
    assert store.within("news").lost_aliases() == []
    first = store.alias("news/corpus@latest")
    store.files.remove("refs/.projects/news/corpus/latest.json")
    said = f"news/corpus@latest: was set (to {first.id} at first) and is gone; the run or command that set it sets it again"
    assert store.lost_aliases() == store.within("law").lost_aliases() == [said]
    store.files.write("refs/.projects/law/corpus/latest.json", b"{}")
    assert ["law/corpus/latest.json: is damaged" in line for line in store.lost_aliases()] == [False, True]


def test_sql_knows_projects(store: Store) -> None:
    store.record("a", runs.event("started", flow="curate", project="news"))
    store.record("b", runs.event("started", flow="curate"))
    rows = catalog.query(store, "select alias, project from aliases order by all").to_pylist()
    assert [(row["alias"], row["project"]) for row in rows] == [
        ("corpus@latest", "default"), ("law/corpus@latest", "law"), ("news/corpus@latest", "news"),
    ]  # fmt: skip
    made = catalog.query(store, "select project, rows from artifacts").to_pylist()
    assert {row["project"]: row["rows"] for row in made} == TEXTS
    assert [row["project"] for row in catalog.query(store, "select project from runs order by run").to_pylist()] == ["news", "default"]
    law = store.within("law")
    for name, count in (("corpus@latest", 2), ("default/corpus@latest", 1), ("news/corpus@latest", 3)):
        assert catalog.query(law, f'select count(*) as n from "{name}"').to_pylist() == [{"n": count}]
        assert catalog.query(law, f"select count(*) as n from signals where artifact = key_of('{name}')").to_pylist() == [{"n": count}]
    assert catalog.query(store, 'select count(*) as n from "corpus@latest"').to_pylist() == [{"n": 1}]
    assert catalog.query(store, "select key_of('default/corpus@latest') as k").to_pylist() == [{"k": store.alias("corpus@latest").key}]


def test_the_views_file_is_one_for_all_projects(store: Store) -> None:
    assert database.write(store.within("news")) and not database.write(store)


def test_the_manifest_names_the_project_and_the_key_does_not(tmp_path: Path) -> None:
    made = {}
    for project in ("default", "news"):
        other = Store.open(tmp_path / project, project)
        identity = Identity("stage")
        with other.work(identity.key) as work:
            work.add("signals", pa.table({"id": ["a"], "words": [1]}), "p")
            made[project] = work.commit("signals", identity.key, identity)
    assert made["default"].key == made["news"].key and made["default"].data_digest == made["news"].data_digest
    texts = {project: json.loads((artifact.folder / "manifest.json").read_text()) for project, artifact in made.items()}
    assert {project: text["project"] for project, text in texts.items()} == {"default": "", "news": "news"}
    assert all(artifact.damage() == [] for artifact in made.values())
    assert all(artifact.manifest.contradictions() == [] for artifact in made.values())


def test_what_a_view_holds_lives_as_long_as_the_view(tmp_path: Path) -> None:
    whole = Store.open(tmp_path)
    made = signals(whole, "text", 1)
    view = whole.within("news").within("law")
    del whole
    gc.collect()
    assert maintenance.collect(Store.open(tmp_path), keep_runs=0, work_days=0, remove=True) == [] and view.find("signals", made.key) == made
    del view
    assert len(maintenance.collect(Store.open(tmp_path), keep_runs=0, work_days=0, remove=False)) == 1
