"""The split: which pages nothing is ever trained on, so that a model can be judged on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.stages import urls
from puna.stages.contract import Documents, SeededConfig, Signals, StageRun, stage
from puna.stages.draws import uniform
from puna.storage import Artifact, Part, PunaError

UNKNOWN = "unknown"


class SplitConfig(SeededConfig):
    """How much is held out."""

    category: str = Field("domain", min_length=1, description="Signal that holds a document's category")
    heldout_fraction: float = Field(0.02, ge=0, lt=1, description="Share of the addresses whose documents training never sees, fraction")
    heldout_least: int = Field(4, ge=0, description="Held-out documents of each category, at least; a third of a smaller category")


@stage(kind="mixture")
def split(documents: Documents, signals: Signals, config: SplitConfig, run: StageRun) -> None:
    """Hold pages out before anything is learned from the others: tokenizer, mixture experiments, the model.

    A hash of a page's address decides, not of its content: a page stays on its side when the corpus grows and
    when it is fetched again, and two versions of one page are never on different sides. What is written is the
    mixture that reads each training document once; `mix` turns it into the one that training reads.
    """
    parts = run.parts(documents, columns=["id", "url", "text"])
    tables = list(run.map(_measured, parts, rows=len(parts)))
    table = pa.concat_tables(tables) if tables else None
    if table is None or not table.num_rows:
        raise PunaError(f"split: {documents.id} has no documents: there is nothing to hold out or to train on")
    ids, sizes = table["id"].to_pylist(), table["bytes"].to_numpy()
    categories = _categories(ids, signals, config.category)
    heldout = held_out(table["address"].to_pylist(), categories, config)
    training: Counter[str] = Counter()
    for category, size, out in zip(categories, sizes.tolist(), heldout.tolist(), strict=True):
        training[category] += 0 if out else size
    total = sum(training.values())
    run.write(
        pa.table(
            {
                "id": ids,
                "category": categories,
                "split": np.where(heldout, "heldout", "train").tolist(),
                "repeats": np.ones(len(ids), np.int32),
                "weight": [training[c] / max(total, 1) for c in categories],
            }
        )
    )
    run.metric("documents", len(ids))
    run.metric("heldout_documents", int(heldout.sum()))
    run.metric("heldout_bytes", int(sizes[heldout].sum()))


def _measured(part: Part) -> pa.Table:
    """Id, comparable address and size in bytes of a part's documents."""
    table = part.read()
    addresses = [urls.normalized(url) for url in table["url"].to_pylist()]
    sizes = pc.binary_length(table["text"]).cast(pa.int64())
    return pa.table({"id": table["id"], "address": pa.array(addresses, pa.string()), "bytes": sizes})


def held_out(addresses: Sequence[str], categories: Sequence[str], config: SplitConfig) -> NDArray[np.bool_]:
    """Which documents are held out, bool[n]: those whose address has a hash below `heldout_fraction`.

    A category with fewer than `heldout_least` of them gives those with its smallest hashes, but never all it has.
    """
    found = np.zeros(len(addresses), dtype=bool)
    if config.heldout_fraction == 0:
        return found
    chance = uniform(addresses, config.seed, "heldout")
    names = np.array(categories)
    for category in sorted(set(categories)):
        members = np.flatnonzero(names == category)
        own = chance[members]
        least = min(config.heldout_least, len(members) // 3)
        border = np.sort(own)[least - 1] if least else -1.0
        chosen = members[(own < config.heldout_fraction) | (own <= border)]
        if len(chosen) < len(members):
            found[chosen] = True
    # Versions of a page may be of different categories, and the borders of these differ.
    return np.isin(chance, chance[found])


def _categories(ids: list[str], signals: Artifact, column: str) -> list[str]:
    table = signals.read()
    if column not in table.schema.names:
        raise PunaError(f"{signals.id} has no signal {column!r}; set split.category to one of {', '.join(table.schema.names)}")
    found = dict(zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True))
    if missing := [i for i in ids if i not in found]:
        raise PunaError(f"{signals.id} has no row for {len(missing)} documents, for example {missing[0]}; score these documents first")
    return [found[i] or UNKNOWN for i in ids]
