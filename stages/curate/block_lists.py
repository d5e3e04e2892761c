"""`block_lists`: read lists of unwanted domains, URLs, words and regular expressions into an artifact."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import pyarrow as pa
from pydantic import Field

from puna.stages import urls
from puna.stages.contract import External, ExternalFile, StageConfig, StageRun, stage
from puna.stages.reading.files import COMPRESSED, decompress
from puna.storage import PunaError

KINDS = {"domains": "domain", "urls": "url", "words": "word", "expressions": "expression"}  # file of a UT1 folder → kind of its lines
SIMPLE = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,24}")
HOSTS = frozenset(("0.0.0.0", "127.0.0.1", "::", "::1"))
PORT = re.compile(r"(?:\w+://)?[^/?#]*:\d+(?:[/?#]|$)")
WORD = re.compile(r"[a-z]+")
DEPTH = 8
SCHEMA = pa.schema([("kind", pa.string()), ("entry", pa.string()), ("rule", pa.string())])


class BlockListsConfig(StageConfig):
    categories: tuple[str, ...] = Field((), description="Folders of a UT1-style tree to read (adult, phishing, …); empty: all folders")


class Job(NamedTuple):
    """A file of the input `source`, the kind of its lines ("": domains or URLs), and the rule that its entries get."""

    source: str
    file: ExternalFile
    kind: str
    rule: str


@stage(kind="lists")
def block_lists(inputs: list[External], config: BlockListsConfig, run: StageRun) -> None:
    """Read lists of unwanted sites for `url_filter`.

    An input may be a tree in the format of the UT1 lists (`CATEGORY/domains`, `urls`, `words` or `expressions`; other files are ignored);
    its rules are named `url_CATEGORY`. Other inputs have domains and domain/path prefixes, one per line; their rule is `url_INPUT`. `#`
    starts a comment, except in expressions. Hosts files, `||domain^` and compressed files (gz, xz, zst) can also be read. An entry in
    several lists gets the rule that sorts first. Invalid lines become rows of `dropped` (not_an_address, has_a_port, public_suffix,
    too_deep, …)."""
    jobs = list(_jobs(inputs, config))
    tables = [SCHEMA.empty_table()]
    for job, (entries, bad) in zip(jobs, run.map(_read, jobs, rows=len(jobs)), strict=True):
        tables.append(entries)
        rows = [{"id": f"{job.source}/{job.file.name}:{line}", "rule": rule, "detail": text} for line, rule, text in bad]
        run.write_rows(rows, "dropped")
    first = pa.concat_tables(tables).group_by(["kind", "entry"]).aggregate([("rule", "min")]).rename_columns(["kind", "entry", "rule"])
    run.write(first)
    for rule, count in sorted(Counter(first["rule"].to_pylist()).items()):
        run.metric(rule, count)


def _jobs(inputs: list[External], config: BlockListsConfig) -> Iterator[Job]:
    seen: set[str] = set()
    for external in sorted(inputs, key=lambda external: (external.name, external.data_digest)):
        if not external.files:
            raise PunaError(f"block_lists: input {external.name} ({external.uri}) has no files; give a file or folder")
        names = {file: PurePosixPath(file.name) for file in external.files}
        tree = any(path.parent.name and _kind(path) for path in names.values())
        for file, path in sorted(names.items(), key=lambda pair: pair[0].name):
            if not tree:
                yield Job(external.name, file, "", f"url_{external.name}")
            elif _kind(path) and (not config.categories or path.parent.name in config.categories):
                seen.add(path.parent.name)
                yield Job(external.name, file, _kind(path), f"url_{path.parent.name}")
    if missing := sorted(set(config.categories) - seen):
        raise PunaError(f"block_lists.categories: no input has the folder {missing[0]!r}; choose from: {', '.join(sorted(seen))}")


def _kind(path: PurePosixPath) -> str:
    stem = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    return KINDS.get(stem, "")


def _read(job: Job) -> tuple[pa.Table, list[tuple[int, str, str]]]:
    with job.file.open() as handle, decompress(handle, job.file.name) as content:
        lines = content.read().decode("utf-8", "replace").splitlines()
    entries, bad = parse(lines, job.kind)
    columns = [[kind for kind, _ in entries], [entry for _, entry in entries], [job.rule] * len(entries)]
    return pa.table([pa.array(column, pa.string()) for column in columns], schema=SCHEMA), bad


def parse(lines: Iterable[str], kind: str = "") -> tuple[list[tuple[str, str]], list[tuple[int, str, str]]]:
    """Return the valid lines as distinct (kind, entry), and the invalid ones as (line number, fault, text). `kind` '': domains or URLs."""
    entries: dict[tuple[str, str], None] = {}
    bad: list[tuple[int, str, str]] = []
    for number, line in enumerate(lines, 1):
        entry = (line if kind == "expression" else line.partition("#")[0]).strip()
        if not entry:
            continue
        results, fault = _expression(entry) if kind == "expression" else _word(entry) if kind == "word" else _place(entry)
        if fault:
            bad.append((number, fault, line.strip()))
        elif results:
            entries[results] = None
    return list(entries), bad


Parsed = tuple[tuple[str, str] | None, str]


def _expression(text: str) -> Parsed:
    try:
        re.compile(text)
    except re.error:
        return None, "not_an_expression"
    return ("expression", text), ""


def _word(text: str) -> Parsed:
    return (("word", text.lower()), "") if WORD.fullmatch(text.lower()) else (None, "not_a_word")


def _place(entry: str) -> Parsed:
    """Return ((kind, entry) or None, fault). An entry is a domain, or a URL without its scheme. (None, ""): ignore a host without a dot."""
    columns = entry.split()
    entry = columns[-1] if len(columns) == 2 and columns[0] in HOSTS else entry.removeprefix("||").removesuffix("^")
    if SIMPLE.fullmatch(entry.lower()):
        host, path, query = entry.lower().removeprefix("www."), "", ""
    elif PORT.match(entry):
        return None, "has_a_port"  # URLs are compared without their ports
    else:
        address = urls.parse(entry if "://" in entry else f"https://{entry}")
        if address is None or not address.host or " " in entry:
            return None, "not_an_address"
        domain = address.host.removeprefix("*").removeprefix(".")
        if "*" in domain or (domain != address.host and "." not in domain):
            return None, "not_an_address"
        host, path, query = domain.removeprefix("www."), urls.escapes(address.path).lower(), urls.escapes(address.query).lower()
        path = path.rstrip("/") if query else "".join(f"/{folder}" for folder in path.split("/") if folder)
    if not path and not query and urls.public_suffix(host):
        return None, "public_suffix" if "." in host else ""  # hosts files contain names without a dot, such as localhost
    if path.count("/") > DEPTH and not query:
        return None, "too_deep"
    return ("url" if path or query else "domain", host + path + (f"?{query}" if query else "")), ""
