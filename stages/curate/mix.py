"""The mixture: which documents are held out, and how often each of the others is read in training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, field_validator

from puna.stages.contract import Documents, Evaluation, Figure, SeededConfig, Signals, StageRun, stage
from puna.stages.curate.cluster_weights import FINEWEB_2, cluster_sizes, weights_of
from puna.stages.curate.draws import uniform
from puna.storage import PunaError

UNKNOWN = "unknown"


class MixConfig(SeededConfig):
    """Held-out split and weights of the knowledge types."""

    category: str = Field("domain", min_length=1, description="Signal that holds a document's category")
    heldout_fraction: float = Field(0.02, ge=0, lt=1, description="Share of each category's documents that training never sees, fraction")
    heldout_least: int = Field(4, ge=0, description="Held-out documents of each category, at least; a third of a smaller category")
    weights: dict[str, float] = Field(
        default_factory=dict, description="Share of training text of single categories; they replace those of the experiment, fraction"
    )
    max_share: float = Field(
        0.5, gt=0, le=1, description="Greatest share of one category where neither configuration nor experiment gives weights, fraction"
    )
    max_repeats: float = Field(4.0, ge=1, le=100, description="Most times that the documents of a category are read, on average, epochs")

    cluster_weights: dict[PositiveInt, float] = Field(
        FINEWEB_2,
        description="Least number of near-duplicates (with itself) that a document stands for → how often it is read compared with one "
        "that stands for itself alone, within its category; where the artifacts that removed duplicates are given",
    )

    @field_validator("cluster_weights")
    @classmethod
    def _cluster_weights_are_positive(cls, weights: dict[int, float]) -> dict[int, float]:
        if wrong := [size for size, weight in weights.items() if not 0 < weight <= 100]:
            raise ValueError(f"weight of clusters from {wrong[0]} documents on must lie in 0..100, above 0")
        return weights

    @field_validator("weights")
    @classmethod
    def _weights_are_shares(cls, weights: dict[str, float]) -> dict[str, float]:
        wrong = [name for name, weight in weights.items() if not 0 <= weight <= 1]
        if wrong:
            raise ValueError(f"weight of {wrong[0]!r} must lie in 0..1")
        if sum(weights.values()) > 1 + 1e-9:
            raise ValueError(f"the weights add up to {sum(weights.values()):.3f}; at most 1")
        return weights


class Share(NamedTuple):
    """One category: bytes of its training documents, its weight, and the epochs that follow."""

    bytes: int
    weight: float
    epochs: float


@stage(kind="mixture")
def mix(
    documents: Documents,
    signals: Signals,
    weights: Evaluation | None,
    deduplicated: list[Documents] | None,
    config: MixConfig,
    run: StageRun,
) -> None:
    """Set how often each document is read (Llama 3, section 3.1.2).

    A category's weight comes from the configuration, else from a mixture experiment, else it is the category's
    share of the text, but at most `max_share`: the web has too much of some subjects. The amount of training text
    stays that of one pass over all documents; a category of weight w is read w x all / own times, at most
    `max_repeats` (four passes cost little: Muennighoff et al. 2023). A fractional number of epochs becomes an
    integer per document by a hash of its id. With the artifacts that removed duplicates, a document that stands for several is
    read more often than its category's others (`cluster_weights`), and the category as a whole as often as before.
    """
    ids, sizes = _sizes(documents)
    categories = _categories(ids, signals, config.category)
    heldout = held_out(ids, categories, config)
    training: dict[str, int] = {}
    for category, size, out in zip(categories, sizes, heldout, strict=True):
        training[category] = training.get(category, 0) + (0 if out else size)
    if unknown := sorted(set(config.weights) - set(categories)):
        names = ", ".join(sorted(set(categories))) or "none"
        raise PunaError(f"mix.weights.{unknown[0]}: no document has this category; they have {names}")
    wanted = _experiment(weights) | config.weights
    shares = plan(training, wanted, config.max_repeats, 1.0 if wanted else config.max_share)
    chance = uniform(ids, config.seed, "repeats")
    epochs = np.array([shares[c].epochs for c in categories])
    if deduplicated:
        epochs *= _relative(weights_of(cluster_sizes(ids, deduplicated), config.cluster_weights), categories, np.where(heldout, 0, sizes))
    repeats = np.where(heldout, 0, np.floor(epochs) + (chance < epochs - np.floor(epochs))).astype(np.int32)
    run.write(
        pa.table(
            {
                "id": ids,
                "category": categories,
                "split": np.where(heldout, "heldout", "train").tolist(),
                "repeats": np.where(heldout, 1, repeats).astype(np.int32),
                "weight": [shares[c].weight for c in categories],
            }
        )
    )
    total = sum(training.values())
    bars = {"text": [(c, s.bytes / max(total, 1)) for c, s in shares.items()], "training": [(c, s.weight) for c, s in shares.items()]}
    run.figure("mixture", Figure("Knowledge types in the text and in training", "knowledge type", "share", bars, "bar"))
    run.metric("documents", len(ids))
    run.metric("heldout_documents", int(heldout.sum()))
    run.metric("train_bytes", int((np.array(sizes) * repeats).sum()))
    for category, share in shares.items():
        run.metric(f"epochs_{category}", round(share.epochs, 4))


def plan(sizes: Mapping[str, int], wanted: Mapping[str, float], max_repeats: float, max_share: float = 1.0) -> dict[str, Share]:
    """Weight and epochs of each category. Categories without a wanted weight divide what is left by size.

    What a category at `max_repeats` or `max_share` cannot take goes to the others, in proportion to their weights.
    """
    total = sum(sizes.values())
    known = {c: float(w) for c, w in wanted.items() if sizes.get(c)}
    left = max(1.0 - sum(known.values()), 0.0)
    rest = sum(size for c, size in sizes.items() if c not in known)
    raw = {c: known[c] if c in known else left * size / rest if rest else 0.0 for c, size in sorted(sizes.items())}
    scale = sum(raw.values())
    if not total or not scale:
        raise PunaError("no category has both text and weight: nothing to mix; check mix.weights")
    weight = {c: w / scale for c, w in raw.items()}
    most = max(max_share, 1.0 / sum(size > 0 for size in sizes.values()))
    ceiling = {c: min(max_repeats * size / total, most) for c, size in sizes.items()}
    capped: dict[str, float] = {}
    while over := [c for c in weight if c not in capped and weight[c] > ceiling[c] + 1e-12]:
        capped |= {c: ceiling[c] for c in over}
        free = sum(w for c, w in weight.items() if c not in capped)
        if not free:
            break
        spare = 1.0 - sum(capped.values())
        weight = {c: capped[c] if c in capped else w * spare / free for c, w in weight.items()}
    weight |= capped
    return {c: Share(sizes[c], weight[c], weight[c] * total / sizes[c] if sizes[c] else 0.0) for c in sorted(sizes)}


def _relative(weights: NDArray[np.float64], categories: Sequence[str], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights divided by the mean weight of a byte of training text of their category, float64[n]."""
    _, number = np.unique(np.array(categories, dtype=object).astype("U"), return_inverse=True)
    text = np.bincount(number, weights=sizes)
    mean = np.bincount(number, weights=weights * sizes) / np.maximum(text, 1)
    return np.asarray(weights / np.where(text > 0, mean, 1.0)[number])


def held_out(ids: Sequence[str], categories: Sequence[str], config: MixConfig) -> NDArray[np.bool_]:
    """Which documents are held out: of each category those with the smallest hash of their id."""
    chance = uniform(ids, config.seed, "heldout")
    found = np.zeros(len(ids), dtype=bool)
    if config.heldout_fraction == 0:
        return found
    for category in sorted(set(categories)):
        members = np.array([i for i, c in enumerate(categories) if c == category])
        least = min(config.heldout_least, len(members) // 3)
        count = max(math.ceil(config.heldout_fraction * len(members)) if len(members) > 1 else 0, least)
        found[members[np.argsort(chance[members], kind="stable")[:count]]] = True
    return found


def _sizes(documents: Documents) -> tuple[list[str], list[int]]:
    ids: list[str] = []
    sizes: list[int] = []
    for batch in documents.batches(columns=["id", "text"], rows=1024):
        ids += batch.column("id").to_pylist()
        sizes += pc.binary_length(batch.column("text")).to_pylist()
    return ids, sizes


def _categories(ids: list[str], signals: Signals, column: str) -> list[str]:
    table = signals.read()
    if column not in table.schema.names:
        raise PunaError(f"{signals.id} has no signal {column!r}; set mix.category to one of {', '.join(table.schema.names)}")
    found = dict(zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True))
    if missing := [i for i in ids if i not in found]:
        raise PunaError(f"{signals.id} has no row for {len(missing)} documents, for example {missing[0]}; score these documents first")
    return [found[i] or UNKNOWN for i in ids]


def _experiment(weights: Evaluation | None) -> dict[str, float]:
    if weights is None:
        return {}
    if "weights" not in weights.tables:
        raise PunaError(f"{weights.id} has no table `weights`; give the artifact of mix_experiment")
    table = weights.read("weights")
    return dict(zip(table["category"].to_pylist(), table["weight"].to_pylist(), strict=True))
