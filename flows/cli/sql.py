"""The command `puna sql`: one query, or an interactive prompt with completion and history."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from puna.flows.cli.inspect import JsonOption, ProjectOption, StoreOption, print_rows, replacing
from puna.flows.engine.defaults import DEFAULT_STORE
from puna.storage import PunaError, Store, catalog, database
from puna.storage.schemas import TABLES
from puna.storage.views import DERIVED, FACTS, MACROS, NEWEST

app = typer.Typer()
LEAVING = (".exit", ".quit", "exit", "quit")  # lines that end the prompt
HISTORY = 2000  # maximum number of lines in the history


@app.command()
def sql(
    text: Annotated[str | None, typer.Argument(metavar="QUERY", help="One SQL statement; without it, a prompt opens")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Result file: .parquet, .csv, .json or .jsonl")] = None,
    file: Annotated[bool, typer.Option("--file", help="Update puna.duckdb, the views for other clients, and print its path")] = False,
    store: StoreOption = DEFAULT_STORE,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Query every artifact with DuckDB, read-only: one view per table, and artifacts, lineage, metrics, aliases, runs, steps."""
    opened = Store.existing(store, project)
    if as_json and (file or output is not None):
        raise PunaError("--json prints rows: leave it out with --output, whose file name gives the format, and with --file")
    if file:
        if text is not None or output is not None:
            raise PunaError("--file takes no query: it prints the path of the file for other clients")
        database.write(opened)
        typer.echo(f"{opened.uri}/{database.FILE}")
    elif output is not None:
        if text is None:
            raise PunaError("--output: give the query whose result is to be written")
        typer.echo(f"{write_result(opened, text, output):,} rows: {output}")
    elif text is not None:
        with catalog.Catalog(opened) as connection:
            _answer(connection, text, as_json)
    else:
        _prompt(opened, as_json)


def write_result(store: Store, text: str, output: Path) -> int:
    """Write the result of a query to a file atomically; return the number of rows. Raise PunaError if the file cannot be written."""
    target = output.expanduser().absolute()
    if target.resolve().is_relative_to(store.root.resolve()):
        raise PunaError(f"--output {output}: is in the store, where only stages write; name a file elsewhere")
    if not target.parent.is_dir():
        raise PunaError(f"--output {output}: there is no folder {target.parent}")
    catalog.format_of(output)
    with replacing(target, f"--output {output}", "name another file") as part, catalog.Catalog(store, part) as connection:
        return connection.write(text, part)


def _answer(opened: catalog.Catalog, text: str, as_json: bool) -> None:
    """Print a statement's result; warn about unverified bytes and, on a terminal, about views with rows of several artifacts."""
    table = catalog.run(opened, text)
    print_rows(catalog.rows_of(table), as_json, table.schema.names)
    if opened.uncompared:
        typer.echo(f"{opened.uncompared:,} bytes were not compared with their checksums; `puna verify` compares them", err=True)
    if not sys.stderr.isatty():
        return
    for name, count in opened.several(text).items():
        typer.echo(f"{name} has rows of {count} artifacts; {NEWEST}.{name} has only the newest artifact's", err=True)


def _prompt(store: Store, as_json: bool) -> None:
    with catalog.Catalog(store) as connection, contextlib.ExitStack() as stack:
        # With input from a pipe, no greeting is printed among the results, and a wrong statement fails the command.
        interactive = sys.stdin.isatty()
        if interactive:
            stack.enter_context(_typing(connection))
            typer.echo(
                f"DuckDB over {store.uri}\ntables: {', '.join([*FACTS, *TABLES, *DERIVED])}\n"
                f"rows of the newest artifact: {NEWEST}.documents, …; of an alias: \"documents@latest\", …\nmacros: {', '.join(MACROS)}\n"
                "end a statement with ;  Tab completes  leave with .exit"
            )
        failed = False
        for text in _statements(interactive):
            try:
                for statement in catalog.statements(connection, text):
                    _answer(connection, statement, as_json)
            except PunaError as error:
                failed = True
                typer.echo(f"error: {error}", err=True)
        if failed and not interactive:
            raise typer.Exit(1)


@contextlib.contextmanager
def _typing(opened: catalog.Catalog) -> Iterator[None]:
    """Turn on Tab completion and a history of statements within the context, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "puna" / "sql_history"
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        readline.read_history_file(file)

    def suggest(word: str, number: int) -> str | None:
        words = completions(opened, word, readline.get_line_buffer())
        return words[number] if number < len(words) else None

    readline.set_completer_delims(" \t\n,;()=<>+-*/")
    readline.set_completer(suggest)
    # macOS has libedit under this name, which binds keys in its own way.
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    try:
        yield
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            readline.set_history_length(HISTORY)
            readline.write_history_file(file)


def completions(opened: catalog.Catalog, word: str, line: str) -> list[str]:
    """Return a word's completions: aliases after a single quote, else tables, macros, keywords, and columns of the tables in the line."""
    if word.startswith("'"):
        return [f"'{alias}'" for alias in opened.aliases if alias.startswith(word[1:])]
    if "." in word and not word.startswith((f"{NEWEST}.", '"')):
        return []
    schemas = {**FACTS, **{name: table.schema for name, table in TABLES.items()}}
    tables = [name.rpartition(".")[2] for name in opened.names_in(line)]
    columns = {"artifact", *(column for name in tables if name in schemas for column in schemas[name].names)}
    keywords = [row[0] for row in opened.connection.execute("select keyword_name from duckdb_keywords()").fetchall()]
    candidates = [*sorted({*columns, *opened.names, *(name.removesuffix(")") for name in MACROS)}), *sorted(keywords)]
    return list(dict.fromkeys(name for name in candidates if name.lower().startswith(word.lower())))


def _statements(interactive: bool) -> Iterator[str]:
    """Yield statements until `.exit` or the end of input. A `;` at a line's end completes a statement; Ctrl-C at the prompt discards it."""
    pending: list[str] = []
    while True:
        try:
            line = input(("  ... " if pending else "puna> ") if interactive else "")
        except KeyboardInterrupt:
            if not interactive:
                raise
            typer.echo("")
            pending = []
            continue
        except EOFError:
            if interactive:
                typer.echo("")
            if any(line.strip() for line in pending):
                yield "\n".join(pending)
            return
        if not pending and line.strip() in LEAVING:
            return
        pending.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(pending)
            pending = []
