"""Puna's flows and stages as Prefect flows, each with a form; and the process that runs them.

`puna serve` publishes these Prefect flows on a Prefect server. A form starts the same run as `puna run`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any
from uuid import UUID

import psutil
from prefect import Flow as PrefectFlow
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import CronSchedule
from prefect.context import FlowRunContext
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import FailedRun, TerminationSignal
from prefect.runner import Runner
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Failed
from pydantic import Field, ValidationError

from puna.flows.engine.declare import Flow, first_sentence
from puna.flows.engine.defaults import DEFAULT_RECIPE, DEFAULT_STORE, SERVED
from puna.flows.engine.inputs import check_address, reads_sample
from puna.flows.engine.launch import Request, changes_of, run_flow, run_stage
from puna.flows.engine.recipe import as_yaml
from puna.flows.engine.trace import add_served_modules
from puna.flows.prefect import task  # noqa: F401 - importing it makes sessions run steps as tasks
from puna.flows.prefect.deployment_sync import STOPPED, DeploymentSync
from puna.flows.prefect.forms import Offer, offers, reference_in
from puna.flows.server.client import Server
from puna.flows.server.reporter import MADE_UP
from puna.stages.contract import Stage
from puna.stages.contract.declaration import InputSpec
from puna.stages.executors import FORMS, PROCESSES
from puna.storage import PunaError, Store
from puna.storage.aliases import checked_project
from puna.storage.explain import flat

GRACE_SECONDS = 20.0
FRESH_SECONDS = 5.0  # seconds between updates of the forms from the store


def flow_of(offer: Offer) -> PrefectFlow[Any, Any]:
    """Return a flow or a stage as a Prefect flow with parameters that a form can show."""
    what = offer.what

    def run(**values: Any) -> Any:
        texts = tuple(text for spec in what.inputs for text in _texts(spec, values[spec.name]))
        how = {"executor": values["executor"], "project": values["project"]}
        if isinstance(what, Flow):
            request = Request(f"flow:{what.name}", reference_in(values["recipe"]), tuple(values["changes"]), texts, **how)
            return _run_work(request, lambda: run_flow(what, request, _open_store(values)))
        changes = changes_of(what, {path: as_yaml(value) for path, value in flat(values["config"].model_dump(mode="json")).items()})
        request = Request(f"stage:{what.name}", None, changes, texts, **how)
        return _run_work(request, lambda: run_stage(what, request, _open_store(values), values["config"]).id)

    inputs = [_input(spec, isinstance(what, Stage) and not spec.optional, reads_sample(what)) for spec in what.inputs]
    if isinstance(what, Flow):
        changes = "Fields to change: select.gopher_quality.min_words=60; line_dedup=null leaves a step out"
        recipe = "Recipe with the values of all steps; a YAML file must be on the machine that starts the runs"
        own = [_parameter("recipe", str, recipe, DEFAULT_RECIPE), *inputs, _parameter("changes", list[str], changes, [])]
    else:
        try:
            default: Any = what.config()
        except ValidationError:  # a required field, or a choice between fields
            default = inspect.Parameter.empty
        own = [*inputs, inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, annotation=what.config, default=default)]
    return _as_flow(offer.flow, run, what.doc, own)


def _texts(spec: InputSpec, value: str | list[str] | None) -> list[str]:
    texts = [value] if isinstance(value, str) else value or []
    if spec.kind == "external":
        return [text for text in texts if text.strip()]
    return [f"{spec.name}={reference_in(text)}" for text in texts]


def _open_store(values: Mapping[str, Any]) -> Store:
    """Open the store that a form names. Raise PunaError if forms may not use the address of the store or of the executor."""
    if values["store"] != os.environ.get(SERVED):
        check_address("store", values["store"])
    check_address("executor", values["executor"])
    return Store.open(values["store"])


def _run_work(request: Request, work: Callable[[], str]) -> Any:
    """Return the result of `work`, or a Prefect state: Failed, without a traceback, after a PunaError; Cancelled after a cancellation."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    try:
        return work()
    except PunaError as error:
        if run is not None and MADE_UP.fullmatch(run.name):  # refused before the run had a name
            with get_client(sync_client=True) as client:
                client.update_flow_run(run.id, name=request.title)
        get_run_logger().error(str(error))
        return Failed(message=str(error))
    except TerminationSignal:
        # Training handles the signal itself until its step ends, so Prefect would report the cancellation as a crash.
        if run is not None:
            with get_client(sync_client=True) as client:
                if (state := client.read_flow_run(run.id).state) is not None and state.is_cancelling():
                    return Cancelled(message=STOPPED)
        raise


def _input(spec: InputSpec, needed: bool, sample: bool) -> inspect.Parameter:
    kind: Any = list[str] if spec.many else str
    if spec.kind == "external":
        description = "Files or folders to read, [NAME=]URI each" + ("; none: the sample of real pages" if sample else "")
        return _parameter(spec.name, kind, description, [] if spec.many else "")
    return _parameter(spec.name, kind if needed else kind | None, f"Of kind {spec.kind}", inspect.Parameter.empty if needed else None)


def _parameter(name: str, kind: Any, about: str, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, Field(description=about)], default=default)


def _as_flow(name: str, run: Callable[..., Any], doc: str, parameters: list[inspect.Parameter]) -> PrefectFlow[Any, Any]:
    """Return `run` as the Prefect flow `name`, whose form has `parameters`, executor, store and project."""
    # A process that Prefect starts for a run imports the flow by this name.
    run.__module__, run.__name__ = "puna.flows.prefect.deployments", f"flow_{name}"
    run.__qualname__ = run.__name__
    parameters = [
        *parameters,
        _parameter("executor", str, f"Executor of the work: {FORMS}", PROCESSES),
        _parameter("store", str, "Store of the artifacts: a folder or s3:// URI", DEFAULT_STORE),
        _parameter("project", str, "Project of the store, whose aliases are read and set; empty: the recipe's project, else `default`", ""),
    ]
    # Prefect's forms take the parameters' descriptions from a docstring of this format.
    lines = [f"    {p.name}: {_description(p.annotation)}" for p in parameters]
    run.__doc__ = "\n".join([doc or name, "", "Args:", *lines])
    run.__signature__ = inspect.Signature(parameters, return_annotation=Any)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": Any}
    return PrefectFlow(run, name=name, description=doc, persist_result=False, result_serializer="json")


def _description(annotation: Any) -> str:
    """Return the description in an `Annotated[…, Field(description=…)]`, else the first sentence of the annotated class's docstring."""
    description = next((item.description for item in getattr(annotation, "__metadata__", ()) if getattr(item, "description", None)), None)
    return description or first_sentence(inspect.getdoc(annotation) or "")


add_served_modules()
OFFERS = {offer.flow: offer for offer in offers()}


def __getattr__(name: str) -> PrefectFlow[Any, Any]:
    """Return the Prefect flow of `flow_NAME`: the entry point of a process that Prefect starts for a run."""
    if not name.startswith("flow_") or (offer := OFFERS.get(name.removeprefix("flow_"))) is None:
        raise AttributeError(name)
    _hide_tracebacks()
    prefect_flow = globals()[name] = flow_of(offer)
    return prefect_flow


def _hide_tracebacks() -> None:
    """Hide Prefect's tracebacks of failed runs, whose state already carries a message, and of runs that a signal ended."""

    def plain(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], (FailedRun, KeyboardInterrupt)))

    for name in ("prefect.engine", "prefect.flow_runs"):
        logging.getLogger(name).addFilter(plain)
    hook = sys.excepthook
    sys.excepthook = lambda kind, *error: None if issubclass(kind, KeyboardInterrupt) else hook(kind, *error)


def serve_all(store: Store, server: Server, schedules: dict[str, str], limit: int, *, supervised: bool = False) -> None:
    """Publish every flow and stage on the Prefect server, with `store` as the default store; start the runs that the server schedules.
    `schedules`: cron expressions by `[PROJECT/]NAME`, in UTC. `limit`: maximum number of parallel runs. `supervised`: `puna up` started
    this process. Raise PunaError for an unknown NAME or a wrong cron expression."""
    for name in schedules:
        if "/" in name:
            checked_project(name.partition("/")[0])
    if unknown := sorted(name for name in schedules if name.rpartition("/")[2] not in OFFERS):
        raise PunaError(f"--cron {unknown[0]}: no such flow or stage; choose from {', '.join(OFFERS)}")
    crons = {name: _cron(name, text) for name, text in schedules.items()}
    offering = DeploymentSync(store, server, [(offer, flow_of(offer)) for offer in OFFERS.values()], linked=supervised)
    # Schedules and pauses that users set outlast this process.
    runner = _Runner(limit=limit, pause_on_shutdown=False)
    for name, text in schedules.items():
        print(f"{name}: scheduled at `{text}`, UTC")
    # Runs are ended with SIGINT, but background jobs of a script start with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    threading.Thread(target=_offer, args=(offering, runner, crons, supervised), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(runner.start())


class _Existing(RunnerDeployment):
    """A deployment that the server already has: applying it returns its id and sends nothing."""

    id: UUID

    async def aapply(self, *unused: Any, **settings: Any) -> UUID:
        return self.id


def _offer(offering: DeploymentSync, runner: Runner, crons: dict[str, str], supervised: bool) -> None:
    try:
        offering.publish(crons, lambda title, deployment: runner.add_deployment(_Existing(name=title, id=deployment)))
    except PunaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    ends = "" if supervised else "; Ctrl-C ends"
    print(f"{len(OFFERS)} flows and stages are published at {get_current_settings().ui_url}/deployments{ends}", flush=True)
    while True:
        time.sleep(FRESH_SECONDS)
        try:
            offering.refresh()
        except Exception as error:  # noqa: BLE001 - a file of the store may go while it is read; the next update looks again
            print(f"forms could not be updated: {error}", file=sys.stderr, flush=True)


class _Runner(Runner):
    """A Prefect runner that ends runs on SIGTERM as on Ctrl-C. Prefect's own runner kills them, and the server still shows them running."""

    def handle_sigterm(self, *args: Any, **kwargs: Any) -> None:
        """Interrupt the runs in progress, so that they report their end to the server; then end the runner."""
        runs = psutil.Process().children()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        # An ended process stays a zombie here, since only the runner waits for it.
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
        raise PunaError(f"--cron {name}={text}: is not a cron expression; for 3:00 every night write {name}='0 3 * * *'") from error
