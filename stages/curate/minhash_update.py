"""`minhash_update`: deduplication of added documents against a deduplicated corpus, without repeating the corpus's deduplication."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from puna.stages.contract import Documents, Reads, Signals, StageConfig, StageRun, stage
from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.stages.curate.minhash.decide import Found, find_removals, flat, preference, together
from puna.stages.curate.minhash.index import INDEX, Index, write_index
from puna.stages.curate.minhash.sketch import sketch
from puna.stages.curate.minhash_dedup import check_score
from puna.stages.curate.removal import DECIDED, remove
from puna.storage import Artifact, PunaError
from puna.storage.schemas import table_schema

Decisions = Annotated[Documents, Reads((f"{INDEX}/", "duplicates.parquet", "revisions.parquet"))]


@stage(kind="documents", filters="documents")
def minhash_update(documents: Documents, previous: list[Decisions], signals: Signals | None, config: StageConfig, run: StageRun) -> None:
    """Remove near-duplicates from added documents, which must have new ids, and record which earlier decisions change.

    `previous`: the artifact of `minhash_dedup` with `keep_index`, then its updates in order. The result has the added documents that are
    kept, evidence for those removed, and an index of both; `revisions` has the earlier documents whose decision changes. Only components
    with added documents are decided again. The combined decisions (see `verdicts`) equal those of `minhash_dedup` on all documents."""
    settings = _configuration(previous)
    if settings.survivor == "best_score":
        check_score(signals, settings)
    ranked = signals if settings.survivor == "best_score" else None
    parts = run.parts(documents)
    sketches = list(run.map(sketch, list(enumerate(parts)), ranked, settings, str(run.scratch), rows=len(parts)))
    for index in previous:
        Index.of(index)
    files = [str(run.scratch / name) for name in ("added.parquet", "revised.parquet")]
    (members,) = run.map(_decide, [sketches], previous, run.folder / INDEX, files, settings)
    threshold = settings.threshold if settings.verify else None
    remove(run, documents, pq.read_table, files[:1], method=settings.method, rule="near_duplicate", threshold=threshold)
    run.produce(_revisions, files[1:])
    run.metric("revised", pq.read_metadata(files[1]).num_rows)
    run.metric("candidates", members)


def _revisions(file: str) -> dict[str, pa.Table]:
    return {"revisions": pq.read_table(file)}


def _decide(sketches: list[str], previous: list[Artifact], folder: Path, files: list[str], config: MinhashDedupConfig) -> int:
    """Write the added documents' index, the removals among them, and the changed earlier decisions. Return the number of candidates."""
    write_index(folder, sketches, config)
    indices = [*(Index.of(artifact) for artifact in previous), Index.open(folder)]
    members = _affected_members(indices, config)
    ids, results = _decide_candidates(indices, members, config)
    own = members.segment == len(previous)
    state = _state(results, ids)
    new_ids = {i for i, new in zip(ids, own.tolist(), strict=True) if new}
    passage = {ids[removed]: words for removed, words in zip(results.removed.tolist(), results.new_words.tolist(), strict=True)}
    gone = [(i, *state[i], config.detail(state[i][0], passage[i])) for i in sorted(new_ids & state.keys())]
    pq.write_table(pa.table([pa.array([row[k] for row in gone], f.type) for k, f in enumerate(DECIDED)], schema=DECIDED), files[0])
    old_ids = [i for i, new in zip(ids, own.tolist(), strict=True) if not new]
    before = verdicts(previous, old_ids)
    changed = sorted(i for i in old_ids if before.get(i) != state.get(i))
    rows = [{"id": i, "kept_id": state[i][0] if i in state else None, "similarity": state[i][1] if i in state else None} for i in changed]
    pq.write_table(pa.Table.from_pylist(rows, schema=table_schema("revisions").schema), files[1])
    return len(ids)


def verdicts(artifacts: list[Artifact], ids: list[str] | None = None) -> dict[str, tuple[str, float]]:
    """Return removed document → (survivor, similarity) after a `minhash_dedup` and its updates. `ids`: return only these documents."""
    result: dict[str, tuple[str, float]] = {}
    for artifact in artifacts:
        for table in ("revisions", "duplicates"):
            if table not in artifact.tables:
                continue
            rows = artifact.read(table, columns=["id", "kept_id", "similarity"])
            if ids is not None:
                rows = rows.filter(pc.is_in(rows["id"], pa.array(ids, pa.string())))
            for identity, survivor, similarity in zip(*(rows[name].to_pylist() for name in rows.schema.names), strict=True):
                if survivor is None:
                    result.pop(identity)
                else:
                    result[identity] = (survivor, similarity)
    return result


def _configuration(previous: list[Artifact]) -> MinhashDedupConfig:
    stages = [artifact.manifest.stage for artifact in previous]
    if stages != ["minhash_dedup", *["minhash_update"] * (len(stages) - 1)]:
        raise PunaError(f"minhash_update.previous must be a minhash_dedup and then its updates; these were made by {', '.join(stages)}")
    for number, artifact in enumerate(previous[1:], 1):
        keys = [record.key for record in artifact.manifest.inputs if record.name == "previous"]
        if keys != [before.key for before in previous[:number]]:
            raise PunaError(f"minhash_update.previous: {artifact.id} does not continue the {number} artifacts given before it")
    return MinhashDedupConfig(**previous[0].manifest.config)


class Members(NamedTuple):
    """M documents of several indices: `segment` int64[M], the index's number, and `row` int64[M] in it; sorted by segment, then row."""

    segment: NDArray[np.int64]
    row: NDArray[np.int64]


def _gather(indices: list[Index], members: Members, name: str) -> NDArray[Any]:
    return np.concatenate([getattr(index, name)[members.row[members.segment == s]] for s, index in enumerate(indices)])


def _affected_members(indices: list[Index], config: MinhashDedupConfig) -> Members:
    """Return the added documents with shingles, and all documents connected to them by shared band keys, directly or indirectly."""
    from puna.stages.curate.minhash.near_duplicates import band_keys

    masks = [np.zeros(len(index.facts), bool) for index in indices]
    fresh = [np.zeros(0, np.int64) for _ in indices]
    fresh[-1] = np.flatnonzero(indices[-1].facts["shingles"])
    while any(map(len, fresh)):
        for seen, rows in zip(masks, fresh, strict=True):
            seen[rows] = True
        signatures = np.concatenate([index.signatures[rows] for index, rows in zip(indices, fresh, strict=True)])
        keys = band_keys(signatures, config.bands, config.rows)
        results = [index.sharing(keys) for index in indices]
        fresh = [rows[~seen[rows]] for seen, rows in zip(masks, results, strict=True)]
    reached = [np.flatnonzero(seen) for seen in masks]
    return Members(np.repeat(np.arange(len(reached)), [len(r) for r in reached]), np.concatenate(reached))


def _decide_candidates(indices: list[Index], members: Members, config: MinhashDedupConfig) -> tuple[list[str], Found]:
    from puna.stages.curate.minhash import near_duplicates

    names = [index.ids() for index in indices]
    if any((known[np.minimum(np.searchsorted(known, names[-1]), len(known) - 1)] == names[-1]).any() for known in names[:-1] if len(known)):
        raise PunaError("minhash_update: a document with the same id was deduplicated before; give only new documents")
    ids = np.concatenate([names[s][members.row[members.segment == s]] for s in range(len(indices))])
    facts, signatures = _gather(indices, members, "facts"), _gather(indices, members, "signatures")
    text = [identity.decode() for identity in ids.tolist()]
    if not len(ids):
        return text, Found.none()
    root = near_duplicates.components(near_duplicates.band_keys(signatures, config.bands, config.rows))
    rank = np.argsort(np.argsort(ids))
    candidates, bounds = together(root, *preference(config, rank, facts))

    def shingles(places: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        pieces: dict[int, NDArray[np.uint64]] = {}
        for segment, index in enumerate(indices):
            here = candidates[places][members.segment[candidates[places]] == segment]
            results = index.shingles(members.row[here], config)
            pieces |= {int(m): results.hashes[results.offsets[k] : results.offsets[k + 1]] for k, m in enumerate(here)}
        return flat([pieces[int(m)] for m in candidates[places]])

    return text, find_removals(facts[candidates], signatures[candidates], bounds, config, shingles).of_rows(candidates)


def _state(found: Found, ids: list[str]) -> dict[str, tuple[str, float]]:
    pairs = zip(found.removed.tolist(), found.kept.tolist(), found.similarity.tolist(), strict=True)
    return {ids[removed]: (ids[kept], similarity) for removed, kept, similarity in pairs}
