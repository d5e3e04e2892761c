"""The commands `puna evaluate`, `puna compare` and `puna predict`: benchmarks of a model, two models side by side, and forecasts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from puna.flows.cli.inspect import JsonOption, ModuleOption, ProjectOption, RanksOption, StoreOption, import_modules, leads, print_rows
from puna.flows.cli.load_engine import serving_options
from puna.flows.cli.model import SERVING, ModelArgument
from puna.flows.engine.console import json_text
from puna.flows.engine.defaults import DEFAULT_STORE, prepare
from puna.flows.html.markup import short
from puna.models.serving import ServingSettings
from puna.stages.contract import External, Facts, execute, parse
from puna.stages.contract.external import external
from puna.stages.evaluation.comparison import differences, evaluations_of, scores_of
from puna.stages.evaluation.task_file import read_task
from puna.stages.executors import ranks
from puna.storage import Artifact, PunaError, Store, errors_at
from puna.storage.catalog import query

app = typer.Typer()
LAW = "law@latest"
MEASURED = {"contaminated": "contaminated", "clean": "clean part", "calibration_error": "calibration error"}
"""Optional column of `task_scores` → its label in the printed table."""


@app.command()
@serving_options
def evaluate(
    model: ModelArgument,
    tasks: Annotated[
        list[str], typer.Option(metavar="FILE|ID,…", help="Task files (lm-evaluation-harness's YAML), folders of these, or prompts")
    ],
    harness: Annotated[bool, typer.Option("--harness", help="Run lm-evaluation-harness; --tasks may name its built-in tasks")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions per task, from the beginning")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question (default: the task file's)")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template (default: plain text)")] = False,
    options: Annotated[
        Literal["task", "letters", "best"], typer.Option(help="Multiple choice: options as in the task, as letters, or the better of both")
    ] = "task",
    answers: Annotated[int | None, typer.Option("--n", min=1, help="Number of answers per question, for pass@k and majority")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=10, help="Sampling temperature (default: the task file's)")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer to prompts; task files set their own")] = 256,
    judges: Annotated[list[str] | None, typer.Option("--judge", metavar="MODEL", help="Model for verifiers that need a judge")] = None,
    contaminated: Annotated[bool, typer.Option("--contamination/--no-contamination", help="Search the training data for questions")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of sampling")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the results in lm-evaluation-harness's JSON")] = None,
    serving: ServingSettings = SERVING,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    modules: ModuleOption = None,
    processes: RanksOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Score a model on benchmarks (multiple choice, perplexity, verified answers) or held-out prompts, with confidence intervals.

    If the store has the model's training data, also show the share of questions in that data, and the scores on the other questions."""
    from puna.stages.evaluation.benchmark import RESULTS, BenchmarkConfig

    if not leads(processes, modules):
        return None
    import_modules(modules)
    if output is not None and not output.absolute().parent.is_dir():
        raise PunaError(f"--output {output}: there is no folder {output.absolute().parent}")
    opened = Store.open(store, project)
    prepare(opened.root)
    values = {
        "limit": limit, "shots": shots, "prompts": "chat" if chat else "plain", "options": options, "answers": answers,
        "temperature": temperature, "max_tokens": max_tokens, "seed": seed, "serving": serving,
    }  # fmt: skip
    inputs, own = _task_inputs([name.strip() for text in tasks for name in text.split(",") if name.strip()], harness, opened)
    inputs["judges"] = [opened.check(opened.resolve(name), whole=True) for name in judges or ()]
    config = parse(BenchmarkConfig, values, "evaluate")
    evaluation = _run(opened, model, inputs, config, as_json, own if harness else None, contaminated)
    ranks.finish()
    text = evaluation.path(RESULTS).read_text(encoding="utf-8")
    if output is not None:
        with errors_at(f"--output {output}", OSError):
            output.write_text(text, encoding="utf-8")
    if as_json:
        return typer.echo(json_text(json.loads(text)))
    _print_scores(evaluation)


def _print_scores(evaluation: Artifact) -> None:
    scores = evaluation.read("task_scores").to_pylist()
    more = {name: label for name, label in MEASURED.items() if any(row[name] is not None for row in scores)}
    rows = [
        {"task": row["task"], "metric": row["metric"], "value": f"{row['value']:.4f}",
         "95 %": "" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}",
         **{label: "" if row[name] is None else f"{row[name]:.4f}" for name, label in more.items()},
         "questions": row["n"], "examples": row["shots"], "asked": row["format"], "CPU s": f"{row['seconds']:.1f}"}
        for row in scores
    ]  # fmt: skip
    print_rows(rows, False)
    typer.echo(f"answers and results: {evaluation.folder}")


def _task_inputs(names: Sequence[str], harness: bool, store: Store) -> tuple[dict[str, list[Any]], tuple[str, ...]]:
    """Split `names` into inputs of the stage (task files, prompts) and the harness's built-in tasks. Raise PunaError for other names."""
    inputs: list[External] = []
    prompts: list[Artifact] = []
    own = []
    for name in names:
        if Path(name).is_dir():
            inputs += External.resolve(name)
        elif Path(name).is_file():
            inputs.append(_task_input(Path(name)))
        elif "@" in name or name.startswith("prompts/"):
            prompts.append(store.check(store.resolve(name), whole=True))
            if harness or prompts[-1].kind != "prompts":
                problem = "leave --harness out, which takes task files" if prompts[-1].kind == "prompts" else "name prompts, or a task file"
                raise PunaError(f"--tasks {name}: {prompts[-1].id} cannot be a task: {problem}")
        elif harness and not name.endswith((".yaml", ".yml")):
            own.append(name)
        else:
            raise PunaError(f"--tasks {name}: there is no such task file or folder{'' if harness else '; tasks by name need --harness'}")
    if not inputs and not own and not prompts:
        raise PunaError("--tasks: name at least one task file")
    return {"tasks": inputs, "prompts": prompts}, tuple(own)


def _task_input(path: Path) -> External:
    """Return a task file with its data files, which lie beside it or in the working directory. Raise PunaError if one is missing."""
    (own,) = External.resolve(str(path))
    spec = read_task(path.read_bytes(), str(path))
    files = list(own.files)
    for name in dict.fromkeys(name for names in spec.files.values() for name in names):
        place = next((place for place in (path.parent / name, Path(name)) if place.is_file()), None)
        if place is None:
            raise PunaError(f"{path}: data_files: {name} not found, neither beside the task file nor in the working directory")
        ((data,),) = (external.files for external in External.resolve(str(place)))
        files.append(replace(data, name=name))
    return external(own.name, own.uri, tuple(files))


def _run(
    store: Store, model: str, asked: dict[str, list[Any]], config: Any, as_json: bool, own: tuple[str, ...] | None, contaminated: bool
) -> Artifact:
    """Return a model's evaluation; import the model first if it is a path. `own`: built-in tasks of the harness; None: do not use it."""
    from puna.flows.engine import preflight
    from puna.flows.engine.session import session
    from puna.stages.curate.contamination import ContaminationConfig, contamination, trained_on
    from puna.stages.evaluation.benchmark import benchmark
    from puna.stages.io.import_model import ImportModelConfig, import_model

    inputs: dict[str, Any] = {name: values or None for name, values in asked.items()}
    stage = benchmark
    if own is not None:
        from puna.stages.evaluation.harness import HarnessConfig, harness, needs

        stage, config = harness, HarnessConfig(**dict(config), names=own)
        if problems := needs(config, Facts({}, None)):
            raise PunaError("; ".join(problems))
        if inputs.pop("judges"):
            raise PunaError("--judge: the harness uses no judges; leave the option out")
        del inputs["prompts"]
    questions = {name: inputs[name] for name in ("tasks", "prompts") if inputs.get(name)}
    names = [*(one.name for one in asked["tasks"]), *(one.id for one in asked["prompts"]), *(own or ())]
    title = f"{stage.name} {model} {' '.join(names)}"[:200]
    with session(store, flow=stage.name, json=as_json, title=title) as now:
        if Path(model).exists():
            (files,) = External.resolve(f"model={model}")
            inputs["model"] = now.perform(import_model, ImportModelConfig(), {"model": files}, "import_model").artifact
        else:
            inputs["model"] = store.check(store.resolve(model), whole=True)
        if contaminated and questions and trained_on(inputs["model"])[0]:
            looked = {**questions, "model": inputs["model"]}
            inputs["overlaps"] = now.perform(contamination, ContaminationConfig(), looked, "contamination").artifact
        preflight.check_stage(stage, config, inputs, store)
        evaluation = now.perform(stage, config, inputs, stage.name).artifact
    now.refresh()
    return evaluation


@app.command()
def compare(
    one: Annotated[str, typer.Argument(metavar="A", help="A model, or an evaluation of `puna evaluate`")],
    other: Annotated[str, typer.Argument(metavar="B", help="The model or evaluation to compare it with")],
    every: Annotated[bool, typer.Option("--all", help="All metrics of a task (default: one)")] = False, store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Compare two models' stored evaluations by question on common tasks: B minus A, with 95 % intervals and Holm-corrected p-values."""
    opened = Store.existing(store, project)
    artifacts = opened.artifacts("evaluation")
    first, second = (scores_of(evaluations_of(opened.check(opened.resolve(name)), artifacts)) for name in (one, other))
    rows, remarks = differences(first, second, every)
    for remark in remarks:
        typer.echo(f"not compared: {remark}", err=True)
    if not rows:
        raise PunaError(f"{one} and {other} have no task in common that can be compared")
    if as_json:
        return print_rows([asdict(row) | {"difference": row.difference._asdict()} for row in rows], True)
    print_rows(
        [
            {"task": row.task, "metric": row.metric, "A": f"{row.one:.4f}", "B": f"{row.other:.4f}",
             "B - A": f"{row.difference.value:+.4f}",
             "95 %": f"{row.difference.low:+.4f} to {row.difference.high:+.4f}", "questions": row.n, "p": f"{row.p:.3g}",
             "p (Holm)": f"{row.holm:.3g}"}
            for row in rows
        ],
        False,
    )  # fmt: skip


@app.command()
def predict(
    flops: Annotated[float | None, typer.Option(help="Budget in floating-point operations")] = None,
    hours: Annotated[float | None, typer.Option(help="Budget in hours of this CPU, or of --gpu")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of --hours (H100, H200, A100, …), in bf16")] = None,
    law: Annotated[str, typer.Option(metavar="ID", help="Scaling law, fitted by the stage `law` to a ladder")] = LAW,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per row (default: the ladder's)")] = None,
    outcomes: Annotated[bool, typer.Option("--outcomes", help="Show earlier forecasts beside the losses measured later")] = False,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Forecast the loss that a training budget reaches, with its 95 % interval, and the model shape and number of tokens that reach it.

    The forecast is stored with a recipe that trains this model. --outcomes shows each forecast beside the loss measured later: in a run
    that trained the forecast's model, or in a run on the ladder's data with about the same FLOPs and number of tokens."""
    opened = Store.existing(store, project)
    if outcomes:
        if flops or hours or gpu or sequence_length or law != LAW:
            raise PunaError("--outcomes shows earlier forecasts: leave --flops, --hours, --gpu, --law and --sequence-length out")
        rows = query(opened, "select * from forecasts").to_pylist()
        if not rows and not as_json:
            return typer.echo(f"{opened.uri} holds no forecast; `puna predict --flops N` makes one")
        return print_rows(rows, as_json)
    prepare(opened.root)
    forecast = _forecast(opened, {"flops": flops, "hours": hours, "gpu": gpu, "sequence_length": sequence_length}, law)
    metrics: dict[str, Any] = forecast.manifest.metrics
    if as_json:
        return typer.echo(json_text({"id": forecast.id, "recipe": forecast.path("recipe.yaml"), **metrics}))
    low, high = metrics["predicted_loss_low"], metrics["predicted_loss_high"]
    typer.echo(f"loss      {metrics['predicted_loss']:.3f} nats per token ({low:.3f} to {high:.3f})")
    total, met = short(metrics["total_parameters"]), short(metrics["parameters"])
    typer.echo(f"shape     {metrics['shape']}: {total} parameters, of which a token meets {met} in matrix products")
    typer.echo(f"tokens    {short(metrics['tokens'])}")
    typer.echo(f"compute   {metrics['flops']:.3g} operations, {metrics['extrapolation']:.3g} times the ladder's largest run")
    typer.echo(f"recipe    {forecast.path('recipe.yaml')}")
    typer.echo(f"kept as   {forecast.id}")


def _forecast(store: Store, budget: dict[str, Any], law: str) -> Artifact:
    from puna.stages.experiments.choose_size import ChooseSizeConfig, choose_size

    if (budget["flops"] is None) == (budget["hours"] is None):
        raise PunaError("predict: give exactly one budget, --flops or --hours")
    config = parse(ChooseSizeConfig, budget, "predict")
    try:
        artifact = store.resolve(law)
    except PunaError as error:
        raise PunaError(f"{error}; to fit a law, use `puna run ladder`, then `puna run law … --as law`") from error
    made = execute(choose_size, config.replace(heldout=artifact.manifest.config.get("heldout", config.heldout)), {"law": artifact}, store)
    store.set_alias(f"forecast@{made.key[:16]}", made)  # `gc` keeps what an alias names: the outcome may come much later
    return made
