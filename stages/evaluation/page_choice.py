"""Which pages a model is evaluated on, and the training text that its baselines read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from puna.stages.contract import StageRun
from puna.stages.training.corpus import Chosen, Ranked, candidates, check_mixture, chosen_of, rank, smallest
from puna.storage import Artifact, Part, PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer


def heldout_pages(documents: Artifact, mixture: Artifact | None, max_page_bytes: int, max_bytes: int, run: StageRun) -> list[Chosen]:
    """The held-out pages with the smallest hashes, until max_bytes is reached."""
    if mixture is not None:
        check_mixture(run, documents, mixture)
    parts = run.parts(documents, columns=["id", "text"])
    found = run.map(_ranked, parts, mixture, "heldout", run.seed("pages"), max_page_bytes, max_bytes)
    pages = [row[3] for row in smallest(found, max_bytes)]
    if not pages:
        raise PunaError(f"{documents.id} has no held-out page of at most {max_page_bytes} bytes")
    return pages


def training_text(
    model: Artifact,
    documents: Artifact,
    mixture: Artifact | None,
    tokenizer: Tokenizer,
    context: int,
    most_tokens: int,
    run: StageRun,
) -> list[list[int]]:
    """As many tokens of training documents as the model was trained on, all of them where there are fewer; none where that number is
    not known, or above `most_tokens`.

    Of more documents than that, pieces of `context` tokens in the order of a hash: a model reads rows of all pages, not all of some
    pages, and n-grams of few whole pages would know less of the others.
    """
    trained = model.manifest.metrics.get("trained_tokens")
    if mixture is None or not isinstance(trained, int) or trained > most_tokens:
        return []
    parts, most, seed = run.parts(documents, columns=["id", "text"]), 16 * trained, run.seed("training text")
    found = [row[3] for row in smallest(run.map(_ranked, parts, mixture, "train", seed, most, most), most)]
    whole = [[*tokenizer.lead, *ids, *tokenizer.end] for ids in tokenizer.encode_batch([row.text for row in found])]
    if sum(map(len, whole)) <= trained:
        return whole
    places = [(rank(seed, f"{row.id} {at}"), page, at) for page, row in enumerate(found) for at in range(0, len(whole[page]), context)]
    read, left = [], trained
    for _, page, at in sorted(places):
        read.append(whole[page][at : at + min(context, left)])
        left -= len(read[-1])
        if left <= 0:
            break
    return read


def _ranked(part: Part, mixture: Artifact | None, split: str, seed: int, max_page_bytes: int, max_bytes: int) -> list[Ranked]:
    """Those of a part's pages of a split that may be among the chosen ones."""
    sized = [(len(row.text.encode()), row) for row in chosen_of(part, mixture, split)]
    return candidates(((rank(seed, row.id), row.id, size, row) for size, row in sized if 0 < size <= max_page_bytes), max_bytes)
