"""The program `puna`: the commands run, plan, clean, accept and report, and the commands of the other modules in this package."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from puna.flows.cli import authoring, evaluate, exchange, inspect, model, rules, serving, sql, status
from puna.flows.cli.inspect import JsonOption, ModuleOption, NameArgument, ProjectOption, RanksOption, StoreOption, import_modules, leads
from puna.flows.engine.console import fail, json_text
from puna.flows.engine.declare import Flow
from puna.flows.engine.defaults import DEFAULT_STORE, prepare
from puna.flows.engine.recipe import project_change
from puna.flows.report import write
from puna.stages.executors import FORMS, PROCESSES, ranks
from puna.storage import PunaError, Store

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="From raw web pages to an aligned language model."
)
for group in (inspect, sql, exchange, rules, model, authoring, evaluate, serving):
    app.add_typer(group.app)

RecipeOption = Annotated[str | None, typer.Option(help="Name of a recipe, or a YAML file (default: demo for a flow, none for a stage)")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: tokenizer.vocab_size=8192")]
ColumnsOption = Annotated[
    list[str] | None, typer.Option("--columns", metavar="[INPUT:]WHAT=FIELD", help="Field with text, html, url or date: html=raw_html")
]
InputOption = Annotated[
    list[str] | None, typer.Option("--input", metavar="[NAME=]URI|ARTIFACT", help="Files or an artifact; NAME: the input that takes it")
]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Number of worker processes (default: one per core)")]


@app.command()
def run(
    what: NameArgument, recipe: RecipeOption = None, changes: SetOption = None, inputs: InputOption = None, columns: ColumnsOption = None,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, workers: WorkersOption = None,
    executor: Annotated[str, typer.Option(metavar="ENGINE", help=f"Executor of the work: {FORMS}")] = PROCESSES,
    modules: ModuleOption = None,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Alias to set for a stage's artifact: NAME@latest")] = None,
    processes: RanksOption = 1, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Run a flow or a single stage; existing artifacts are reused."""
    opened = Store.open(store)
    prepare(opened.root)
    from puna.flows.engine import launch
    from puna.flows.engine.inputs import alias_of, column_changes

    fields = (*column_changes(columns or (), "ingest"), *(changes or ()))
    alias = None if name is None else alias_of(name)
    request = launch.Request(what, recipe, fields, tuple(inputs or ()), workers, executor, as_json, alias, project or "")
    if leads(processes, modules, lambda start: launch.run(replace(request, begin=start), opened)):
        import_modules(modules)
        launch.run(request, opened)
        ranks.finish()


@app.command()
def plan(
    what: NameArgument = "pipeline", recipe: RecipeOption = None, changes: SetOption = None, inputs: InputOption = None,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, modules: ModuleOption = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU (H100, H200, A100, …) in bf16, not for this CPU")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs that train together; lists the fastest layouts that fit")] = 1,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show the steps that are reused or would run, with their cost. For pretraining, add parameters, FLOPs, memory and time; for the stage
    `sample`, KV cache memory and minimum time. Without --gpu, pretraining that would take this CPU years is planned for H100 GPUs.

    A recipe, an input or a layout that `puna run` would refuse before its first step is refused here, too; a lack of memory only if the
    plan is for this CPU. A step's time, disk and memory are estimated from its earlier runs in the store. A step that depends on steps
    still to run is run only if their output is new. The cost of pretraining is computed from the model's shape, which comes from the
    recipe, the input model or choose_size. A packed row counts as one long document, which makes attention cost most. Times are computed
    from this CPU's measured rates or the GPU's data sheet. For several GPUs, the plan is for the recipe's own layout or, without one, for
    the fastest tested layouts that fit: at most three, one per set of parallel axes. Bytes are of one device under the first layout."""
    from puna.flows.engine.cost import CPU, Total, answering, pretraining, steps_of
    from puna.flows.engine.launch import Request
    from puna.flows.engine.plan import STATES

    import_modules(modules)
    request = Request(what, recipe, tuple(changes or ()), tuple(inputs or ()), project=project or "")
    target, steps = steps_of(request, store)
    trains = any(step.stage == "pretrain" for step in steps)
    sample = target if not isinstance(target, Flow) and target.name == "sample" else None
    if (gpu is not None or gpus > 1) and not trains and sample is None:
        option = f"--gpus {gpus}" if gpu is None else f"--gpu {gpu}"
        by = f" with recipe {recipe}" if recipe else ""
        raise PunaError(f"{option}: only pretraining and the stage sample are planned for GPUs, and {what}{by} is neither; leave it out")
    if gpus > 1 and sample is not None:
        raise PunaError(f"--gpus {gpus}: the cost of sample is planned for one GPU; leave --gpus out")
    estimate = pretraining(target, request, steps, store, gpu, gpus) if trains else {}
    costs = answering(sample, request, store, gpu) if sample is not None else []
    if gpu is None and estimate.get("device", CPU) == CPU:
        steps_of(request, store, PROCESSES)  # the memory that a run here needs
    if as_json:
        summary = {**estimate, **({"answering": costs} if costs else {})}
        return typer.echo(json_text({**summary, "steps": [asdict(step) for step in steps], "expected": asdict(Total.of(steps))}))
    for step in steps:
        typer.echo(f"{step.label:24s} {step.state:7s} {step.why}{f' · {step.expected}' if step.expected else ''}")
    counts = Counter(step.state for step in steps)
    typer.echo(", ".join(f"{counts[state]} {words}" for state, words in STATES.items() if counts[state]))
    typer.echo(f"{Total.of(steps)}\n")
    for figures in (estimate, *costs):
        for name, value in figures.items():
            if name != "phases":
                typer.echo(f"{name:28s} {_readable(name, value)}")
    for phase in estimate.get("phases", ()):
        typer.echo(f"\nphase {phase.pop('name')}")
        for name, value in phase.items():
            typer.echo(f"  {name:26s} {_readable(name, value)}")


def _readable(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"\n  {'':26s} ".join(value)
    if value is None or isinstance(value, str):
        return value or "none: no tested layout fits"
    if name.startswith("share"):
        return f"{value:.0%}"
    if name.endswith("seconds"):
        return f"{value:,.0f} s ({value / 3600:,.1f} h)" if value >= 10 else f"{value:.3g} s"
    for unit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:,.4g} {letter}{'B' if 'bytes' in name else ''}"
    return f"{value:,.4g}"


@app.command()
def clean(
    paths: Annotated[list[str], typer.Argument(metavar="[NAME=]PATH…", help="Files or folders of pages, or documents of the store")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder, or a file that ends in .jsonl or .parquet")],
    columns: ColumnsOption = None,
    recipe: Annotated[str, typer.Option("--recipe", help="Name of a recipe, or a YAML file with changes to the recipe clean")] = "clean",
    changes: SetOption = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    workers: WorkersOption = None,
    modules: ModuleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn your own pages (WARC, HTML, text, Parquet, JSON, CSV) or documents of the store into clean documents, with a report."""
    import_modules(modules)
    opened = Store.open(store)
    prepare(opened.root)
    from puna.flows.cli.clean import clean as run_clean

    result = run_clean(
        paths, output, opened, changes=(*(changes or ()), *project_change(project)), columns=columns or (), recipe=recipe, workers=workers,
        say=partial(typer.echo, err=as_json), quiet=as_json,
    )  # fmt: skip
    if as_json:
        return typer.echo(json_text(asdict(result)))
    typer.echo(f"{result.kept:,} of {result.pages:,} pages are clean documents: {result.documents}")
    most = ", ".join(f"{rule} {count:,}" for rule, count in list(result.rules.items())[:3])
    typer.echo(f"dropped pages with their rules{f' (most by {most})' if most else ''}: {result.dropped}")
    if result.no_page:
        by_rule = ", ".join(f"{rule} {count:,}" for rule, count in result.no_page.items())
        bare = f"; {result.files_without_page}" if result.files_without_page else ""
        typer.echo(f"no page: {sum(result.no_page.values()):,} records ({by_rule}){bare}")
    typer.echo(f"report: {result.report}")


@app.command()
def accept(
    old: Annotated[str, typer.Argument(help="The artifact made by the old code")],
    new: Annotated[str | None, typer.Argument(help="The artifact made by the new code (default: what the current code would make)")] = None,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, modules: ModuleOption = None,
) -> None:  # fmt: skip
    """Declare that a change of code changes no results. Runs then reuse OLD instead of computing NEW (default: the current code's)."""
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
            raise PunaError(f"{before.id} is what the current code makes: there is nothing to declare")
        opened.accept(before, identity.key)
        differences = "; ".join(map(str, changes(before.manifest, identity)))
        return typer.echo(f"{before.id} is now reused for what the current code would make: {differences}")
    after = opened.resolve(new)
    if before.key == after.key:
        raise PunaError(f"{old} and {new} are the same artifact, {before.id}: there is nothing to declare")
    if before.manifest.stage != after.manifest.stage or before.kind != after.kind:
        raise PunaError(f"{before.id} was made by {before.manifest.stage}, {after.id} by {after.manifest.stage}: they cannot be equivalent")
    other = [str(change) for change in changes(before.manifest, after.manifest) if change.what != "code"]
    if other:
        raise PunaError(f"{before.id} and {after.id} differ in more than code ({'; '.join(other[:3])}): they cannot be declared equivalent")
    opened.accept(before, after.key)
    typer.echo(f"{before.id} is now reused in place of {after.id}")


@app.command()
def report(
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="A run; `puna list --runs` shows them, `latest` is the newest")] = "latest",
    output: Annotated[Path | None, typer.Option(help="HTML file to write (default: runs/RUN.html in the store)")] = None,
    compare: Annotated[str | None, typer.Option(metavar="RUN", help="An earlier run: write a comparison with it instead")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write one self-contained HTML page that describes a run, or compares two runs."""
    typer.echo(str(write(Store.existing(store), run_name, output, compare)))


def main() -> None:
    """Run the command line. Print a PunaError as one message, without a traceback, and exit with status 1."""
    status.append(1)
    try:
        try:
            app()
        except PunaError as error:
            fail(str(error))
    except (SystemExit, KeyboardInterrupt) as error:
        code = getattr(error, "code", 130)
        status.append(code if isinstance(code, int) else int(code is not None))
        raise


if __name__ == "__main__":
    main()
