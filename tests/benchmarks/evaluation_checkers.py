"""The checkers of well-known benchmarks compared with the truth, and the fields that an import loses: a part of `evaluation.py`.

`humaneval_canonical_pass`, `humaneval_mutants_pass`: pass rates of HumanEval's own solutions, and of functions that return nothing or end
the program. `gsm8k_checker_agreement`: agreement of verdicts on own, foreign and altered solutions. `ifeval_verdicts_equal`: share of
verdicts equal to those of IFEval's reference implementation in lm-evaluation-harness. `fields_lost_silently`: fields of all layouts that
are neither in the prompt nor reported. `contamination_megabytes_a_cpu_second`: speed of looking up 1,319 questions of GSM8K in the text of
books (part `contamination`).
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import zstandard

from puna.stages.contract import External, execute
from puna.stages.conversations import asking
from puna.stages.curate.contamination import ContaminationConfig, contamination
from puna.stages.io.imports import ImportPromptsConfig, import_prompts
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.combinations import Combination
from puna.stages.verifiers.registry import from_text
from puna.storage import Store
from puna.storage.schemas import table_schema

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
Row = dict[str, Any]
UNREAD = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
"""IFEval instructions whose reference implementation needs nltk data from the network."""


def lines(name: str, most: int) -> list[Row]:
    """Return the first rows of a file of the shared data."""
    file = DATA / name
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as handle:
        return [json.loads(line) for line in itertools.islice(handle, most)]


def figures(store: Store, rows: int) -> dict[str, Any]:
    """Return all figures on the first rows of each benchmark."""
    verdicts = ifeval(store, 4 * rows)
    lost, count = fields_lost()
    return humaneval(store, rows) | {
        "gsm8k_checker_agreement": gsm8k(store, 4 * rows), "fields_lost_silently": lost, "fields": count,
        **({"ifeval": f"skipped: {verdicts}"} if isinstance(verdicts, str) else verdicts),
    }  # fmt: skip


def contamination_rate(store: Store, megabytes: float) -> dict[str, float]:
    """Return the MB of text per CPU second in a scan for a benchmark's questions, after a small scan that loads the code."""
    whole = zstandard.ZstdDecompressor().stream_reader((DATA / "text_books/books36.jsonl.zst").open("rb")).read().decode().splitlines()
    pieces = [text[at : at + 4000] for line in whole for text in [json.loads(line)["text"]] for at in range(0, len(text), 4000)]
    texts = [f"{n} {pieces[n % len(pieces)]}" for n in range(int(megabytes * 250))]
    asked = [{"id": str(n), "messages": asking(row["question"])} for n, row in enumerate(lines("gsm8k/train.jsonl", 1319))]
    rows = [{"task": "gsm8k", "split": "heldout", "tools": None, "reference": None, "verifier": None, **one} for one in asked]
    prompts = store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))
    for some in (texts[:100], texts):
        documents = [{"id": str(n), "text": text, "url": str(n), "source": "books", "fetched_at": datetime(2020, 1, 1)} for n, text in enumerate(some)]
        table = store.import_table("documents", pa.Table.from_pylist(documents, schema=table_schema("documents").schema))
        began = time.process_time()
        execute(contamination, ContaminationConfig(), {"prompts": [prompts], "documents": [table]}, store)
        seconds = time.process_time() - began
    return {"contamination_megabytes_a_cpu_second": sum(len(text.encode()) for text in texts) / 1e6 / seconds}


def imported(rows: list[Row], store: Store, name: str) -> list[Row]:
    """Return the prompts that the import makes of `rows`, in their order, with the import's metrics as `metrics`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        artifact = execute(import_prompts, ImportPromptsConfig(), {"inputs": External.resolve(str(file))}, store)
    return [{**row, "metrics": artifact.manifest.metrics} for row in artifact.read().to_pylist()]


def score(row: Row, answer: str) -> float:
    """Return an answer's score for a prompt."""
    verifier = from_text(row["verifier"])
    question = Question(row["id"], row["task"], "", row["reference"])
    if isinstance(verifier, Combination):
        return float(verifier.combine([one.score(question, answer) for one in verifier.parts()]).value or 0.0)
    return float(verifier.score(question, answer).value or 0.0)


def humaneval(store: Store, limit: int) -> dict[str, float]:
    """Return the pass rates of HumanEval's own solutions, and of functions that return nothing or end the program."""
    rows = imported(lines("humaneval/HumanEval.jsonl.gz", limit), store, "humaneval")
    own = [score(row, row["reference"]) for row in rows]
    mutants = [score(row, body) for row in rows for body in ("    return None\n", "    import os\n    os._exit(0)\n")]
    return {"humaneval_canonical_pass": sum(own) / len(own), "humaneval_mutants_pass": sum(mutants) / len(mutants)}


def gsm8k(store: Store, limit: int) -> float:
    """Return how often the checker's verdict is right on own solutions, those of other questions, and solutions with a changed number."""
    rows = imported(lines("gsm8k/train.jsonl", limit), store, "gsm8k")

    def number(text: str) -> str:
        return str(text.rpartition("####")[2].strip().replace(",", ""))

    right = []
    for row, other in itertools.pairwise([*rows, rows[0]]):
        own = row["reference"]
        right.append(score(row, own) == 1.0)
        right.append(score(row, f"So the answer is {number(own)}.") == 1.0)
        right.append(score(row, other["reference"]) == float(float(number(own)) == float(number(other["reference"]))))
        right.append(score(row, re.sub(r"####.*", f"#### {float(number(own)) + 1:.2f}", own)) == 0.0)
    return sum(right) / len(right)


def fields_lost() -> tuple[int, int]:
    """Return the number of fields, over all layouts, whose content is neither in the prompt nor reported as left out; and of all fields."""
    sys.path.insert(0, str(ROOT))
    from tests.stages.io.benchmark_rows import BENCHMARKS

    lost, count = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "store")
        for name, (_, row, *_) in BENCHMARKS.items():
            (found,) = imported([row], store, re.sub(r"\W+", "_", name))
            left = " ".join(str(v) for k, v in found["metrics"].items() if k.startswith("columns_not_taken")).split(", ")
            whole = "\n".join(_leaves([json.loads(found["messages"]), found["reference"], json.loads(found["verifier"]), found["task"]]))
            plain = re.sub(r"\s+", "", whole)
            for column, value in row.items():
                texts = [re.sub(r"\s+", "", text) for text in _leaves(value)]
                named = column in left or column in ("id", "key", "task_id", "question_id", "split")
                count += 1
                lost += not named and not all(text in plain or len(text) < 3 or re.escape(text) in plain for text in texts)
    return lost, count


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value


def ifeval(store: Store, limit: int) -> dict[str, Any] | str:
    """Return the share of verdicts on which IFEval's reference implementation agrees, and the kinds that differ; or why it could not
    run."""
    if importlib.util.find_spec("lm_eval") is None:
        return "lm-evaluation-harness, which brings the reference implementation, is not installed"
    import nltk

    nltk.download = lambda *given, **more: False  # the compared kinds do not need nltk's data
    try:
        from lm_eval.tasks.ifeval import instructions_registry
    except ImportError as error:
        return f"the reference implementation cannot be imported ({error})"
    rows = lines("ifeval/en_input_data.jsonl", limit)
    kinds = [[name.removeprefix("en:") for name in row["instruction_id_list"]] for row in rows]
    rows = [row for row, own in zip(rows, kinds, strict=True) if not set(own) & set(UNREAD)]
    prompts = {json.loads(row["messages"])[0]["content"]: row for row in imported(rows, store, "ifeval")}
    same = count = followed = 0
    different: dict[str, int] = {}
    for number, row in enumerate(rows):
        spec = json.loads(prompts[row["prompt"]]["verifier"])
        for own, kwargs in zip(spec["instruction_id_list"], spec["kwargs"], strict=True):
            name = own.removeprefix("en:")
            if not kwargs.get("letter", "a").isalpha():
                continue  # the reference implementation draws a random letter here
            instruction = instructions_registry.INSTRUCTION_DICT[name](name)
            instruction.build_description(**{key: value for key, value in kwargs.items() if value})
            if "prompt" in (instruction.get_instruction_args() or {}):
                instruction.build_description(prompt=row["prompt"])
            verifier = from_text(json.dumps(spec | {"instruction_id_list": [own], "kwargs": [kwargs]}))
            for answer in _answers(row["prompt"], number):
                follows = bool(answer.strip()) and bool(instruction.check_following(answer))
                equal = follows == (verifier.score(Question("q", "", row["prompt"], None), answer).value == 1.0)
                same, count, followed = same + equal, count + 1, followed + follows
                if not equal:
                    different[name] = different.get(name, 0) + 1
    return {"ifeval_verdicts_equal": same / count, "ifeval_verdicts": count, "ifeval_followed": followed, "ifeval_different": different}


def _answers(prompt: str, number: int) -> list[str]:
    """Return texts, each of which follows some of IFEval's instructions."""
    words = re.findall(r"\w+", "The quick brown fox jumps over the lazy dog and runs home again before the night falls on the hills")
    body = " ".join(words[(number + n) % len(words)] for n in range(20 + 40 * (number % 9)))
    return [
        body, body.upper(), body.lower(), f'"{body}"', f"<<Title>>\n\n{body}\n\nP.S. [name] [address] [date]",
        "\n".join(f"* *{word}* point" for word in words[: 1 + number % 6]), f"{prompt}\n\n{body}\n\n***\n\n{body}",
        json.dumps({"answer": body}), f"SECTION 1\n{body}\nSECTION 2\n{body}", f"{body}******{body}", "My answer is yes.",
    ]  # fmt: skip
