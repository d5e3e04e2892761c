"""A process that has imported everything and waits for the next run: what Prefect would start for each has seconds of imports before it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import Process, TaskStatus
from prefect.runner import _starter_engine
from prefect.settings import get_current_settings
from prefect.utilities.processutils import run_process, sanitize_subprocess_env

ENGINE = "prefect.engine"
"""The module that Prefect starts a process of for a run."""
WAITING = (sys.executable, "-m", "puna.flows.prefect.waiting", ENGINE, "prefect.flow_engine", "puna.flows.prefect.deployments")
PER_RUN = "PREFECT__"
"""What the names of variables begin with that are of one run; the process learns them with the run, all others when it begins."""


class Ready:
    """The one process that waits, as the side that starts it sees it; it takes the place of what Prefect calls to start a run.

    It takes a few hundred megabytes of memory. While runs are at work no new one is begun: its imports would slow them.
    """

    def __init__(self, heartbeat_seconds: float | None) -> None:
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        beat = {} if heartbeat_seconds is None else {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(int(heartbeat_seconds))}
        self._environment = _lasting(sanitize_subprocess_env({**os.environ, **settings, **beat}))
        self._waiting: Process | None = None
        self._at_work = 0
        _starter_engine.run_process = self.run  # type: ignore[attr-defined, assignment]

    async def prepare(self) -> None:
        """Begin the process where none waits and no run is at work."""
        if self._waiting is not None or self._at_work:
            return
        try:
            self._waiting = await anyio.open_process(WAITING, stdout=None, stderr=None, env=self._environment)
        except OSError as error:
            print(f"no process waits for the next run, which will begin some seconds later: {error}", file=sys.stderr, flush=True)

    async def run(
        self,
        command: list[str],
        *,
        task_status: TaskStatus[Any],
        task_status_handler: Callable[[Process], Any],
        env: dict[str, str],
        cwd: Any = None,
        **more: Any,
    ) -> None:
        """What Prefect's `run_process` does for a run, by the process that waits, if there is one that this run can have."""
        self._at_work += 1
        try:
            process = await self._handed(command, env, cwd)
            if process is None:
                await run_process(command, task_status=task_status, task_status_handler=task_status_handler, env=env, cwd=cwd, **more)
            else:
                task_status.started(task_status_handler(process))
                await _over(process)
        finally:
            self._at_work -= 1
        await self.prepare()

    async def _handed(self, command: list[str], env: dict[str, str], cwd: Any) -> Process | None:
        """The process that waited, with the run; None where there was none, or the run asks for something else."""
        process = self._waiting
        if process is None or command[1:] != ["-m", ENGINE] or _lasting(env) != self._environment:
            return None
        self._waiting = None
        if process.returncode is not None:
            return None
        own = {name: value for name, value in env.items() if name.startswith(PER_RUN)}
        assert process.stdin is not None
        try:
            await process.stdin.send(json.dumps({"env": own, "cwd": None if cwd is None else str(cwd)}).encode() + b"\n")
            await process.stdin.aclose()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):  # it is going
            await _over(process)
            return None
        return process


def _lasting(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(PER_RUN)}


async def _over(process: Process) -> None:
    """Wait for the end of a process, which does not outlive whoever waits."""
    try:
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with anyio.CancelScope(shield=True):
            await process.aclose()
