"""Rows of every layout with their expected import, files of every format, and rows that must be refused."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from puna.stages.contract import External, execute, parse
from puna.stages.io.imports import (
    ImportDocumentsConfig,
    ImportInstructionsConfig,
    ImportPreferencesConfig,
    ImportPromptsConfig,
    import_documents,
    import_instructions,
    import_preferences,
    import_prompts,
)
from puna.storage import Artifact, Store

STAGES: dict[str, Any] = {
    "instructions": (import_instructions, ImportInstructionsConfig),
    "prompts": (import_prompts, ImportPromptsConfig),
    "preferences": (import_preferences, ImportPreferencesConfig),
    "documents": (import_documents, ImportDocumentsConfig),
}
USER, ASSISTANT = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
FALSE = {"role": "assistant", "content": "3"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
HH = "\n\nHuman: 1 + 1?\n\nAssistant: {}"


def made(tmp_path: Path, kind: str, file: Path, **config: Any) -> Artifact:
    stage, settings = STAGES[kind]
    return execute(stage, parse(settings, config, kind), {"inputs": External.resolve(f"data={file}")}, Store.open(tmp_path / "store"))


def written(folder: Path, rows: list[dict[str, Any]], format: str) -> Path:
    """Write rows as a file of a format, with JSON for nested values in CSV cells; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if format == "jsonl.gz":
        (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    elif format == "jsonl.zst":
        (folder / "rows.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    elif format == "json":
        (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    elif format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    elif format in ("csv", "tsv"):
        names = list(dict.fromkeys(name for row in rows for name in row))
        with (folder / f"rows.{format}").open("w", newline="") as out:
            writer = csv.DictWriter(out, names, delimiter="\t" if format == "tsv" else ",")
            writer.writeheader()
            writer.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
    elif format == "dataset":
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    else:
        (folder / "rows.jsonl").write_bytes(lines)
    return next(folder.iterdir())


LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "messages": ("instructions", {"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}),
    "from/value": (
        "instructions",
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
        {"messages": [USER, ASSISTANT]},
    ),
    "system column": (
        "instructions",
        {"system": "Be brief.", "messages": [USER, ASSISTANT]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]},
    ),
    "tool calls": (
        "instructions",
        {
            "conversations": [
                {"from": "human", "value": "1 + 1?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "2"},
            ],
            "tools": '[{"name": "add"}]',
        },
        {"messages": [USER, CALL, {"role": "tool", "content": "2"}, ASSISTANT], "tools": [{"name": "add"}]},
    ),
    "prompt/completion": ("instructions", {"prompt": "1 + 1?", "completion": "2"}, {"messages": [USER, ASSISTANT]}),
    "instruction/input/output": (
        "instructions",
        {"instruction": "Add.", "input": "1 and 1", "output": "2"},
        {"messages": [{"role": "user", "content": "Add.\n\n1 and 1"}, ASSISTANT]},
    ),
    "question": ("prompts", {"question": "1 + 1?", "answer": "2"}, {"messages": [USER], "reference": "2"}),
    "conversation to continue": ("prompts", {"messages": [USER, ASSISTANT]}, {"messages": [USER], "reference": "2"}),
    "text pair": (
        "preferences",
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": FALSE},
    ),
    "message pair": (
        "preferences",
        {"chosen": [USER, ASSISTANT], "rejected": [USER, FALSE]},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": FALSE},
    ),
    "message pair with its prompt": (
        "preferences",
        {"prompt": "1 + 1?", "chosen": [USER, ASSISTANT], "rejected": [USER, FALSE], "score_chosen": 4.5, "score_rejected": 1.0},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": FALSE, "margin": 3.5},
    ),
    "HH": (
        "preferences",
        {"chosen": HH.format("2"), "rejected": HH.format("3")},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": FALSE},
    ),
    "KTO good": ("preferences", {"prompt": "1 + 1?", "completion": "2", "label": True}, {"messages": [USER], "chosen": ASSISTANT}),
    "KTO bad": ("preferences", {"messages": [USER, FALSE], "label": False}, {"messages": [USER], "rejected": FALSE}),
    "ranked": (
        "preferences",
        {"prompt": "1 + 1?", "answers": [{"text": "2", "score": 5, "edited": "2!"}, {"text": "3", "score": 1}, {"text": "two", "score": 3}]},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": FALSE, "edited": {"role": "assistant", "content": "2!"}, "margin": 4.0,
         "others": [{"role": "assistant", "content": "two", "rank": 1}]},
    ),
    "ranked by lists": (
        "preferences",
        {"prompt": "1 + 1?", "responses": ["3", "2", "two", "4"], "scores": [1, 5, 5, 1]},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": {"role": "assistant", "content": "4"}, "margin": 4.0,
         "others": [{"role": "assistant", "content": "two", "rank": 0}, {"role": "assistant", "content": "3", "rank": -1}]},
    ),
    "HelpSteer3": (
        "preferences",
        {"domain": "general", "language": "english", "context": [USER], "response1": "2", "response2": "3", "overall_preference": -2,
         "individual_preference": [{"score": -2, "reasoning": "It is right.", "feedback1": "Right.", "feedback2": "Wrong."}]},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": FALSE, "level": "better", "margin": 2.0},
    ),
    "HelpSteer2": (
        "preferences",
        {"split": "train", "prompt": "1 + 1?", "response_1": "3", "response_2": "2", "preference_strength": 3},
        {"messages": [USER], "chosen": ASSISTANT, "rejected": FALSE, "level": "significantly_better", "margin": 3.0},
    ),
    "text": ("documents", {"text": "On the puna", "title": "Llamas", "url": "https://a.example/1"}, {"text": "On the puna", "title": "Llamas"}),
}  # fmt: skip
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet", "csv", "tsv", "dataset")

FAULTS: list[tuple[str, Any, str, str, str]] = [
    # kind, the line, rule, field, part of the reason
    ("instructions", {"messages": None}, "wrong_type", "messages", "contains null, not a list"),
    ("instructions", {"messages": []}, "empty", "messages", "has no messages"),
    ("instructions", {"messages": [USER]}, "no_answer", "messages", "no assistant message"),
    ("instructions", {"messages": [{**USER, "role": "judge"}, ASSISTANT]}, "unknown_role", "messages.0.role", "has the role 'judge'"),
    ("instructions", {"messages": [{"content": "x"}]}, "no_role", "messages.0", "neither role nor from; it has content"),
    ("instructions", {"messages": [{**USER, "from": "human"}]}, "no_role", "messages.0", "role and from"),
    ("instructions", {"messages": [USER, {**ASSISTANT, "content": 4}]}, "wrong_type", "messages.1.content", "contains a number, not text"),
    ("instructions", {"messages": [USER, {**ASSISTANT, "content": " "}]}, "empty", "messages.1.content", "is blank"),
    ("instructions", {"messages": "no JSON"}, "wrong_type", "messages", "neither JSON nor a dialogue"),
    ("instructions", {"messages": [USER, ASSISTANT], "tools": 3}, "wrong_type", "tools", "contains a number, not a list of tools"),
    ("instructions", {"messages": [USER, ASSISTANT], "split": "x"}, "unknown_split", "split", "contains 'x'; the known splits are train"),
    ("instructions", b'{"messages": [', "invalid_json", "", "is not JSON"),
    ("instructions", b"[1]", "not_an_object", "", "is a list, not an object"),
    ("instructions", b'{"messages": "\xff"}', "invalid_utf8", "messages", "not valid Unicode text"),
    ("prompts", {"prompt": 3}, "wrong_type", "prompt", "contains a number, not text"),
    ("prompts", {"prompt": "a", "verifier": "x"}, "wrong_type", "verifier", "neither JSON"),
    ("prompts", {"prompt": "b", "verifier": {"name": "json_schema", "json_schema": {"$schema": []}}}, "no_verifier", "verifier", "$schema: is not"),
    ("preferences", {"prompt": "a", "chosen": None, "rejected": None}, "missing", "chosen", "is missing or null"),
    ("preferences", {"prompt": "a", "chosen": "b"}, "missing", "rejected", "is missing or null"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "b"}, "identical", "rejected", "is the same as chosen"),
    ("preferences", {"prompt": "a", "chosen": [USER, ASSISTANT], "rejected": "b"}, "prompt_differs", "chosen", "begins with messages other than the prompt"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "level": "x"}, "unknown_level", "level", "contains 'x'; the known levels are"),
    ("preferences", {"chosen": HH.format("2"), "rejected": HH.format("")}, "empty", "rejected", "turn 1 of Assistant is blank"),
    ("preferences", {"chosen": HH.format("2") + "\n\nHuman: why", "rejected": HH.format("3")}, "not_one_answer", "chosen", "assistant, user"),
    ("documents", {"text": None, "url": "u"}, "missing", "text", "is missing or null"),
    ("documents", {"text": "a", "date": "soon"}, "wrong_type", "date", "contains 'soon', not a date"),
]  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "instructions": {"messages": [USER, ASSISTANT], "tools": [{"name": "f"}], "split": "train"},
    "prompts": {"prompt": "good", "verifier": {"name": "exact"}},
    "preferences": {"prompt": "1 + 1?", "chosen": "2", "rejected": "3", "level": "better"},
    "documents": {"text": "good", "url": "https://a.example", "date": "2024-05-01"},
}


def line(row: Any) -> bytes:
    """Return a row as a line of a file."""
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def misread(artifact: Artifact, expected: dict[str, Any]) -> list[str]:
    """Return the columns of the only row that differ from `expected`; columns without an expected value must be null."""
    (found,) = artifact.read().to_pylist()
    wrong = []
    for name, value in expected.items():
        said = json.loads(found[name]) if isinstance(value, list | dict) and found[name] else found[name]
        wrong += [name] * (said != value)
    for name in {"chosen", "rejected", "edited", "others", "tools", "reference"} & set(found) - set(expected):
        wrong += [name] * (found[name] is not None)
    return wrong


def named_fault(detail: str) -> tuple[str, int, str, str]:
    """Return file, row, field and reason of a row of `dropped`."""
    where, _, rest = detail.partition(", row ")
    number, _, said = rest.partition(": ")
    number, _, field = number.partition(", field ")
    return where, int(number), field, said
