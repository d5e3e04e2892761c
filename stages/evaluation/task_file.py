"""Task files in the YAML format of lm-evaluation-harness, over local data, without Python code.

`TaskFile` lists the supported keys. Keys in `UNUSED` affect no score and are ignored; any other key is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any, Literal

import yaml
from pydantic import Field, JsonValue, field_validator, model_validator

from puna.stages.contract import External, ExternalFile, StageConfig, parse
from puna.stages.conversations import asking
from puna.stages.draws import identifier, place
from puna.stages.evaluation.task_programs import FILTER_SETTINGS, FILTERS, MATCH_SETTINGS, Row, render, run_filter, verifiers_of
from puna.stages.reading.rows import Fault, read_rows
from puna.stages.verifiers.registry import from_text
from puna.stages.verifiers.scoring import question_of
from puna.storage import PunaError, errors_at

Output = Literal["multiple_choice", "generate_until", "loglikelihood_rolling"]
METRICS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes", "exact_match"),
    "generate_until": ("exact_match",),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
}
DEFAULTS = {"multiple_choice": ("acc", "acc_norm"), "generate_until": ("exact_match",)}
LOWER = ("word_perplexity", "byte_perplexity", "bits_per_byte")  # metrics for which lower values are better
AGGREGATIONS = {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity", "bits_per_byte": "bits_per_byte"}
UNUSED = ("tag", "group", "task_alias", "should_decontaminate", "doc_to_decontamination_query", "dataset_name")
"""Keys that do not affect scores on local data."""
FILE_BYTES = 1 << 20
ROW_BYTES = 16 << 20
FORMATS = {"json": "json", "parquet": "parquet", "csv": "csv"}


class Metric(StageConfig):
    """An entry of metric_list: a metric, and how exact_match compares texts."""

    metric: str = Field(description="Name of the metric")
    aggregation: str = Field("", description="Empty, or the metric's standard aggregation; no other is supported")
    higher_is_better: bool | None = Field(None, description="Higher values are better; only for readers")
    ignore_case: bool = Field(False, description="exact_match: ignore case")
    ignore_punctuation: bool = Field(False, description="exact_match: ignore ASCII punctuation")
    ignore_numbers: bool = Field(False, description="exact_match: ignore digits")
    regexes_to_ignore: tuple[str, ...] = Field((), description="exact_match: regular expressions whose matches are removed first")

    @property
    def matching(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in MATCH_SETTINGS}


class Filter(StageConfig):
    """An entry of filter_list: steps that transform an answer before it is scored."""

    name: str = Field(min_length=1, description="Name of the filter, appended to the metric's name")
    filter: tuple[dict[str, JsonValue], ...] = Field(min_length=1, description="Steps, such as {function: regex, …}")

    @field_validator("filter")
    @classmethod
    def _steps(cls, steps: tuple[dict[str, JsonValue], ...]) -> tuple[dict[str, JsonValue], ...]:
        for step in steps:
            if (name := step.get("function")) not in FILTERS:
                raise ValueError(f"the function {name!r} is not supported; use one of {', '.join(FILTERS)}")
            if unknown := sorted(set(step) - {"function", *FILTER_SETTINGS.get(str(name), ())}):
                raise ValueError(f"{name}: the setting {unknown[0]!r} is not supported")
        return steps


class Shots(StageConfig):
    """Settings of the fixed few-shot examples (`fewshot_config`)."""

    sampler: Literal["first_n"] = Field("first_n", description="Choice of the examples: the first ones; random ones are not supported")
    split: str | None = Field(None, description="Split of the examples; null: fewshot_split")
    samples: tuple[dict[str, JsonValue], ...] | None = Field(None, description="The examples themselves, as rows")
    doc_to_text: str | None = Field(None, description="Question of an example; null: doc_to_text of the task")
    doc_to_target: str | int | None = Field(None, description="Answer of an example; null: doc_to_target of the task")
    fewshot_delimiter: str | None = Field(None, description="Text after each example; null: the task's")
    target_delimiter: str | None = Field(None, description="Text between question and answer; null: the task's")


class Generation(StageConfig):
    """Settings of generation (`generation_kwargs`)."""

    until: tuple[str, ...] | None = Field(None, description="Texts that end an answer; null: fewshot_delimiter")
    max_gen_toks: int = Field(256, ge=1, description="Maximum length of an answer, in tokens")
    temperature: float = Field(0.0, ge=0, le=10, description="Sampling temperature; 0: greedy decoding")
    do_sample: bool | None = Field(None, description="False: temperature 0")
    top_p: float = Field(1.0, gt=0, le=1, description="Top-p: total probability of the tokens to sample from")
    top_k: int = Field(0, ge=0, description="Top-k: number of likeliest tokens to sample from; 0: all")

    @field_validator("until", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class TaskFile(StageConfig):
    """The content of a task file. A template is Jinja over a row's fields, or the name of a field."""

    task: str = Field(min_length=1, pattern=r"^[\w.:-]+$", description="Name of the task")
    dataset_path: Literal["json", "parquet", "csv"] = Field(description="Format of the data files")
    dataset_kwargs: dict[str, JsonValue] = Field(description="data_files: one, several or {split: files}, from the task file's folder")
    training_split: str | None = Field(None, description="Split to train on; not read")
    validation_split: str | None = Field(None, description="Split to evaluate if there is no test_split")
    test_split: str | None = Field(None, description="Split to evaluate")
    fewshot_split: str | None = Field(None, description="Split of the few-shot examples")
    output_type: Output = Field("generate_until", description="Type of output")
    doc_to_text: str | int = Field("", description="Question; multiple_choice: a number is the index of the right option in doc_to_choice")
    doc_to_target: str | int = Field(description="Answer; multiple_choice: index or text of the right choice")
    doc_to_choice: str | tuple[str, ...] | None = Field(None, description="Options: a template that gives a list, a field, or a list")
    description: str = Field("", description="Text before everything else")
    target_delimiter: str = Field(" ", description="Text between question and answer")
    fewshot_delimiter: str = Field("\n\n", description="Text after each example")
    fewshot_config: Shots = Field(Shots(), description="The examples")
    num_fewshot: int = Field(0, ge=0, le=1000, description="Number of few-shot examples per question")
    metric_list: tuple[Metric, ...] = Field((), description="Metrics; default: acc and acc_norm, exact_match, or the perplexities")
    generation_kwargs: Generation = Field(Generation(), description="Settings of generation")
    repeats: int = Field(1, ge=1, le=10_000, description="Number of answers per question")
    filter_list: tuple[Filter, ...] = Field((), description="Filters applied to answers before metrics; default: take_first")
    verifier: str | dict[str, JsonValue] | None = Field(
        None, description="Puna's own: a verifier that also scores answers, by name or {name: …}; its texts are templates or fields"
    )
    permuted: bool = Field(
        False, description="Puna's own: show each question's options in a random order that is the same for all models (for letters)"
    )
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="version, and anything else")

    @field_validator("num_fewshot", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return value or 0

    @model_validator(mode="after")
    def _fits(self) -> TaskFile:
        metrics = METRICS[self.output_type]
        for entry in self.metric_list:
            if entry.metric not in metrics:
                raise ValueError(f"metric_list: {entry.metric!r} is not supported for {self.output_type}; use one of {', '.join(metrics)}")
            if entry.aggregation not in ("", aggregation := AGGREGATIONS.get(entry.metric, "mean")):
                raise ValueError(f"metric_list: {entry.metric}: the aggregation {entry.aggregation!r} is not supported, only {aggregation}")
        if self.output_type != "generate_until" and (self.filter_list or self.verifier is not None or self.repeats > 1):
            raise ValueError("filter_list, repeats and verifier need answers: set output_type to generate_until")
        if self.output_type == "multiple_choice" and self.doc_to_choice is None:
            raise ValueError("multiple_choice needs doc_to_choice")
        if self.permuted and (self.output_type != "multiple_choice" or isinstance(self.doc_to_choice, tuple)):
            raise ValueError("permuted needs multiple_choice with options of each row; a list in the task file is the same for all rows")
        if "data_files" not in self.dataset_kwargs or len(self.dataset_kwargs) > 1:
            raise ValueError("dataset_kwargs: only data_files is supported")
        return self

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics, or the output type's defaults if there is no metric_list."""
        return self.metric_list or tuple(Metric(metric=name) for name in DEFAULTS.get(self.output_type, METRICS[self.output_type]))

    @property
    def filters(self) -> tuple[Filter, ...]:
        return self.filter_list or (Filter(name="none", filter=({"function": "take_first"},)),)

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Return split → data files, as named in the task file. Without splits, all files are `train`."""
        data_files = self.dataset_kwargs["data_files"]
        splits = data_files if isinstance(data_files, dict) else {"train": data_files}
        return {split: tuple(map(str, files)) if isinstance(files, list) else (str(files),) for split, files in splits.items()}

    def split(self, where: str) -> str:
        """Return the split to evaluate; raise PunaError if it has no data files."""
        split = self.test_split or self.validation_split
        if split is None or split not in self.files:
            subject = "test_split or validation_split" if split is None else f"the split {split!r}"
            raise PunaError(f"{where}: {subject} is missing; the data files have the splits {', '.join(self.files)}")
        return split


class _Loader(yaml.SafeLoader):
    """A YAML loader that creates no Python objects."""


def _code(loader: _Loader, node: yaml.Node) -> None:
    raise PunaError(f"{node.tag} {node.value} names a Python function, which is not run; write a template")


_Loader.add_constructor("!function", _code)


def read_task(text: bytes, where: str) -> TaskFile:
    """Return the task in a YAML text. Raise a PunaError that begins with `where` if the text is not YAML or has unsupported content."""
    with errors_at(f"{where} is not YAML", yaml.YAMLError, RecursionError, ValueError), errors_at(where, PunaError):
        content = yaml.load(text[: FILE_BYTES + 1], _Loader)  # noqa: S506  a loader without Python
    if len(text) > FILE_BYTES or not isinstance(content, dict):
        raise PunaError(f"{where} is not a task file: it has {'more than a MB' if len(text) > FILE_BYTES else 'no keys'}")
    if unknown := sorted(str(key) for key in content if key not in TaskFile.model_fields and key not in UNUSED):
        raise PunaError(f"{where}: the key {unknown[0]!r} is not supported; use {', '.join(TaskFile.model_fields)}")
    values = {key: value for key, value in content.items() if key not in UNUSED}
    if isinstance(settings := values.get("generation_kwargs"), dict):
        values["generation_kwargs"] = generation(settings)
    return parse(TaskFile, values, where)


def generation(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_kwargs with the token limit renamed to max_gen_toks."""
    return {("max_gen_toks" if name in ("max_new_tokens", "max_tokens") else name): value for name, value in values.items()}


def task_files(external: External) -> Iterator[tuple[ExternalFile, TaskFile]]:
    """Yield (file, task) for each task file (.yaml, .yml) of an input. Raise PunaError if there are none, or one is invalid."""
    found = False
    for file in external.files:
        if PurePosixPath(file.name).suffix in (".yaml", ".yml"):
            found = True
            with closing(file.open()) as handle:
                yield file, read_task(handle.read(FILE_BYTES + 1), file.location)
    if not found:
        raise PunaError(f"{external.uri}: there is no task file (.yaml); give a task file, or a folder with one")


@dataclass(frozen=True)
class Document:
    """A row as a question. If `choices` are beginnings of one ending, `target` is the ending and `text` the index of the right choice."""

    id: str
    row: Row
    text: str | int
    target: Any
    choices: tuple[str, ...]
    description: str = ""

    @property
    def right(self) -> tuple[int, ...]:
        """Return the indices of the right options. Raise ValueError if the target is not among the options."""
        target = self.text if isinstance(self.text, int) else self.target
        indices = []
        for one in target if isinstance(target, list) else [target]:
            index = self.choices.index(one) if isinstance(one, str) and one in self.choices else one
            if not isinstance(index, int) or not 0 <= index < len(self.choices):
                raise ValueError(f"{str(one)[:40]!r} is none of the {len(self.choices)} options of {str(self.text)[:60]!r}")
            indices.append(index)
        return tuple(indices)


@dataclass(frozen=True)
class Task:
    """A task with its documents and few-shot examples. `where`: the task file. `digest`: hash of file and data. `prompted`: the rows are
    prompts of an artifact, with their verifiers."""

    file: TaskFile
    where: str
    digest: str
    documents: tuple[Document, ...]
    shots: tuple[Document, ...]
    verifiers: tuple[str | None, ...]
    prompted: bool = False

    @property
    def name(self) -> str:
        return self.file.task

    def prompt_rows(self) -> list[dict[str, Any]]:
        """Return the documents as rows of the prompts table, which a Scorer takes."""
        if self.prompted:
            return [dict(document.row) for document in self.documents]
        return [
            {"id": document.id, "task": self.name, "tools": None, "messages": asking(str(document.text)), "verifier": verifier,
             "reference": document.target if isinstance(document.target, str) else json.dumps(document.target)}
            for document, verifier in zip(self.documents, self.verifiers, strict=True)
        ]  # fmt: skip

    def examples(self, document: Document) -> Sequence[Document]:
        """Return a document's few-shot examples; those from data files exclude rows equal to the document's. Raise PunaError if too few."""
        given = (self.file.fewshot_config.split or self.file.fewshot_split) is None
        pool = [shot for shot in self.shots if given or shot.row != document.row]
        if len(pool) < self.file.num_fewshot:
            raise PunaError(f"{self.where}: num_fewshot is {self.file.num_fewshot}, but there are only {len(pool)} examples")
        return pool[: self.file.num_fewshot]


def load_task(external: External, file: ExternalFile, spec: TaskFile, limit: int | None = None, shots: int | None = None) -> Task:
    """Return a task with its first `limit` documents; `shots` overrides num_fewshot. Raise PunaError for any fault in the task."""
    spec = spec if shots is None else spec.replace(num_fewshot=shots)
    where = file.location
    rows = _rows(external, file, spec, spec.split(where))
    documents = _documents(spec, rows[:limit], where)
    verifiers = [None] * len(documents) if spec.verifier is None else verifiers_of(spec.verifier, rows[:limit], where)
    digest = identifier(file.digest, *(_data(external, file, name).digest for names in spec.files.values() for name in names))
    task = Task(spec, where, digest, tuple(documents), tuple(_shots(external, file, spec, where)), tuple(verifiers))
    for document in documents:
        task.examples(document)
    for one in spec.filters if spec.output_type == "generate_until" else ():
        run_filter([[""]], one.filter, f"{where}: filter {one.name}")
    for number, row in enumerate(task.prompt_rows() if spec.verifier is not None else (), 1):
        with errors_at(f"{where}: verifier, row {number}", PunaError):
            from_text(row["verifier"]).check(question_of(row))
    return task


def _shots(external: External, file: ExternalFile, spec: TaskFile, where: str) -> list[Document]:
    if not spec.num_fewshot:
        return []
    own, split = spec.fewshot_config, spec.fewshot_config.split or spec.fewshot_split
    if split is not None and split in spec.files:
        rows: Sequence[Row] = _rows(external, file, spec, split)[: 2 * spec.num_fewshot + 1]
    elif split is None and own.samples is not None:
        rows = own.samples
    else:
        raise PunaError(f"{where}: num_fewshot is {spec.num_fewshot}: give fewshot_config samples, or a fewshot_split of the data files")
    changes = {name: value for name in ("doc_to_text", "doc_to_target") if (value := getattr(own, name)) is not None}
    return _documents(spec.replace(**changes), rows, where)


def _data(external: External, file: ExternalFile, name: str) -> ExternalFile:
    """Return the data file that the task file calls `name`. Raise PunaError if it is missing."""
    by_name = {normpath(one.name): one for one in external.files}
    data = by_name.get(normpath(str(PurePosixPath(file.name).parent / name)), by_name.get(normpath(name)))
    if data is None:
        raise PunaError(f"{file.location}: data_files: {name} does not exist; paths are relative to the task file's folder")
    return data


def _rows(external: External, file: ExternalFile, spec: TaskFile, split: str) -> list[dict[str, Any]]:
    """Return a split's rows; missing columns are None. Raise PunaError for a faulty row, or if there are no rows."""
    rows: list[dict[str, Any]] = []
    for name in spec.files[split]:
        data = _data(external, file, name)
        with closing(data.open()) as handle:
            for row in read_rows(handle, data.location, FORMATS[spec.dataset_path], ROW_BYTES):
                if isinstance(row, Fault):
                    raise PunaError(f"{data.location}, row {row.number}{f', field {row.field}' if row.field else ''}: {row.reason}")
                rows.append(row.fields)
    if not rows:
        raise PunaError(f"{file.location}: the split {split!r} has no rows")
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def _documents(spec: TaskFile, rows: Sequence[Row], where: str) -> list[Document]:
    templates = {name: text for name in ("doc_to_text", "doc_to_target", "doc_to_choice") if isinstance(text := getattr(spec, name), str)}
    if spec.output_type == "loglikelihood_rolling":
        templates.pop("doc_to_text", None)
    if spec.description:
        templates["description"] = spec.description
    documents = []
    seen: dict[str, int] = {}
    for number, (row, values) in enumerate(zip(rows, render(templates, rows, spec.doc_to_choice is not None, where), strict=True), 1):
        choices = values.get("doc_to_choice", spec.doc_to_choice or ())
        choices = tuple(choices.values()) if isinstance(choices, dict) else choices
        text = values.get("doc_to_text", spec.doc_to_text)
        if not isinstance(choices, list | tuple) or not all(isinstance(one, str) and one for one in choices):
            raise PunaError(f"{where}: doc_to_choice, row {number}: not a list of texts: {str(choices)[:80]}")
        if not isinstance(text, str | int) or (isinstance(text, int) and spec.output_type != "multiple_choice"):
            raise PunaError(f"{where}: doc_to_text, row {number}: not text: {str(text)[:80]}")
        content = identifier("question", spec.task, json.dumps(dict(row), sort_keys=True, default=str, ensure_ascii=False))
        seen[content] = seen.get(content, 0) + 1
        own = content if seen[content] == 1 else identifier(content, seen[content])
        target = values.get("doc_to_target", spec.doc_to_target)
        document = Document(own, row, text, target, tuple(choices), str(values.get("description", "")))
        if spec.output_type == "multiple_choice":
            with errors_at(f"{where}: doc_to_target, row {number}", ValueError):
                if len(document.choices) < 2 or not document.right:
                    raise ValueError(f"no right one among {len(document.choices)} options")
        if spec.output_type == "loglikelihood_rolling" and not (isinstance(target, str) and target):
            raise PunaError(f"{where}: doc_to_target, row {number}: {str(target)[:40]!r} is not text")
        documents.append(_permute(document) if spec.permuted else document)
    return documents


def _permute(document: Document) -> Document:
    """Return a question with its options sorted by a hash of question id and option index, and the right options' new indices."""
    order = sorted(range(len(document.choices)), key=lambda at: place(0, document.id, str(at)))

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(one) for one in value]
        return order.index(value) if isinstance(value, int) and value in order else value

    text = document.text if isinstance(document.text, str) else move(document.text)
    target = document.target if isinstance(document.text, int) else move(document.target)
    return replace(document, text=text, target=target, choices=tuple(document.choices[at] for at in order))
