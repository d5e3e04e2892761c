"""Stages as Prefect tasks, flows and deployments, on a server of the test's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from puna.flows.settings import OFFLINE
from puna.storage import Store

SCRIPT = """
import json, sys, time
from pathlib import Path
from puna.flows.settings import prepare
from puna.storage import Store
store = Store.open(sys.argv[1])
prepare(store.root)
from prefect import flow
from prefect.client.orchestration import get_client
from puna.flows.adapter import flow_of, perform
from puna.flows.trace import load_stages
from puna.flows.session import session
load_stages()
from puna.stages.align.prompts import PromptsConfig, prompts
config = PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2)

@flow(name="two", persist_result=False)
def two() -> list[str]:
    return [perform(prompts, config, label, {}).id for label in ("prompts", "again")]

with session(store, flow="two", workers=1, json=True) as now:
    ids = two()
    steps = [(name, outcome.reused) for name, outcome in now.outcomes]
alone = flow_of("prompts")(config=config, store=str(store.root))
def ended():
    # The server learns of task runs by events, a little later.
    runs = client.read_task_runs()
    return runs if len(runs) >= 2 and all(run.state.is_final() for run in runs) else None
with get_client(sync_client=True) as client:
    for _ in range(600):
        if runs := ended():
            break
        time.sleep(0.1)
    states = sorted((run.name, run.state.name) for run in runs)
    results = [run.state.data for run in runs]
events = [e for e in store.events(now.run) if "key" in e]
print("RESULT", json.dumps({"ids": ids, "steps": steps, "alone": alone, "states": states, "events": events, "pickled": "ickle" in str(results)}))
"""


ROOT = Path(__file__).parents[2]
CONFIG = {"tasks": [{"task": "chain_sum"}], "train": 5, "heldout": 2}


def until(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first true value of `what`, which is asked again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.3)
    raise TimeoutError


class Server:
    """A Prefect server, asked over HTTP as its UI does."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        self.environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT / ".pkg"), "PREFECT_HOME": str(folder)}
        self.environment.pop("PREFECT_API_URL", None)
        self.log = (folder / "log").open("w")
        self.process = self.start("-m", "prefect", "server", "start", "--port", str(port), "--host", "127.0.0.1")
        self.environment["PREFECT_API_URL"] = self.url
        until(self.healthy, 240)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words], env=self.environment, stdout=self.log, stderr=subprocess.STDOUT)

    def healthy(self) -> bool:
        assert self.process.poll() is None, Path(self.log.name).read_text()
        try:
            return bool(self.ask("GET", "/health"))
        except OSError:
            return False

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        for wait in (0.5, 1.0, 2.0, 4.0, None):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read() or "null")
            except urllib.error.HTTPError as error:
                # On SQLite a busy server asks to be asked again, as Prefect's own client does.
                if error.code not in (500, 503) or wait is None:
                    raise
                time.sleep(wait)
        return None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.process.terminate()
    made.process.wait(60)
    made.log.close()


@pytest.fixture(scope="module")
def result(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("prefect")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, env=server.environment, timeout=240, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return {**json.loads(lines[0].removeprefix("RESULT ")), "folder": folder}


@pytest.fixture(scope="module")
def serving(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Store, subprocess.Popen[bytes]]]:
    """What `puna serve` offers, by name, its store and its process."""
    store = Store.open(tmp_path_factory.mktemp("served"))
    process = server.start("-m", "puna.flows.cli", "serve", "--store", str(store.root), "--cron", "align=0 3 * * *")

    def offered() -> dict[str, Any]:
        assert process.poll() is None
        found = {made["name"]: made for made in server.ask("POST", "/deployments/filter", {})}
        return found if "url_filter" in found else {}

    yield until(offered), store, process
    process.terminate()
    process.wait(60)


@pytest.fixture
def served(serving: tuple[dict[str, Any], Store, subprocess.Popen[bytes]]) -> tuple[dict[str, Any], Store]:
    """What is offered, by name, and the store."""
    return serving[:2]


def test_every_flow_and_stage_is_a_form(served: tuple[dict[str, Any], Store]) -> None:
    offered, store = served
    assert {"pipeline", "curate", "pretrain", "stage_pretrain", "align", "extract"} <= set(offered)
    assert [schedule["schedule"]["cron"] for schedule in offered["align"]["schedules"]] == ["0 3 * * *"]
    form = offered["heuristics"]["parameter_openapi_schema"]
    assert all(field.get("description") for name, field in form["properties"].items() if name != "config")
    assert set(form["required"]) == {"documents"} and "HeuristicsConfig" in form["definitions"]
    assert all(made["parameters"] == {"store": str(store.root)} for made in offered.values())


def test_a_run_that_is_asked_for_is_done(server: Server, served: tuple[dict[str, Any], Store]) -> None:
    offered, store = served
    states = []
    for config in (CONFIG, CONFIG, {**CONFIG, "tasks": [{"task": "no_such_task"}]}):
        asked = {"parameters": {"config": config}, "state": {"type": "SCHEDULED"}}
        run = server.ask("POST", f"/deployments/{offered['prompts']['id']}/create_flow_run", asked)["id"]

        def ended(run: str = run) -> Any:
            state = server.ask("GET", f"/flow_runs/{run}")["state"]
            return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED") else None

        states.append(until(ended))
    assert [state["type"] for state in states] == ["COMPLETED", "COMPLETED", "FAILED"]
    assert "no_such_task" in states[2]["message"]
    assert [artifact.rows() for artifact in store.artifacts()] == [7]
    assert [event["reused"] for run in store.runs() for event in store.events(run) if "key" in event] == [False, True]


def test_a_value_out_of_range_is_refused_before_a_run(server: Server, served: tuple[dict[str, Any], Store]) -> None:
    offered, _ = served
    asked = {"parameters": {"config": {**CONFIG, "heldout": -1}}, "state": {"type": "SCHEDULED"}}
    with pytest.raises(urllib.error.HTTPError, match="409"):
        server.ask("POST", f"/deployments/{offered['prompts']['id']}/create_flow_run", asked)


def test_a_supervisor_that_ends_the_serving_ends_its_runs(server: Server, serving: tuple[dict[str, Any], Store, subprocess.Popen[bytes]]) -> None:
    offered, store, process = serving
    asked = {"parameters": {"config": {**CONFIG, "train": 2_000_000}}, "state": {"type": "SCHEDULED"}}
    run = server.ask("POST", f"/deployments/{offered['prompts']['id']}/create_flow_run", asked)["id"]

    def at_work() -> list[str]:
        return [name for name in store.runs() if store.log(name).state == "at work"]

    until(at_work)
    below = psutil.Process(process.pid).children(recursive=True)
    assert below
    process.terminate()
    assert process.wait(60) == 0
    assert server.ask("GET", f"/flow_runs/{run}")["state"]["type"] == "CRASHED"
    assert at_work() == [] and not any(one.is_running() for one in below)


def test_a_run_without_a_server_loads_no_prefect(tmp_path: Path) -> None:
    config = [word for name, value in CONFIG.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    words = ["puna", "run", "prompts", "--store", str(tmp_path), *config]
    code = f"import sys; sys.argv = {words!r}; from puna.flows.cli import app; app(standalone_mode=False); print('prefect' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg"), "PREFECT_API_URL": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg"), "PREFECT_API_URL": "http://127.0.0.1:1/api"}
    words = [sys.executable, "-m", "puna.flows.cli", "serve", "--store", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and "no Prefect server answers there" in done.stderr and "Traceback" not in done.stderr


def test_a_second_task_finds_the_artifact_and_ends_cached(result: dict) -> None:
    assert result["steps"] == [["prompts", False], ["again", True]]
    assert result["ids"][0] == result["ids"][1] == result["alone"]
    assert ["again", "Cached"] in result["states"] and ["prompts", "Completed"] in result["states"]


def test_the_run_is_logged(result: dict) -> None:
    assert [(e["step"], e["reused"]) for e in result["events"]] == [("prompts", False), ("again", True)]


def test_nothing_is_pickled(result: dict) -> None:
    assert not result["pickled"]
    assert not list((result["folder"] / "prefect").rglob("storage/*"))


def test_prefect_stays_out_of_the_other_rooms() -> None:
    code = "import sys, pkgutil, importlib, puna.stages\n" \
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(puna.stages.__path__, 'puna.stages.')]\n" \
        "print([m for m in ('prefect', 'torch', 'transformers', 'trl', 'fasttext', 'reasoning_gym', 'datasets') if m in sys.modules])"  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".pkg")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
