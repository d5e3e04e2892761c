"""`puna up`: one process with Prefect's server, the forms, and the runs that they start; on a store of the test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from puna.flows import launch
from puna.flows.server import Server, Unreachable, read_note, server_of
from puna.flows.up import up
from puna.storage import PunaError, Store

ROOT = Path(__file__).parents[2]
CONFIG = {"tasks": [{"task": "chain_sum"}], "train": 5, "heldout": 2}
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def until(what: Callable[[], Any], seconds: float = 240.0) -> Any:
    """The first true value of `what`, which is asked again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.2)
    raise TimeoutError


class Up:
    """A `puna up` at work, asked over HTTP as a browser does."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder / "store")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}
        for name in [name for name in environment if name.startswith("PREFECT_")]:
            environment.pop(name)
        self._log = (folder / "log").open("w+")
        words = [sys.executable, "-m", "puna.flows.cli", "up", "--port", "0", "--store", str(self.store.root)]
        self.process = subprocess.Popen(words, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        until(lambda: self.alive() and read_note(self.store.root))
        self.note = read_note(self.store.root) or {}
        self.server = Server(self.note["api"])
        until(lambda: self.alive() and "are offered at" in self.said())

    def alive(self) -> bool:
        assert self.process.poll() is None, self.said()
        return True

    def said(self) -> str:
        return Path(self._log.name).read_text()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        for _ in range(20):
            try:
                return self.server.ask(method, path, body, timeout=60.0)
            except Unreachable:  # on SQLite a busy server asks to be asked again
                time.sleep(0.5)
        raise TimeoutError(path)

    def deployments(self) -> dict[str, Any]:
        return {found["entrypoint"].rpartition(".flow_")[2]: found for found in self.ask("POST", "/deployments/filter", {"limit": 200})}

    def start(self, name: str, **parameters: Any) -> str:
        """The id of a run that is asked for as a form does."""
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

    def of(self, what: str, run: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("POST", f"/{what}/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return found


@pytest.fixture(scope="module")
def at_work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    made = Up(tmp_path_factory.mktemp("up"))
    yield made
    if made.process.poll() is None:
        made.process.terminate()
        made.process.wait(120)


def test_forms_stand_in_the_order_of_the_pipeline_and_offer_what_there_is(at_work: Up) -> None:
    offered = at_work.deployments()
    ordered = sorted(offered, key=lambda name: offered[name]["name"])
    assert ordered[:5] == ["pipeline", "curate", "experiments", "pretrain", "align"]
    assert [name for name in ordered if offered[name]["name"].startswith("1.")][:2] == ["ingest", "extract"]
    assert offered["stage_pretrain"]["name"].endswith(" pretrain") and offered["stage_pretrain"]["tags"] == ["puna", "pretrain"]
    assert all(found["description"] and "puna" in found["tags"] for found in offered.values())
    form = offered["curate"]["parameter_openapi_schema"]["properties"]
    assert "demo" in form["recipe"]["anyOf"][0]["enum"] and offered["curate"]["parameters"]["recipe"] == "demo"
    # What may be left out is left out where nothing was picked.
    assert {"title": "None", "type": "null"} in form["evaluations"]["anyOf"]
    assert all(one.get("type") != "null" for one in offered["extract"]["parameter_openapi_schema"]["properties"]["pages"]["anyOf"])
    # The recipe's value, not the stage's default.
    assert offered["tokenizer"]["parameters"]["config"]["vocab_size"] == 4096


def test_a_run_from_a_form_is_done_and_shows_what_it_made(at_work: Up) -> None:
    run = at_work.start("prompts", config=CONFIG)
    found = at_work.ended(run)
    assert found["state"]["type"] == "COMPLETED", found["state"]
    made = at_work.store.artifacts()
    assert [artifact.rows() for artifact in made] == [7]
    shown = {one["key"]: one for one in at_work.of("artifacts", run)}
    assert "7 rows" in shown["prompts"]["description"] and made[0].id in shown["prompts"]["data"] and "/puna/run/" in shown["run-prompts"]["data"]
    (step,) = until(lambda: at_work.of("task_runs", run))
    assert (step["name"], step["state"]["type"]) == ("prompts", "COMPLETED") and made[0].id in step["state"]["message"]
    assert shown["prompts"]["task_run_id"] == step["id"]
    again = at_work.start("prompts", config=CONFIG)
    assert at_work.ended(again)["state"]["type"] == "COMPLETED"
    (step,) = until(lambda: at_work.of("task_runs", again))
    assert step["state"]["name"] == "Cached" and len(at_work.store.artifacts()) == 1

    # It is on the forms that take prompts soon after, by a name that the command line and the form take.
    def offered() -> Any:
        choice = at_work.deployments()["decontaminate"]["parameter_openapi_schema"]["properties"]["prompts"]
        return [name for form in choice.get("anyOf", []) for name in form.get("items", {}).get("enum", [])]

    assert until(offered)[0].startswith(f"{made[0].id} · prompts · 7 rows · ")


def test_a_run_on_the_command_line_shows_up_beside_with_its_edges(at_work: Up) -> None:
    request = launch.Request("stage:prompts", None, tuple(f"{name}={json.dumps(value)}" for name, value in CONFIG.items()), json=True)
    for _ in range(2):  # the second one finds the artifact
        launch.run(request, at_work.store)
    prompts = next(artifact for artifact in at_work.store.artifacts() if artifact.kind == "prompts")
    launch.run(launch.Request("instructions", inputs=(prompts.id,), json=True), at_work.store)
    runs = at_work.ask("POST", "/flow_runs/filter", {"flow_runs": {"deployment_id": {"is_null_": True}}})
    assert {run["state"]["type"] for run in runs} == {"COMPLETED"} and len(runs) == 3
    again = next(run for run in runs if run["name"].startswith("prompts"))
    assert [step["state"]["name"] for step in at_work.of("task_runs", again["id"])] == ["Cached"]
    assert again["labels"]["puna.run"] in at_work.store.runs()


def test_what_is_wrong_is_said_first_and_without_a_traceback(at_work: Up) -> None:
    offered = at_work.deployments()["prompts"]
    for config in ({**CONFIG, "heldout": -1}, {**CONFIG, "nonsense": 1}):
        asked = {"parameters": {**offered["parameters"], "config": config}, "state": {"type": "SCHEDULED"}}
        with pytest.raises(PunaError, match="(?i)409"):
            at_work.ask("POST", f"/deployments/{offered['id']}/create_flow_run", asked)
    run = at_work.start("instructions", prompts="prompts/0123456789ab")
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
    until(lambda: at_work.alive() and at_work.said().count("are offered at") == 2)
    assert "killed by SIGKILL" in at_work.said()
    found = at_work.deployments()["align"]
    assert found["id"] == align["id"] and [one["schedule"]["cron"] for one in found["schedules"]] == ["0 3 * * *"]
    # What did not change was not sent again.
    assert at_work.deployments()["prompts"]["updated"] == untouched


def test_a_second_start_on_the_store_says_where_the_first_is(at_work: Up, capsys: pytest.CaptureFixture[str]) -> None:
    up(at_work.store, "127.0.0.1", 0, 1, "")
    assert f"at {at_work.note['url']}" in capsys.readouterr().out


def test_a_taken_port_and_an_open_door_are_refused_at_once(at_work: Up, tmp_path: Path) -> None:
    other = Store.open(tmp_path)
    with pytest.raises(PunaError, match="cannot be had .*choose another"):
        up(other, "127.0.0.1", int(at_work.note["url"].rpartition(":")[2]), 1, "")
    with pytest.raises(PunaError, match="set --auth USER:PASSWORD"):
        up(other, "0.0.0.0", 0, 1, "")


def test_ending_it_ends_its_runs_and_its_children(at_work: Up) -> None:
    run = at_work.start("prompts", config={**CONFIG, "train": 2_000_000, "draws": 100_000_000})
    until(lambda: [name for name in at_work.store.runs() if at_work.store.log(name).state == "at work"])
    below = psutil.Process(at_work.process.pid).children(recursive=True)
    at_work.process.send_signal(signal.SIGINT)
    assert at_work.process.wait(120) == 0
    assert not [name for name in at_work.store.runs() if at_work.store.log(name).state == "at work"]
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below)
    assert server_of(at_work.store) is None and "puna is down" in at_work.said() and run
