"""Schemas of all tables of artifacts: Arrow schemas with the meaning and unit of every column.

The main table of an artifact has the name of its kind; other tables are side tables. `signals` is open: besides `id`, its columns are
numbers and words about the document, whose unit and meaning are described by the stage that writes them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from puna.storage.errors import PunaError, errors_at

KINDS = (
    "pages", "documents", "signals", "classifier", "mixture", "tokenizer", "tokens", "model",
    "prompts", "answers", "preferences", "instructions", "evaluation", "lists",
)  # fmt: skip

TIME = pa.timestamp("us", tz="UTC")
TOKENS = pa.list_(pa.field("element", pa.int32()))


def column(name: str, kind: pa.DataType, meaning: str, unit: str = "", *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning, "unit": unit})


@dataclass(frozen=True)
class TableSchema:
    """A table: its columns, the primary key it is sorted by, and how it is stored.

    `open`: additional described columns of numbers and words are allowed. `identity`: the artifact's data digest depends on the table's
    content (false for logs with timings). `group_rows`: maximum rows of a Parquet row group, the unit of reading. `shard_bytes`:
    uncompressed bytes above which there is more than one shard. `selectable`: rows may be kept by reference."""

    name: str
    schema: pa.Schema
    key: tuple[str, ...] = ("id",)
    open: bool = False
    identity: bool = True
    group_rows: int = 65_536
    shard_bytes: int = 2 << 20
    selectable: bool = False

    def conform(self, table: pa.Table) -> pa.Table:
        """Return `table` with this schema's column order and types. Raise PunaError for a missing, unknown or wrong column."""
        schema = self.schema_for(table.schema)
        for field in schema:
            if field.name not in table.schema.names:
                raise PunaError(f"table {self.name}: column {field.name!r} is missing ({field.type})")
        table = table.select(schema.names)
        for field in schema:
            values = table.column(field.name)
            if not field.nullable and values.null_count:
                raise PunaError(f"table {self.name}: column {field.name!r} must not be null")
        if table.schema.equals(schema, check_metadata=True):
            return table  # a cast that changes nothing takes a millisecond
        with errors_at(f"table {self.name}", pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
            return table.cast(schema)

    def schema_for(self, given: pa.Schema) -> pa.Schema:
        """Return the Arrow schema for columns `given`. Additional ones become float64, int64 or string if `open`, else raise PunaError."""
        names = set(self.schema.names)
        extra = sorted((field for field in given if field.name not in names), key=lambda field: field.name)
        if extra and not self.open:
            raise PunaError(f"table {self.name}: unknown column {extra[0].name!r}; it has {', '.join(self.schema.names)}")
        return pa.schema([*self.schema, *(_open_column(self.name, field) for field in extra)])


def _open_column(table: str, field: pa.Field) -> pa.Field:
    """Return the field of an additional column of an open table, as float64, int64 or string. Raise PunaError for other types."""
    for is_such, kind in ((pa.types.is_floating, NUMBER), (pa.types.is_integer, pa.int64()), (_is_text, pa.string())):
        if is_such(field.type):
            return pa.field(field.name, kind, nullable=True, metadata=field.metadata)
    raise PunaError(f"table {table}: column {field.name!r} is {field.type}; it must hold numbers or words")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _table(name: str, *columns: pa.Field, key: tuple[str, ...] = ("id",), **stored: Any) -> TableSchema:
    return TableSchema(name, pa.schema(list(columns)), key, **stored)


ID = column("id", pa.string(), "id of the row: 32 hex digits for pages and documents")
PROMPT_ID = column("prompt_id", pa.string(), "prompt that the row belongs to")
URL = column("url", pa.string(), "URL the page was fetched from")
FETCHED = column("fetched_at", TIME, "when the page was fetched", "UTC, microseconds")
SOURCE = column("source", pa.string(), "name of the input that the row came from")
TASK = column("task", pa.string(), "task the row belongs to")
SPLIT = column("split", pa.string(), "train or heldout")
MESSAGES = column("messages", pa.string(), "the conversation up to the answer: role, content, …", "JSON list of messages")
TOOLS = column("tools", pa.string(), "the tools that the conversation may call", "JSON list", nullable=True)
NUMBER = pa.float64()

TABLES: dict[str, TableSchema] = {
    table.name: table
    for table in (
        _table("pages", ID, URL, FETCHED, SOURCE,
            column("content_type", pa.string(), "media type given by the server, without parameters"),
            column("charset", pa.string(), "character set given by the server", nullable=True),
            column("body", pa.binary(), "the page as fetched"),
            group_rows=16_384, shard_bytes=16 << 20),
        _table("documents", ID, URL, FETCHED, SOURCE,
            column("title", pa.string(), "title of the page", nullable=True),
            column("text", pa.string(), "the document"),
            group_rows=16_384, selectable=True),
        _table("signals", ID, open=True),
        _table("lists", column("kind", pa.string(), "type of the entry: domain, url, word or expression"),
            column("entry", pa.string(), "the entry in normalized form"),
            column("rule", pa.string(), "rule by which the entry drops a document"),
            key=("kind", "entry")),
        _table("dropped", ID,
            column("rule", pa.string(), "rule that removed the row"),
            column("value", NUMBER, "the row's value of the signal that the rule reads", nullable=True),
            column("threshold", NUMBER, "the rule's threshold", nullable=True),
            column("detail", pa.string(), "details that explain the decision", nullable=True),
            key=("id", "rule")),
        _table("duplicates", ID,
            column("kept_id", pa.string(), "id of the document that was kept instead"),
            column("method", pa.string(), "how the pair was found and verified"),
            column("similarity", NUMBER, "verified similarity of the pair", "fraction"),
            column("cluster", pa.string(), "id of the cluster's survivor")),
        _table("revisions", ID,
            column("kept_id", pa.string(), "id of the document that is now kept instead; null: this document is kept again", nullable=True),
            column("similarity", NUMBER, "verified similarity of the pair", "fraction", nullable=True)),
        _table("removed_lines", ID,
            column("line", pa.int32(), "number of the line in the input document", "from 0"),
            column("text", pa.string(), "the line, and the blank lines removed after it"),
            column("rule", pa.string(), "rule that removed the line"),
            column("value", NUMBER, "the line's value of the rule's signal"),
            key=("id", "line")),
        _table("removed_spans", ID,
            column("start", pa.int64(), "first character of the span in the input document", "from 0"),
            column("text", pa.string(), "the span"),
            column("kept_id", pa.string(), "id of the document in which the beginning of the span occurs first"),
            key=("id", "start")),
        _table("line_signals", ID,
            column("line", pa.int32(), "number of the line in the document", "from 0"),
            column("words", pa.int32(), "words of the line", "words"),
            column("ngram_coverage", NUMBER, "words inside n-grams seen earlier in the document", "fraction of words"),
            key=("id", "line")),
        _table("c4_lines", ID,
            column("line", pa.int32(), "number of the line in the document", "from 0"),
            column("words", pa.int32(), "words of the line, separated by white space", "words"),
            column("final_punctuation", pa.bool_(), "whether the line ends in . ? ! or the double quote"),
            key=("id", "line")),
        _table("languages", column("language", pa.string(), "ISO 639 code of the language"),
            column("script", pa.string(), "ISO 15924 code of its script"),
            column("documents", pa.int64(), "number of documents in this language", "documents"),
            column("stop_words", pa.string(), "frequent words expected in a document in this language", nullable=True),
            column("evidence", pa.string(), "source of the row. The columns NAME_factor times a recipe's threshold on the signal NAME "
        "are the language's own thresholds; null: no basis, so the rule judges no document in this language"),
            key=("language", "script"), open=True),
        _table("mixture", ID,
            column("category", pa.string(), "knowledge type"),
            SPLIT,
            column("repeats", pa.int32(), "number of times the document is read in training", "epochs"),
            column("weight", NUMBER, "sampling weight of the document's category", "fraction")),
        _table("tokens", column("row", pa.int64(), "index of the packed row"),
            column("tokens", TOKENS, "token ids of the row"),
            column("lengths", TOKENS, "lengths of the documents inside the row", "tokens"),
            column("documents", pa.list_(pa.field("element", pa.string())), "ids of the documents inside the row"),
            key=("row",), group_rows=1024),
        _table("prompts", ID, TASK, SPLIT, MESSAGES, TOOLS,
            column("reference", pa.string(), "gold answer", nullable=True),
            column("verifier", pa.string(), "how answers are scored: {\"name\": …, …parameters}", "JSON", nullable=True)),
        _table("exchanges", ID,
            column("endpoint", pa.string(), "address of the server"),
            column("request", pa.string(), "the request sent", "JSON"),
            column("answer", pa.string(), "text of the answer"),
            column("finished", pa.bool_(), "false if truncated at the length limit"),
            column("refused", pa.string(), "why the server refused the request; empty if it did not")),
        _table("answers", ID, PROMPT_ID,
            column("sample", pa.int32(), "index of the answer among those of its prompt and model", "from 0"),
            column("model", pa.string(), "data digest of the model that wrote the answer"),
            column("text", pa.string(), "the answer"),
            column("tokens", TOKENS, "token ids of the answer"),
            column("logprobs", pa.list_(pa.field("element", pa.float32())), "log-probability of each token", "nats"),
            column("finished", pa.bool_(), "false if truncated at the length limit"),
            column("score", NUMBER, "reward model's score", nullable=True),
            column("gold", NUMBER, "score from the prompt's verifier", "0 to 1", nullable=True),
            column("detail", pa.string(), "the verifier's comment on the score", nullable=True)),
        _table("preferences", ID, PROMPT_ID, TASK, SPLIT, MESSAGES, TOOLS,
            column("chosen", pa.string(), "the better answer; null: only a bad answer is known", "JSON message", nullable=True),
            column("rejected", pa.string(), "the worse answer, with `finished` false if truncated; null: only a good answer is known",
                   "JSON message", nullable=True),
            column("edited", pa.string(), "an edited version of the chosen answer", "JSON message", nullable=True),
            column("others", pa.string(), "in a ranking of more than two: the other answers, each with `rank`: 0 as good as chosen, "
        "1, 2, … in between, -1 as bad as rejected", "JSON list of messages", nullable=True),
            column("level", pa.string(), "significantly_better, better, slightly_better or marginally_better", nullable=True),
            column("margin", NUMBER, "difference of the two answers' scores", nullable=True),
            column("chosen_model", pa.string(), "data digest of the model that wrote the chosen answer", nullable=True),
            column("rejected_model", pa.string(), "data digest of the model that wrote the rejected answer", nullable=True)),
        _table("instructions", ID, PROMPT_ID, TASK, SPLIT,
            column("messages", pa.string(), "the whole conversation, trained on at the assistant's turns", "JSON list of messages"),
            TOOLS, SOURCE,
            column("score", NUMBER, "reward model's score", nullable=True)),
        _table("evaluation", TASK,
            column("metric", pa.string(), "name of the metric"),
            column("value", NUMBER, "the measured value"),
            column("low", NUMBER, "lower end of the 95 % interval", nullable=True),
            column("high", NUMBER, "upper end of the 95 % interval", nullable=True),
            column("n", pa.int64(), "number of items measured"),
            key=("task", "metric")),
        _table("task_scores", TASK,
            column("metric", pa.string(), "name of the metric, followed by a comma and the answer filter, if any"),
            column("value", NUMBER, "the measured value"),
            column("low", NUMBER, "lower end of the 95 % interval", nullable=True),
            column("high", NUMBER, "upper end of the 95 % interval", nullable=True),
            column("n", pa.int64(), "number of questions measured"),
            column("version", pa.string(), "version given in the task file"),
            column("content", pa.string(), "digest of the task file and its data"),
            column("shots", pa.int64(), "number of few-shot examples"),
            column("format", pa.string(), "how questions were asked: plain or chat, with letters"),
            column("seed", pa.int64(), "seed of the answers"),
            column("seconds", NUMBER, "compute time of the task", "CPU seconds"),
            column("tokens", pa.int64(), "tokens of questions, options and answers", "tokens"),
            column("calibration_error", NUMBER, "expected calibration error of the chosen options' probabilities, 0 to 1", nullable=True),
            column("contaminated", NUMBER, "share of the questions that occur in the model's training data, fraction", nullable=True),
            column("clean", NUMBER, "the value on the other questions", nullable=True),
            key=("task", "metric"), identity=False),
        _table("training_log", column("step", pa.int64(), "optimizer step", "from 1"),
            column("loss", NUMBER, "training loss of the step", nullable=True),
            column("learning_rate", NUMBER, "learning rate of the step"),
            column("gradient_norm", NUMBER, "norm of the gradient before clipping", nullable=True),
            column("tokens", pa.int64(), "tokens of the step", "tokens"),
            key=("step",), open=True, identity=False),
        _table("rollouts", column("step", pa.int64(), "rollout that contains the answer", "from 1"), PROMPT_ID,
            column("sample", pa.int32(), "index of the answer among those to its prompt in the rollout", "from 0"),
            column("text", pa.string(), "the answer; with replies, each turn under its role"),
            column("tokens", TOKENS, "number of tokens, including those of replies"),
            column("turns", pa.int32(), "number of the policy's turns in the answer"),
            column("steps", pa.list_(NUMBER), "rewards of the answer's steps", nullable=True),
            column("finished", pa.bool_(), "false if truncated at the length limit"),
            column("score", NUMBER, "its reward"), column("verifier", NUMBER, "part of the reward: the verifier's score", nullable=True),
            column("reward_model", NUMBER, "part of the reward: the reward model's output", nullable=True),
            column("advantage", NUMBER, "mean advantage of the answer's tokens"),
            column("logprob", NUMBER, "mean log-probability of the answer's tokens when sampled", "nats"),
            column("reference_logprob", NUMBER, "the same under the reference, in rollouts that measure it", "nats", nullable=True),
            column("version", pa.int64(), "number of rollouts that the sampling weights had been trained on"),
            key=("step", "prompt_id", "sample"), identity=False),
        _table("trials", column("trial", pa.int32(), "number of the small run"),
            column("name", pa.string(), "what the run varies"),
            column("parameters", pa.string(), "its settings", "JSON"),
            column("loss", NUMBER, "final held-out loss", "nats per token"),
            column("tokens", pa.int64(), "number of training tokens", "tokens"),
            column("flops", NUMBER, "floating-point operations of the training", "FLOP"),
            column("seconds", NUMBER, "wall time of the run", "seconds"),
            key=("trial", "name"), identity=False),
        _table("points", column("point", pa.int32(), "number of the point"),
            column("heldout", pa.string(), "text that the loss is measured on: validation, or another input"),
            column("heldout_tokens", pa.int64(), "number of predicted tokens of this text", "tokens", nullable=True),
            column("shape", pa.string(), "shape of the model, in pretrain's format", "JSON"),
            column("parameters", pa.int64(), "matrix parameters that a token meets: its own experts only, and the output layer"),
            column("tokens", pa.int64(), "number of training tokens", "tokens"),
            column("flops", NUMBER, "floating-point operations of training on this many tokens", "FLOP"),
            column("loss", NUMBER, "final held-out loss", "nats per token"),
            column("task_loss", NUMBER, "negative log-likelihood of the right options", "nats per token", nullable=True),
            column("accuracy", NUMBER, "share of questions whose right option is likeliest", "fraction", nullable=True),
            column("seed", pa.int64(), "seed of weights and rows"), column("rows", pa.int64(), "rows per step"),
            column("learning_rate", NUMBER, "learning rate of the trunk"), column("steps", pa.int64(), "steps of trunk and decay"),
            column("decay_share", NUMBER, "share of the steps in which the learning rate falls to 0", "fraction", nullable=True),
            column("optimizer", pa.string(), "the optimizer, in pretrain's format", "JSON"),
            key=("point", "heldout")),
        _table("weights", column("category", pa.string(), "knowledge type"),
            column("weight", NUMBER, "share of training tokens", "fraction"),
            key=("category",)),
        _table("scores", ID, column("name", pa.string(), "id of scored item"), column("value", NUMBER, "the score"), key=("id", "name")),
        _table("examples", ID, column("kind", pa.string(), "what the example shows"),
            column("prompt", pa.string(), "question", nullable=True),
            column("text", pa.string(), "text of the example"),
            column("detail", pa.string(), "explanation for a reader", nullable=True)),
    )
}  # fmt: skip


def known_kind(name: str) -> str:
    """Return `name` if it is a kind of artifact. Otherwise raise PunaError with the nearest kinds."""
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise PunaError(f"{name!r} is not a kind of artifact; {hint}The kinds are {', '.join(KINDS)}")
    return name


def table_schema(name: str) -> TableSchema:
    if name not in TABLES:
        raise PunaError(f"there is no table {name!r}; the tables are {', '.join(TABLES)}")
    return TABLES[name]
