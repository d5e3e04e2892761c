"""The process that waits for the next run, from the side that starts it: who gets it, and that a run begins without it, too."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import anyio
import pytest
from anyio.abc import Process

from puna.flows.prefect import ready

RUN = [sys.executable, "-m", "said"]


class Said:
    """What Prefect hands in to be told of the process."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def started(self, value: Any = None) -> None:
        self.processes.append(value)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A `Ready` whose runs are the module `said`, which tells its process, its run and whether it had waited; and its environment."""
    (tmp_path / "said.py").write_text(
        "import json, os, pathlib, sys\n"
        "if __name__ == '__main__':\n"
        "    told = {'pid': os.getpid(), 'run': os.environ['PREFECT__RUN'], 'waited': 'helper' in sys.modules}\n"
        "    (pathlib.Path(__file__).parent / os.environ['PREFECT__RUN']).write_text(json.dumps(told))\n"
    )
    (tmp_path / "helper.py").write_text("")
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(ready, "ENGINE", "said")
    monkeypatch.setattr(ready, "WAITING", (sys.executable, "-m", "puna.flows.prefect.waiting", "said", "helper"))
    monkeypatch.setattr(ready._starter_engine, "run_process", ready.run_process)
    one = ready.Ready(None)
    return one, tmp_path, one._environment


async def run(one: ready.Ready, folder: Any, environment: dict[str, str], name: str) -> dict[str, Any]:
    """What a run tells."""
    said = Said()
    await one.run(
        RUN, task_status=said, task_status_handler=lambda p: p, env={**environment, "PREFECT__RUN": name}, stream_output=False
    )  # fmt: skip
    (process,) = said.processes
    found: dict[str, Any] = json.loads((folder / name).read_text())
    assert found["pid"] == process.pid and found["run"] == name and process.returncode == 0
    return found


async def ended(one: ready.Ready) -> None:
    assert one._waiting is not None
    one._waiting.kill()
    await one._waiting.aclose()


def test_each_run_has_the_process_that_waited_and_the_next_one_begins_after_it(made):
    async def work() -> list[bool]:
        one, folder, environment = made
        await one.prepare()
        found = [(await run(one, folder, environment, name))["waited"] for name in ("a", "b")]
        await ended(one)
        return found

    assert anyio.run(work) == [True, True]


def test_a_run_begins_without_it_where_it_was_killed_or_has_other_settings(made):
    async def work() -> list[bool]:
        one, folder, environment = made
        await one.prepare()
        os.kill(one._waiting.pid, signal.SIGKILL)
        await one._waiting.wait()
        killed = await run(one, folder, environment, "a")
        other = await run(one, folder, {**environment, "PREFECT_LOGGING_LEVEL": "DEBUG"}, "b")
        kept = await run(one, folder, environment, "c")
        await ended(one)
        return [killed["waited"], other["waited"], kept["waited"]]

    assert anyio.run(work) == [False, False, True]


def test_no_new_one_is_begun_while_runs_are_at_work(made):
    async def work() -> None:
        one, *_ = made
        one._at_work = 1
        await one.prepare()
        assert one._waiting is None

    anyio.run(work)
