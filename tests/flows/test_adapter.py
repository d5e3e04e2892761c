"""Stages as Prefect tasks and flows, on a server of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
from puna.flows.settings import prepare
from puna.storage import Store
store = Store.open(sys.argv[1])
prepare(store.root)
from prefect import flow
from prefect.client.orchestration import get_client
from puna.flows.adapter import flow_of, step
from puna.flows.recipe import load_stages
from puna.flows.session import session
load_stages()
from puna.stages.align.prompts import PromptsConfig, prompts
config = PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2)

@flow(name="two", persist_result=False)
def two() -> list[str]:
    return [step(prompts, config).id, step(prompts, config, label="again").id]

with session(store, flow="two", workers=1, json=True) as now:
    ids = two()
    steps = [(name, outcome.reused) for name, outcome in now.outcomes]
alone = flow_of("prompts")(config=config, store=str(store.root))
with get_client(sync_client=True) as client:
    states = sorted((run.name, run.state.name) for run in client.read_task_runs())
    results = [run.state.data for run in client.read_task_runs()]
events = [e for e in store.events(now.run) if "key" in e]
print("RESULT", json.dumps({"ids": ids, "steps": steps, "alone": alone, "states": states, "events": events, "pickled": "ickle" in str(results)}))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    import json

    folder = tmp_path_factory.mktemp("prefect")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".pkg")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return {**json.loads(lines[0].removeprefix("RESULT ")), "folder": folder}


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
