"""A round is due once people have judged enough."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from puna.flows.engine.rounds import Trigger, due, load_trigger, new_preferences, save_trigger
from puna.flows.prefect import deployments
from puna.flows.web import application
from puna.stages.contract import Preferences, StageConfig, StageRun, execute, stage
from puna.stages.conversations import asking
from puna.storage import Artifact, Store
from puna.storage.schemas import table_schema


class Nothing(StageConfig):
    """A configuration without fields."""


@stage(kind="model", version="1")
def taught(preferences: Preferences, config: Nothing, run: StageRun) -> None:
    """Write a model that learned from preferences."""
    (run.folder / "config.json").write_text("{}")


def judged(store: Store, count: int) -> Artifact:
    schema = table_schema("preferences").schema
    empty = dict.fromkeys(schema.names)
    rows = [
        {**empty, "id": f"{n:06d}", "prompt_id": "p", "task": "t", "split": "train", "messages": asking("?"), "chosen": "{}"} for n in range(count)
    ]
    made = store.import_table("preferences", pa.Table.from_pylist(rows, schema=schema))
    store.set_alias("judged@latest", made)
    return made


def test_the_forms_are_kept_up_to_date_after_an_unreadable_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Offering:
        ends = [OSError("a stale file handle"), KeyboardInterrupt()]

        def publish(self, crons: dict[str, str], served: object) -> None:
            pass

        def refresh(self) -> None:
            raise self.ends.pop(0)

    monkeypatch.setattr(deployments, "FRESH_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        deployments._offer(Offering(), None, {}, True)
    assert "forms could not be updated: a stale file handle" in capsys.readouterr().err


def test_a_round_is_due_once_for_so_many_that_no_policy_learned_from(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    assert due(store) is None and load_trigger(store) == Trigger() and new_preferences(store) == 0
    first = judged(store, 3)
    assert due(store) is None  # no request was made
    save_trigger(store, Trigger(3, "smollm2-135m"))
    name, asked = due(store) or ("", None)
    assert asked == Trigger(3, "smollm2-135m") and due(store) == (name, asked)
    save_trigger(store, Trigger(4))
    assert due(store) is None
    store.set_alias("policy@latest", execute(taught, Nothing(), {"preferences": first}, store))
    judged(store, 6)
    assert new_preferences(store) == 3 and due(store) is None
    judged(store, 7)
    assert new_preferences(store) == 4 and (due(store) or (name,))[0] != name


@pytest.mark.parametrize(("sent", "kept"), [("preferences=50&recipe=demo", Trigger(50)), ("preferences=&recipe=demo", Trigger(0))])
def test_the_page_of_rounds_sets_it(tmp_path: Path, sent: str, kept: Trigger) -> None:
    store = Store.open(tmp_path)
    client = TestClient(application(store, prefect=None, auth=""), follow_redirects=False)
    save_trigger(store, Trigger(7))
    assert client.post("/rounds/next", content=sent).status_code == 303 and load_trigger(store) == kept
    for wrong in ("preferences=many&recipe=demo", "preferences=5&recipe=nothing"):
        assert client.post("/rounds/next", content=wrong).status_code == 404 and load_trigger(store) == kept
