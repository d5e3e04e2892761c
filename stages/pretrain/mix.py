"""The stage `mix`: the mixture, which sets how often training reads each document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator

from puna.stages.contract import Documents, Evaluation, Figure, Mixture, SeededConfig, StageRun, Tokenizer, stage
from puna.stages.draws import uniform
from puna.stages.training.corpus import check_mixture, of_part, token_counts
from puna.storage import Artifact, Part, PunaError

TOLERANCE = 1e-6  # for rounding errors of weights that should add up to 1


class MixConfig(SeededConfig):
    weights: dict[str, float] = Field(
        default_factory=dict, description="Category → share of the training tokens (sum: 1); empty: an experiment's, else natural shares. "
        "Shares are of bytes if the stage is given no tokenizer"
    )
    max_share: float = Field(0.5, gt=0, le=1, description="Maximum share of a category if no weights are given, here or by an experiment")
    down_sample: dict[str, float] = Field(
        {"arts_entertainment": 0.5}, description="Overrepresented category → share of its weight that it keeps; the others gain the rest "
        "in proportion. Not applied to `weights`, or to the weights of anneal_experiment"
    )  # fmt: skip
    max_repeats: float = Field(4.0, ge=1, le=100, description="Maximum passes over a category's documents, on average")

    @field_validator("down_sample", "weights")
    @classmethod
    def _are_shares(cls, shares: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if wrong := [name for name, share in shares.items() if not 0 <= share <= 1]:
            raise ValueError(f"the share of {wrong[0]!r} must lie in 0..1")
        if info.field_name == "weights" and shares and abs(sum(shares.values()) - 1) > TOLERANCE:
            raise ValueError(f"the weights add up to {sum(shares.values()):.6g}, not to 1: give every category its share")
        return shares


class Share(NamedTuple):
    """A category's size of training documents (tokens or bytes), weight (share of the training text), and resulting epochs."""

    size: int
    weight: float
    epochs: float


@stage(kind="mixture")
def mix(
    documents: Documents, split: Mixture, weights: Evaluation | None, tokenizer: Tokenizer | None, config: MixConfig, run: StageRun
) -> None:
    """Set how often each training document of a split is read (Llama 3, section 3.1.2).

    A category's weight is configured, or comes from a mixture experiment; without both, it is the category's share of the text, but at most
    `max_share`. Unless weights are configured or come from `anneal_experiment`, the categories in `down_sample` keep only that fraction of
    their weight. Training reads as much text as one pass over all training documents: a category of weight w with n of all N tokens is read
    w N / n times, at most `max_repeats` (four passes cost little: Muennighoff et al. 2023); if that limits every category, training reads
    less. A fractional number of epochs is rounded up for a sample of the category's documents, of all lengths alike, and down for the
    others. Held-out documents stay held out.

    Tokens are estimated: each category's bytes per token are measured on a sample. Without a tokenizer, all shares are of bytes."""
    check_mixture(run, documents, split)
    cut = max(1, documents.record().cut)
    facts = run.exchange(_measure, run.parts(documents, columns=["id", "text"]), split, by="id", partitions=cut)
    amounts: dict[str, Amounts] = {}
    for part_amounts in run.map(of_part, facts.nonempty_parts, _amounts):
        for category, own in part_amounts.items():
            amounts[category] = Amounts(*map(sum, zip(amounts.get(category, Amounts()), own, strict=True)))
    training = {category: amounts[category].bytes for category in sorted(amounts)}
    if tokenizer is not None:
        counts = {category: (amounts[category].documents, size) for category, size in training.items()}
        training = token_counts(documents, split, counts, tokenizer, run)
    weighting, late = dict(config.weights), list[str]()
    if weights is not None and not weighting:
        weighting, late = _experiment(weights, training)
    if weighting:
        _check_weights(weighting, training, "mix.weights" if config.weights or weights is None else weights.id)
    max_share = 1.0 if weighting else config.max_share
    # An annealing experiment measured exactly these weights, so they are not down-sampled.
    final = bool(config.weights) or (weights is not None and weights.manifest.stage == "anneal_experiment")
    factors = {} if final else _factors(config, training)
    if any(factors.get(category, 1.0) < 1 for category in training):
        weighting = down_sampled(weighting or training, factors)
    shares = plan(training, weighting, config.max_repeats, max_share)
    train_bytes = sum(run.produce_shards(_mixture, facts, cut, shares, config.seed))
    total = sum(training.values())
    bars = {"text": [(c, s.size / max(total, 1)) for c, s in shares.items()], "training": [(c, s.weight) for c, s in shares.items()]}
    notes = [f"{weights.id} does not weigh {', '.join(late)}: their share is that of the text"] if weights and late else []
    note = "; ".join(notes + _explain(shares, factors, config.max_repeats, max_share, total))
    run.figure("mixture", Figure("Knowledge types in the text and in training", "knowledge type", "share", bars, "bar", note=note))
    run.metric("documents", facts.rows)
    run.metric("heldout_documents", sum(own.heldout for own in amounts.values()))
    run.metric("train_bytes", train_bytes)
    run.metric("share_unit", "bytes" if tokenizer is None else "tokens")
    for category, share in shares.items():
        run.metric(f"epochs_{category}", round(share.epochs, 4))
        run.metric(f"share_{category}", round(share.size / max(total, 1), 6))
        run.metric(f"weight_{category}", round(share.weight, 6))
        if tokenizer is not None and share.size:
            run.metric(f"bytes_per_token_{category}", round(amounts[category].bytes / share.size, 4))
        if factors.get(category, 1.0) < 1:
            run.metric(f"down_sample_{category}", factors[category])


def plan(sizes: Mapping[str, int], wanted: Mapping[str, float], max_repeats: float, max_share: float = 1.0) -> dict[str, Share]:
    """Return category → share. The initial weights are `wanted` or, if it is empty, the shares of the text (`sizes`, tokens or bytes).

    Weight beyond `max_repeats` or `max_share` is distributed over other categories by weight, if possible. Raise PunaError without text."""
    total = sum(sizes.values())
    if not total:
        raise PunaError("mix: the split has no training document with text; give more documents, or hold out fewer")
    weight = {c: float(wanted[c]) if c in wanted else 0.0 if wanted else size / total for c, size in sorted(sizes.items())}
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


def down_sampled(weights: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    """Return weights multiplied by factors (0 to 1) and rescaled to add up to 1. Raise PunaError if all products are 0."""
    left = {category: weight * factors.get(category, 1.0) for category, weight in weights.items()}
    total = sum(left.values())
    if not total:
        raise PunaError(f"mix.down_sample leaves nothing of any category with training text ({', '.join(sorted(weights))})")
    return {category: weight / total for category, weight in left.items()}


def _factors(config: MixConfig, training: Mapping[str, int]) -> dict[str, float]:
    """Return the `down_sample` factors of the corpus's categories. Raise PunaError if the user names a category without documents."""
    unknown = sorted(set(config.down_sample) - set(training))
    if unknown and "down_sample" in config.model_fields_set:
        raise PunaError(f"mix.down_sample: no document is of {unknown[0]!r}; the categories are {', '.join(training)}")
    return {category: factor for category, factor in config.down_sample.items() if category in training}


def _explain(shares: Mapping[str, Share], factors: Mapping[str, float], max_repeats: float, max_share: float, total: int) -> list[str]:
    notes = [f"{category} keeps {factor:g} of its weight (down_sample)" for category, factor in sorted(factors.items()) if factor < 1]
    most = max(max_share, 1.0 / max(1, sum(share.size > 0 for share in shares.values())))
    for category, share in shares.items():
        if share.epochs >= max_repeats - TOLERANCE:
            notes.append(f"{category} is read {max_repeats:g} times, the maximum (max_repeats)")
        elif max_share < 1 and share.weight >= most - TOLERANCE and share.size > most * total:
            notes.append(f"{category} is held at {most:.3g} of the training text (max_share)")
    return notes


def _check_weights(wanted: Mapping[str, float], training: Mapping[str, int], where: str) -> None:
    """Raise PunaError if a weighted category is unknown or has no training text, if one with text has no weight, or if the sum is not 1."""
    faults = {
        "no document is of": sorted(set(wanted) - set(training)),
        "there is no weight for": sorted(c for c, size in training.items() if size and c not in wanted),
        "there is no training text of": sorted(c for c, weight in wanted.items() if weight > 0 and training.get(c) == 0),
    }
    problems = [f"{what} {', '.join(map(repr, names))}" for what, names in faults.items() if names]
    if abs(sum(wanted.values()) - 1) > TOLERANCE:
        problems.append(f"the weights add up to {sum(wanted.values()):.6g}, not to 1")
    if problems:
        categories = ", ".join(c for c, size in training.items() if size) or "none"
        raise PunaError(f"{where}: {'; '.join(problems)}; the categories with training text are {categories}")


def _measure(part: Part, split: Artifact) -> pa.Table:
    table = part.read()
    ids = table["id"]
    own = split.between(ids[0].as_py(), ids[-1].as_py(), columns=["id", "category", "split"])
    own = own.take(pc.index_in(ids, own["id"].combine_chunks()))
    size = pc.binary_length(table["text"]).cast(pa.int64())
    return pa.table({"id": ids, "category": own["category"], "heldout": pc.equal(own["split"], "heldout"), "bytes": size})


class Amounts(NamedTuple):
    """A category's bytes and number of training documents with text, and its number of held-out documents."""

    bytes: int = 0
    documents: int = 0
    heldout: int = 0


def _amounts(rows: pa.Table) -> dict[str, Amounts]:
    names, number = np.unique(np.array(rows["category"].to_pylist(), dtype="U"), return_inverse=True)
    out = rows["heldout"].to_numpy()
    sizes = np.where(out, 0, rows["bytes"].to_numpy())
    columns = (np.bincount(number, values, len(names)).astype(np.int64) for values in (sizes, sizes > 0, out))
    return {name: Amounts(*values) for name, *values in zip(names.tolist(), *(column.tolist() for column in columns), strict=True)}


def _mixture(rows: pa.Table, shares: Mapping[str, Share], seed: int) -> tuple[dict[str, pa.Table], int]:
    """Return the mixture table of a shard, and the bytes of text that training reads from the shard, repeats included."""
    rows = rows.sort_by("id")
    categories, out = rows["category"].to_pylist(), rows["heldout"].to_numpy()
    epochs = np.array([shares[c].epochs for c in categories])
    repeats = np.floor(epochs).astype(np.int32) + _rounded_up(rows.filter(pc.invert(rows["heldout"])), shares, seed, rows["id"])
    table = pa.table(
        {
            "id": rows["id"], "category": rows["category"], "split": np.where(out, "heldout", "train").tolist(),
            "repeats": np.where(out, 1, repeats).astype(np.int32), "weight": pa.array([shares[c].weight for c in categories], pa.float64()),
        }
    )  # fmt: skip
    return {"mixture": table}, int((rows["bytes"].to_numpy() * np.where(out, 0, repeats)).sum())


def _rounded_up(rows: pa.Table, shares: Mapping[str, Share], seed: int, ids: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return a mask of the `ids` whose epochs are rounded up: a systematic sample of each category's rows in order of length. Each row has
    the same probability, and the sample's size differs by less than one from the fraction that the weight asks for."""
    rows = rows.append_column("chance", pa.array(uniform(rows["id"].to_pylist(), seed, "repeats"), pa.float64()))
    rows, chosen = rows.sort_by([("category", "ascending"), ("bytes", "ascending"), ("chance", "ascending")]), list[NDArray[np.bool_]]()
    for category, count in zip(*np.unique(np.array(rows["category"].to_pylist(), dtype="U"), return_counts=True), strict=True):
        start = uniform([f"{category} {ids[0]}"], seed, "rounding")[0]
        marks = np.floor(start + (shares[category].epochs % 1) * np.arange(count + 1))
        chosen.append(np.diff(marks) > 0)
    drawn = rows["id"].filter(pa.array(np.concatenate([np.zeros(0, bool), *chosen])))
    return np.asarray(pc.is_in(ids, drawn.combine_chunks()))


def _experiment(weights: Evaluation, training: Mapping[str, int]) -> tuple[dict[str, float], list[str]]:
    """Return an experiment's weights for `training` (category → bytes), and the categories that the experiment did not measure.

    On a newer corpus (Olmix), new categories get their share of the text, and the measured categories with text divide the rest in the
    experiment's proportions."""
    if "weights" not in weights.tables:
        raise PunaError(f"{weights.id} has no table `weights`; give the artifact of mix_experiment or anneal_experiment")
    table = weights.read("weights")
    weighting = dict(zip(table["category"].to_pylist(), table["weight"].to_pylist(), strict=True))
    overlap = {category: weight for category, weight in weighting.items() if training.get(category)}
    share = sum(overlap.values())
    late = {c: size / sum(training.values()) for c, size in training.items() if size and c not in weighting}
    # `_check_weights` rejects weights that do not add up to 1, or that name no category of this corpus.
    if not share or abs(sum(weighting.values()) - 1) > TOLERANCE or (not late and weighting.keys() == overlap.keys()):
        return weighting, []
    return {c: weight * (1 - sum(late.values())) / share for c, weight in overlap.items()} | late, sorted(late)
