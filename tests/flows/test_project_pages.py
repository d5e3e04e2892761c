"""Projects on the pages, in forms, and in runs that a server starts by itself."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from puna.flows.engine import trace
from puna.flows.engine.cost import steps_of
from puna.flows.engine.rounds import Trigger, due, load_trigger, save_trigger
from puna.flows.prefect import deployments
from puna.flows.prefect.deployment_sync import DeploymentSync
from puna.flows.prefect.forms import Choices, offers
from puna.flows.web import application, forms
from puna.flows.web.forms import request_of
from puna.storage import PunaError, Store, runs

from .test_round import World, pretend
from .test_trigger import judged
from .test_web import text


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store with different judged preferences in two projects, and a run of each."""
    store = Store.open(tmp_path)
    for project, count in (("default", 2), ("news", 3)):
        judged(store.within(project), count)
        store.record(f"run-of-{project}", runs.event("started", flow="curate", project=project))
    return store


@pytest.fixture
def client(store: Store) -> TestClient:
    return TestClient(application(store, prefect=None, auth=""), follow_redirects=False)


def test_lists_have_a_switch_between_projects(client: TestClient, store: Store) -> None:
    for path in ("/", "/artifacts", "/rounds", "/start", "/start/dpo"):
        links = re.findall(r'href="(/puna[^"]*\?project=news)"', client.get(path).text)
        assert links == [f"/puna{path}?project=news"]
    for project, shown, hidden in (("news", "3", "2"), ("default", "2", "3")):
        said = client.get(f"/?project={project}").text
        assert f"run-of-{project}" in said and said.count("/puna/run/run-of-") == 1
        listed = text(client.get(f"/artifacts?project={project}"))
        assert re.findall(r"preferences/\w+\s+import\s+(\d)", listed) == [shown] and hidden not in re.findall(r"import\s+(\d)", listed)
    assert {"judged@latest", "news/judged@latest"} <= set(text(client.get("/")).split())
    own = text(client.get("/?project=news")).split()
    assert "judged@latest" in own and "news/judged@latest" not in own
    for path in ("/", "/artifacts", "/rounds"):
        answer = client.get(f"{path}?project=newz")
        assert answer.status_code == 404 and "has no such project; it has default, news" in text(answer)


def test_a_store_with_one_project_shows_no_switch(tmp_path: Path) -> None:
    client = TestClient(application(Store.open(tmp_path), prefect=None, auth=""))
    assert not any("project=" in client.get(path).text for path in ("/", "/artifacts", "/start"))


def test_the_start_page_offers_the_aliases_of_the_project_and_asks_for_it(client: TestClient, store: Store) -> None:
    page = client.get("/start/dpo?project=news").text
    assert re.findall(r'<option value="([^"]*judged@latest)"', page) == ["default/judged@latest", "judged@latest"]
    assert 'name="project" value="news"' in page
    asked = {"project": [" news "], "preferences": ["judged@latest"]}
    for name in ("dpo", "round"):
        request = request_of(forms.offer_of(name), asked)
        assert request.project == "news" and "--project news" in request.command()
    assert request_of(forms.offer_of("round"), {}).project == ""
    with pytest.raises(PunaError, match="letters, digits"):
        steps_of(request_of(forms.offer_of("curate"), {"project": ["a/b"]}), store.uri)


def test_the_forms_of_a_server_ask_for_the_project_and_names_mean_the_same_in_each(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Choices(store, everywhere=True).of("preferences")[:2] == ["default/judged@latest", "news/judged@latest"]
    asked = []
    monkeypatch.setattr(deployments, "_run_work", lambda request, work: asked.append(request))
    for offer in (one for one in offers() if one.flow in ("curate", "prompts")):
        form = deployments.flow_of(offer)
        parameters = inspect.signature(form.fn).parameters
        assert parameters["project"].default == ""
        given = {name: None if p.default is inspect.Parameter.empty else p.default for name, p in parameters.items()}
        if "config" in given:
            given["config"] = offer.what.config.model_construct()  # type: ignore[union-attr]
        form.fn(**{**given, "project": "news"})
    assert [request.project for request in asked] == ["news", "news"]


class Server:
    """A stub of a server that records its requests."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []

    def insist(self, method: str, path: str, body: Any = None) -> Any:
        if method == "POST" and not path.endswith("/filter"):
            self.made.append((path, json.loads(json.dumps(body))))
            return {"id": f"{len(self.made):032x}", "version": "", "schedules": []}
        return []


def test_rounds_are_begun_and_scheduled_by_project(store: Store) -> None:
    save_trigger(store.within("news"), Trigger(3))
    assert load_trigger(store) == Trigger() and due(store) is None and (store.root / "rounds-news.json").exists()
    (once, _) = due(store.within("news")) or ("", None)
    save_trigger(store, Trigger(2))
    assert (due(store) or ("",))[0] != once
    server = Server()
    offered = [(offer, deployments.flow_of(offer)) for offer in offers() if offer.flow == "round"]
    offering = DeploymentSync(store, server, offered, linked=True)  # type: ignore[arg-type]
    offering.publish({"round": "0 3 * * *", "news/round": "0 4 * * *", "news/align": "0 5 * * *"}, lambda title, deployment: None)
    schedules = [body[0] for path, body in server.made if path.endswith("/schedules")]
    assert [(one["schedule"]["cron"], one["slug"], one.get("parameters")) for one in schedules] == [
        ("0 3 * * *", "puna-serve", None), ("0 4 * * *", "puna-serve-news", {"project": "news"}),
    ]  # fmt: skip
    server.made.clear()
    save_trigger(store.within("news"), Trigger(1))
    offering.refresh()
    begun = [body for path, body in server.made if path.endswith("/create_flow_run")]
    assert [body["parameters"]["project"] for body in begun] == ["default", "news"] and len({body["idempotency_key"] for body in begun}) == 2


def test_a_serve_without_a_cron_removes_its_earlier_schedule_and_no_other(store: Store) -> None:
    """The schedules of `--cron` are those of the last `puna serve`; people's schedules, and those of `puna up`, stay."""
    offered = [(offer, deployments.flow_of(offer)) for offer in offers() if offer.flow == "round"]
    there = [{"id": "own", "slug": "puna-serve"}, {"id": "news", "slug": "puna-serve-news"}, {"id": "ui", "slug": None}, {"id": "named", "slug": "night"}]

    class Scheduled(Server):
        def insist(self, method: str, path: str, body: Any = None) -> Any:
            if path == "/deployments/filter":
                entrypoint = "puna.flows.prefect.deployments.flow_round"
                return [{"id": "1" * 32, "name": offered[0][0].title, "entrypoint": entrypoint, "version": "", "schedules": there}]
            if method == "DELETE":
                self.made.append((path.rpartition("/")[2], None))
            return super().insist(method, path, body)

    for linked, gone in ((False, ["own", "news"]), (True, [])):
        server = Scheduled()
        DeploymentSync(store, server, offered, linked=linked).publish({}, lambda title, deployment: None)  # type: ignore[arg-type]
        assert [path for path, body in server.made if body is None] == gone


def test_the_page_of_rounds_decides_and_counts_in_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    world = World(tmp_path)
    whole, model, pool = world.store, world.model(), world.pool(train=20)
    pages = TestClient(application(whole, prefect=None, auth=""), follow_redirects=False)
    world.store = whole.within("news")
    assert world.fire(model, pool, changes=("gate.decision=person",)).startswith("round 1: waits for an approval")
    (gate,) = [artifact for artifact in whole.artifacts() if artifact.manifest.stage == "gate"]
    # Only the round of news is due.
    assert "Round 1 waits" in pages.get("/rounds?project=news").text and "Round 1 waits" not in pages.get("/rounds").text
    answer = pages.post(f"/rounds/{gate.key[:16]}", content="by=Ada&verdict=approve&project=news")
    assert answer.headers["location"] == "/puna/rounds?project=news"
    assert whole.alias("news/policy@latest") == whole.alias("news/policy@round-1") and "policy@latest" not in whole.aliases()
    assert pages.post("/rounds/next", content="preferences=5&recipe=demo&project=news").headers["location"] == "/puna/rounds?project=news#next"
    assert load_trigger(whole.within("news")) == Trigger(5) and load_trigger(whole) == Trigger()
    trace.everything.cache_clear()
