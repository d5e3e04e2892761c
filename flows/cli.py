"""The command line: `puna …`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from puna.flows import look, plan
from puna.flows.console import fail
from puna.flows.look import StoreOption
from puna.flows.settings import DEFAULT_STORE
from puna.stages.contract import did_you_mean
from puna.storage import PunaError, Store
from puna.storage.store import located

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Raw web pages to an aligned language model."
)
app.add_typer(look.app)
app.add_typer(plan.app)

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per artifact on standard output")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field, for example select.gopher_quality.min_words=60")
]
InputOption = Annotated[
    list[str] | None, typer.Option("--input", metavar="[NAME=]URI|ARTIFACT", help="Pages to read, or artifacts of a single stage")
]


@app.command()
def run(
    what: Annotated[str, typer.Argument(help="A flow (pipeline, curate, base, align) or a stage; `puna stages` lists them")],
    recipe: Annotated[
        str | None, typer.Option(help="Name of a recipe, or a YAML file (default: demo for a flow; a stage alone keeps its defaults)")
    ] = None,
    changes: SetOption = None,
    inputs: InputOption = None,
    store: StoreOption = DEFAULT_STORE,
    workers: Annotated[int | None, typer.Option(min=1, help="Local processes (default: one per core)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a flow or a single stage; what was made before is reused."""
    from puna.flows.settings import prepare

    opened = Store.open(store)
    prepare(opened.root)
    from puna.flows import launch

    launch.run(what, recipe, changes or [], inputs or [], opened, workers, as_json)


@app.command()
def stages() -> None:
    """List the stages: what they take and what they write."""
    from puna.flows.recipe import load_stages

    for stage in load_stages().values():
        taken = ", ".join(f"{'list of ' if s.many else ''}{s.kind}{'?' if s.optional else ''}" for s in stage.inputs)
        typer.echo(f"{stage.name:20s} {taken or 'nothing'} → {stage.kind}\n    {stage.doc.splitlines()[0]}")


@app.command()
def fields(stage: Annotated[str, typer.Argument(help="Name of a stage")]) -> None:
    """The configuration of a stage: every field with its default and meaning, as JSON schema."""
    from puna.flows.recipe import load_stages

    found = load_stages()
    if stage not in found:
        raise PunaError(f"{stage}: no such stage{did_you_mean(stage, found)}")
    typer.echo(json.dumps(found[stage].config.model_json_schema(), indent=1))


@app.command()
def sample(
    folder: Annotated[Path | None, typer.Argument(help="Where the WARC files go (default: sample in the store)")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
) -> None:
    """Fetch the sample of real pages: a few thousand documents, as WARC files."""
    from puna.flows.launch import make_sample, sample_folder

    made = make_sample(folder or sample_folder(located(store)), quiet=as_json)
    if as_json:
        typer.echo(json.dumps(asdict(made), default=str))
    else:
        for file in made.files:
            typer.echo(f"{made.folder / file.name}: {file.pages:,} pages, {file.size / 1e6:.1f} MB")


@app.command()
def serve(
    store: StoreOption = DEFAULT_STORE,
    cron: Annotated[
        list[str] | None, typer.Option(metavar="NAME=CRON", help="Run a flow or stage on a schedule (UTC), for example align='0 3 * * *'")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Runs at work at once; each uses every core")] = 2,
) -> None:
    """Offer every flow and stage to the Prefect server at PREFECT_API_URL, and run what is asked for."""
    from puna.flows.settings import prepare

    opened = Store.open(store)
    prepare(opened.root, terminal="WARNING")
    from puna.flows.launch import reached_server

    if reached_server() is None:
        raise PunaError("PREFECT_API_URL is not set; start `prefect server start` and set it to http://127.0.0.1:4200/api")
    from puna.flows.deployments import serve_all

    schedules: dict[str, str] = {}
    for text in cron or []:
        name, sign, schedule = text.partition("=")
        if not sign:
            raise PunaError(f"--cron {text}: write NAME=CRON, for example align='0 3 * * *'")
        schedules[name] = schedule
    serve_all(str(opened.root), schedules, limit)


@app.command()
def report(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="A run; `puna list --runs` shows them, `latest` is the newest")] = "latest",
    output: Annotated[Path | None, typer.Option(help="HTML file to write (default: runs/RUN.html in the store)")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write one self-contained HTML page about a run."""
    from puna.flows.report import write

    typer.echo(str(write(Store.open(store), run_name, output)))


def main() -> None:
    """Entry point: every PunaError is one clear message, not a traceback."""
    try:
        app()
    except PunaError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
