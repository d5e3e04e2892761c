"""`puna up`: one process with Prefect's server, the forms, and the runs that they start, on a new store."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from puna.flows.engine import launch
from puna.flows.server.client import Server, Unreachable, read_note, server_of
from puna.flows.web.serve import up
from puna.storage import Artifact, PunaError, Store

ROOT = Path(__file__).parents[2]
CONFIG = {"tasks": [{"task": "chain_sum"}], "train": 5, "heldout": 2}
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
OWN = '''
from puna.stages.contract import StageConfig, StageRun, stage


class GreetConfig(StageConfig):
    """A configuration without fields."""


@stage(kind="model")
def greet(config: GreetConfig, run: StageRun) -> None:
    """Write a file."""
    (run.folder / "config.json").write_text("{}")
'''


def until(what: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Return the first true value of `what`, which is polled."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.2)
    raise TimeoutError


class Up:
    """A running `puna up`, with requests over HTTP as a browser sends them."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder / "store")
        self.asked: dict[str, str] = {}
        environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}
        for name in [name for name in environment if name.startswith("PREFECT_")]:
            environment.pop(name)
        self._log = (folder / "log").open("w+")
        (folder / "greeting.py").write_text(OWN)
        words = [sys.executable, "-m", "puna.flows.cli.main", "up", "--port", "0", "--store", str(self.store.root), "--module", str(folder / "greeting.py")]
        self.process = subprocess.Popen(words, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        until(lambda: self.alive() and read_note(self.store.root))
        self.note = read_note(self.store.root) or {}
        self.server = Server(self.note["api"])
        until(lambda: self.alive() and "are published at" in self.said())

    def alive(self) -> bool:
        assert self.process.poll() is None, self.said()
        return True

    def said(self) -> str:
        return Path(self._log.name).read_text()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        for _ in range(20):
            try:
                return self.server.ask(method, path, body, timeout=60.0)
            except Unreachable:  # on SQLite a busy server asks clients to retry
                time.sleep(0.5)
        raise TimeoutError(path)

    def deployments(self) -> dict[str, Any]:
        return {found["entrypoint"].rpartition(".flow_")[2]: found for found in self.ask("POST", "/deployments/filter", {"limit": 200})}

    def start(self, name: str, **parameters: Any) -> str:
        """Return the id of a run started as a form does."""
        found = self.deployments()[name]
        asked = {"parameters": {**found["parameters"], **parameters}, "state": {"type": "SCHEDULED"}}
        made: str = self.ask("POST", f"/deployments/{found['id']}/create_flow_run", asked)["id"]
        return made

    def ended(self, run: str) -> dict[str, Any]:
        def asked() -> Any:
            found = self.ask("GET", f"/flow_runs/{run}")
            return found if found["state"]["type"] in ENDED else None

        found: dict[str, Any] = until(asked)
        return found

    def working(self) -> list[str]:
        return [name for name in self.store.runs() if self.store.log(name).state == "at work"]

    def of(self, what: str, run: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("POST", f"/{what}/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return found


@pytest.fixture(scope="module")
def at_work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Yield a running `puna up`, on a store with some prompts, and runs started by forms at once; each run is a process that imports
    everything it needs."""
    folder = tmp_path_factory.mktemp("up")
    (prompts,) = made_before(Store.open(folder / "store"))
    made = Up(folder)
    choices = made.deployments()["instructions"]["parameter_openapi_schema"]["properties"]["prompts"]["anyOf"][0]["enum"]
    picked = next(name for name in choices if name.startswith(prompts.id))
    made.asked = {
        "cached": made.start("prompts", config=CONFIG),
        "made": made.start("instructions", prompts=picked),
        "wrong": made.start("instructions", prompts="prompts/0123456789ab"),
        "own": made.start("greet"),
        "address": made.start("curate", inputs=["simplecache::http://127.0.0.1:9/pages.warc"]),
    }
    yield made
    if made.process.poll() is None:
        made.process.terminate()
        made.process.wait(120)


def made_before(store: Store) -> list[Artifact]:
    """Return the artifacts in the store before it is served."""
    request = launch.Request("stage:prompts", None, tuple(f"{name}={json.dumps(value)}" for name, value in CONFIG.items()), json=True)
    launch.run(request, store)
    return store.artifacts()


def test_forms_stand_in_the_order_of_the_pipeline_and_offer_what_there_is(at_work: Up) -> None:
    offered = at_work.deployments()
    ordered = sorted(offered, key=lambda name: offered[name]["name"])
    assert ordered[:5] == ["pipeline", "curate", "experiments", "pretrain", "align"]
    assert [name for name in ordered if offered[name]["name"].startswith("1.")][:2] == ["ingest", "extract"]
    assert offered["stage_pretrain"]["name"].endswith(" pretrain") and offered["stage_pretrain"]["tags"] == ["puna", "pretrain"]
    assert all(found["description"] and "puna" in found["tags"] for found in offered.values())
    form = offered["curate"]["parameter_openapi_schema"]["properties"]
    assert "demo" in form["recipe"]["anyOf"][0]["enum"] and offered["curate"]["parameters"]["recipe"] == "demo"
    # Fields in which nothing was picked are left out.
    assert {"title": "None", "type": "null"} in form["evaluations"]["anyOf"]
    assert all(one.get("type") != "null" for one in offered["extract"]["parameter_openapi_schema"]["properties"]["pages"]["anyOf"])
    # The recipe's value, not the stage's default.
    assert offered["tokenizer"]["parameters"]["config"]["vocab_size"] == 4096


def test_a_run_from_a_form_is_done_and_shows_what_it_made(at_work: Up) -> None:
    run = at_work.asked["made"]
    found = at_work.ended(run)
    assert found["state"]["type"] == "COMPLETED", found["state"]
    made = next(artifact for artifact in at_work.store.artifacts() if artifact.kind == "instructions")

    def told() -> dict[str, Any] | None:  # soon after the run's end
        found = {one["key"]: one for one in at_work.of("artifacts", run)}
        return found if {"instructions", "run-instructions"} <= found.keys() else None

    shown = until(told)
    assert f"{made.rows()} rows" in shown["instructions"]["description"] and made.id in shown["instructions"]["data"]
    assert "/puna/run/" in shown["run-instructions"]["data"]
    (step,) = until(lambda: at_work.of("task_runs", run))
    assert (step["name"], step["state"]["type"]) == ("instructions", "COMPLETED") and made.id in step["state"]["message"]
    assert shown["instructions"]["task_run_id"] == step["id"]

    # It soon appears on the forms that take instructions, under a name that the command line and the form accept.
    def offered() -> Any:
        choice = at_work.deployments()["sft"]["parameter_openapi_schema"]["properties"]["instructions"]
        return [name for form in choice.get("anyOf", []) for name in form.get("items", {}).get("enum", [])]

    assert until(offered)[0].startswith(f"{made.id} · instructions · ")


def test_a_stage_of_a_served_module_runs(at_work: Up) -> None:
    assert at_work.ended(at_work.asked["own"])["state"]["type"] == "COMPLETED"
    assert [artifact.kind for artifact in at_work.store.artifacts() if artifact.manifest.stage == "greet"] == ["model"]


def test_an_address_in_a_form_of_prefect_is_refused(at_work: Up) -> None:
    ended = at_work.ended(at_work.asked["address"])
    assert ended["state"]["type"] == "FAILED" and "forms read only local paths" in ended["state"]["message"]


def test_what_is_there_already_is_cached(at_work: Up) -> None:
    assert at_work.ended(at_work.asked["cached"])["state"]["type"] == "COMPLETED"
    (step,) = until(lambda: at_work.of("task_runs", at_work.asked["cached"]))
    assert step["state"]["name"] == "Cached" and sum(artifact.kind == "prompts" for artifact in at_work.store.artifacts()) == 1


def test_a_run_on_the_command_line_shows_up_beside(at_work: Up) -> None:
    made_before(at_work.store)
    (run,) = at_work.ask("POST", "/flow_runs/filter", {"flow_runs": {"deployment_id": {"is_null_": True}}})
    assert run["state"]["type"] == "COMPLETED" and run["name"].startswith("prompts")
    assert [step["state"]["name"] for step in at_work.of("task_runs", run["id"])] == ["Cached"]
    assert run["labels"]["puna.run"] in at_work.store.runs()


def test_what_is_wrong_is_said_first_and_without_a_traceback(at_work: Up) -> None:
    offered = at_work.deployments()["prompts"]
    for config in ({**CONFIG, "heldout": -1}, {**CONFIG, "nonsense": 1}):
        asked = {"parameters": {**offered["parameters"], "config": config}, "state": {"type": "SCHEDULED"}}
        with pytest.raises(PunaError, match="(?i)409"):
            at_work.ask("POST", f"/deployments/{offered['id']}/create_flow_run", asked)
    run = at_work.asked["wrong"]
    state = at_work.ended(run)["state"]
    assert state["type"] == "FAILED" and state["message"].startswith("prompts/0123456789ab: no such artifact")
    lines = until(lambda: at_work.ask("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}}))
    assert not [line for line in lines if "Traceback" in line["message"]]


def test_a_worker_that_is_killed_comes_back_and_schedules_stay(at_work: Up) -> None:
    align = at_work.deployments()["align"]
    at_work.ask("POST", f"/deployments/{align['id']}/schedules", [{"schedule": {"cron": "0 3 * * *"}, "active": True}])
    untouched = at_work.deployments()["prompts"]["updated"]
    worker = next(child for child in psutil.Process(at_work.process.pid).children() if "--supervised" in child.cmdline())
    worker.kill()
    until(lambda: at_work.alive() and at_work.said().count("are published at") == 2)
    assert "killed by SIGKILL" in at_work.said()
    found = at_work.deployments()["align"]
    assert found["id"] == align["id"] and [one["schedule"]["cron"] for one in found["schedules"]] == ["0 3 * * *"]
    # Unchanged deployments are not sent again.
    assert at_work.deployments()["prompts"]["updated"] == untouched


def test_a_second_start_on_the_store_says_where_the_first_is(at_work: Up, capsys: pytest.CaptureFixture[str]) -> None:
    assert at_work.alive()  # otherwise this process would become the server
    up(at_work.store.uri, "127.0.0.1", 0, 1, "")
    assert f"at {at_work.note['url']}" in capsys.readouterr().out


def test_a_taken_port_and_an_open_door_are_refused_at_once(at_work: Up, tmp_path: Path) -> None:
    other = str(tmp_path / "store")
    with pytest.raises(PunaError, match="cannot be used .*choose another"):
        up(other, "127.0.0.1", int(at_work.note["url"].rpartition(":")[2]), 1, "")
    with pytest.raises(PunaError, match="set --auth USER:PASSWORD"):
        up(other, "0.0.0.0", 0, 1, "")
    assert not any(tmp_path.iterdir())
    for body in (b'"\\ud800"', b'{"limit": 1e999}'):
        sent = urllib.request.Request(at_work.note["url"] + "/api/deployments/filter", body, {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="422"):
            urllib.request.urlopen(sent, timeout=60)
    for path in ("/puna/start/prompts", "/api/deployments/filter"):
        sent = urllib.request.Request(at_work.note["url"] + path, b"{}", {"origin": "http://evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(sent, timeout=60)


def test_a_form_of_these_pages_starts_what_its_plan_shows(at_work: Up) -> None:
    def page(path: str, body: bytes | None = None) -> str:
        with urllib.request.urlopen(urllib.request.Request(at_work.note["url"] + path, body), timeout=60) as answer:
            return str(answer.read().decode())

    fields = {"set.tasks": json.dumps(CONFIG["tasks"]), "set.train": "2000000", "set.heldout": "2", "set.draws": "100000000"}
    token = re.findall(r'name="token" value="([^"]+)"', page("/puna/start/prompts"))[0]
    assert "1 run" in page("/puna/plan/prompts", urllib.parse.urlencode({**fields, "token": token}).encode())
    assert "draws" in page("/puna/plan/prompts", urllib.parse.urlencode({**fields, "set.draws": "-1", "token": token}).encode())
    started = page("/puna/start/prompts", urllib.parse.urlencode(fields).encode())
    assert "<title>prompts" in started  # the page shows the run whether or not it has started by now
    until(at_work.working)
    (run,) = at_work.ask("POST", "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}})
    assert run["parameters"]["config"]["train"] == 2_000_000


def test_ending_it_ends_its_runs_and_its_children(at_work: Up) -> None:
    assert at_work.working()
    below = psutil.Process(at_work.process.pid).children(recursive=True)
    at_work.process.send_signal(signal.SIGINT)
    assert at_work.process.wait(120) == 0
    assert not at_work.working()
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below)
    assert server_of(at_work.store) is None and "puna is down" in at_work.said()
