"""Commands that show, check and clean a store, and options that other commands share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console as Terminal
from rich.table import Table

from puna.flows.engine.console import json_text, summary, tee_stderr
from puna.flows.engine.defaults import DEFAULT_STORE
from puna.flows.html.markup import cell_text, size
from puna.flows.report.why import fate
from puna.stages import plugins
from puna.stages.contract import rank_jobs
from puna.stages.executors import ranks
from puna.storage import Artifact, PunaError, Store, database, maintenance
from puna.storage import explain as explaining
from puna.storage.aliases import DEFAULT, checked_project
from puna.storage.runs import RunLog
from puna.storage.schemas import known_kind

app = typer.Typer()
RanksOption = Annotated[int, typer.Option(min=1, help="Processes that train together, or divide the prompts; see `layout`")]
ModuleOption = Annotated[list[str] | None, typer.Option("--module", metavar="FILE|MODULE", help="Your own stages, rules and verifiers")]
StoreOption = Annotated[str, typer.Option("--store", envvar="PUNA_STORE", help="Store of the artifacts: a folder or s3:// URI")]


def _project(name: str | None) -> str | None:
    return None if name is None else checked_project(name)


ProjectOption = Annotated[str | None, typer.Option(metavar="NAME", callback=_project, help="Use this project's aliases, not `default`'s")]
NameArgument = Annotated[str, typer.Argument(metavar="FLOW|STAGE", help="See `puna stages`; stage:NAME if a flow has the same name")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="kind/prefix, a prefix of the key, or NAME@VERSION")]
MOST_ROWS = 200
HTML = (".html", ".htm", ".xhtml")


@contextlib.contextmanager
def replacing(target: Path, where: str, remedy: str) -> Iterator[Path]:
    """Yield a temporary path that replaces `target` at the end, unless an error occurs. Raise PunaError (`where`, `remedy`) for OSError."""
    part = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        yield part
        os.replace(part, target)
    except OSError as error:
        raise PunaError(f"{where}: cannot be written ({error}); {remedy}") from error
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)


def print_rows(rows: list[dict[str, Any]], as_json: bool, columns: list[str] | None = None) -> None:
    """Print the first MOST_ROWS rows as a table, or all rows as JSON lines."""
    if as_json:
        for row in rows:
            typer.echo(json_text(row))
        return
    names = columns or (list(rows[0]) if rows else [])
    table = Table(box=None, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows[:MOST_ROWS]:
        table.add_row(*(_cell(row.get(name)) for name in names))
    terminal = Terminal(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 200)
    terminal.print(table)
    if len(rows) > MOST_ROWS:
        terminal.print(f"{len(rows) - MOST_ROWS:,} more rows; --json prints all")


def _when(created_at: str) -> str:
    return f"{datetime.fromisoformat(created_at):%Y-%m-%d %H:%M:%S} UTC"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _cell(value: Any) -> str:
    text = json_text(value, ascii=False) if isinstance(value, (bool, list, dict)) else cell_text(value)
    return text if len(text) <= 300 else text[:297] + "…"


def _counts(log: RunLog) -> dict[str, int]:
    return {"artifacts": len(log.made), "reused": sum(record.reused for record in log.made)}


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help="Only artifacts of this kind")] = None,
    runs: Annotated[bool, typer.Option("--runs", help="List runs instead of artifacts")] = False,
    store: StoreOption = DEFAULT_STORE,
    project: Annotated[str | None, typer.Option(metavar="NAME", callback=_project, help="Only this project's runs or artifacts")] = None,
    as_json: JsonOption = False,
) -> None:
    """List artifacts with their aliases, or runs, oldest first. A project's artifacts are those that its runs made or its aliases name."""
    opened = Store.existing(store, project)
    if runs and kind is not None:
        raise PunaError(f"list {kind} --runs: runs have no kind; leave one of the two out")
    if runs:
        logs = [log for log in map(opened.log, opened.runs()) if project in (None, log.project)]
        if as_json:
            return print_rows([log.row() | _counts(log) | {"versions": log.about.get("versions")} for log in logs], True)
        rows = []
        for log in logs:
            took = timedelta(seconds=round((log.closed - log.opened).total_seconds())) if log.opened and log.closed else ""
            commit, command = str(log.about.get("commit") or "")[:10], log.about.get("command") or log.flow
            row = {"run": log.name, "project": log.project, "state": log.state, **_counts(log), "took": str(took)}
            rows.append({**row, "commit": commit, "command": command, "error": log.error})
        unsaid = {"project": {log.project for log in logs} == {DEFAULT}, "error": not any(log.error for log in logs)}
        columns = [name for name in rows[0] if not unsaid.get(name)] if rows else []
        return print_rows(rows, False, columns)
    if kind is not None:
        known_kind(kind)
    entries, names = [one for one in opened.entries(project) if kind in (None, one["kind"])], opened.names(project)
    suspects = opened.suspects()
    if as_json:
        artifacts = [Artifact(one["kind"], one["key"], opened.files) for one in entries]
        return print_rows([summary(a, aliases=names.get(a.key, []), suspect=suspects.get(a.key)) for a in artifacts], True)
    rows = [
        {
            "id": Artifact(one["kind"], one["key"], opened.files).id, "stage": one["stage"], "rows": one["rows"],
            "created at": _when(one["created_at"]), "aliases": ", ".join(names.get(one["key"], [])),
            "suspect": suspects.get(one["key"]),
        }
        for one in entries
    ]  # fmt: skip
    print_rows(rows, False, ["id", "stage", "rows", "created at", "aliases", *(["suspect"] if suspects else [])])


def leads(processes: int, modules: list[str] | None = None, check: Callable[[Callable[[], None]], object] = lambda start: start()) -> bool:
    """Return True in rank 0, which runs the command. Other ranks join each distributed stage until rank 0 ends, then return False. If
    `processes` > 1 and no ranks run, `check` starts them, and their status ends this process. The tasks of a Slurm step are ranks."""

    def start() -> None:
        raise typer.Exit(ranks.start([sys.executable, "-m", "puna.flows.cli.main", *sys.argv[1:]], processes))

    os.environ.update(ranks.slurm())
    if processes > 1 and ranks.count() == 1:
        seen = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        os.environ.update(seen)  # the checks see as many processes as will run
        try:
            import_modules(modules)
            check(start)
            return False
        finally:
            for name in seen:
                del os.environ[name]
    if processes not in (1, ranks.count()):
        raise PunaError(f"--processes {processes}: {ranks.count()} processes run already (WORLD_SIZE, of torchrun or srun); leave it out")
    ranks.join()
    if ranks.follows():
        from puna.flows.engine.trace import load_stages

        load_stages()
        import_modules(modules)
        with tee_stderr(ranks.tell):
            ranks.follow(rank_jobs.do)
    return not ranks.follows()


def import_modules(modules: list[str] | None) -> list[ModuleType]:
    """Import and return the modules named by `--module`, which register their stages, rules and verifiers."""
    return [plugins.add(text) for text in modules or []]


@app.command()
def show(name: IdArgument, store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Show one artifact's manifest: configuration, inputs, tables, files, metrics, timings."""
    opened = Store.existing(store, project)
    artifact = opened.resolve(name)
    m = artifact.manifest
    suspect = opened.suspects().get(artifact.key)
    if as_json:
        return typer.echo(json_text(json.loads(m.to_json()) | ({"suspect": suspect} if suspect else {})))
    typer.echo(f"{artifact.id}  made by {m.stage}, {_when(m.created_at)}{''.join(f', {n}' for n in opened.names().get(artifact.key, []))}")
    typer.echo(artifact.folder)
    if suspect:
        typer.echo(f"suspect: {suspect}; a run that needs it recomputes it")
    sections: dict[str, list[tuple[str, str]]] = {
        # Fields have the names that `--set` takes.
        "configuration": [(field, json.dumps(value)) for field, value in explaining.flat(m.config).items() if field],
        "inputs": [(i.name, i.key if i.kind == "external" else f"{i.kind}/{i.key[:12]} {i.stage}") for i in m.inputs],
        "tables": [(n, f"{r.rows:,} rows: {', '.join(r.columns)}") for n, r in m.tables.items()],
        "files": [(n, f"{r.bytes:,} bytes") for n, r in m.files.items()],
        "metrics": [(n, _number(v)) for n, v in m.metrics.items()],
        "measured": [(n, _number(v)) for n, v in (*m.timings.items(), ("peak_memory_bytes", m.peak_memory_bytes))],
    }
    for title, lines in sections.items():
        if lines:
            typer.echo(f"\n{title}")
            for field, text in lines:
                typer.echo(f"  {field:40s} {text}")


@app.command()
def lineage(name: IdArgument, store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Show an artifact's inputs, the inputs of these inputs, and so on, back to the files outside the store."""
    opened = Store.existing(store, project)
    rows: list[dict[str, Any]] = []
    ids: set[str] = set()
    suspects = opened.suspects()

    def walk(artifact: Artifact, depth: int, role: str) -> None:
        mark = {"suspect": suspects[artifact.key]} if artifact.key in suspects else {}
        rows.append({"depth": depth, "id": artifact.id, "key": artifact.key, "stage": artifact.manifest.stage, "as": role} | mark)
        if artifact.key in ids:
            return
        ids.add(artifact.key)
        for item in artifact.manifest.inputs:
            source = opened.find(item.kind, item.key) if item.kind != "external" else None
            if source is not None:
                walk(source, depth + 1, item.name)
            else:
                label = item.key if item.kind == "external" else f"{item.kind}/{item.key[:12]} (removed)"
                rows.append({"depth": depth + 1, "id": label, "key": item.key, "stage": item.kind, "as": item.name})

    walk(opened.resolve(name), 0, "")
    if as_json:
        return print_rows(rows, True)
    seen_before: set[str] = set()
    for row in rows:
        more = " (as above)" if row["key"] in seen_before else f" (suspect: {row['suspect']})" if "suspect" in row else ""
        seen_before.add(row["key"])
        typer.echo(f"{'  ' * row['depth']}{row['id']}  {row['stage']}{' as ' + row['as'] if row['as'] else ''}{more}")


@app.command()
def explain(name: IdArgument, store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Explain why an artifact was recomputed: the fields, code and inputs that differ from an earlier artifact of the same stage."""
    opened = Store.existing(store, project)
    artifact = opened.resolve(name)
    before, changes = explaining.explain(opened, artifact)
    if as_json:
        rows = [{"what": c.what, "name": c.name, "before": c.before, "now": c.now} for c in changes]
        return typer.echo(json_text({"id": artifact.id, "before": before.id if before else None, "changes": rows}))
    if before is None:
        return typer.echo(f"{artifact.id}: the first artifact of stage {artifact.manifest.stage}")
    typer.echo(f"{artifact.id} differs from {before.id} (made {_when(before.manifest.created_at)}):")
    for change in changes:
        typer.echo(f"  {change}")


@app.command()
def why(
    document: Annotated[str, typer.Argument(help="A document's id (or its first digits), or its URL")], store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show each stage that kept, changed or dropped a document; for a drop, also the rule."""
    rows = fate(Store.existing(store), document)
    if as_json:
        return print_rows(rows, True)
    for row in rows:
        typer.echo(f"{row['step']:20s} {row['artifact'][:12]}  {row['what']}")


@app.command()
def near(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text, a page (.html), or - for standard input")],
    documents: Annotated[str | None, typer.Argument(metavar="[ID]", help="Documents to search (default: the newest)")] = None,
    least: Annotated[float, typer.Option(min=0, max=1, help="Minimum share of common word n-grams, in the union or in either text")] = 0.1,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of documents to show")] = 10, store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """List the documents that resemble a text. Common word n-grams are shown as a share of the union, the text's and the document's."""
    from puna.stages.curate.minhash.index import describe, resembling

    opened = Store.existing(store, project)
    artifact = _documents(opened, documents)
    rows = describe(resembling(_text_of(file), artifact, least)[:most], artifact)
    if as_json:
        return typer.echo(json_text({"documents": artifact.id, "found": rows}))
    typer.echo(f"{artifact.id}, {artifact.rows():,} documents: {len(rows) or 'nothing'} similar")
    if rows:
        shares = ("similarity", "of_text", "of_document")
        print_rows([{**row, **{name: f"{row[name]:.3f}" for name in shares}} for row in rows], False)


def _documents(store: Store, name: str | None) -> Artifact:
    if name is not None:
        artifact = store.resolve(name)
        if artifact.kind != "documents":
            raise PunaError(f"{artifact.id} holds {artifact.kind}, not documents; `puna list documents` lists them")
        return artifact
    artifacts = store.artifacts("documents")
    if not artifacts:
        raise PunaError(f"{store.uri} holds no documents to search")
    return artifacts[-1]


def _text_of(file: str) -> str:
    from puna.stages.curate.extract import ExtractConfig, Unreadable, page_text
    from puna.stages.reading.bodies import sniff

    path = Path(file)
    try:
        body = sys.stdin.buffer.read() if file == "-" else path.read_bytes()
    except OSError as error:
        raise PunaError(f"{file} cannot be read: {error.strerror}") from error
    media = "text/html" if path.suffix.lower() in HTML else sniff(body)
    try:
        return page_text(body, media or "text/plain", None, ExtractConfig()).text
    except Unreadable as why:
        raise PunaError(f"{file}: {why.detail}") from why


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(metavar="ID", help="One artifact (default: all)")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Accept the content of the suspect artifact ID")] = False,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move damaged artifacts to quarantine, to be recomputed")] = False,
    store: StoreOption = DEFAULT_STORE, project: ProjectOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Compare files with their checksums. List damaged artifacts, suspects (artifacts made from damaged ones) and lost aliases.

    Exit with status 1 if there are any."""
    opened = Store.existing(store, project)
    if trust and name is None:
        raise PunaError("--trust: name the one artifact whose content you accept")
    findings = maintenance.verify(opened, [opened.resolve(name)] if name else None, trust=trust)
    damaged = [f for f in findings if f.damage]
    suspect = [f for f in findings if f.suspect]
    aliases = [] if name else opened.lost_aliases()
    for line in aliases:
        typer.echo(line, err=as_json)
    if as_json:
        rows = [{"id": f.artifact.id, "key": f.artifact.key, "damage": f.damage, "suspect": f.suspect or None} for f in findings]
        print_rows(rows, True)
    else:
        for finding in damaged:
            typer.echo(f"{finding.artifact.id}: {'; '.join(finding.damage)}")
        for finding in suspect:
            typer.echo(f"{finding.artifact.id} is suspect: {finding.suspect}; a run that needs it recomputes it")
        typer.echo(f"{len(findings)} artifacts, {len(damaged)} damaged{f', {len(suspect)} suspect' if suspect else ''}")
    if quarantine:
        for finding in damaged:
            where = opened.quarantine(finding.artifact)
            outcome = f"is now in {where}" if where else "was recomputed meanwhile"
            typer.echo(f"{finding.artifact.id} {outcome}", err=True)
        if damaged:
            database.write(opened)
    if damaged or suspect or aliases:
        raise typer.Exit(1)


@app.command()
def gc(
    keep_runs: Annotated[int, typer.Option(min=0, help="Number of newest runs whose artifacts are kept")] = 5,
    work_days: Annotated[float, typer.Option(min=0, help="Days for which unfinished work is kept")] = 7.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without --yes, only list")] = False,
    store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """List or (--yes) remove artifacts that no alias or recent run needs, abandoned work and the quarantine; artifacts in use stay."""
    opened = Store.existing(store)
    garbage = maintenance.collect(opened, keep_runs=keep_runs, work_days=work_days, remove=yes)
    if yes and garbage:
        database.write(opened)
    if as_json:
        return print_rows([{"folder": g.place, "reason": g.reason, "bytes": g.bytes, "removed": yes} for g in garbage], True)
    for item in garbage:
        typer.echo(f"{size(item.bytes):>10s}  {item.place}  ({item.reason})")
    total = size(sum(g.bytes for g in garbage))
    outcome = "" if not garbage else " removed" if yes else " would be removed; add --yes"
    typer.echo(f"{len(garbage)} folders, {total}{outcome}")
