"""Every flow as a Prefect flow with JSON parameters: `pipeline`, `curate`, `pretrain`, …, and one per stage.

`puna serve` offers them to a Prefect server, and `puna run` calls them where there is one, so both do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import Annotated, Any

import psutil
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule
from prefect.runner import Runner
from prefect.settings import get_current_settings
from prefect.types.entrypoint import EntrypointType
from pydantic import Field

from puna.flows.adapter import as_flow, flow_of
from puna.flows.running import whole
from puna.flows.settings import DEFAULT_STORE
from puna.flows.trace import load_flows, load_stages
from puna.stages.contract.executors import FORMS, PROCESSES
from puna.storage import PunaError

GRACE_SECONDS = 20.0


def _whole(name: str) -> Flow[Any, Any]:
    """The flow `name` with parameters that a form can show."""

    def run(
        recipe: Annotated[str, Field(description="Name of a recipe, or a YAML file on the worker")] = "demo",
        changes: Annotated[list[str], Field(description="Changed fields, for example select.gopher_quality.min_words=60")] = [],  # noqa: B006
        inputs: Annotated[list[str], Field(description="Pages to read, [NAME=]URI, or artifacts; none: the sample, or NAME@latest")] = [],  # noqa: B006
        store: Annotated[str, Field(description="Folder of the artifacts")] = DEFAULT_STORE,
        executor: Annotated[str, Field(description=f"What the work runs on: {FORMS}")] = PROCESSES,
    ) -> str:
        return whole(name, recipe, changes, inputs, store, executor)

    return as_flow(name, run, load_flows()[name].doc)


WHOLE = {name: _whole(name) for name in load_flows()}
STAGES = {name: flow_of(name) for name in load_stages()}
SERVED = {flow.name: flow for flow in (*WHOLE.values(), *STAGES.values())}


def __getattr__(name: str) -> Flow[Any, Any]:
    """`flow_NAME` is the flow that is offered as NAME: how a process that Prefect starts for a run finds it."""
    if (found := SERVED.get(name.removeprefix("flow_"))) is None or not name.startswith("flow_"):
        raise AttributeError(name)
    return found


def serve_all(store: str, schedules: dict[str, str], limit: int) -> None:
    """Offer every flow and stage to the Prefect server, and run what is asked for on `store` until stopped.

    `schedules`: cron expressions by name, in UTC. `limit`: how many runs may be at work at once.
    """
    if unknown := sorted(set(schedules) - set(SERVED)):
        raise PunaError(f"--cron {unknown[0]}: there is no such flow or stage; they are {', '.join(SERVED)}")
    runner = _Runner(limit=limit)
    for name, flow in SERVED.items():
        deployment: Any = flow.to_deployment(
            name=name,
            tags=["flow" if name in WHOLE else "stage"],
            parameters={"store": store},
            cron=_cron(name, schedules[name]) if name in schedules else None,
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        runner.add_deployment(deployment)
    for name in schedules:
        print(f"{name}: every run of `{schedules[name]}`, UTC")
    print(f"{len(SERVED)} flows and stages of {store} are offered at {get_current_settings().ui_url}/deployments; Ctrl-C ends", flush=True)
    # A script's background jobs, and all that they start, ignore this signal; here it is how a run is ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(runner.start())


class _Runner(Runner):
    """Starts the runs that are asked for; ended by a supervisor's SIGTERM, it ends them as Ctrl-C does.

    Prefect's own kills them, and a server counts a run that was killed with its runner as running for ever.
    """

    def handle_sigterm(self, *args: Any, **kwargs: Any) -> None:
        """End the runs in progress, each of which tells the server, then the runner."""
        runs = psutil.Process().children()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        # They are left to the runner to be waited for.
        while any(_works(run) for run in runs) and time.monotonic() < deadline:
            time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)


def _works(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _cron(name: str, text: str) -> str:
    try:
        return CronSchedule(cron=text).cron
    except ValueError as error:
        raise PunaError(f"--cron {name}={text}: is no cron expression, for example {name}='0 3 * * *' for 3 every night") from error
