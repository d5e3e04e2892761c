"""A run and the server that shows it: the server gets every report while it answers, and the run never waits for it."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from puna.flows.engine import launch
from puna.flows.server.client import Server, Unreachable, read_note, server_of, write_note
from puna.flows.server.reporter import progress_text, slug
from puna.storage import PunaError, Store

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".pkg"), "PREFECT_API_URL": ""}
SET = ('tasks=[{"task":"chain_sum"}]', "train=5", "heldout=2")


class Recorded:
    """A stub of a server that records its requests; while `away` is set, it answers that it is busy."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.away = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "null")
                if outer.away and self.path != "/api/health":
                    self.send_response(503)
                    self.end_headers()
                    return
                outer.asked.append((self.command, self.path.removeprefix("/api"), body))
                data = json.dumps({"id": f"id-{len(outer.asked)}", "name": "calm-otter", "tags": ["mine"]}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = _answer

            def log_message(self, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/api"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def of(self, start: str) -> list[Any]:
        return [body for _, path, body in self.asked if path.startswith(start)]

    def ends(self) -> list[dict[str, Any]]:
        """Return the last state of the run's step and of the run; a step may end before the server learns of it."""
        told = [(path, body["state"]) for _, path, body in self.asked if isinstance(body, dict) and "state" in body]
        return [[state for path, state in told if path.startswith(kind)][-1] for kind in ("/task_runs/", "/flow_runs/")]


@pytest.fixture
def server() -> Iterator[Recorded]:
    made = Recorded()
    yield made
    made.http.shutdown()
    made.http.server_close()


def remembered(tmp_path: Path, url: str) -> Store:
    store = Store.open(tmp_path)
    write_note(store.root, {"url": url.removesuffix("/api"), "api": url, "auth": "", "pid": 1})
    return store


def test_a_store_remembers_its_server_and_nobody_else_reads_the_password(tmp_path: Path, server: Recorded) -> None:
    store = remembered(tmp_path, server.url)
    assert server_of(store) is not None and server_of(store).url == server.url
    assert (store.root / "serve.json").stat().st_mode & 0o077 == 0
    server.http.shutdown()
    server.http.server_close()
    assert server_of(store) is None and read_note(store.root) is not None


def test_a_server_of_this_machine_is_asked_past_the_proxy(server: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert Server(server.url).ask("GET", "/flows") == {"id": "id-1", "name": "calm-otter", "tags": ["mine"]}
    assert Server("http://prefect.invalid/api").trouble() and "Connection refused" in str(Server("http://prefect.invalid/api").trouble())


def test_a_run_is_told_step_by_step(tmp_path: Path, server: Recorded) -> None:
    store = remembered(tmp_path, server.url)
    launch.run(launch.Request("prompts", changes=SET, json=True), store)
    made = server.of("/flow_runs/")[0]
    assert made["name"].startswith("prompts · tasks=") and made["labels"] == {"puna.run": store.runs()[0]} and "prompts" in made["tags"]
    step = server.of("/task_runs/")[0]
    assert (step["name"], step["task_key"], step["task_inputs"]) == ("prompts", "prompts", {})
    assert [state["type"] for state in server.ends()] == ["COMPLETED", "COMPLETED"]
    assert any("7 rows" in one["description"] for one in server.of("/artifacts/"))  # on a busy machine, progress comes first


def test_a_full_disk_does_not_end_the_reports(tmp_path: Path, server: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.flows.server.reporter.write_bytes", Mock(side_effect=OSError("no space left on device")))
    store = remembered(tmp_path, server.url)
    launch.run(launch.Request("prompts", changes=SET, json=True), store)
    assert [state["type"] for state in server.ends()] == ["COMPLETED", "COMPLETED"]


def test_a_run_that_fails_says_why(tmp_path: Path, server: Recorded) -> None:
    store = remembered(tmp_path, server.url)
    with pytest.raises(PunaError, match="no_such"):
        launch.run(launch.Request("prompts", changes=('tasks=[{"task":"no_such"}]',), json=True), store)
    states = server.ends()
    assert [state["type"] for state in states] == ["FAILED", "FAILED"] and all("no_such" in state["message"] for state in states)


def test_a_run_is_that_of_the_form_which_started_it(tmp_path: Path, server: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "11111111-1111-1111-1111-111111111111")
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    launch.run(launch.Request("prompts", changes=SET, json=True), Store.open(tmp_path))
    patches = [body for method, path, body in server.asked if method == "PATCH" and path.endswith("1111")]
    assert set(patches[0]["tags"]) == {"mine", "puna", "prompts"} and patches[0]["name"].startswith("prompts")
    assert not [path for _, path, _ in server.asked if path.endswith("1111/set_state")]  # Prefect itself reports its end


def test_work_ends_at_once_when_the_server_is_gone(tmp_path: Path, server: Recorded) -> None:
    store = remembered(tmp_path, server.url)
    server.away = True
    launch.run(launch.Request("prompts", changes=SET, json=True), store)
    assert store.log(store.runs()[0]).state == "finished" and not server.of("/flow_runs/")


def test_a_server_that_comes_back_is_told_what_it_missed(tmp_path: Path, server: Recorded) -> None:
    from puna.flows.server.reporter import Reporter
    from puna.stages.contract import Outcome

    store = Store.open(tmp_path)
    server.away = True
    reporter = Reporter(store, "r", "prompts", server_of(remembered(tmp_path, server.url)))
    launch.run(launch.Request("prompts", changes=SET, json=True), Store.open(tmp_path / "other"))
    artifact = Store.open(tmp_path / "other").artifacts()[0]
    for label in ("first", "second"):
        step = reporter.start_step(label, "prompts", {"prompts": [artifact] if label == "second" else []})
        reporter.finish_step(step, Outcome(artifact, label == "second", 1.0))
    time.sleep(0.2)  # the reporter tries meanwhile, and fails
    server.away = False
    while reporter.flow_run is None:
        time.sleep(0.05)
    reporter.end("COMPLETED")
    steps = server.of("/task_runs/")
    created = [body for body in steps if "task_key" in body]
    assert [body["name"] for body in created] == ["first", "second"]
    assert created[1]["task_inputs"] == {"prompts": [{"input_type": "task_run", "id": created[0]["id"]}]}
    # For a step that has ended, the server learns only the end, at once.
    assert [(body["state"]["type"], body["state"]["name"]) for body in steps] == [("COMPLETED", None), ("COMPLETED", "Cached")]


def test_progress_says_how_far_and_how_long() -> None:
    assert progress_text((25.0, 100.0, "lines"), 10.0) == "25 % (25 of 100; lines), about 30 s left"
    assert progress_text((0.0, 100.0, ""), 10.0) == "0 % (0 of 100)" and slug("evaluate_round_1") == "evaluate-round-1"


def test_a_run_loads_no_prefect(tmp_path: Path, server: Recorded) -> None:
    remembered(tmp_path, server.url)
    words = ["puna", "run", "prompts", "--store", str(tmp_path), *(word for one in SET for word in ("--set", one))]
    code = f"import sys; sys.argv = {words!r}; from puna.flows.cli.main import app; app(standalone_mode=False); print('prefect' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.splitlines()[-1] == "False" and server.of("/flow_runs/")


def test_a_server_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    with pytest.raises(PunaError, match="no Prefect server answers there"):
        launch.run(launch.Request("prompts", changes=SET, json=True), Store.open(tmp_path))


def test_prefect_stays_out_of_the_other_rooms() -> None:
    code = "import sys, pkgutil, importlib, puna.stages\n" \
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(puna.stages.__path__, 'puna.stages.')]\n" \
        "print([m for m in ('prefect', 'torch', 'transformers', 'trl', 'fasttext', 'reasoning_gym', 'datasets') if m in sys.modules])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.strip() == "[]"


def test_half_an_answer_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as one:
                one.recv(4096)
                one.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Unreachable):
            Server(f"http://127.0.0.1:{listening.getsockname()[1]}").ask("GET", "/health")
