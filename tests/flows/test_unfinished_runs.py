"""How a start of `puna up` handles runs that the server still shows as unfinished."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelling, Running, State

from puna.flows.engine.launch import Request
from puna.flows.prefect import deployments
from puna.flows.prefect.deployment_sync import DeploymentSync
from puna.storage import Store, runs


class Server:
    """A stub of a server with unfinished runs; it records the states that it is given."""

    def __init__(self, unfinished: list[dict[str, Any]]) -> None:
        self.unfinished, self.states = unfinished, {}  # type: ignore[var-annotated]

    def insist(self, method: str, path: str, body: Any = None) -> Any:
        if path == "/flow_runs/filter":
            return [run for run in self.unfinished if run["id"] not in self.states]
        if path.endswith("/set_state"):
            self.states[path.split("/")[2]] = (body["state"]["type"], body["state"]["message"])
        return []


def run(identity: str, state: str, name: str | None, *tags: str) -> dict[str, Any]:
    return {"id": identity, "state_type": state, "labels": {"puna.run": name} if name else {}, "tags": list(tags)}


def test_a_start_ends_runs_without_a_process_and_begins_those_that_were_about_to_start(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for name, events in (("killed", []), ("done", [runs.event("finished")]), ("ended", [runs.event("stopped")])):
        for event in (runs.event("started", flow="curate"), *events):
            store.record(name, event)
    unfinished = [
        run("1", "RUNNING", "killed", "puna"), run("2", "RUNNING", "done", "puna"), run("3", "RUNNING", "ended", "puna"),
        run("4", "CANCELLING", "killed", "puna"), run("5", "PENDING", None, "puna"), run("6", "PENDING", None, "of somebody else"),
        run("7", "RUNNING", None, "puna"),
    ]  # fmt: skip
    server = Server(unfinished)
    offering = DeploymentSync(store, server, [], linked=True)  # type: ignore[arg-type]
    offering.publish({}, lambda title, deployment: None)
    assert not server.states  # a process that is about to report may still do so
    offering.publish({}, lambda title, deployment: None)
    assert {identity: state for identity, (state, _) in server.states.items()} == {
        "1": "CRASHED", "2": "COMPLETED", "3": "CANCELLED", "4": "CANCELLED", "5": "SCHEDULED",
    }  # fmt: skip
    assert "killed or out of memory" in server.states["1"][1]


def test_runs_that_another_process_serves_are_left_alone(tmp_path: Path) -> None:
    server = Server([run("5", "PENDING", None, "puna")])
    offering = DeploymentSync(Store.open(tmp_path), server, [], linked=False)  # type: ignore[arg-type]
    for _ in range(3):
        offering.publish({}, lambda title, deployment: None)
    assert not server.states


@pytest.mark.parametrize("state", [Cancelling(), Running()])
def test_a_run_that_is_cancelled_within_a_training_is_no_crash(monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    """A training run handles SIGTERM until its state is written, so Prefect alone cannot tell a cancellation from a crash."""
    server = SimpleNamespace(read_flow_run=lambda id: SimpleNamespace(state=state))
    monkeypatch.setattr(deployments, "get_client", lambda sync_client: contextlib.nullcontext(server))
    monkeypatch.setattr(FlowRunContext, "get", lambda: SimpleNamespace(flow_run=SimpleNamespace(id="a", name="b")))

    def work() -> str:
        raise TerminationSignal(signal.SIGTERM)

    request = Request("stage:pretrain", None, (), ())
    if state.is_cancelling():
        assert deployments._run_work(request, work).is_cancelled()
    else:
        with pytest.raises(TerminationSignal):
            deployments._run_work(request, work)
