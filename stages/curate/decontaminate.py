"""Decontamination: removal of documents that contain questions of the evaluation sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.kernels.text.fuzzy_match import FuzzyIndex, build_fuzzy, fuzzy_match
from puna.kernels.text.grams import Hashed, Sieve, gram_hashes, may_hold, places_held, sieve, word_hashes
from puna.kernels.text.hash_table import table_of
from puna.stages.contract import Documents, Figure, Prompts, StageConfig, StageRun, stage
from puna.stages.conversations import as_text, asking, messages_of, text_of
from puna.storage import Artifact, PunaError
from puna.storage.schemas import table_schema

RULE = "decontaminate.ngram"
FUZZY_RULE = "decontaminate.fuzzy"
DROPPED = table_schema("dropped").schema


class DecontaminateConfig(StageConfig):
    n: int = Field(13, ge=2, le=50, description="Length of the compared n-grams, in words")
    min_characters: int = Field(25, ge=1, description="Minimum characters of a question of fewer than n words, which is matched as a whole")
    fuzzy_overlap: float = Field(0.8, gt=0, le=1, description="Minimum share of a prompt's rarity-weighted n-grams in a matching passage")
    fuzzy_n: int = Field(5, ge=2, le=50, description="Length of the short n-grams, in words")
    fuzzy_step: int = Field(3, ge=1, le=50, description="Step between the short n-grams of a document that are looked up, in words")
    fuzzy_misses: int = Field(10, ge=0, le=100, description="Maximum number of consecutive n-grams in a passage that the prompt lacks")
    fuzzy_min_words: int = Field(20, ge=2, description="Minimum length, in words, of prompts that are also searched for with changes")
    splits: tuple[Literal["heldout", "train"], ...] = Field(
        ("heldout",), min_length=1, description="Splits of the prompts to search for; if all prompts are in the split train, all are used"
    )
    max_overlap: float = Field(0.0, ge=0, lt=1, description="Maximum fraction of one prompt's n-grams that a document may contain")


@dataclass(frozen=True)
class Index:
    """N-grams of the prompts. `lengths`: in words. For each length: sorted `hashes` uint64[m], `owners` int64[m] (prompt numbers), and
    `tables`, the hash table for `places_held`. For each prompt: `totals` int64[prompts], its number of n-grams, and `names`: (task, id)."""

    lengths: tuple[int, ...]
    hashes: tuple[NDArray[np.uint64], ...]
    owners: tuple[NDArray[np.int64], ...]
    tables: tuple[NDArray[np.uint64], ...]
    totals: NDArray[np.int64]
    names: list[tuple[str, str]]

    def with_fuzzy(self, near: FuzzyIndex) -> Sieve:
        """Return a sieve for the n-grams of this index and of `near`. A text without any of these contains no prompt, exact or changed."""
        return sieve([*zip(self.lengths, [1] * len(self.lengths), self.hashes, strict=True), (near.n, near.step, near.hashes)])


@stage(kind="documents", filters="documents")
def decontaminate(
    documents: Documents, prompts: list[Prompts] | None, texts: list[Documents] | None, config: DecontaminateConfig, run: StageRun
) -> None:
    """Drop documents that share word n-grams with held-out prompts (question and reference together) or with `texts`.

    `texts` are documents that must not be trained on; each counts as a prompt whose task is its source. As in GPT-3 (Brown et al. 2020,
    appendix C), n-grams have `n` (13) words, ignoring case and punctuation. A shorter question is matched as a whole if it has
    `min_characters`, else counted in `unmatchable_TASK`. Other documents are also searched for changed prompts (`decontaminate.fuzzy`).
    `dropped` has the best-matching prompt, the fraction of its n-grams found, and the first of these or the changed passage.
    `contaminated_TASK` counts the prompts found; `examples` shows each best-matching prompt with its first document."""
    if not prompts and not texts:
        raise PunaError("decontaminate: there is nothing to search for; give prompts or texts")
    rows_of_prompts = [row for artifact in prompts or () for row in prompts_of_splits(artifact, config.splits)]
    for row in (row for artifact in texts or () for row in artifact.read(columns=["id", "source", "text"]).to_pylist()):
        rows_of_prompts.append({"id": row["id"], "task": row["source"], "messages": asking(row["text"]), "reference": None})
    search, unmatchable = search_for(rows_of_prompts, config)
    names = search.index.names
    results: dict[str, set[str]] = {task: set() for task, _ in names}
    held: dict[str, tuple[int, dict[str, Any]]] = {}
    for seen, first in run.filter(_find, documents, search, columns=["id", "text"]):
        for at in seen:
            task, prompt = names[at]
            results[task].add(prompt)
        for name, (count, row) in first.items():
            before, earlier = held.get(name, (0, row))
            held[name] = (before + count, earlier)
    run.write_rows(_report(held, rows_of_prompts), "examples")
    prompts_of = Counter(task for task, _ in names)
    for task in sorted(prompts_of):
        run.metric(f"prompts_{task}", prompts_of[task])
        run.metric(f"contaminated_{task}", len(results[task]))
        run.metric(f"unmatchable_{task}", unmatchable[task])
    run.metric("contaminated_documents", sum(count for count, _ in held.values()))
    series = {"prompts found in documents": [(task, float(len(results[task]))) for task in sorted(prompts_of)]}
    run.figure("contamination", Figure("Evaluation prompts found in documents", "task", "prompts", series, kind="bar"))


def _report(held: dict[str, tuple[int, dict[str, Any]]], prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    questions = {f"{row['task']} prompt {row['id']}": as_text(messages_of(row)) for row in prompts}
    return [
        {"id": name, "kind": "contaminated prompt", "prompt": questions[name], "text": row["detail"].partition(": ")[2],
         "detail": f"{count} documents, the first is {row['id']} ({row['rule']}, {row['value']:.2f})"}
        for name, (count, row) in held.items()
    ]  # fmt: skip


def prompts_of_splits(prompts: Artifact, splits: Sequence[str]) -> list[dict[str, Any]]:
    """Return the prompts of `splits`, or all prompts if all are in the split train. Raise PunaError if there are none."""
    rows = prompts.read(columns=["id", "task", "split", "messages", "reference"]).to_pylist()
    whole = all(row["split"] == "train" for row in rows)
    result = rows if whole else [row for row in rows if row["split"] in splits]
    if not result:
        raise PunaError(f"{prompts.id} has no prompts in the splits {', '.join(splits)} to search for")
    return result


def build_index(rows: list[dict[str, Any]], config: DecontaminateConfig) -> tuple[Index, Counter[str]]:
    """Return the index of the prompts `rows`, and task → number of prompts that are too short to match."""
    rows = sorted(rows, key=lambda row: (row["task"], row["id"]))
    unmatchable: Counter[str] = Counter()
    entries: dict[int, list[tuple[int, int]]] = {}
    totals = np.zeros(len(rows), np.int64)
    for at, row in enumerate(rows):
        prompt = text_of(messages_of(row))
        question, whole = word_hashes(prompt).words, word_hashes(f"{prompt}\n{row['reference'] or ''}").words
        grams = {(config.n, value) for value in gram_hashes(whole, config.n).tolist()}
        if 0 < len(question) < config.n and len(prompt.strip()) >= config.min_characters:
            grams |= {(len(question), value) for value in gram_hashes(question, len(question)).tolist()}
        for length, value in grams:
            entries.setdefault(length, []).append((value, at))
        totals[at] = len(grams)
        unmatchable[row["task"]] += not grams
    lengths = tuple(sorted(entries))
    pairs = [sorted(entries[length]) for length in lengths]
    hashes = tuple(np.array([value for value, _ in own], np.uint64) for own in pairs)
    owners = tuple(np.array([at for _, at in own], np.int64) for own in pairs)
    tables = tuple(table_of({value for value, _ in own}) for own in pairs)
    return Index(lengths, hashes, owners, tables, totals, [(row["task"], row["id"]) for row in rows]), unmatchable


@dataclass(frozen=True)
class Match:
    """The prompt with the largest overlap with a document. `overlap`: share of the prompt's n-grams (0 to 1). `text`: the first n-gram
    found, or with FUZZY_RULE the changed passage. `shares`: prompt number → overlap, for all prompts found (`Search`: above the bound)."""

    prompt: int
    overlap: float
    text: str
    shares: dict[int, float]
    rule: str = RULE


def match(text: Hashed, index: Index) -> Match | None:
    """Return the prompt with the largest share of its n-grams in a document (ties: the first); None if no n-gram matches."""
    hits: dict[int, set[tuple[int, int]]] = {}
    first: dict[int, tuple[int, int]] = {}
    for length, hashes, owners, table in zip(index.lengths, index.hashes, index.owners, index.tables, strict=True):
        grams = gram_hashes(text.words, length)
        for place in places_held(grams, table).tolist():
            low, high = (int(np.searchsorted(hashes, grams[place], side=side)) for side in ("left", "right"))
            for prompt in owners[low:high].tolist():
                hits.setdefault(prompt, set()).add((length, int(grams[place])))
                first.setdefault(prompt, (place, length))
    if not hits:
        return None
    share = {prompt: len(results) / int(index.totals[prompt]) for prompt, results in hits.items()}
    # Prompts are numbered by task and id, so ties do not depend on the order of the inputs.
    best = min(share, key=lambda prompt: (-share[prompt], prompt))
    place, length = first[best]
    return Match(best, share[best], text.lowered[text.start[place] : text.stop[place + length - 1]], share)


@dataclass(frozen=True)
class Search:
    """The prompts to search for, exactly (`index`) and with changes (`fuzzy`). `grams` quickly rejects texts without any prompt."""

    index: Index
    fuzzy: FuzzyIndex
    grams: Sieve
    config: DecontaminateConfig

    def matches(self, texts: pa.Array | pa.ChunkedArray) -> Iterator[tuple[int, Match]]:
        """Yield the index and the best match of each text that contains more of a prompt than the configuration allows."""
        suspects = may_hold(texts, self.grams).nonzero()[0]
        for at, text in zip(suspects.tolist(), texts.take(pa.array(suspects)).to_pylist(), strict=True):
            hashed = word_hashes(text)
            exact = match(hashed, self.index)
            if exact is not None and exact.overlap > self.config.max_overlap:
                above = {prompt: share for prompt, share in exact.shares.items() if share > self.config.max_overlap}
                yield at, replace(exact, shares=above)
            elif (near := fuzzy_match(hashed, self.fuzzy)) is not None and near.share >= self.config.fuzzy_overlap:
                yield at, Match(near.prompt, near.share, near.text, {near.prompt: near.share}, FUZZY_RULE)


def search_for(rows: list[dict[str, Any]], config: DecontaminateConfig) -> tuple[Search, Counter[str]]:
    """Return a `Search` for the prompts `rows`, and task → number of prompts that are too short to match."""
    index, unmatchable = build_index(rows, config)
    texts = [text_of(messages_of(row)) for row in sorted(rows, key=lambda row: (row["task"], row["id"]))]
    fuzzy = build_fuzzy(texts, config.fuzzy_n, config.fuzzy_step, config.fuzzy_misses, config.fuzzy_min_words)
    return Search(index, fuzzy, index.with_fuzzy(fuzzy), config), unmatchable


def _find(documents: pa.Table, search: Search) -> tuple[dict[str, Any], tuple[list[int], dict[str, tuple[int, dict[str, Any]]]]]:
    """Return `keep` and `dropped`; the indices of all prompts found; and prompt → (documents that match it best, first dropped row)."""
    rows: list[dict[str, Any]] = []
    seen: set[int] = set()
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for at, one in search.matches(documents["text"]):
        name = "{} prompt {}".format(*search.index.names[one.prompt])
        threshold = search.config.max_overlap if one.rule == RULE else search.config.fuzzy_overlap
        detail = f"{name}: {' '.join(one.text.split())}"
        rows.append({"id": documents["id"][at].as_py(), "rule": one.rule, "value": one.overlap, "threshold": threshold, "detail": detail})
        seen |= one.shares.keys()
        count, earlier = first.get(name, (0, rows[-1]))
        first[name] = (count + 1, earlier)
    dropped = pa.Table.from_pylist(rows, schema=DROPPED)
    keep = pc.invert(pc.is_in(documents["id"], dropped["id"].combine_chunks()))
    return {"keep": keep, "dropped": dropped}, (sorted(seen), first)
