"""Documents that hold evaluation data are dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import xxhash
from pydantic import Field

from puna.stages.contract import Documents, Prompts, StageConfig, StageRun, stage

WORD = re.compile(r"\w+")


class DecontaminateConfig(StageConfig):
    """What counts as a match."""

    ngram_words: int = Field(13, ge=3, le=100, description="Words of an n-gram; a shorter question counts as a whole")
    least_characters: int = Field(
        24, ge=1, description="Shortest n-gram that counts, characters; shorter questions are too common to mean anything"
    )
    max_matches: int = Field(0, ge=0, description="N-grams of evaluation data that a document may hold")


class Gram(NamedTuple):
    """An n-gram of evaluation data: the prompt and task it stands in, its words."""

    prompt: str
    task: str
    text: str


@stage(kind="documents", filters="documents")
def decontaminate(documents: Documents, prompts: list[Prompts], config: DecontaminateConfig, run: StageRun) -> None:
    """Drop documents that share a 13-gram with a held-out evaluation prompt or its answer (GPT-3, appendix C).

    Words are compared in lower case, without punctuation. `dropped` names the task, the prompt and the n-gram.
    """
    grams: dict[int, Gram] = {}
    short = 0
    tasks: dict[str, int] = {}
    for artifact in prompts:
        for row in artifact.read().to_pylist():
            if row["split"] != "heldout":
                continue
            tasks[row["task"]] = tasks.get(row["task"], 0) + 1
            found = list(question_grams(f"{row['prompt']} {row['reference']}", config))
            short += not found
            for text in found:
                hashed = xxhash.xxh3_64_intdigest(text.encode())
                # One n-gram may stand in many prompts: the smallest id names it, whatever their order.
                gram = Gram(row["id"], row["task"], text)
                grams[hashed] = min(gram, grams.get(hashed, gram))
    lengths = sorted({gram.text.count(" ") + 1 for gram in grams.values()})
    run.transform(_decide, documents, grams, lengths, config)
    run.metric("ngrams", len(grams))
    run.metric("prompts_too_short", short)
    for task, count in sorted(tasks.items()):
        run.metric(f"prompts_{task}", count)


def question_grams(text: str, config: DecontaminateConfig) -> Iterator[str]:
    """The n-grams of a question (all of it, when it has fewer words) that are long enough to count."""
    words = WORD.findall(text.lower())
    size = min(config.ngram_words, len(words))
    for start in range(len(words) - size + 1 if size else 0):
        gram = " ".join(words[start : start + size])
        if len(gram) >= config.least_characters:
            yield gram


def matches(text: str, grams: dict[int, Gram], lengths: list[int]) -> list[Gram]:
    """The n-grams that stand in a text, each once, in the order of their first place."""
    words = WORD.findall(text.lower())
    found: dict[int, Gram] = {}
    for size in lengths:
        for start in range(len(words) - size + 1):
            hashed = xxhash.xxh3_64_intdigest(" ".join(words[start : start + size]).encode())
            if hashed in grams and hashed not in found:
                found[hashed] = grams[hashed]
    return list(found.values())


def _decide(rows: pa.Table, grams: dict[int, Gram], lengths: list[int], config: DecontaminateConfig) -> dict[str, pa.Table]:
    """Kept and dropped documents of a part."""
    keep: list[bool] = []
    dropped: dict[str, list[object]] = {name: [] for name in ("id", "rule", "value", "threshold", "detail")}
    for name, text in zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True):
        found = matches(text, grams, lengths)
        keep.append(len(found) <= config.max_matches)
        if not keep[-1]:
            first = found[0]
            values = (name, "evaluation_data", float(len(found)), float(config.max_matches), f"{first.task}, prompt {first.prompt}: {first.text}")
            for column, value in zip(dropped.values(), values, strict=True):
                column.append(value)
    kinds = {"value": pa.float64(), "threshold": pa.float64()}
    table = pa.table({n: pa.array(column, kinds.get(n, pa.string())) for n, column in dropped.items()})
    return {"documents": rows.filter(pa.array(keep, pa.bool_())), "dropped": table}
