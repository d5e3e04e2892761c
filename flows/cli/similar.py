"""The command `puna near`: documents of the store that resemble a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from puna.flows.cli.inspect import JsonOption, ProjectOption, StoreOption, print_rows
from puna.flows.engine.defaults import DEFAULT_STORE
from puna.stages.curate.extract import ExtractConfig, Unreadable, page_text
from puna.stages.curate.ingest import sniffed
from puna.stages.curate.minhash.index import described, resembling
from puna.storage import Artifact, PunaError, Store

app = typer.Typer()
HTML = (".html", ".htm", ".xhtml")


@app.command()
def near(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text, a page (.html), or - for standard input")],
    documents: Annotated[str | None, typer.Argument(metavar="[ID]", help="Documents to look through; the newest by default")] = None,
    least: Annotated[float, typer.Option(min=0, max=1, help="Least share of word runs in common, of either or of both")] = 0.1,
    most: Annotated[int, typer.Option(min=1, help="Documents to show")] = 10,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the documents that resemble a text, with shared word runs as shares of both, of the text, and of the document."""
    opened = Store.existing(store, project)
    artifact = _documents(opened, documents)
    rows = described(resembling(_text(file), artifact, least)[:most], artifact)
    if as_json:
        typer.echo(json.dumps({"documents": artifact.id, "found": rows}))
        return
    typer.echo(f"{artifact.id}, {artifact.rows():,} documents: {len(rows) or 'nothing'} like it")
    if rows:
        shares = ("similarity", "of_text", "of_document")
        print_rows([{**row, **{name: f"{row[name]:.3f}" for name in shares}} for row in rows], False)


def _documents(store: Store, name: str | None) -> Artifact:
    if name is not None:
        artifact = store.resolve(name)
        if artifact.kind != "documents":
            raise PunaError(f"{artifact.id} holds {artifact.kind}, not documents; `puna list documents` shows those there are")
        return artifact
    entries = [entry for entry in store.entries() if entry["kind"] == "documents"]
    if not entries:
        raise PunaError(f"{store.uri} holds no documents to look through")
    return Artifact("documents", entries[-1]["key"], store.files)


def _text(file: str) -> str:
    path = Path(file)
    try:
        body = sys.stdin.buffer.read() if file == "-" else path.read_bytes()
    except OSError as error:
        raise PunaError(f"{file} cannot be read: {error.strerror}") from error
    media = sniffed(body) if file == "-" else "text/html" if path.suffix.lower() in HTML else ""
    try:
        return page_text(body, media or "text/plain", None, ExtractConfig()).text
    except Unreadable as why:
        raise PunaError(f"{file}: {why.detail}") from why
