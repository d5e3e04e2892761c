"""The command `puna annotate`: a page on which people judge pairs of answers."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from puna.flows.cli.inspect import ProjectOption, StoreOption
from puna.flows.engine.defaults import DEFAULT_STORE
from puna.storage import PunaError, Store

app = typer.Typer()


@app.command()
def annotate(
    answers: Annotated[str, typer.Argument(metavar="ANSWERS", help="Answers to judge: ID or NAME@VERSION; `puna run sample` makes some")],
    pairs: Annotated[int, typer.Option(min=1, help="Most pairs of a prompt")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen at; beyond this machine only with --auth")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free")] = 8765,
    auth: Annotated[str, typer.Option(metavar="USER:PASSWORD", envvar="PUNA_AUTH", help="What a browser must say to get in")] = "",
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
) -> None:
    """Judge pairs of answers in a browser, keyboard first; several people can, each under their name. Ctrl-C ends it and saves."""
    import socket

    import uvicorn

    from puna.flows.server.guard import Bounded, OwnSite, Password, check_auth
    from puna.flows.web.annotate import LINKED, Desk, application, prompts_of
    from puna.stages.align.judgements import ALIAS

    check_auth(host, auth)
    opened = Store.existing(store).within(project)
    artifact = opened.checked(opened.resolve(answers))
    desk = Desk(opened, artifact, prompts_of(opened, artifact), pairs)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise PunaError(f"--port {port}: cannot listen at {host} ({error}); another program may use it, --port names another") from error
    typer.echo(f"{len(desk.order):,} pairs of {artifact.id}: http://{host}:{listening.getsockname()[1]}; Ctrl-C ends and saves")
    door = OwnSite(Password(Bounded(application(desk)), auth), protected=bool(auth), pages=LINKED, asking=None)
    config = uvicorn.Config(door, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])
    if desk.file.exists():
        result = desk.save()
        typer.echo(f"{result.rows():,} preferences: {result.id} is {opened.full_name(ALIAS)}; {json.dumps(result.manifest.metrics)}")
