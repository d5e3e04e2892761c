"""Decontamination: documents that contain questions of the evaluation sets go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, Figure, Prompts, StageConfig, StageRun, stage
from puna.storage import Artifact, Part

RULE = "decontaminate.ngram"
DROPPED = pa.schema(
    [("id", pa.string()), ("rule", pa.string()), ("value", pa.float64()), ("threshold", pa.float64()), ("detail", pa.string())]
)


class DecontaminateConfig(StageConfig):
    """What counts as contamination."""

    n: int = Field(13, ge=2, le=50, description="Length of the n-grams that are compared, words")
    min_characters: int = Field(
        25, ge=1, description="A question of fewer than n words is matched as a whole where it has at least so many characters"
    )
    max_overlap: float = Field(0.0, ge=0, lt=1, description="Greatest fraction of one prompt's n-grams that a document may contain")


@dataclass(frozen=True)
class Index:
    """N-grams of the prompts: `lengths` in words; per length sorted `hashes` uint64[m] and `owners` int64[m], the prompt each
    belongs to; `totals` int64[prompts], n-grams of each prompt."""

    lengths: tuple[int, ...]
    hashes: tuple[NDArray[np.uint64], ...]
    owners: tuple[NDArray[np.int64], ...]
    totals: NDArray[np.int64]
    names: list[tuple[str, str]]


@stage(kind="documents", filters="documents")
def decontaminate(documents: Documents, prompts: list[Prompts], config: DecontaminateConfig, run: StageRun) -> None:
    """Drop documents that share n-grams of words with held-out prompts (question and reference together).

    GPT-3's measure (Brown et al. 2020, appendix C) with 13 words; case and punctuation do not count, numbers do. A
    question of fewer words is matched as a whole, where it is long enough to mean something; those that are not are counted
    in the metric `unmatchable_TASK`. `dropped` has the fraction of the best matched prompt's n-grams as value, and the
    prompt and its first n-gram found as detail. The metric `contaminated_TASK` counts the task's prompts that were found.
    """
    index, unmatchable = build_index([row for artifact in prompts for row in heldout_rows(artifact)], config)
    parts = run.parts(documents, columns=["id", "text"])
    found: dict[str, set[str]] = {task: set() for task, _ in index.names}
    dropped: list[dict[str, Any]] = []
    for rows, seen in run.map(_find, parts, index, config, rows=len(parts)):
        dropped += rows
        for at in seen:
            task, prompt = index.names[at]
            found[task].add(prompt)
    run.write(pa.Table.from_pylist(dropped, schema=DROPPED), "dropped")
    run.transform(_keep, documents, {row["id"] for row in dropped})
    prompts_of = Counter(task for task, _ in index.names)
    for task in sorted(prompts_of):
        run.metric(f"prompts_{task}", prompts_of[task])
        run.metric(f"contaminated_{task}", len(found[task]))
        run.metric(f"unmatchable_{task}", unmatchable[task])
    run.metric("contaminated_documents", len(dropped))
    series = {"prompts found in documents": [(task, float(len(found[task]))) for task in sorted(prompts_of)]}
    run.figure("contamination", Figure("Evaluation prompts found in documents", "task", "prompts", series, kind="bar"))


def heldout_rows(prompts: Artifact) -> list[dict[str, Any]]:
    """The held-out prompts of an artifact."""
    rows = prompts.read(columns=["id", "task", "split", "prompt", "reference"]).to_pylist()
    return [row for row in rows if row["split"] == "heldout"]


def build_index(rows: list[dict[str, Any]], config: DecontaminateConfig) -> tuple[Index, Counter[str]]:
    """The index of held-out prompts, and per task how many are too short to be matched at all."""
    from puna.stages.curate.grams import gram_hashes, normal_words

    rows = sorted(rows, key=lambda row: (row["task"], row["id"]))
    unmatchable: Counter[str] = Counter()
    entries: dict[int, list[tuple[int, int]]] = {}
    totals = np.zeros(len(rows), np.int64)
    for at, row in enumerate(rows):
        question, _, text = normal_words(row["prompt"])
        whole, _, _ = normal_words(f"{row['prompt']}\n{row['reference']}")
        grams = {(config.n, value) for value in gram_hashes(whole, config.n).tolist()}
        if 0 < len(question) < config.n and len(text.strip()) >= config.min_characters:
            grams |= {(len(question), value) for value in gram_hashes(question, len(question)).tolist()}
        for length, value in grams:
            entries.setdefault(length, []).append((value, at))
        totals[at] = len(grams)
        unmatchable[row["task"]] += not grams
    lengths = tuple(sorted(entries))
    ordered = [sorted(entries[length]) for length in lengths]
    return (
        Index(
            lengths,
            tuple(np.array([value for value, _ in pairs], np.uint64) for pairs in ordered),
            tuple(np.array([at for _, at in pairs], np.int64) for pairs in ordered),
            totals,
            [(row["task"], row["id"]) for row in rows],
        ),
        unmatchable,
    )


@dataclass(frozen=True)
class Match:
    """The prompt of which a document holds most: `overlap` of its n-grams, `text` the first of them found; `seen` all prompts."""

    prompt: int
    overlap: float
    text: str
    seen: set[int]


def match(text: str, index: Index) -> Match | None:
    """What a document holds of the indexed prompts, or None."""
    from puna.stages.curate.grams import gram_hashes, normal_words

    words, ranges, lowered = normal_words(text)
    hits: dict[int, set[tuple[int, int]]] = {}
    first: dict[int, tuple[int, int]] = {}
    for length, hashes, owners in zip(index.lengths, index.hashes, index.owners, strict=True):
        grams = gram_hashes(words, length)
        low = np.searchsorted(hashes, grams, side="left")
        high = np.searchsorted(hashes, grams, side="right")
        for place in np.flatnonzero(high > low).tolist():
            for prompt in owners[low[place] : high[place]].tolist():
                hits.setdefault(prompt, set()).add((length, int(grams[place])))
                first.setdefault(prompt, (place, length))
    if not hits:
        return None
    share = {prompt: len(found) / int(index.totals[prompt]) for prompt, found in hits.items()}
    # Prompts are numbered by task and id: ties go to the first, whatever the order of the inputs.
    best = min(share, key=lambda prompt: (-share[prompt], prompt))
    place, length = first[best]
    return Match(best, share[best], lowered[ranges[place][0] : ranges[place + length - 1][1]], set(hits))


def _find(part: Part, index: Index, config: DecontaminateConfig) -> tuple[list[dict[str, Any]], set[int]]:
    """Rows of `dropped` of a part, and the prompts that its documents hold."""
    table = part.read()
    rows: list[dict[str, Any]] = []
    seen: set[int] = set()
    for identity, text in zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True):
        found = match(text, index)
        if found is None or found.overlap <= config.max_overlap:
            continue
        task, prompt = index.names[found.prompt]
        seen |= found.seen
        rows.append(
            {
                "id": identity,
                "rule": RULE,
                "value": found.overlap,
                "threshold": config.max_overlap,
                "detail": f"{task} prompt {prompt}: {' '.join(found.text.split())}",
            }
        )
    return rows, seen


def _keep(documents: pa.Table, dropped: set[str]) -> pa.Table:
    return documents.filter(pc.invert(pc.is_in(documents["id"], pa.array(sorted(dropped), pa.string()))))
