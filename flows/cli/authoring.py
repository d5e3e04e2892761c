"""Commands for authors of recipes and stages: lists of flows, stages and fields, a sample of pages, and a new project."""

from __future__ import annotations

import json
import keyword
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from puna.flows.cli.inspect import JsonOption, ModuleOption, NameArgument, StoreOption, import_modules, replacing
from puna.flows.engine.console import json_text
from puna.flows.engine.defaults import DEFAULT_STORE
from puna.storage import PunaError
from puna.storage.store import folder_of

app = typer.Typer()
TEMPLATES = Path(__file__).with_name("new_project")
"""The folder of the template files of a new project; FILE.txt becomes FILE. In paths and texts, PROJECT becomes the project's name."""


@app.command()
def stages(modules: ModuleOption = None) -> None:
    """List the flows with their inputs, and the stages with their inputs and output."""
    from puna.flows.engine.declare import first_sentence, input_kind
    from puna.flows.engine.trace import load_flows, load_stages

    import_modules(modules)
    for flow in load_flows().values():
        inputs = ", ".join(f"{input_kind(s)}{'?' if s.optional else ''}" for s in flow.inputs)
        typer.echo(f"{'flow:' + flow.name:20s} {inputs}\n    {first_sentence(flow.doc)}")
    for stage in load_stages().values():
        kinds = ", ".join(f"{'list of ' if s.many else ''}{s.kind}{'?' if s.optional else ''}" for s in stage.inputs)
        typer.echo(f"{stage.name:20s} {kinds or 'nothing'} → {stage.kind}\n    {first_sentence(stage.doc)}")


@app.command()
def fields(name: NameArgument, modules: ModuleOption = None) -> None:
    """Print the JSON schema of a stage's configuration, of a step or setting of a recipe, or of a flow's recipes: every field with its
    default and meaning."""
    from puna.flows.engine.declare import Flow
    from puna.flows.engine.launch import target_named
    from puna.flows.engine.trace import config_schema, load_flows, load_stages, schema, schema_named

    import_modules(modules)
    own = schema_named(name) if name not in {**load_flows(), **load_stages()} else None
    if own is None:
        target = target_named(name)
        own = schema(target) if isinstance(target, Flow) else config_schema(target)
    typer.echo(json.dumps(own, indent=1))


@app.command("demo-pages")
def demo_pages(
    folder: Annotated[Path | None, typer.Argument(help="Folder for the WARC files (default: sample in the store)")] = None,
    store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Build the sample, a few thousand pages from pinned Python packages, as WARC files, unless it exists."""
    from puna.flows.engine.inputs import sample_folder
    from puna.flows.engine.launch import make_sample

    sample = make_sample(folder or sample_folder(folder_of(store)), quiet=as_json)
    if as_json:
        return typer.echo(json_text(asdict(sample)))
    for file in sample.files:
        typer.echo(f"{sample.folder / file.name}: {file.pages:,} pages, {file.size / 1e6:.1f} MB")


@app.command()
def new(folder: Annotated[Path, typer.Argument(metavar="NAME", help="New folder; its name becomes the package's name")]) -> None:
    """Create a project of your own with examples: a stage, a signal with a rule, a verifier, a recipe, and their tests."""
    for file in write_project(folder):
        typer.echo(str(file))


def write_project(folder: Path) -> list[Path]:
    """Write the template project to a new folder, whose name becomes the package's, and return its files, sorted. Raise PunaError if the
    name is not a lower-case identifier, is a keyword or `puna`, or if the folder exists or cannot be written."""
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name == "puna":
        raise PunaError(f"new {folder}: the name is the package's: lower-case letters, digits and _, for example my_rules")
    if folder.exists():
        raise PunaError(f"new {folder}: already exists; choose another name")
    with replacing(folder, f"new {folder}", "choose another place") as part:
        for template in TEMPLATES.rglob("*.txt"):
            file = part / str(template.relative_to(TEMPLATES).with_suffix("")).replace("PROJECT", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(template.read_text(encoding="utf-8").replace("PROJECT", name), encoding="utf-8")
    return sorted(file for file in folder.rglob("*") if file.is_file())
