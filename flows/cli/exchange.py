"""The commands `puna import` and `puna export`, which turn external models and data into artifacts, and artifacts into plain files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import pyarrow.parquet as pq
import typer

from puna.flows.cli.inspect import JsonOption, ModuleOption, ProjectOption, StoreOption, import_modules
from puna.flows.engine.console import json_text
from puna.flows.engine.defaults import DEFAULT_STORE, prepare
from puna.flows.html.markup import size
from puna.stages.contract import did_you_mean
from puna.storage import PunaError, Store

if TYPE_CHECKING:
    from puna.stages.io.export import Format

app = typer.Typer()


@app.command("import")
def import_(
    kind: Annotated[str, typer.Argument(help="model, documents, instructions, prompts, preferences or classifier")],
    paths: Annotated[list[str], typer.Argument(metavar="PATH|URI…", help="Files or folders, as [NAME=]URI; hf://… for the hub")],
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Alias to set: NAME@latest")] = None,
    columns: Annotated[list[str] | None, typer.Option(metavar="FIELD=COLUMN", help="Column that holds a field: prompt=question")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of import_KIND")] = None,
    verifier: Annotated[
        str | None, typer.Option(metavar="NAME|JSON", help='Verifier of prompts that name none: numeric, exact or {"name": …}')
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    modules: ModuleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import a model (a checkpoint with its tokenizer), a classifier, or data (JSON lines, Parquet, CSV, data sets on disk or the hub)."""
    from puna.flows.engine.inputs import alias_of

    plugins = import_modules(modules)
    alias = None if name is None else alias_of(name)
    opened = Store.open(store)
    prepare(opened.root)
    from puna.flows.engine import launch
    from puna.flows.engine.trace import load_stages

    fields = [f"columns={json.dumps(column_map(columns))}"] if columns else []
    if modules and kind == "prompts":
        fields.append(f"code_from={json.dumps([module.__name__ for module in plugins])}")
    if verifier is not None:
        if kind != "prompts":
            raise PunaError(f"--verifier: {kind} have no verifier; leave it out")
        fields.append(f"verifier={json.dumps(verifier)}")
    stages = load_stages()
    kinds = [name.removeprefix("import_") for name in stages if name.startswith("import_")]
    if kind not in kinds:
        raise PunaError(f"import {kind}: no such kind{did_you_mean(kind, kinds)}; pages are read by `puna clean` and `puna run curate`")
    stage = stages[f"import_{kind}"]
    request = launch.Request(stage.name, None, (*fields, *(changes or ())), tuple(paths), json=as_json, alias=alias, project=project or "")
    artifact = launch.run_stage(stage, request, opened)
    if bare := artifact.manifest.metrics.get("prompts_without_verifier"):
        remedy = 'import again with --verifier (numeric, exact or {"name": …}), or give each row a column `verifier`'
        warning = f"{artifact.id}: {bare} of {artifact.rows()} prompts have no verifier: rounds and evaluations refuse them; {remedy}"
        typer.echo(warning, err=True)


def column_map(texts: list[str]) -> dict[str, str]:
    """Return field → column, parsed from texts `FIELD=COLUMN[,FIELD=COLUMN]`. Raise PunaError for any other text."""
    columns: dict[str, str] = {}
    for text in texts:
        for pair in text.split(","):
            field, sign, column = pair.partition("=")
            if not sign or not field or not column:
                raise PunaError(f"--columns {text}: write FIELD=COLUMN, for example prompt=question")
            columns[field] = column
    return columns


@app.command("export")
def export(
    identity: Annotated[str, typer.Argument(metavar="ID", help="kind/prefix, a prefix of the key, or NAME@VERSION")],
    folder: Annotated[Path, typer.Argument(help="New folder for the files")],
    format: Annotated[
        str | None,
        typer.Option(help="Models: hf (default), gguf, awq (4 bits), adapter. Data: parquet (default), jsonl, datasketch (signatures)"),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="With awq: calibration text of 8,192 tokens")] = None,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an artifact as plain files: a model for transformers, vLLM or llama.cpp, data as Parquet or JSON lines."""
    from puna.stages.curate.minhash.index import signature_table
    from puna.stages.io.export import export_data, export_model, new_folder

    opened = Store.existing(store, project)
    artifact = opened.check(opened.resolve(identity), whole=True)
    formats = ("hf", "gguf", "awq", "adapter") if artifact.kind == "model" else ("parquet", "jsonl", "datasketch")
    if format is not None and format not in formats:
        raise PunaError(f"--format {format}: {artifact.id} can be exported as {' or '.join(formats)}")
    if text is not None and format != "awq":
        raise PunaError("--text is for --format awq only; leave it out")
    if text is not None and not text.is_file():
        raise PunaError(f"--text {text}: there is no such file")
    if artifact.kind == "model":
        files = export_model(artifact, folder, cast("Format", format or "hf"), text)
    elif format == "datasketch":
        with new_folder(folder) as part:
            pq.write_table(signature_table(artifact), part / "signatures.parquet", compression="zstd")
        files = [folder / "signatures.parquet"]
    else:
        files = [export_data(artifact, folder, "jsonl" if format == "jsonl" else "parquet")]
    if as_json:
        return typer.echo(json_text(files))
    for file in files:
        typer.echo(f"{file}  {size(file.stat().st_size)}")
