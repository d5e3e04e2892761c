"""The command line: `puna …`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from puna.flows.cli import annotate, exchange, inspect, model, plan, similar, sql
from puna.flows.cli.inspect import ModuleOption, ProjectOption, StoreOption, import_modules, print_rows
from puna.flows.engine.console import fail
from puna.flows.engine.defaults import DEFAULT_STORE
from puna.stages.contract import following
from puna.stages.executors import FORMS, PROCESSES, ranks
from puna.storage import PunaError, Store
from puna.storage.store import located

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Raw web pages to an aligned language model."
)
for group in (inspect, sql, plan, exchange, similar, model, annotate):
    app.add_typer(group.app)

NameArgument = Annotated[
    str, typer.Argument(metavar="FLOW|STAGE", help="A flow or a stage; `puna stages` lists them. stage:NAME where a flow has the name too")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per artifact on standard output")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field, for example select.gopher_quality.min_words=60")
]
ColumnsOption = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="[INPUT:]WHAT=FIELD", help="Field of the rows that holds text, html, url or date: html=raw_html"),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="[NAME=]URI|ARTIFACT", help="Pages to read, or artifacts of a single stage; NAME: of the input"),
]

HostOption = Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with --auth")]
AuthOption = Annotated[str, typer.Option(metavar="USER:PASSWORD", envvar="PUNA_AUTH", help="What a browser must say to get in")]
UrlsOption = Annotated[bool, typer.Option("--urls", help="Let forms name inputs by address (http, s3, hf, …), which are then fetched")]


@app.command()
def run(
    what: NameArgument,
    recipe: Annotated[
        str | None, typer.Option(help="Name of a recipe, or a YAML file (default: demo for a flow; a stage alone keeps its defaults)")
    ] = None,
    changes: SetOption = None,
    inputs: InputOption = None,
    columns: ColumnsOption = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of this machine (default: one per core)")] = None,
    executor: Annotated[str, typer.Option(metavar="ENGINE", help=f"What the work runs on: {FORMS}")] = PROCESSES,
    modules: ModuleOption = None,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Of a stage: alias to set, NAME@latest")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes of this machine that train together; a training without a layout copies its model")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run a flow or a single stage; what was made before is reused."""
    if processes > 1 and ranks.count() == 1:
        raise typer.Exit(ranks.start([sys.executable, "-m", "puna.flows.cli.main", *sys.argv[1:]], processes))
    ranks.join()
    if ranks.follows():
        from puna.flows.engine.trace import load_stages

        load_stages()
        import_modules(modules)
        return ranks.follow(following.do)
    from puna.flows.engine.defaults import prepare

    opened = Store.open(store)
    prepare(opened.root)
    from puna.flows.engine import launch
    from puna.flows.engine.inputs import alias_of, column_changes

    import_modules(modules)
    fields = column_changes(columns or (), "ingest")
    alias = None if name is None else alias_of(name)
    all_changes = (*fields, *(changes or ()))
    request = launch.Request(what, recipe, all_changes, tuple(inputs or ()), workers, executor, as_json, alias, project or "")
    launch.run(request, opened)
    ranks.finish()


@app.command()
def clean(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH…", help="Files or folders of pages, or documents of the store: [NAME=]URI|ARTIFACT each")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder, or a file that ends in .jsonl or .parquet")],
    columns: ColumnsOption = None,
    recipe: Annotated[str, typer.Option("--recipe", help="A recipe, or a YAML file with what differs from the recipe clean")] = "clean",
    changes: SetOption = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Local processes (default: one per core)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per artifact, and a last one for the files")] = False,
) -> None:
    """Clean pages of your own: WARC, HTML, text, Parquet, JSON, CSV, or documents of the store, to clean documents and a report."""
    from puna.flows.engine.defaults import prepare

    opened = Store.open(store)
    prepare(opened.root)
    from puna.flows.cli.clean import clean as run_clean
    from puna.flows.engine.recipe import project_change

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    result = run_clean(
        paths, output, opened, changes=(*(changes or ()), *project_change(project)), columns=columns or (), recipe=recipe, workers=workers,
        say=say, quiet=as_json,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(asdict(result), default=str))
        return
    typer.echo(f"{result.kept:,} of {result.pages:,} pages are clean documents: {result.documents}")
    most = ", ".join(f"{rule} {count:,}" for rule, count in list(result.rules.items())[:3])
    typer.echo(f"what went, and by which rule{f' (most by {most})' if most else ''}: {result.dropped}")
    if result.no_page:
        by_rule = ", ".join(f"{rule} {count:,}" for rule, count in result.no_page.items())
        bare = f"; {result.files_without_page}" if result.files_without_page else ""
        typer.echo(f"no page: {sum(result.no_page.values()):,} records ({by_rule}){bare}")
    typer.echo(f"report: {result.report}")


@app.command()
def fairness(
    documents: Annotated[Path, typer.Argument(metavar="DOCUMENTS", help="JSON lines or Parquet with language, text and, of some, kind")],
    recipe: Annotated[str, typer.Option("--recipe", help="Whose language, heuristics and select are measured")] = "clean",
    changes: SetOption = None,
    reference: Annotated[str, typer.Option("--reference", help="Language that the others are compared with")] = "en",
    spoil: Annotated[bool, typer.Option("--spoil", help="Measure spoilt twins too: repeats, misread, menu, salad")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: rows and figures")] = False,
) -> None:
    """Measure the share of labelled documents that curation keeps in each language, and name the rules that drop the rest."""
    from puna.flows.cli import fairness as measuring

    labelled = measuring.read_labelled(documents)
    twins = measuring.twins(labelled) if spoil else []
    result = measuring.fairness([*labelled, *twins], recipe, changes or (), reference)
    if as_json:
        typer.echo(json.dumps({"rows": result.rows, "figures": result.figures}, ensure_ascii=False))
        return
    rows_shown = [{name: f"{value:.2f}" if isinstance(value, float) else value for name, value in row.items()} for row in result.rows]
    print_rows(rows_shown, as_json=False)
    for name, value in result.figures.items():
        typer.echo(f"{name:32} {value:g}")


@app.command()
def stages(modules: ModuleOption = None) -> None:
    """List the flows and stages: what they take and what they write."""
    from puna.flows.engine.declare import described, first_sentence
    from puna.flows.engine.trace import load_flows, load_stages

    import_modules(modules)
    for flow in load_flows().values():
        inputs = ", ".join(f"{described(s)}{'?' if s.optional else ''}" for s in flow.inputs)
        typer.echo(f"{'flow:' + flow.name:20s} {inputs}\n    {first_sentence(flow.doc)}")
    for stage in load_stages().values():
        taken = ", ".join(f"{'list of ' if s.many else ''}{s.kind}{'?' if s.optional else ''}" for s in stage.inputs)
        typer.echo(f"{stage.name:20s} {taken or 'nothing'} → {stage.kind}\n    {first_sentence(stage.doc)}")


@app.command()
def fields(name: NameArgument, modules: ModuleOption = None) -> None:
    """Print the configuration of a stage or the recipe of a flow as JSON schema: every field with its default and meaning."""
    from puna.flows.engine.declare import Flow
    from puna.flows.engine.launch import chosen
    from puna.flows.engine.trace import schema

    import_modules(modules)
    target = chosen(name)
    typer.echo(json.dumps(schema(target) if isinstance(target, Flow) else target.config.model_json_schema(), indent=1))


@app.command()
def new(folder: Annotated[Path, typer.Argument(metavar="NAME", help="Folder to make; its name is the package's")]) -> None:
    """Start a project of your own: a stage, a signal with a rule, a verifier, a recipe and their test."""
    from puna.flows.cli.new import new as write

    for file in write(folder):
        typer.echo(str(file))


@app.command("demo-pages")
def demo_pages(
    folder: Annotated[Path | None, typer.Argument(help="Where the WARC files go (default: sample in the store)")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
) -> None:
    """Fetch the sample of real pages: a few thousand documents, as WARC files."""
    from puna.flows.engine.inputs import sample_folder
    from puna.flows.engine.running import make_sample

    sample = make_sample(folder or sample_folder(located(store)), quiet=as_json)
    if as_json:
        typer.echo(json.dumps(asdict(sample), default=str))
    else:
        for file in sample.files:
            typer.echo(f"{sample.folder / file.name}: {file.pages:,} pages, {file.size / 1e6:.1f} MB")


@app.command()
def up(
    store: StoreOption = DEFAULT_STORE,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free")] = 4200,
    auth: AuthOption = "",
    limit: Annotated[int, typer.Option(min=1, help="Runs at work at once; each uses every core")] = 2,
    urls: UrlsOption = False,
) -> None:
    """Start Prefect with its UI, everything served, and Puna's own pages: one process, one address."""
    from puna.flows.web import serve as serving

    serving.up(store, host, port, limit, auth, urls)


@app.command()
def web(
    store: StoreOption = DEFAULT_STORE,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free")] = 4300,
    auth: AuthOption = "",
    urls: UrlsOption = False,
) -> None:
    """Serve Puna's own pages without Prefect: runs, artifacts, documents, questions."""
    opened = Store.existing(store)
    from puna.flows.web import serve as serving

    serving.pages(opened, host, port, auth, urls)


@app.command()
def serve(
    store: StoreOption = DEFAULT_STORE,
    cron: Annotated[
        list[str] | None,
        typer.Option(metavar="[PROJECT/]NAME=CRON", help="Run a flow or stage on a schedule (UTC), for example align='0 3 * * *'"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Runs at work at once; each uses every core")] = 2,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Offer every flow and stage to the Prefect server at PREFECT_API_URL, and run what is asked for."""
    from puna.flows.engine.defaults import prepare
    from puna.flows.server.client import end_with, from_environment, named_server

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
        raise PunaError("PREFECT_API_URL is not set; `puna up` needs none, or start `prefect server start` and set it to its address")
    from puna.flows.prefect.deployments import serve_all

    if supervised and (trouble := server.wait_until_ready(600.0)) is not None:
        raise PunaError(f"{server.url} does not answer: {trouble}")
    serve_all(opened, server, schedules, limit, supervised=supervised)


@app.command()
def accept(
    old: Annotated[str, typer.Argument(help="The artifact made by the code before")],
    new: Annotated[str | None, typer.Argument(help="The artifact made by the code after (default: what today's code would make)")] = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    modules: ModuleOption = None,
) -> None:
    """Declare a refactoring equivalent: OLD is used where today's code, or the code that made NEW, would make it again."""
    from puna.storage.explain import changes

    opened = Store.existing(store, project)
    before = opened.resolve(old)
    if new is None:
        from puna.flows.engine.trace import load_stages
        from puna.stages.contract.execute import by_todays_code

        import_modules(modules)
        load_stages()
        identity = by_todays_code(before, opened)
        if identity.key == before.key:
            raise PunaError(f"{before.id} is what today's code makes: there is nothing to declare")
        opened.accept(before, identity.key)
        typer.echo(f"{before.id} now stands for what today's code would make: {'; '.join(map(str, changes(before.manifest, identity)))}")
        return
    after = opened.resolve(new)
    if before.key == after.key:
        raise PunaError(f"{old} and {new} are one artifact, {before.id}: there is nothing to declare")
    if before.manifest.stage != after.manifest.stage or before.kind != after.kind:
        raise PunaError(f"{before.id} was made by {before.manifest.stage}, {after.id} by {after.manifest.stage}: they cannot be equivalent")
    other = [str(change) for change in changes(before.manifest, after.manifest) if change.what != "code"]
    if other:
        raise PunaError(f"{before.id} and {after.id} differ in more than code ({'; '.join(other[:3])}): they are not the same work")
    opened.accept(before, after.key)
    typer.echo(f"{after.id} is now {before.id}")


@app.command()
def report(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="A run; `puna list --runs` shows them, `latest` is the newest")] = "latest",
    output: Annotated[Path | None, typer.Option(help="HTML file to write (default: runs/RUN.html in the store)")] = None,
    compare: Annotated[str | None, typer.Option(metavar="RUN", help="An earlier run to set beside it, in place of its own page")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write one self-contained HTML page about a run, or about two of them side by side."""
    from puna.flows.report import write

    typer.echo(str(write(Store.open(store), run_name, output, compare)))


def main() -> None:
    """Run the command line. A PunaError ends it as one clear message, without a traceback."""
    try:
        app()
    except PunaError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
