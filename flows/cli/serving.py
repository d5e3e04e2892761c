"""The commands that serve: `puna up`, `puna web`, `puna serve` and `puna annotate`."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from puna.flows.cli.inspect import ModuleOption, ProjectOption, StoreOption, import_modules
from puna.flows.engine.console import json_text
from puna.flows.engine.defaults import DEFAULT_STORE, MODULES, prepare
from puna.flows.server.client import end_with, from_environment, named_server
from puna.stages import plugins
from puna.storage import PunaError, Store

app = typer.Typer()
HostOption = Annotated[str, typer.Option(help="Address to listen on; if other machines can reach it, set --auth")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port")]
AuthOption = Annotated[str, typer.Option(metavar="USER:PASSWORD", envvar="PUNA_AUTH", help="Login that browsers must send")]
UrlsOption = Annotated[bool, typer.Option("--urls", help="Let forms name inputs by URL (http, s3, hf, …)")]
LimitOption = Annotated[int, typer.Option(min=1, help="Maximum number of parallel runs; a run uses every core")]


def _add_modules(modules: list[str] | None) -> None:
    """Import the modules of `--module`, and name them to the server's child processes (see `MODULES`)."""
    if import_modules(modules):
        os.environ[MODULES] = json.dumps([file or name for name, file in plugins.added_modules().items()])


@app.command()
def up(
    store: StoreOption = DEFAULT_STORE, host: HostOption = "127.0.0.1", port: PortOption = 4200, auth: AuthOption = "",
    limit: LimitOption = 2, urls: UrlsOption = False, modules: ModuleOption = None,
) -> None:  # fmt: skip
    """Start Prefect with its UI, the forms of all flows and stages, and Puna's own pages, at one address."""
    _add_modules(modules)
    from puna.flows.web import serve as serving

    serving.up(store, host, port, limit, auth, urls)


@app.command()
def web(
    store: StoreOption = DEFAULT_STORE, host: HostOption = "127.0.0.1", port: PortOption = 4300, auth: AuthOption = "",
    urls: UrlsOption = False, modules: ModuleOption = None,
) -> None:  # fmt: skip
    """Serve Puna's own pages without Prefect: runs, artifacts, documents, SQL queries."""
    _add_modules(modules)
    opened = Store.existing(store)
    from puna.flows.web import serve as serving

    serving.pages(opened, host, port, auth, urls)


@app.command()
def serve(
    store: StoreOption = DEFAULT_STORE,
    cron: Annotated[
        list[str] | None, typer.Option(metavar="[PROJECT/]NAME=CRON", help="Schedule of a flow or stage, in UTC: align='0 3 * * *'")
    ] = None,
    limit: LimitOption = 2,
    modules: ModuleOption = None,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Publish every flow and stage on the Prefect server at PREFECT_API_URL, and start the runs that the server schedules.

    The schedules of `--cron` replace those that an earlier `puna serve` set on the server. Schedules set in Prefect's UI stay."""
    _add_modules(modules)
    opened = Store.open(store)
    prepare(opened.root, terminal="WARNING")
    schedules: dict[str, str] = {}
    for text in cron or []:
        name, sign, schedule = text.partition("=")
        if not sign:
            raise PunaError(f"--cron {text}: write [PROJECT/]NAME=CRON, for example align='0 3 * * *'")
        schedules[name] = schedule
    if supervised:
        end_with(sys.stdin.buffer)
        server = from_environment()
    else:
        server = named_server()
    if server is None:
        raise PunaError("PREFECT_API_URL is not set: run `puna up`, which does not need it, or `prefect server start` and set it")
    from puna.flows.prefect.deployments import serve_all

    if supervised and (trouble := server.wait_until_ready(600.0)) is not None:
        raise PunaError(f"{server.url} does not answer: {trouble}")
    serve_all(opened, server, schedules, limit, supervised=supervised)


@app.command()
def annotate(
    answers: Annotated[str, typer.Argument(metavar="ANSWERS", help="Answers to judge: ID or NAME@VERSION; `puna run sample` makes some")],
    pairs: Annotated[int, typer.Option(min=1, help="Pairs per prompt")] = 1, host: HostOption = "127.0.0.1", port: PortOption = 8765,
    auth: AuthOption = "", store: StoreOption = DEFAULT_STORE, project: ProjectOption = None,
) -> None:  # fmt: skip
    """Judge pairs of answers in a browser, by keyboard; several people can judge, each under a name. Ctrl-C ends the server and saves."""
    from puna.flows.server.guard import check_auth
    from puna.flows.web import serve as serving
    from puna.flows.web.annotate import Desk, prompts_of
    from puna.stages.align.judgements import ALIAS

    check_auth(host, auth)
    opened = Store.existing(store, project)
    artifact = opened.check(opened.resolve(answers))
    desk = Desk(opened, artifact, prompts_of(opened, artifact), pairs)
    serving.judging(desk, host, port, auth)
    if desk.file.exists():
        result = desk.save()
        typer.echo(f"{result.rows():,} preferences: {result.id} is {opened.full_name(ALIAS)}; {json_text(result.manifest.metrics)}")
