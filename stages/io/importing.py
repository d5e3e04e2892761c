"""Code that the import stages share: finding files, detecting formats and layouts, reading rows in workers, and counting dropped rows.

One worker reads each file. Rows are then partitioned by id, and the first row of each id is kept. Invalid and repeated rows go to the table
`dropped` with file, row, field and reason, or stop the run (`bad_rows`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from puna.stages import plugins
from puna.stages.contract import External, ExternalFile, SeededConfig, StageRun
from puna.stages.conversations import dump
from puna.stages.draws import fraction, identifier
from puna.stages.io import convert, layouts
from puna.stages.io.layouts import EMPTY, IGNORE, Plan
from puna.stages.io.turns import Refused
from puna.stages.reading.files import Job, address_of, jobs_of, suffix
from puna.stages.reading.pages import UNREADABLE, repetitions
from puna.stages.reading.rows import COLUMNAR, SIDECARS, Fault, Row, format_of, is_text, read_rows, stream_rows
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.python_code import PythonFunction
from puna.stages.verifiers.registry import from_text
from puna.storage import PunaError, errors_at
from puna.storage.exchange import partitions
from puna.storage.schemas import table_schema
from puna.storage.shards import count, row_bytes

BESIDE = (
    "", ".md", ".rst", ".txt", ".pdf", ".html", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".bib", ".svg", ".png", ".jpg",
    ".jpeg", ".gif",
)  # fmt: skip
"""Suffixes of files without rows in a data repository: description, licence, code and pictures."""
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
SNIFFED_ROWS = 200
SHOWN = 4000  # maximum characters of an example in the table `examples`
CHUNK_BYTES = 32 << 20
PACKED = 4  # approximate bytes of rows in memory per byte of a file
HUB_BYTES = 1 << 30
HELDOUT_SHARE = "Share of prompts held out, by a hash of prompt and seed, among rows that name no split"


class ImportConfig(SeededConfig):
    """Settings that all imports of rows share."""

    columns: dict[str, str] = Field(default_factory=dict, description="Field → column, for columns with unusual names; a.b.0: nested value")
    ignored_columns: tuple[str, ...] = Field((), description="Columns to ignore")
    bad_rows: Literal["drop", "refuse"] = Field("drop", description="Bad or repeated rows go to `dropped` (drop), or stop the run (refuse)")
    format: Literal["auto", "json", "parquet", "csv", "tsv", "dataset"] = Field(
        "auto", description="Format of all files (json: lines or an array); auto: each file's format by name, else by first bytes"
    )
    max_row_bytes: int = Field(16 << 20, ge=1024, le=1 << 30, description="Maximum size of a row in bytes; larger rows are invalid")
    task: str = Field("", description="Task of rows that name no task; empty: the input's name")
    dataset_subset: str | None = Field(None, min_length=1, description="Subset (configuration) of a data set on the hub")
    dataset_split: str = Field("train", min_length=1, description="Split of a data set on the hub")


class SplitConfig(ImportConfig):
    """Settings of an import whose rows are split into training and held-out rows."""

    heldout_fraction: float = Field(0.0, ge=0, lt=1, description=HELDOUT_SHARE)


class PromptRowsConfig(SplitConfig):
    """Settings of an import of prompts, whose rows may name verifiers."""

    verifier: str = Field("", description="Verifier of rows that name none, a name (numeric, exact) or JSON; replaces a benchmark's")
    code_from: tuple[str, ...] = Field((), description="Modules whose functions a row's verifier may name; set by `puna import --module`")


def import_rows(kind: str, layout: str, inputs: Sequence[External], config: ImportConfig, run: StageRun) -> None:
    """Write the tables of valid rows, of `dropped` rows and of `examples` (each input's layout, with a row). `kind`: the kind of artifact;
    `layout`: a layout's name or "auto". Raise PunaError if no row is valid."""
    jobs = list(_jobs(inputs, kind, config, run))
    if isinstance(config, PromptRowsConfig) and config.verifier:
        from_text(named_verifier(config.verifier))
    plans, examples = {}, []
    for name in dict.fromkeys(job.source for job in jobs):
        plan, example = _plan(kind, layout, name, [job for job in jobs if job.source == name], config)
        if plan is not None:
            plans[name] = plan
            run.metric(f"layout_{name}", plan.layout)
            examples.append(example)
    if not plans:
        raise PunaError(f"{run.stage}: {', '.join(e.uri for e in inputs)}: there are no rows in {len(jobs)} files")
    read = list(enumerate(job for job in jobs if job.source in plans))
    size = sum(job.file.bytes * PACKED if job.file else HUB_BYTES for _, job in read)
    arguments = (plans, kind, config.model_dump_json(), type(config))
    rows = run.exchange(_read, read, *arguments, by="id", partitions=partitions(size), rows=len(read))
    run.count_input(sum(info["rows"] for info in rows.infos))
    for name in plans:
        if left := sorted({column for info in rows.infos if info["source"] == name for column in info["left"]}):
            run.metric(f"columns_not_taken_{name}", ", ".join(left))
    cut = count(table_schema(kind), sum(info["bytes"] for info in rows.infos))
    counts = run.produce_shards(_first_of_each_id, rows, cut, kind, config.bad_rows)
    rules = sum((Counter(result["rules"]) for result in counts), Counter[str]())
    if not sum(result["kept"] for result in counts):
        why = ", ".join(f"{number} {rule}" for rule, number in rules.most_common())
        _, first = min((result["first"] for result in counts if result["first"]), default=[0, ""])
        raise PunaError(f"{run.stage}: no row of {', '.join(plans)} is valid: {why or 'there are none'}. The first: {first}")
    run.write_rows(examples, "examples")
    run.metric("files", len(jobs))
    run.metric("rows", (run.input_rows or 0))
    if "split" in table_schema(kind).schema.names:
        run.metric("heldout", sum(result["heldout"] for result in counts))
    if kind == "prompts":
        run.metric("prompts_without_verifier", sum(result["bare"] for result in counts))
    for rule, number in sorted(rules.items()):
        run.metric(f"dropped_{rule}", number)


@dataclass
class Files:
    """An input's files. `formats`: name → format; `splits`: name → split, empty if none is `train`; `beside`: files without rows."""

    formats: dict[str, str] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)

    def heldout(self, name: str) -> bool:
        return self.splits.get(name, "") in convert.HELDOUT


def look(external: External, format: str) -> Files:
    """Return an input's non-empty files with formats and splits. Raise PunaError if a format is unknown, or if no file has rows."""
    results, whole = Files(), len(external.files) == 1
    for file in external.files:
        if PurePosixPath(file.name).name in SIDECARS or not file.bytes:
            continue
        aside = not whole and suffix(file.name) in BESIDE
        kind = format_of(file.name, b"") or ("" if aside else format)
        if kind and format != "auto":
            kind = format
        elif kind == "auto" or (aside and not suffix(file.name)):
            with closing(file.open()) as handle:
                kind = format_of(file.name, handle.read(4096)) or ""
        if kind:
            results.formats[file.name] = kind
        elif not aside:
            raise PunaError(f"{file.location}: is not recognized as JSON, Parquet, CSV, TSV or a saved data set; set format")
        else:
            results.beside.append(file.name)
    if results.beside and not results.formats:
        raise PunaError(f"input {external.uri}: none of its {len(external.files)} files contains rows: {', '.join(results.beside[:5])}")
    splits = {name: split for name in results.formats if (split := split_named(name))}
    if not whole and "train" in splits.values():
        results.splits = splits
    return results


def split_named(name: str) -> str:
    """Return the first split named by a word of a file's path (`hh_test.jsonl`, `validation/…`), file name first; "" if there is none."""
    path = PurePosixPath(name.lower())
    stem = SHARD.sub("", path.name.partition(".")[0])
    words = [word for part in (stem, *reversed(path.parts[:-1])) for word in re.split(r"[-._ ]+", part)]
    return next((word for word in words if word in ("train", *convert.HELDOUT)), "")


def _jobs(inputs: Sequence[External], kind: str, config: ImportConfig, run: StageRun) -> Iterator[Job]:
    """Yield the files and hub shards to read. Report files without rows, and held-out files (not read for documents), as metrics."""
    first_rows = {external.name: look(external, config.format) for external in inputs}
    beside = [name for files in first_rows.values() for name in files.beside]
    apart = [name for files in first_rows.values() for name in files.formats if files.heldout(name)]
    heldout_metric = "files_left_out" if kind == "documents" else "files_held_out"
    for metric, names in (("files_without_rows", beside), (heldout_metric, apart)):
        if names:
            run.metric(metric, ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else ""))

    def format_(external: External, file: ExternalFile) -> str | None:
        files = first_rows[external.name]
        return None if kind == "documents" and files.heldout(file.name) else files.formats.get(file.name)

    for job in jobs_of(inputs, config.dataset_subset, config.dataset_split, format_):
        yield job._replace(split="heldout") if job.file is not None and first_rows[job.source].heldout(job.file.name) else job


def _rows(job: Job, config: ImportConfig) -> Iterator[Row | Fault]:
    if job.file is None:
        yield from stream_rows(job.stream())
        return
    with errors_at(f"input {job.file.location}: the file no longer exists", FileNotFoundError), closing(job.file.open()) as handle:
        try:
            yield from read_rows(handle, job.file.location, job.format, config.max_row_bytes)
        except PunaError as error:
            yield Fault(0, "", UNREADABLE, f"{error}; write the file again, or leave it out")


def _plan(kind: str, layout: str, name: str, jobs: Sequence[Job], config: ImportConfig) -> tuple[Plan | None, dict[str, Any]]:
    sample: list[dict[str, Any]] = []
    fault: Fault | None = None
    for job in jobs:
        for row in islice(_rows(job, config), max(1, SNIFFED_ROWS // len(jobs))):
            if isinstance(row, Row):
                fields = _fields(row, job.format).items()
                sample.append({column: value for column, value in fields if column not in config.ignored_columns})
            else:
                fault = fault or row
        if len(sample) >= SNIFFED_ROWS:
            break
    if not sample and fault is not None:
        where = f"row {fault.number} " if fault.number else ""
        raise PunaError(f"input {name}: none of its first records is a valid row; {where}{fault.reason}")
    if not sample:
        return None, {}
    verified = isinstance(config, PromptRowsConfig) and bool(config.verifier)
    plan = layouts.plan(kind, sample, f"input {name}", layout, config.columns, verified)
    example = next((text for row in sample if (text := _example(kind, plan, row)) is not None), "none of the first rows is valid")
    about = {"layout": plan.layout, "why": plan.why, "columns": plan.columns, "format": jobs[0].format}
    texts = {"prompt": _json(sample[0]), "text": example, "detail": dump(about)}
    return plan, {"id": f"layout-{name}", "kind": "layout", **texts}


def _example(kind: str, plan: Plan, row: dict[str, Any]) -> str | None:
    try:
        values = convert.CONVERT[kind](plan, row)
    except Refused:
        return None
    return _json({name: value for name, value in values.items() if value is not None})


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace").decode()
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _read(numbered: tuple[int, Job], plans: dict[str, Plan], kind: str, settings: str, config_type: type[ImportConfig]) -> Iterator[Any]:
    """Yield one file's rows as tables, then a summary: number of rows, bytes of valid rows, source and unused columns."""
    number, job = numbered
    config = config_type.model_validate_json(settings)
    columns = table_schema(kind).schema.names
    waiting: list[dict[str, Any]] = []
    size = rows = total = 0
    paths = plans[job.source].columns.values()
    fields = {*paths, *(path.partition(".")[0] for path in paths)}
    left: set[str] = set()

    def flush() -> pa.Table:
        nonlocal size, total
        table, size = _records(kind, waiting), 0
        total += int(row_bytes(table.filter(pc.is_valid(table["place"])).select(columns)).sum())
        waiting.clear()
        return table

    for row in _rows(job, config):
        if isinstance(row, Row):
            left.update(column for column, value in row.fields.items() if column not in fields and value not in EMPTY)
        values = _take_row(row, job, plans[job.source], kind, config) if isinstance(row, Row) else row
        if isinstance(values, dict) and not is_text(values):  # JSON within a valid text may decode to lone surrogates
            values = Fault(row.number, "", "invalid_utf8", "contains lone surrogates, which are not valid Unicode text")
        if isinstance(values, Fault):
            field = f", field {values.field}" if values.field else ""
            fault = f"{job.location}, row {values.number}{field}: {values.reason}" if values.number else values.reason
            if config.bad_rows == "refuse":
                raise PunaError(f"{fault}. Set bad_rows=drop to drop such rows")
            values = {"id": identifier("dropped", job.source, job.name, values.number), "rule": values.rule, "detail": fault}
        else:
            if kind == "documents":
                values["url"] = address_of(values["url"] or "", job.source, job.name, row.number)
            values["place"] = f"{job.location}, row {row.number}"
        waiting.append(values | {"order": (number << 40) + rows})
        rows += 1
        size += 300 + sum(len(value) for value in values.values() if isinstance(value, str))
        if size >= CHUNK_BYTES:
            yield flush()
    yield flush()
    yield {"rows": rows, "bytes": total, "source": job.source, "left": sorted(left)}


def _records(kind: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Return valid rows (with a `place`) and `dropped` rows (without) as one Arrow table; `order` sorts rows by file and position."""
    fields = {field.name: field.with_nullable(True) for name in (kind, "dropped") for field in table_schema(name).schema}
    return pa.Table.from_pylist(rows, schema=pa.schema([*fields.values(), pa.field("place", pa.string()), pa.field("order", pa.int64())]))


def _take_row(row: Row, job: Job, plan: Plan, kind: str, config: ImportConfig) -> dict[str, Any] | Fault:
    fields = _fields(row, job.format)
    try:
        for column, meaning in plan.unread.items():
            if fields.get(column) not in EMPTY and column not in config.ignored_columns:
                reason = f"contains {meaning}, which layout {plan.layout} does not read; leave it out: {IGNORE.format(column)}"
                raise Refused(column, "unread_column", reason)
        values = convert.CONVERT[kind](plan, fields)
        own = plan.get(fields, "id")
        if own is not None and not isinstance(own, str | int):
            raise Refused(plan.name("id"), "wrong_type", "is neither text nor a number")
        row_id = identifier(kind, job.source, own) if own is not None else None
        if kind == "documents":
            name = row_id or identifier("document", job.source, values["url"] or "", values["text"])
            return values | {"id": name, "source": job.source}
        if isinstance(config, PromptRowsConfig) and config.verifier and plan.get(fields, "verifier") is None:
            values["verifier"] = named_verifier(config.verifier)
            _check_question(values)
        if values.get("verifier") is not None:
            assert isinstance(config, PromptRowsConfig)
            _check_verifier(plan.name("verifier"), values["verifier"], config.code_from)
        more = {"source": job.source, "score": None} if kind == "instructions" else {}
        return _with_ids(kind, values | more | _about(plan, fields, job, config), row_id, config)
    except Refused as error:
        return Fault(row.number, error.field, error.rule, error.reason)


def named_verifier(text: str) -> str:
    return text if text.lstrip().startswith("{") else dump({"name": text.strip()})


def _check_question(values: dict[str, Any]) -> None:
    """Raise Refused if the configured verifier cannot score the row, for example because the row has no reference."""
    try:
        from_text(values["verifier"]).check(Question("of this row", "", "", values["reference"]))
    except PunaError as error:
        raise Refused("reference", "no_reference", str(error)) from error


def _fields(row: Row, format: str) -> dict[str, Any]:
    """Return the fields that a row has. Columnar formats add nulls for missing fields; in CSV, a missing field is an empty cell."""
    if format in ("csv", "tsv"):
        return {column: cell for column, cell in row.fields.items() if cell}
    return dict(_without_nulls(row.fields)) if format in COLUMNAR else row.fields


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _about(plan: Plan, row: dict[str, Any], job: Job, config: ImportConfig) -> dict[str, Any]:
    task = plan.get(row, "task")
    if task is not None and (not isinstance(task, str) or not task.strip()):
        raise Refused(plan.name("task"), "wrong_type", "is not a task's name: give text")
    of_file = job.split if job.file is not None else ""
    return {"task": task or config.task or job.source, "split": convert.split_of(plan, row) or of_file or None}


def _check_verifier(field: str, text: str, code_from: Sequence[str]) -> None:
    """Raise Refused for an invalid verifier, or one that names code outside the allowed modules, since rows are untrusted."""
    try:
        todo = [from_text(text)]
    except (PunaError, RecursionError) as error:
        raise Refused(field, "names_code" if '"function"' in text else "no_verifier", str(error)) from error
    while todo:
        verifier = todo.pop()
        todo += verifier.parts()
        module, colon, _ = verifier.function.partition(":") if isinstance(verifier, PythonFunction) else ("", "", "")
        if colon and module not in code_from and not plugins.is_offered(module):
            allow = f"--set 'code_from=[\"{module}\"]'"
            raise Refused(field, "names_code", f"names a function of {module}, which this import does not allow: {allow}")


def _with_ids(kind: str, values: dict[str, Any], named: str | None, config: ImportConfig) -> dict[str, Any]:
    """Return `values` with the row's id (`named`, else a digest), its prompt's id (except for prompts) and its split."""
    context, tools = values["messages"], values["tools"] or ""
    content: tuple[Any, ...] = "instruction", context, tools
    if kind == "instructions":
        context = dump(list(takewhile(lambda turn: turn["role"] != "assistant", json.loads(context))))
    prompt = identifier(context, tools)
    if kind == "preferences":
        content = ("preference", prompt, *(values.get(side) for side in ("chosen", "rejected", "edited", "others")))
    values["id"] = named or (prompt if kind == "prompts" else identifier(*content))
    if kind != "prompts":
        values["prompt_id"] = prompt
    if values["split"] is None:
        assert isinstance(config, SplitConfig)
        values["split"] = "heldout" if fraction(config.seed, context) < config.heldout_fraction else "train"
    return values


def _first_of_each_id(rows: pa.Table, kind: str, bad_rows: str) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Return the first row of each id in a partition and the dropped rows, as tables, and counts. Raise PunaError for a repeated id if
    `bad_rows` is refuse."""
    rows = rows.sort_by([("id", "ascending"), ("order", "ascending")])
    ids, valid = rows["id"].to_pylist(), pc.is_valid(rows["place"])
    (first, repeated), again = repetitions(ids), []
    for at in repeated:
        where = rows["place"][at].as_py()
        detail = f"{where}, field id: an earlier row has the same id, {ids[at]}"
        if bad_rows == "refuse":
            raise PunaError(detail)
        again.append({"id": identifier("duplicate", where), "rule": "duplicate", "detail": detail})
    firsts = rows.filter(pc.and_(valid, pa.array(first))).select(table_schema(kind).schema.names)
    schema = table_schema("dropped").schema
    other = rows.filter(pc.invert(valid))
    dropped = pa.concat_tables([other.select(schema.names).cast(schema), pa.Table.from_pylist(again, schema=schema)])
    earliest = list(min(zip(other["order"].to_pylist(), other["detail"].to_pylist(), strict=True), default=()))
    rules = dict(Counter(dropped["rule"].to_pylist()))
    heldout = firsts["split"].to_pylist().count("heldout") if "split" in firsts.column_names else 0
    bare = firsts["verifier"].null_count if "verifier" in firsts.column_names else 0
    return {kind: firsts, "dropped": dropped}, {"kept": len(firsts), "heldout": heldout, "bare": bare, "rules": rules, "first": earliest}
