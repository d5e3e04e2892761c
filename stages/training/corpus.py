"""Documents joined with a mixture, which gives every document a split, a category and a number of repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from puna.stages.contract import StageRun
from puna.stages.draws import place, uniform
from puna.stages.training.vocabulary import load
from puna.storage import Artifact, Part, PunaError
from puna.storage.exchange import Partition
from puna.storage.parts import Beside, span

KEPT = "kept"
"""Category of the documents that no rule of a selection drops."""
SAMPLE, BEGINNING = 1000, 16_000
"""For an estimate of a category's tokens: the expected number of documents to encode, and the maximum characters of each."""


class Chosen(NamedTuple):
    """A document of a split, with its category (a knowledge type, or a selection's rule) and the number of times it is read."""

    id: str
    text: str
    category: str
    repeats: int


def split_documents(documents: pa.Table, mixture: Artifact | None, split: str) -> Iterator[Chosen]:
    """Yield the documents (a table sorted by id) that the mixture puts into `split` and reads at least once; without a mixture, all once.

    If `mixture` is a selection (kind documents), yield every document once; the category is `kept`, or the rule that drops the document."""
    ids = documents.column("id").to_pylist()
    if not ids:
        return
    uses: dict[str, tuple[str, int]]
    if mixture is None:
        uses = dict.fromkeys(ids, ("all", 1))
    elif mixture.kind == "documents":
        dropped = mixture.between(ids[0], ids[-1], "dropped", ["id", "rule"])
        uses = dict.fromkeys(ids, (KEPT, 1)) | {row["id"]: (row["rule"], 1) for row in dropped.to_pylist()}
    else:
        rows = mixture.between(ids[0], ids[-1], columns=["id", "category", "repeats", "split"])
        rows = rows.filter(pc.field("split") == split)
        uses = {
            id_: (category, repeats)
            for id_, category, repeats in zip(
                rows["id"].to_pylist(), rows["category"].to_pylist(), rows["repeats"].to_pylist(), strict=True
            )
        }
    for id_, text in zip(ids, documents.column("text").to_pylist(), strict=True):
        if id_ in uses and uses[id_][1] > 0:
            yield Chosen(id_, text, *uses[id_])


def chosen_of(part: Part, mixture: Artifact | None, split: str) -> list[Chosen]:
    """Return the documents that `split_documents` yields for one part of a documents table; for workers."""
    return list(split_documents(part.read(), mixture, split))


def check_mixture(run: StageRun, documents: Artifact, mixture: Artifact | None) -> None:
    """Raise PunaError if there is a mixture and its ids differ from those of `documents`. Each worker compares one range of ids."""
    if mixture is None:
        return
    cut = max(1, documents.record().cut)
    sides, spans = (mixture.beside(["id"]), documents.beside(["id"])), [span(cut, number) for number in range(cut)]
    differences = list(run.map(_unlike, [(around, *(side.within(*around) for side in sides)) for around in spans]))
    messages = (f"names {{}} documents that {documents.id} does not have", f"lacks {{}} documents of {documents.id}")
    for what, only in zip(messages, zip(*differences, strict=True), strict=True):
        if count := sum(number for number, _ in only):
            example = next(first for number, first in only if number)
            raise PunaError(f"{mixture.id} {what.format(count)}, for example {example}; give the documents that the mixture was made from")


def _unlike(job: tuple[tuple[str, str | None], Beside, Beside]) -> list[tuple[int, str]]:
    """Return, for each of two tables, the number of its ids in a range that the other table lacks, and the first of them."""
    around, *tables = job
    one, other = ({id_ for piece in table.pieces(*around) for id_ in piece["id"].to_pylist()} for table in tables)
    return [(len(only), min(only, default="")) for only in (one - other, other - one)]


def token_counts(
    documents: Artifact, mixture: Artifact, amounts: Mapping[str, tuple[int, int]], vocabulary: Artifact, run: StageRun
) -> dict[str, int]:
    """Return category → estimated tokens of its training documents, with BOS and EOS. `amounts`: category → (documents with text, bytes).

    A category's bytes per token are measured on the beginnings of about `SAMPLE` documents, drawn by hashes of their ids."""
    rates = {category: SAMPLE / count for category, (count, _) in amounts.items() if count}
    sizes, tokens = Counter[str](), Counter[str]()
    for part in run.map(_sampled, run.parts(documents, columns=["id", "text"]), mixture, rates, str(vocabulary.path()), run.seed("tokens")):
        sizes.update(part[0])
        tokens.update(part[1])
    ends = 1 + len(load(str(vocabulary.path())).end)
    return {c: round(size * tokens[c] / sizes[c]) + count * ends if sizes[c] else 0 for c, (count, size) in amounts.items()}


def _sampled(part: Part, mixture: Artifact, rates: dict[str, float], folder: str, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Return category → bytes and category → tokens of the beginnings of the documents that a part adds to the sample."""
    rows = [row for row in chosen_of(part, mixture, "train") if row.text and row.category in rates]
    draws = uniform([row.id for row in rows], seed, "tokens").tolist()
    rows = [row for row, draw in zip(rows, draws, strict=True) if draw < rates[row.category]]
    texts, sizes, tokens = [row.text[:BEGINNING] for row in rows], Counter[str](), Counter[str]()
    for row, text, ids in zip(rows, texts, load(folder).encode_batch(texts), strict=True):
        sizes[row.category] += len(text.encode())
        tokens[row.category] += len(ids)
    return sizes, tokens


def of_part(part: Partition, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(rows, *args)` for the rows of a partition; for workers."""
    return function(part.read(), *args)


Ranked = tuple[int, str, int, Any]
"""A document in hash order: its hash, id, size in bytes, and an optional further value."""


def smallest(found: Iterable[Iterable[Ranked]], most: int, held: int = 10_000) -> list[Ranked]:
    """Return the documents with the smallest hashes, in order, up to a total of `most` bytes (at least one document).

    Memory holds the best rows so far and about the same number of new rows, or about `held` new rows if that is more."""
    documents: list[Ranked] = []
    waiting: list[Ranked] = []
    for rows in found:
        waiting += rows
        if len(waiting) > max(held, len(documents)):
            documents, waiting = candidates([*documents, *waiting], most), []
    documents = candidates([*documents, *waiting], most)
    return documents[:-1] if len(documents) > 1 and sum(row[2] for row in documents) > most else documents


def candidates(rows: Iterable[Ranked], most: int) -> list[Ranked]:
    """Return rows in order of their hashes, up to and including the first row with which their sizes add up to more than `most` bytes."""
    documents = sorted(rows, key=lambda row: row[:2])
    size = 0
    for number, row in enumerate(documents):
        size += row[2]
        if number and size > most:
            return documents[: number + 1]
    return documents


def rank(*parts: object) -> int:
    """Return a 63-bit hash by which rows are ordered independently of file order and the number of workers."""
    return place(*parts) >> 1
